"""Seconds of `weft.parallelize` for large shapes, and the predicted step of its plans beside hand-written ones.

    python benchmarks/parallelize_search.py [--out benchmarks/results] [--shapes 8b-16,70b-256]

The modules are plain Llamas on the meta device. The hand-written plans are those of Megatron-LM: columns of q, k, v,
gate and up, rows of o and down, vocabulary-parallel embedding and head; for a fair comparison, the search chooses the
rest (sequence parallelism, recomputation), and each size of the tensor axis up to a host is tried, without pipeline
stages. Both are priced by the same cost model, so the ratio shows what the search adds, not what a cluster would
measure.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from peers.common import processor
from torch import nn
from torch.distributed.tensor import Shard

from weft.formatting import timing
from weft.planner.hardware import load_hardware
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.runtime import match
from weft.planner.parallelize.search import memory_bytes, search_plan, solve_setting
from weft.planner.parallelize.tables import Search

HARDWARE = "h100-sxm"
MEGATRON = {
    **{f"layers.*.{name}.weight": Shard(0) for name in ("q", "k", "v", "gate", "up")},
    **{f"layers.*.{name}.weight": Shard(1) for name in ("o", "down")},
    "embedding.weight": Shard(0),
    "head.weight": Shard(0),
}


class Block(nn.Module):
    """A decoder layer with grouped query heads."""

    def __init__(self, hidden: int, heads: int, inner: int):
        super().__init__()
        self.heads, size = heads, hidden // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, 8 * size, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the next residual stream."""
        y = self.norm_1(x)
        q = self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (f(y).unflatten(-1, (8, -1)).transpose(1, 2) for f in (self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // 8, 1) for t in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A plain Llama that returns a mean over log-sums of logits."""

    def __init__(self, hidden: int, heads: int, inner: int, layers: int, vocab: int = 128256):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns a loss."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float().logsumexp(-1).mean()


SIZES = {"8b": (4096, 32, 14336, 32), "70b": (8192, 64, 28672, 80)}
ROWS = {"8b-16": 16, "8b-16-long": 2, "70b-256": 256}
GOALS = {"8b-16": 10.0, "70b-256": 30.0}


NOTE = """\
`python benchmarks/parallelize_search.py` on {processor}, PyTorch {torch}. Shapes are Llamas on the meta device, with
rows of 8,192 tokens (65,536 in `long`), one row for each device (2 in all in `long`); hardware file h100-sxm. `wall` is
the whole search: capture, trials, integer programs, stages, and the plan. `Megatron-style` has no pipeline stages.
ratio: predicted step of the plan / of the Megatron-style plan. gap: of the worst integer program.

Peers: autoparallel's cost model asks for the name of a GPU, so it does not search on this machine. A search time that
nnScaler's authors published for these shapes was not found."""


@dataclass
class Row:
    """A search and its plan.

    Attributes:
        wall: seconds of the whole search: capture, trials, solver, stages and the plan.
        cpu: processor seconds of it.
        found: predicted seconds of a step by the plan.
        within: predicted seconds of the best plan without pipeline stages; None if none fits.
        hand: predicted seconds of the best Megatron-style plan; None if none fits.
        gap: how far the worst solution of an integer program may be from the best.
        plan: the plan in words.
    """

    shape: str
    wall: float
    cpu: float
    found: float
    within: float | None
    hand: float | None
    gap: float
    plan: str


def hand_written(search: Search, limit: float) -> float | None:
    """Returns the predicted seconds of the best Megatron-style plan; None if none fits."""
    before = [step.strategies for step in search.space.steps]
    for step in search.space.steps:
        wanted = match(step.node.name.replace("layers.0", "layers.*"), MEGATRON)
        if step.kind == "parameter" and wanted is not None:
            step.strategies = [one for one in step.strategies if one.outputs[0].forward[0] == wanted]  # type: ignore[union-attr]
    settings = [one.setting for one in search.found if 1 < one.setting.tp <= 8]
    again = Search(search.space)
    for setting in settings:
        solve_setting(again, load_hardware(HARDWARE), setting, limit, 10.0)
    for step, strategies in zip(search.space.steps, before, strict=True):
        step.strategies = strategies
    return min((one.choice.cost for one in again.found), default=None)


def measure(shape: str) -> Row:
    """Returns the row of a shape such as `8b-16`."""
    size, devices = shape.split("-")[:2]
    length = 65536 if shape.endswith("long") else 8192
    tokens = torch.empty(ROWS[shape], length, dtype=torch.long, device="meta")

    def make() -> nn.Module:
        return Llama(*SIZES[size]).bfloat16()

    wall, cpu = time.perf_counter(), time.process_time()
    plan, search, _ = search_plan(make, tokens, devices=int(devices), hardware=HARDWARE)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    limit = memory_bytes(None, load_hardware(HARDWARE))
    hand = hand_written(search, limit)
    within = min((one.choice.cost for one in search.found), default=None)
    gap = max((one.choice.gap for one in search.found), default=0.0)
    return Row(shape, wall, cpu, plan.prediction["step_seconds"], within, hand, gap, text_of(plan))


def text_of(plan: Plan) -> str:
    """Returns mesh, stages and recomputation of a plan."""
    again = ", recomputation" if plan.recompute else ""
    mesh = str(replace(plan, pp=1))
    if not plan.stages:
        return mesh + again
    pipeline = f"{len(plan.stages)} stages, {plan.schedule}, {plan.micro_batches} micro-batches"
    return f"pp {plan.pp} x {mesh}, {pipeline}{again}"


def table(rows: list[Row]) -> str:
    """Returns the rows as Markdown."""
    lines = [
        "| shape, devices | wall | CPU | goal | plan | predicted step | no stages | Megatron-style | ratio | gap |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in rows:
        goal = f"{GOALS[one.shape]:g} s" if one.shape in GOALS else ""
        within, hand = (timing(each) if each else "does not fit" for each in (one.within, one.hand))
        ratio = f"{one.found / one.hand:.3f}" if one.hand else ""
        steps = f"{timing(one.found)} | {within} | {hand} | {ratio} | {one.gap:.1e}"
        lines.append(f"| {one.shape} | {one.wall:.1f} s | {one.cpu:.1f} s | {goal} | {one.plan} | {steps} |")
    return "\n".join([*lines, "", NOTE.format(processor=processor(), torch=torch.__version__)])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(ROWS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = table([measure(shape) for shape in args.shapes.split(",")])
    print(text)
    if args.out:
        (args.out / "parallelize_search.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
