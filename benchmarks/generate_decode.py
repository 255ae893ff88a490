"""Decoding tokens/s of the same Llama in Weft's engine and its peers: transformers' `generate`, and llama.cpp.

    .venv/bin/python benchmarks/generate_decode.py [--sizes 40m,350m] [--rounds 3] [--llama-python ENV/bin/python]

Each measurement is a process of its own, which generates 128 tokens after 64, greedily, for 1 prompt and for 16. The
time includes the prompts. The peers take turns, and the table has the median of the rounds. llama.cpp needs an
environment with llama-cpp-python and gguf (see peers/decode_llama_cpp.py); without it, its rows are left out.
"""

import argparse
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import available_cores, processor, run_peer, slug, write_results  # noqa: E402

SHAPES = {
    "40m": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1408},
    "350m": {"hidden_size": 1024, "num_hidden_layers": 22, "num_attention_heads": 16, "intermediate_size": 2816},
}
PEERS = {  # row of the table: (program, dtype, other settings)
    "transformers `generate`, bf16": ("decode_transformers.py", "bfloat16", {}),
    "Weft without the compiled step, bf16": ("decode_weft.py", "bfloat16", {"compile": False}),
    "Weft, bf16": ("decode_weft.py", "bfloat16", {"compile": True}),
    "llama.cpp, bf16": ("decode_llama_cpp.py", "bfloat16", {}),
    "Weft, int8": ("decode_weft.py", "bfloat16", {"compile": True, "quantize": "int8"}),
    "llama.cpp, q8_0": ("decode_llama_cpp.py", "int8", {}),
    "Weft, int4": ("decode_weft.py", "bfloat16", {"compile": True, "quantize": "int4"}),
    "llama.cpp, q4_0": ("decode_llama_cpp.py", "int4", {}),
}
BATCHES = (1, 16)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decoding tokens/s of Weft and its peers on a CPU.")
    parser.add_argument("--sizes", default="40m,350m", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="", help="only the rows that contain one of these texts, such as int8,q8_0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--llama-python", type=Path, help="interpreter with llama-cpp-python and gguf")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="one round of 40m with 16 tokens: does it work at all?")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds, args.tokens = "40m", 1, 16
    return args


def measure(peer: str, shape: dict, args: argparse.Namespace) -> dict:
    """Returns the seconds of each batch size."""
    program, dtype, settings = PEERS[peer]
    python = args.llama_python if "llama_cpp" in program else sys.executable
    shape = {**shape, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    shape["num_key_value_heads"] = shape["num_attention_heads"]
    asked = {"shape": shape, "dtype": dtype, "threads": args.threads, "batches": BATCHES, "tokens": args.tokens}
    asked["device"] = args.device
    return run_peer(python, program, asked | settings)


def table(found: dict, args: argparse.Namespace) -> str:
    lines = [
        "# Decoding",
        "",
        f"{device_name(args)}, {args.threads} threads. Tokens/s of {args.tokens} new tokens after 64, greedy; medians "
        f"of {args.rounds} interleaved rounds.",
        "",
        "| model | engine | batch 1 | batch 16 |",
        "| --- | --- | --- | --- |",
    ]
    for size, peers in found.items():
        for peer, rounds in peers.items():
            if not rounds:
                continue
            rates = [args.tokens * b / statistics.median(seconds[str(b)] for seconds in rounds) for b in BATCHES]
            lines.append(f"| {size} | {peer} | " + " | ".join(f"{rate:,.0f}" for rate in rates) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = arguments()
    peers = [peer for peer in PEERS if args.llama_python or "llama.cpp" not in peer]
    peers = [peer for peer in peers if any(text in peer for text in args.rows.split(","))]
    name = f"generate_decode-{slug(device_name(args))}" + ("-quick" if args.quick else "")
    found: dict = {size: {peer: [] for peer in peers} for size in args.sizes.split(",")}
    for size in found:
        for _ in range(args.rounds):
            for peer in peers:
                try:
                    found[size][peer].append(measure(peer, SHAPES[size], args))
                except SystemExit as error:  # such as a peer that is not installed
                    print(size, peer, f"FAILED: {str(error)[-300:]}", flush=True)
                    continue
                print(size, peer, found[size][peer][-1], flush=True)
                write_results(args.out, name, table(found, args), found, show=False)
    if not any(rounds for peers in found.values() for rounds in peers.values()):
        raise SystemExit("nothing was measured")
    write_results(args.out, name, table(found, args), found)


def device_name(args: argparse.Namespace) -> str:
    if args.device == "cpu":
        return processor()
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
