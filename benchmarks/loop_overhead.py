"""What Weft's loop adds to a bare step with the same model, optimizer and batch. The goal: under 1%.

    .venv/bin/python benchmarks/loop_overhead.py [--sizes tiny,14m] [--steps 40]

A run is wired as `Trainer.fit` wires it. Its steps (data, seeding, accumulation, clipping, learning rate, metrics file,
console, log) take turns with bare ones (forward, backward, clip, update) on the same model, and with those of a plain
loop: bare steps with PyTorch's DataLoader, a learning rate and a line of metrics. All see the same minute of the
machine, and the difference of the medians is the loop's. `tiny` has hardly any arithmetic and so shows the fixed cost
per step; a user's share of it is the figure of `14m`.
"""

import argparse
import datetime
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import available_cores, processor, write_results  # noqa: E402
from overhead import SEQUENCE, SHAPES  # noqa: E402

SEQUENCES = {"tiny": 4, "14m": 16, "60m": 8}
WARMUP = 5


class Turns:
    """A tracker. At the end of each of the loop's steps, it notes the time, and takes a bare and a plain step."""

    bare_step = plain_step = None  # set once the model is there
    looped: list[float]
    bare: list[float]
    plain: list[float]

    def __init__(self, run):
        Turns.looped, Turns.bare, Turns.plain = [], [], []
        self.began = None

    def log(self, step, values):
        now = time.perf_counter()
        if self.began is not None:
            Turns.looped.append(now - self.began)
        Turns.bare_step()
        between = time.perf_counter()
        Turns.plain_step()
        self.began = time.perf_counter()
        Turns.bare.append(between - now)
        Turns.plain.append(self.began - between)

    def text(self, step, name, text):
        pass

    def close(self):
        pass


def config(size: str, steps: int, threads: int, directory: str) -> dict:
    rows = SEQUENCES[size]
    return {
        "run": {"name": size, "directory": directory},
        "model": SHAPES[size],
        "data": {
            "train": {"type": "overhead:Rows", "vocab_size": SHAPES[size]["vocab_size"]},
            "sequence_length": SEQUENCE,
        },
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "training": {
            "steps": steps,
            "batch_tokens": rows * SEQUENCE,
            "micro_batch_size": rows,
            "dtype": "auto",
            "threads": threads,
        },
        "checkpoint": {"every": steps},
        "log": {"trackers": ["loop_overhead:Turns"]},
    }


def bare_step_of(loop):
    """Forward, backward, clip and update of the loop's own model, on one batch prepared beforehand."""
    import torch
    from torch.distributed.tensor import DTensor

    batch = loop.data.source.batch(0).to(loop.world.device)
    rows = SEQUENCE * len(batch.tokens)

    def step(batch=batch):
        logprobs = loop.model(batch.tokens, batch.positions, batch.segments, labels=batch.labels)
        loss = -(logprobs * batch.weight).sum() / rows
        loss.backward()
        grads = [p.grad for p in loop.parameters]
        grads = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads])).item()
        if norm > 1.0:
            for grad in grads:
                grad.mul_(1.0 / norm)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return {"loss": loss.item(), "norm": norm}

    return step


def plain_step_of(loop, bare_step, file):
    """The bare step with what a plain loop has, too: PyTorch's DataLoader, a learning rate, a line of metrics."""
    import torch
    from torch.utils.data import DataLoader

    from weft.data.batches.batch import Batch

    rows, positions = len(loop.data.source.batch(0).tokens), torch.arange(SEQUENCE)

    def batches():
        while True:
            yield from DataLoader(loop.data.source.dataset, batch_size=rows, shuffle=True, drop_last=True)

    endless, numbered = batches(), itertools.count()

    def step():
        lr = loop.optimizer.param_groups[0]["lr"]
        for group in loop.optimizer.param_groups:
            group["lr"] = lr * 0.999
        tokens = next(endless)["tokens"]
        weight = torch.ones(tokens.shape)
        weight[:, -1] = 0
        numbers = torch.zeros(rows, dtype=torch.int64)
        batch = Batch(tokens, tokens.roll(-1, 1), weight, positions.expand_as(tokens), None, numbers)
        found = bare_step(batch)
        line = {"step": next(numbered), **found, "lr": lr, "time": time.time()}
        file.write(json.dumps(line) + "\n")
        file.flush()

    return step


def measure(size: str, steps: int, threads: int) -> dict:
    import weft
    from weft.train.loop import Loop
    from weft.train.trainer import Trainer

    class Paired(Loop):
        def begin(self, *args):
            state = super().begin(*args)
            bare = bare_step_of(self)
            Turns.bare_step = staticmethod(bare)
            Turns.plain_step = staticmethod(plain_step_of(self, bare, lines))
            return state

    work = HERE / "work"
    work.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as directory, open(Path(directory) / "plain.jsonl", "w") as lines:
        path = Path(directory) / "run.yaml"
        path.write_text(json.dumps(config(size, WARMUP + steps + 2, threads, directory)))
        trainer = Trainer(weft.RunConfig.load(path))
        trainer.loop = Paired
        trainer.fit()
        dtype = weft.RunConfig.load(Path(directory) / size / "config.yaml").training.dtype
    # The first step's time is not taken, and the last one's has the last checkpoint in it.
    looped, bare, plain = Turns.looped[WARMUP:-1], Turns.bare[WARMUP:-2], Turns.plain[WARMUP:-2]
    added, plainly = (statistics.median(a - b for a, b in zip(one, bare, strict=True)) for one in (looped, plain))
    return {
        "size": size,
        "dtype": dtype,
        "looped_ms": 1e3 * statistics.median(looped),
        "bare_ms": 1e3 * statistics.median(bare),
        "added_ms": 1e3 * added,
        "plain_added_ms": 1e3 * plainly,
        "added_share": added / statistics.median(bare),
        "steps": len(looped),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="What Weft's loop adds to a bare step.")
    parser.add_argument("--sizes", default="tiny,14m", help=f"of {', '.join(SEQUENCES)}")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    found = [measure(size, args.steps, args.threads) for size in args.sizes.split(",")]
    lines = [
        "# What the loop adds to a bare step",
        "",
        f"{processor()}, {args.threads} threads; {datetime.date.today()}; medians of {args.steps} pairs.",
        "",
        "A plain loop is the bare step with PyTorch's DataLoader, a learning rate and a line of metrics.",
        "",
        "| model | bare step | Weft's loop | added | share | added by a plain loop |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found:
        name = f"{row['size']}, {SEQUENCES[row['size']] * SEQUENCE:,} tokens a step, {row['dtype']}"
        times = " | ".join(f"{row[key]:.2f} ms" for key in ("bare_ms", "looped_ms", "added_ms"))
        lines.append(f"| {name} | {times} | {row['added_share']:.2%} | {row['plain_added_ms']:.2f} ms |")
    write_results(args.out, "loop_overhead", "\n".join(lines) + "\n", found)
    return 0


if __name__ == "__main__":
    # The run's config names the class above as `loop_overhead:Turns`: it is to be this module's, not a copy's.
    sys.modules["loop_overhead"] = sys.modules["__main__"]
    raise SystemExit(main())
