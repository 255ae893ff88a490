"""Supervised fine-tuning on short records: useful tokens/s and peak memory of Weft and TRL's `SFTTrainer`.

    .venv/bin/python benchmarks/tune_sft.py --trl-python ENV/bin/python [--size 60m] [--rounds 3] [--quick]

Each measurement is a process of its own: one epoch over the same conversations with the same Hugging Face model, chat
template, optimizer and number of records per step, with and without LoRA. Useful tokens are those of the records,
without padding. The first steps are not timed. The peers take turns, and the table has the median of the rounds.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import SHAPES, available_cores, processor, run_peer, slug, write_results  # noqa: E402
from corpus import make_jsonl  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CASES = {"all weights": {}, "LoRA, r 16": {"lora": 16}}
PEERS = {"TRL": "tune_trl.py", "Weft": "tune_weft.py"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed and memory of supervised fine-tuning, beside TRL.")
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter with trl and peft")
    parser.add_argument("--size", default="60m", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--records", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="one round of 14m with 96 records: does it work at all?")
    args = parser.parse_args()
    if args.quick:
        args.size, args.records, args.rounds = "14m", 96, 1
    return args


def make_records(path: Path, count: int) -> None:
    """Writes conversations whose lengths are like those of instruction data: most are short, some are long."""
    with tempfile.TemporaryDirectory() as folder:
        make_jsonl(Path(folder) / "text.jsonl", 4, unique=True)
        lines = (Path(folder) / "text.jsonl").read_text().splitlines()
    words, rng = (
        [word for line in lines for word in json.loads(line)["text"].split() if len(word) < 20],
        random.Random(0),
    )
    with open(path, "w") as out:
        for _ in range(count):
            sizes = [min(220, int(rng.lognormvariate(mean, 0.7)) + 3) for mean in (2.8, 3.6)]
            start = rng.randrange(len(words) - sum(sizes))
            texts = " ".join(words[start : start + sizes[0]]), " ".join(words[start + sizes[0] : start + sum(sizes)])
            roles = zip(("user", "assistant"), texts, strict=True)
            out.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}) + "\n")


def make_model(folder: Path, size: str, records: Path) -> None:
    """Writes a Llama with random weights, and a tokenizer that was trained on the records."""
    from hf_model import llama
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained = ByteLevelBPETokenizer()
    trained.train([str(records)], vocab_size=8000, special_tokens=tokens, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(folder)
    llama(SHAPES[size]).save_pretrained(folder)


def table(found: dict, args: argparse.Namespace) -> str:
    lines = [
        "# Supervised fine-tuning",
        "",
        f"{processor()}, {args.threads} threads. A {args.size} Llama in bf16 with float32 weights (LoRA: bf16 base), "
        f"{args.records} short conversations, 16 records a step; medians of {args.rounds} interleaved rounds.",
        "",
        "| case | system | useful tokens/s | of TRL's | peak memory, MiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case, peers in found.items():
        rates = {
            peer: statistics.median(one["tokens"] / one["seconds"] for one in rounds) for peer, rounds in peers.items()
        }
        for peer, rounds in peers.items():
            memory = statistics.median(one["peak_bytes"] for one in rounds) / 2**20
            lines.append(f"| {case} | {peer} | {rates[peer]:,.0f} | {rates[peer] / rates['TRL']:.2f} | {memory:,.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = arguments()
    pythons = {"TRL": args.trl_python, "Weft": sys.executable}
    found: dict = {case: {peer: [] for peer in PEERS} for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        records, model = Path(folder) / "records.jsonl", Path(folder) / "model"
        make_records(records, args.records)
        make_model(model, args.size, records)
        asked = {"records": str(records), "model": str(model), "work": folder, "threads": args.threads, "batch": 16}
        for _ in range(args.rounds):
            for case, settings in CASES.items():
                for peer in PEERS:
                    found[case][peer].append(run_peer(pythons[peer], PEERS[peer], asked | settings, folder))
                    print(case, peer, found[case][peer][-1], flush=True)
    write_results(args.out, f"tune_sft-{slug(processor())}", table(found, args), found)


if __name__ == "__main__":
    main()
