"""Decoding tokens/s of the same Llama in float32: Weft's engine, and onnxruntime on `weft export --to onnx`.

    .venv/bin/python benchmarks/export_onnx.py [--size 40m] [--rounds 3]

Each measurement is a process of its own, which generates 64 tokens after 64, greedily, for 1 prompt and for 16. The
time includes the prompts. The engines take turns, and the table has the median of the rounds.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "peers"), str(HERE.parent / "src")]
from common import available_cores, processor, run_peer, slug, write_results  # noqa: E402
from generate_decode import SHAPES  # noqa: E402

PEERS = {  # row of the table: (program, other settings)
    "Weft": ("decode_weft.py", {"compile": True}),
    "Weft without the compiled step": ("decode_weft.py", {"compile": False}),
    "onnxruntime": ("decode_onnx.py", {}),
}
BATCHES = (1, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding tokens/s of Weft and of onnxruntime on a CPU.")
    parser.add_argument("--size", default="40m", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="one round of 8 tokens: does it work at all?")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens = 1, 8
    shape = {**SHAPES[args.size], "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    shape["num_key_value_heads"] = shape["num_attention_heads"]
    found: dict = {peer: [] for peer in PEERS}
    with tempfile.TemporaryDirectory() as work:
        import onnxruntime
        from hf_model import llama

        import weft

        llama(shape).save_pretrained(f"{work}/hf")
        weft.export_model(f"{work}/hf", f"{work}/onnx", "onnx")
        asked = {"shape": shape, "dtype": "float32", "threads": args.threads, "batches": BATCHES}
        asked |= {"tokens": args.tokens, "folder": f"{work}/onnx"}
        for _ in range(args.rounds):
            for peer, (program, settings) in PEERS.items():
                found[peer].append(run_peer(sys.executable, program, asked | settings))
                print(peer, found[peer][-1], flush=True)
    lines = [
        "# Decoding with onnxruntime",
        "",
        f"{processor()}, {args.threads} threads, Llama of {args.size}, float32, onnxruntime "
        f"{onnxruntime.__version__}. Tokens/s of {args.tokens} new tokens after 64, greedy; "
        f"medians of {args.rounds} interleaved rounds.",
        "",
        "| engine | batch 1 | batch 16 |",
        "| --- | --- | --- |",
    ]  # fmt: skip
    for peer, rounds in found.items():
        rates = [args.tokens * batch / statistics.median(one[str(batch)] for one in rounds) for batch in BATCHES]
        lines.append(f"| {peer} | " + " | ".join(f"{rate:,.0f}" for rate in rates) + " |")
    write_results(args.out, f"export_onnx-{slug(processor())}", "\n".join(lines) + "\n", found)


if __name__ == "__main__":
    main()
