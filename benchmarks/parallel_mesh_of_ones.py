"""What a mesh of ones costs: Weft's sharded model on one process beside the same model, bare. The goal: under 1%.

    .venv/bin/python benchmarks/parallel_mesh_of_ones.py [--sizes tiny,14m,60m] [--steps 40] [--quick]

One process has two models with the same weights: one as `build_sharded_model` makes it, of DTensors, with its passes,
clipping and update; one as `build_model` makes it, in PyTorch's own loop. They take turns, a step each, on the same
rows, the first one changing each time: both see the same minute of the machine. `tiny` has hardly any arithmetic, so
its difference is the fixed cost of a step. Writes a table (.md) and all numbers (.json) into benchmarks/results.
"""

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    CLIP,
    SHAPES,
    available_cores,
    batch,
    job,
    measured_apart,
    optimizer,
    processor,
    write_results,
    write_tokens,
)

SHAPES["tiny"] = SHAPES["14m"] | {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPES["tiny"] |= {"num_key_value_heads": 2, "intermediate_size": 172, "vocab_size": 512}
ROWS = {"tiny": 4, "14m": 8, "60m": 4}
SEQUENCE, WARMUP = 256, 4
NOTES = """\
- The bare loop: forward, loss, `backward`, `clip_grad_norm_`, fused `AdamW`; in bf16 under autocast, whose casts of
  weights and activations Weft makes in other places, so that only fp32 compares like with like.
- Weft's: its passes (one micro-batch a step), clipping, the same AdamW, and the sum of losses over the mesh.
- The difference is the median of those of neighbouring steps, its share that of the bare median."""


def work(asked: dict) -> None:
    """Both models' steps in turns; prints their times."""
    import json

    import torch
    import torch.distributed as dist
    from parallel_steps import weft  # pyright: ignore[reportMissingImports]

    from weft.config.model import ModelSection
    from weft.models.build import build_model
    from weft.models.initialize import initialize
    from weft.train.auto_settings import keep_freed_memory

    keep_freed_memory()
    on_mesh = weft(asked)
    bare = build_model(ModelSection(**asked["shape"])).train()
    initialize(bare, seed=0)  # as the other is
    adamw = optimizer(bare)
    if asked["compile"]:
        for block in bare.get_submodule("layers").children():
            block.compile()

    def alone(number: int) -> float:
        tokens, labels = batch(asked, number)
        with torch.autocast("cpu", torch.bfloat16, enabled=asked["dtype"] == "bf16"):
            logprobs = bare(tokens, labels=labels)
        loss = -logprobs.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()
        return loss.item()

    seconds, losses = {on_mesh: [], alone: []}, {on_mesh: [], alone: []}
    for number in range(asked["warmup"] + asked["steps"]):
        for step in (on_mesh, alone) if number % 2 else (alone, on_mesh):
            began = time.perf_counter()
            losses[step].append(step(number))
            seconds[step].append(time.perf_counter() - began)
    dist.destroy_process_group()
    print(
        json.dumps(
            {
                "bare_seconds": seconds[alone][asked["warmup"] :],
                "mesh_seconds": seconds[on_mesh][asked["warmup"] :],
                "bare_loss": losses[alone][-1],
                "mesh_loss": losses[on_mesh][-1],
            }
        )
    )


def table(args: argparse.Namespace, found: dict) -> str:
    """The result as a page of Markdown."""
    lines = [
        "# A mesh of ones beside the bare model",
        "",
        f"{found['device']}, {args.threads} threads; torch {found['torch']}; {found['date']}; {args.steps} pairs of "
        f"steps in each of {args.rounds} processes.",
        "",
        NOTES,
        "",
        "| model | bare step | mesh of ones | difference | share | last losses |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key, runs in found["cells"].items():
        size, dtype, mode = key.split()
        bare, mesh = ([s for run in runs for s in run[f"{name}_seconds"]] for name in ("bare", "mesh"))
        added = statistics.median(b - a for a, b in zip(bare, mesh, strict=True))
        times = " | ".join(f"{1e3 * statistics.median(of):.2f} ms" for of in (bare, mesh))
        lines.append(
            f"| {size}, {ROWS[size] * SEQUENCE:,} tokens a step, {dtype}, {mode} | {times} | {1e3 * added:+.2f} ms "
            f"| {added / statistics.median(bare):+.2%} | {runs[0]['bare_loss']:.5f}, {runs[0]['mesh_loss']:.5f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="What a mesh of ones costs.")
    parser.add_argument("--sizes", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--quick", action="store_true", help="the smallest, a few steps: does it work at all?")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.modes, args.steps, args.rounds = "tiny", "eager", 4, 1
    import torch

    found = {
        "date": str(datetime.date.today()),
        "device": processor(),
        "torch": torch.__version__,
        "threads": args.threads,
        "cells": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for size, dtype, mode in product(args.sizes.split(","), args.dtypes.split(","), args.modes.split(",")):
                data = write_tokens(Path(folder) / f"{size}.npy", 512, SEQUENCE, SHAPES[size]["vocab_size"])
                asked = {
                    "shape": SHAPES[size],
                    "dtype": dtype,
                    "compile": mode == "compiled",
                    "threads": args.threads,
                    "warmup": WARMUP,
                    "steps": args.steps,
                    "batch": ROWS[size],
                    "sequence": SEQUENCE,
                    "device": "cpu",
                    "data": str(data),
                }
                got = measured_apart(__file__, asked)
                if "failed" in got:
                    print(f"{size} {dtype} {mode}: {got['failed']}", file=sys.stderr)
                    return 1
                found["cells"].setdefault(f"{size} {dtype} {mode}", []).append(got)
    write_results(args.out, "parallel_mesh_of_ones", table(args, found), found)
    return 0


if __name__ == "__main__":
    if "--job" in sys.argv:
        work(job())
    else:
        raise SystemExit(main())
