"""Measures what quantization-aware training wins back of the loss that `--quantize int4` adds, on Python's own code.

Usage: python benchmarks/qat.py DIRECTORY [--steps N] [--more N] [--seeds N]

DIRECTORY is that of `weft quickstart`, whose tokenizer and stores are used. For each seed a small model is trained for
`--steps` steps, and then trained on twice for `--more` steps from the same checkpoint, with and without
`training.qat: {type: int4}`, on the same batches. Prints held-out nats per token of each model, with full and with
4-bit weights. A row is an average over the seeds; the last column is the largest deviation from it.
"""

import argparse
import json
import statistics
from pathlib import Path

import weft
from weft.cli.main import main as run_weft

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def train(folder: Path, name: str, model: dict, steps: int, lr: float, seed: int, **training) -> Path:
    """Trains a run, and returns its directory."""
    sections = {
        "run": {"name": name, "directory": str(folder / "qat"), "seed": seed},
        "model": model,
        "tokenizer": str(folder / "tokenizer"),
        "data": {"train": str(folder / "train"), "sequence_length": 128},
        "optimizer": {"type": "adamw", "lr": lr, "weight_decay": 0.0},
        "schedule": {"type": "cosine", "warmup_steps": 10, "final": 0.1},
        "training": {"steps": steps, "batch_tokens": 2048, "micro_batch_size": 16, "dtype": "float32", **training},
        "checkpoint": {"every": steps},
        "log": {"trackers": []},
    }
    file = folder / f"qat-{name}.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
    assert run_weft(["train", str(file), "--fresh"]) == 0
    return folder / "qat" / name


def losses(run: Path, folder: Path) -> tuple[float, float]:
    """Returns the held-out loss with full weights, and with weights in 4 bits."""
    held_out = str(folder / "heldout")
    full, four = (weft.evaluate(run, store=held_out, quantize=how, max_tokens=50_000) for how in (None, "int4"))
    return full.loss, four.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--more", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    folder, found = args.directory, {"plain": [], "qat": []}
    for seed in range(1, args.seeds + 1):
        base = train(folder, "base", SIZES, args.steps, 0.01, seed)
        for name in found:
            more = {"qat": {"type": "int4"}} if name == "qat" else {}
            run = train(folder, name, {"from": str(base)}, args.more, 0.001, seed, **more)
            found[name].append(losses(run, folder))
    print(f"{'':8}{'full':>9}{'int4':>9}{'int4 - full of plain':>22}{'deviation':>11}")
    start = statistics.mean(full for full, _ in found["plain"])
    lost = {
        name: [four - full for (_, four), (full, _) in zip(rows, found["plain"], strict=True)]
        for name, rows in found.items()
    }
    for name, rows in found.items():
        full, four = (statistics.mean(column) for column in zip(*rows, strict=True))
        spread = max(abs(value - statistics.mean(lost[name])) for value in lost[name])
        print(f"{name:8}{full:9.4f}{four:9.4f}{four - start:22.4f}{spread:11.4f}")


if __name__ == "__main__":
    main()
