"""Memory of a training step with one long sequence, beside the planner's formula.

    .venv/bin/python benchmarks/long_sequences.py [--lengths 8192,16384,32768] [--out FILE]

Each length is a process of its own, which makes two steps of a small decoder with `activation_checkpointing: full`. The
highest number of bytes of all storages (see `plan_memory_real.py`) in the second step is compared with
`weft.planner.memory.memory_of`, and with the attention scores and the logits that a plain implementation would hold.
The process's resident memory, minus that before the model was built, has libraries and what the allocator keeps, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import yaml

import weft

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "peers"), str(HERE)]
from common import processor  # noqa: E402
from plan_memory_real import Storages, resident  # noqa: E402

MODEL = {"vocab_size": 8192, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
MIB = 2**20


def config_of(length: int, folder: Path) -> weft.RunConfig:
    content = {
        "run": {"name": "long", "directory": str(folder)},
        "model": {**MODEL, "max_position_embeddings": length},
        "data": {"sequence_length": length},
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "schedule": {"type": "constant"},
        "training": {
            "batch_tokens": length,
            "micro_batch_size": 1,
            "dtype": "float32",
            "activation_checkpointing": "full",
        },
        "log": {"trackers": []},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return weft.RunConfig.load(file, check_data=False, ranks=1)


def measure(length: int) -> dict[str, float]:
    counter = Storages()
    with tempfile.TemporaryDirectory() as place, counter:
        config = config_of(length, Path(place))
        warm = torch.randn(64, 64, requires_grad=True)  # loads the libraries of forward and backward
        (warm @ warm).sum().backward()
        before = resident("VmRSS")
        trainer = weft.Trainer(config, batches="global")
        for step in range(2):
            tokens = torch.randint(MODEL["vocab_size"], (1, length), generator=torch.Generator().manual_seed(step))
            with suppress(OSError):  # some containers do not let a process reset its mark
                Path("/proc/self/clear_refs").write_text("5")
            began, counter.peak = time.process_time(), counter.total
            trainer.step({"tokens": tokens})
        found = {"process": resident("VmHWM") - before, "cpu_seconds": time.process_time() - began}
        trainer.close()
    return found | {"tensors": counter.peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="8192,16384,32768")
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    from weft.planner.memory import memory_of

    shape = f"{MODEL['num_hidden_layers']} layers of {MODEL['hidden_size']}, a vocabulary of {MODEL['vocab_size']:,}"
    rows = [
        "# Memory of a step with one long sequence",
        "",
        f"{processor()}; {shape}, float32, full recomputation; MiB.",
        "",
        "| tokens | tensors | formula | process | scores of a layer and logits, if they were held | CPU seconds |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for length in map(int, arguments.lengths.split(",")):
        words = [sys.executable, __file__, "--measure", str(length)]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ, check=False)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        found = json.loads(done.stdout.splitlines()[-1])
        with tempfile.TemporaryDirectory() as place:
            formula = memory_of(config_of(length, Path(place)), 1, cpu=True)[0].total
        held = 4 * length * (length * MODEL["num_attention_heads"] + MODEL["vocab_size"])
        tensors, process, planned, plain = (size / MIB for size in (found["tensors"], found["process"], formula, held))
        error = f"{planned / tensors - 1:+.0%}"
        sizes = f"{tensors:,.0f} | {planned:,.0f} ({error}) | {process:,.0f} | {plain:,.0f}"
        rows.append(f"| {length:,} | {sizes} | {found['cpu_seconds']:,.0f} |")
        print(rows[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join((*rows, "")))


if __name__ == "__main__":
    main()
