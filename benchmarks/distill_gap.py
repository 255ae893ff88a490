"""How much of the gap to its teacher a student closes by distillation, in as many steps on the same data as without.

    .venv/bin/python benchmarks/distill_gap.py [--seeds 3] [--quick]

The text is Python sources. The teacher is a larger model, trained on 6 MB. The student is trained on 0.15 MB, several
times over, with the cross-entropy of the text or with each divergence from the teacher. The share of the gap is
(plain - distilled) / (plain - teacher) in the held-out cross-entropy; 0 is no gain, and 1 reaches the teacher.
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
sys.path.insert(0, str(HERE.parent / "src"))
from common import available_cores, processor, slug, write_results  # noqa: E402
from corpus import make_jsonl  # noqa: E402

from weft.cli.main import main as weft  # noqa: E402

VOCABULARY, SEQUENCE = 2048, 128
SHAPES = {"teacher": (192, 4), "student": (96, 2)}  # hidden size and layers
OBJECTIVES = {
    "cross-entropy of the text": {"type": "pretrain"},
    "forward KL": {"loss": "forward"},
    "forward KL, top_k 64": {"loss": "forward", "top_k": 64},
    "forward KL, half cross-entropy": {"loss": "forward", "alpha": 0.5},
    "reverse KL": {"loss": "reverse"},
    "jsd": {"loss": "jsd"},
}
PLAIN = next(iter(OBJECTIVES))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The share of its gap to the teacher that a student closes.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--teacher-steps", type=int, default=1200)
    parser.add_argument("--student-steps", type=int, default=300)
    parser.add_argument("--megabytes", type=int, default=6, help="text of the teacher")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: does it work at all?")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.teacher_steps, args.student_steps, args.megabytes = 1, 20, 10, 2
    return args


def call(*command: object) -> None:
    if code := weft([str(word) for word in command]):
        raise SystemExit(f"weft {' '.join(map(str, command))}: exit code {code}")


def make_stores(folder: Path, megabytes: int) -> None:
    """Packs stores of the same kind of text: `teacher`, `student` and `heldout`."""
    make_jsonl(folder / "all.jsonl", megabytes + 1, unique=True)
    lines = (folder / "all.jsonl").read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    limits, parts = {"heldout": 0.2e6, "student": 0.15e6, "teacher": megabytes * 1e6}, {}
    for name, limit in limits.items():
        parts[name], size = [], 0
        while lines and size < limit:
            parts[name].append(lines.pop())
            size += len(parts[name][-1])
        (folder / f"{name}.jsonl").write_text("".join(parts[name]))
    tokenizer = folder / "tokenizer"
    call("data", "train-tokenizer", folder / "teacher.jsonl", "--vocab-size", VOCABULARY, "--out", tokenizer)
    for name in limits:
        call("data", "pack", folder / f"{name}.jsonl", "--tokenizer", tokenizer, "--out", folder / name)


def train(folder: Path, args: argparse.Namespace, name: str, objective: dict, seed: int, steps: int) -> dict:
    """Makes a run, and returns the metrics of its last step, which are those of all held-out text."""
    kind = "teacher" if name == "teacher" else "student"
    hidden, layers = SHAPES[kind]
    heads = hidden // 32
    model = {"vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    content = {
        "run": {"name": name, "directory": str(folder / "runs"), "seed": seed},
        "model": {**model, "intermediate_size": 3 * hidden, "max_position_embeddings": SEQUENCE},
        "data": {"train": str(folder / kind), "validation": str(folder / "heldout"), "sequence_length": SEQUENCE},
        "objective": objective,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
        "schedule": {"type": "cosine", "warmup_fraction": 0.05},
        "training": {"steps": steps, "batch_tokens": 2048, "dtype": "float32", "threads": args.threads},
        "validation": {"every": steps},
        "checkpoint": {"keep_last": 1},
        "log": {"trackers": []},
    }
    file = folder / "run.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in content.items()))
    call("train", file, "--fresh")
    last = json.loads((folder / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1])
    return {key: last[key] for key in last if key.startswith("validation")} | {"loss": last["loss"]}


def cross_entropy(metrics: dict) -> float:
    return metrics.get("validation_cross_entropy", metrics["validation_loss"])


def table(found: dict, args: argparse.Namespace) -> str:
    teacher = cross_entropy(found["teacher"])
    lines = [
        f"# Distillation: the gap to the teacher\n\n{processor()}; {args.teacher_steps:,} steps of the teacher, "
        f"{args.student_steps:,} steps of the student, {args.seeds} seed{'s' * (args.seeds > 1)}.\n",
        f"The teacher's held-out cross-entropy is {teacher:.3f} nats per token.\n",
        "| objective of the student | held-out cross-entropy (lowest to highest) | share of the gap closed (lowest) |",
        "| --- | ---: | ---: |",
    ]
    plain = [cross_entropy(one) for one in found[PLAIN]]
    for name in OBJECTIVES:
        losses = [cross_entropy(one) for one in found[name]]
        shares = [(p - one) / (p - teacher) for p, one in zip(plain, losses, strict=True)]
        share = "" if name == PLAIN else f"{statistics.median(shares):.0%} ({min(shares):.0%})"
        span = f"{statistics.median(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        lines.append(f"| {name} | {span} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = arguments()
    found: dict = {name: [] for name in OBJECTIVES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_stores(folder, args.megabytes)
        found["teacher"] = train(folder, args, "teacher", {"type": "pretrain"}, 0, args.teacher_steps)
        for seed in range(args.seeds):
            for name, objective in OBJECTIVES.items():
                if name != PLAIN:
                    objective = {"type": "distill", "teacher": str(folder / "runs" / "teacher"), **objective}
                found[name].append(train(folder, args, "student", objective, seed, args.student_steps))
                print(seed, name, found[name][-1], flush=True)
    text = table(found, args)
    if args.quick:
        print(text)
    else:
        write_results(args.out, f"distill_gap-{slug(processor())}", text, found)


if __name__ == "__main__":
    main()
