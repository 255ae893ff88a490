"""How fast initial weights are drawn, and what a rank of eight draws. The goal: at least half of `normal_`'s speed.

    .venv/bin/python benchmarks/initial_weights.py [--rounds 5] [--quick]

Each tensor is filled in turns by `torch.Tensor.normal_`, by the C function, and by its reference in PyTorch, whole; and
by the C function and `normal_` as a rank of eight needs it: the C function draws the shard only, `normal_` draws the
whole tensor, of which the shard is kept, because the values of a generator depend on all values before. Then a model
is built on a mesh of one process, with its weights drawn, and as on resuming, with none drawn. Writes a table (.md) and
all numbers (.json) into benchmarks/results.
"""

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from weft.config.mesh import ParallelSection
from weft.config.model import ModelSection
from weft.kernels import random_rows
from weft.models.counter_random import fill_normal
from weft.parallel.apply import build_sharded_model
from weft.parallel.model_state import ModelPlan
from weft.parallel.world import World, start_world

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    SHAPES,
    available_cores,
    processor,
    slug,
    write_results,
)

TENSORS = {"matrix": (4096, 4096), "embedding": (32_000, 512), "experts": (16, 1024, 1024)}
RANKS, STD, SEED = 8, 0.02, 7


def drawn(shape: tuple[int, ...], rows: int, small: float) -> Callable[[], object]:
    """A function that draws the first `rows` rows of a tensor by index; `small` chooses C (0) or PyTorch (inf)."""
    out, start = torch.empty(rows, *shape[1:]), [0] * len(shape)

    def fill() -> None:
        random_rows.SMALL = small
        fill_normal(out, STD, SEED, start, shape)

    return fill


def sequential(shape: tuple[int, ...], rows: int) -> Callable[[], object]:
    """A function that draws a tensor with `normal_`, and copies its first `rows` rows if these are not all."""
    whole, part = torch.empty(shape), torch.empty(rows, *shape[1:])
    return lambda: part.copy_(whole.normal_(0, STD)[:rows]) if rows < shape[0] else whole.normal_(0, STD)


def in_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each function, which take turns, after one turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            if number:
                times[name].append(1e3 * (time.perf_counter() - began))
    return times


def built(size: str, draw: bool, world: World) -> Callable[[], object]:
    plan = ModelPlan(ModelSection.model_validate(SHAPES[size]), ParallelSection(dp_shard=1), draw=draw)
    return lambda: build_sharded_model(plan, world)


def cell(times: list[float]) -> str:
    return f"{statistics.median(times):,.1f} ({min(times):,.1f} to {max(times):,.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of the smallest tensor, to try the program")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    asked = parser.parse_args()
    torch.set_num_threads(available_cores())
    small = random_rows.SMALL
    random_rows.load_library("random_rows", *random_rows.FLAGS)
    tensors = {"experts": (8, 64, 64)} if asked.quick else TENSORS
    rounds = 1 if asked.quick else asked.rounds
    found, lines = {}, []
    for name, shape in tensors.items():
        rows = shape[0] // RANKS
        functions = {
            "normal_": sequential(shape, shape[0]),
            "C": drawn(shape, shape[0], 0),
            "reference": drawn(shape, shape[0], float("inf")),
            "normal_, shard": sequential(shape, rows),
            "C, shard": drawn(shape, rows, 0),
        }
        times = found[name] = in_turns(functions, rounds)
        ratio = statistics.median(times["normal_"]) / statistics.median(times["C"])
        lines.append(f"| {' x '.join(map(str, shape))} | {' | '.join(map(cell, times.values()))} | {ratio:.2f} |")
    random_rows.SMALL = small
    models, world = [], start_world(ParallelSection(dp_shard=1))
    for size in ("14m",) if asked.quick else ("14m", "60m"):
        functions = {"drawn": built(size, True, world), "not drawn": built(size, False, world)}
        times = found[size] = in_turns(functions, rounds)
        models.append(f"| {size} | {' | '.join(map(cell, times.values()))} |")
    world.close()
    page = f"""# Initial weights

{processor()}, float32, {datetime.date.today()}; PyTorch {torch.__version__}. Milliseconds: median
(range) of {rounds} rounds in turns. The last column: speed of the C function as a multiple of `normal_`.

| tensor | `normal_` | C | reference | `normal_`, rank of {RANKS} | C, rank of {RANKS} | C : `normal_` |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(lines)}

Building a model on one process, with its weights drawn, and as on resuming (the checkpoint's values are read later):

| model | drawn | not drawn |
| --- | --- | --- |
{chr(10).join(models)}
"""
    write_results(asked.out, f"initial_weights-{slug(processor())}", page, found)


if __name__ == "__main__":
    main()
