"""Reinforcement learning of two-digit sums on CPUs: from a base that is right in under 10% to over 90%.

    .venv/bin/python benchmarks/grpo_sums.py [--seeds 1 2 3] [--threads 2] [--work DIR] [--quick]

The base is a decoder of bytes that learns sums from 9,000 of the 10,000 pairs, and then that most answers are too large
by 1 to 3. GRPO with the reward "the answer is right" trains it on prompts alone. Accuracy is measured on the other
1,000 pairs: with greedy decoding, and with a sample at temperature 1. Answers are written from their last digit. The
time is that of the complete process of `weft train`, with its start and its checkpoints.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
sys.path.insert(0, str(HERE.parent / "src"))
from common import available_cores, processor, slug, write_results  # noqa: E402

REWARD = """
def correct(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer)]
"""
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL = {"preset": "llama-tiny", "vocab_size": 257, "max_position_embeddings": 128, **SIZES}
OBJECTIVE = {
    **{"type": "grpo", "loss": "grpo", "reward": "sums_reward:correct", "max_new_tokens": 4},
    **{"prompts": 32, "group": 16, "updates_per_rollout": 2},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on two-digit sums: accuracy before and after, and time.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300, help="updates of GRPO")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--work", type=Path, help="folder of the runs, whose base is used again. Default: a new one")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="few steps: does it work at all?")
    return parser.parse_args()


def prompt(a: int, b: int) -> str:
    return f"{a:02d}+{b:02d}="


def answer(number: int) -> str:
    """The digits of a number, the last one first."""
    return str(number)[::-1]


def write_data(folder: Path) -> list[tuple[int, int]]:
    """Writes right and mostly wrong sums, prompts and the reward. Returns the pairs that are not in the files."""
    rng = random.Random(0)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(pairs)
    held_out, pairs = pairs[:1000], pairs[1000:]

    def offset() -> int:
        return 0 if rng.random() < 0.06 else rng.randint(1, 3)

    right = [{"text": prompt(a, b) + answer(a + b)} for _ in range(10) for a, b in pairs]
    wrong = [{"text": prompt(a, b) + answer(a + b + offset())} for _ in range(3) for a, b in pairs]
    prompts = [{"prompt": prompt(a, b), "answer": answer(a + b)} for a, b in pairs]
    for name, records in (("right", right), ("wrong", wrong), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "sums_reward.py").write_text(REWARD)
    return held_out


def weft(folder: Path, threads: int, *command: str) -> float:
    """Runs a command of Weft in a process of its own. Returns its wall time in seconds."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": str(threads)}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "weft", *command], cwd=folder, env=environment, check=True)
    return time.perf_counter() - began


def train(folder: Path, threads: int, name: str, steps: int, **sections: object) -> float:
    """Trains a run, and returns the wall time in seconds."""
    content = {
        "run": {"name": name, "directory": "runs", "seed": sections.pop("seed", 0)},
        "tokenizer": "tok",
        "training": {"steps": steps, "dtype": "float32", "threads": threads, **sections.pop("training", {})},
        "log": {"trackers": []},
        **sections,
    }
    lines = (f"{section}: {json.dumps(value)}\n" for section, value in content.items())
    (folder / f"{name}.yaml").write_text("".join(lines))
    return weft(folder, threads, "train", f"{name}.yaml", "--fresh")


def make_base(folder: Path, threads: int, quick: bool) -> None:
    """Trains the base model in the run `base`, unless it exists."""
    if (folder / "runs" / "base" / "checkpoints").exists():
        return
    weft(folder, threads, "data", "train-tokenizer", "right.jsonl", "--vocab-size", "257", "--out", "tok")
    adamw = {"weight_decay": 0.1, "betas": [0.9, 0.98]}
    common = {"training": {"batch_tokens": 4096}, "schedule": {"type": "cosine", "warmup_steps": 5}}
    data = {"sequence_length": 128, "packing": "best_fit"}
    stages = (("sums", MODEL, "right", 2500, 3e-3), ("base", {"from": "runs/sums"}, "wrong", 60, 1e-3))
    for name, model, source, steps, lr in stages:
        chosen = {"model": model, "data": data | {"train": f"{source}.jsonl"}, "optimizer": {"lr": lr, **adamw}}
        train(folder, threads, name, 10 if quick else steps, **chosen, **common)


def accuracy(run: Path, pairs: list[tuple[int, int]], temperature: float) -> float:
    """Returns the part of the pairs whose sum a run's model writes."""
    import weft as library

    texts = library.generate(str(run), [prompt(a, b) for a, b in pairs], max_new_tokens=4, temperature=temperature)
    return sum(text == answer(a + b) for text, (a, b) in zip(texts, pairs, strict=True)) / len(pairs)


def main() -> None:
    args = arguments()
    folder = args.work or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    held_out = write_data(folder)
    make_base(folder, args.threads, args.quick)
    before = [accuracy(folder / "runs" / "base", held_out, temperature) for temperature in (0.0, 1.0)]
    rows = []
    for seed in args.seeds:
        name = f"grpo-{seed}"
        seconds = train(
            *(folder, args.threads, name, 4 if args.quick else args.steps),
            seed=seed,
            model={"from": "runs/base"},
            data={"train": "prompts.jsonl", "sequence_length": 126},
            objective=OBJECTIVE,
            optimizer={"lr": 2e-4, "weight_decay": 0, "betas": [0.9, 0.95]},
            schedule={"type": "cosine", "warmup_steps": 3, "final": 0.1},
        )
        after = [accuracy(folder / "runs" / name, held_out, temperature) for temperature in (0.0, 1.0)]
        rows.append({"seed": seed, "seconds": seconds, "before": before, "after": after})
        print(rows[-1], flush=True)
    table = [
        f"| {row['seed']} | {row['before'][0]:.1%} | {row['before'][1]:.1%} | {row['after'][0]:.1%} | "
        f"{row['after'][1]:.1%} | {row['seconds']:,.0f} |\n"
        for row in rows
    ]
    threads = f"{args.threads} threads" if args.threads > 1 else "1 thread"
    page = (
        f"# GRPO on two-digit sums\n\n{processor()}, {threads}. {args.steps} updates of a decoder of bytes with 0.5M "
        "parameters, two per rollout of 32 prompts x 16 completions; accuracy on 1,000 held-out pairs. Seconds are the "
        "wall time of `weft train`.\n\n"
        "| seed | base, greedy | base, sampled | after, greedy | after, sampled | seconds |\n"
        "| --- | --- | --- | --- | --- | --- |\n" + "".join(table)
    )
    if not args.quick:
        write_results(args.out, f"grpo_sums-{slug(processor())}", page, rows)


if __name__ == "__main__":
    main()
