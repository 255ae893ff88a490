"""Steps of a run's own loop in a world of which only one rank is there: PyTorch's fake process group.

What the others would send is as what this rank sends (the fake group copies it), or 1.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from wire import Call, Wire, axis_names

from weft.config.components import load_class
from weft.config.derive import derive
from weft.config.run import RunConfig
from weft.data.batches.batch import Batch
from weft.observe.console import Console
from weft.parallel.gradients.scaling import LossScale
from weft.parallel.world import World, start_world
from weft.planner.torch_private import Received
from weft.torch_private import fake_ranks
from weft.train.build import build
from weft.train.data import Data
from weft.train.job import Job
from weft.train.loop import Loop
from weft.train.saving import NoSaver
from weft.train.watch.monitor import NoMonitor

# ---- a world


@contextlib.contextmanager
def imagined(ranks: int, rank: int = 0) -> Iterator[None]:
    """Be one of `ranks`. PyTorch remembers process groups in many places: use it in a process of its own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with fake_ranks(ranks, rank), _Copied():
        yield


class _Copied(TorchDispatchMode):
    """Fills what is received with what is sent, as the fake group of PyTorch 2.13 does. That of 2.11 leaves it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func._opname in ("_reduce_scatter_base_", "alltoall_base_"):
            self._copy(*args[:2])
        elif func._opname in ("reduce_scatter_tensor", "all_to_all_single"):
            self._copy(found, args[0])
        return found

    def _copy(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        if received.numel():
            rows = sent.flatten()
            received.flatten().copy_(rows.repeat(-(-received.numel() // len(rows)))[: received.numel()])


def names_of(world: World) -> dict[str, str]:
    """What to call the process groups of a world."""
    names = axis_names(*(value for value in vars(world).values() if isinstance(value, DeviceMesh)))
    if world.token_group is not None:
        names[world.token_group.group_name] = "tokens"
    return {dist.group.WORLD.group_name: "world"} | names


# ---- a loop


class Steps(Loop):
    """A run's loop that saves and measures nothing, and tells a `Wire` which part of the step it is in."""

    wire = Wire()
    new_saver, new_monitor = NoSaver, NoMonitor

    def due(self, step: int, every: int) -> bool:
        return False

    def accumulate_gradients(self, *arguments: Any) -> float:
        self.wire.phase = "forward"
        loss = super().accumulate_gradients(*arguments)
        self.wire.phase = "update"
        return loss


class Rows:
    """The same random tokens in every step, in micro-batches of `micro` sequences."""

    def __init__(self, rows: int, sequence: int, vocabulary: int, micro: int):
        self.micro = micro
        tokens = torch.randint(vocabulary, (rows, sequence + 1))
        self.batch = Batch(
            tokens=tokens[:, :-1].contiguous(),
            labels=tokens[:, 1:].contiguous(),
            weight=torch.ones(rows, sequence),
            positions=torch.arange(sequence).repeat(rows, 1),
            segments=None,
            samples=torch.arange(rows),
        )

    def micro_batch_size(self, batch: Batch) -> int:
        return self.micro

    def iterate(self, start: int, stop: int, workers: int) -> Iterator[Batch]:
        for _ in range(start, stop):
            yield self.batch


class Beginnings:
    """A recorder that notes when steps begin, and has the wire count the last of them alone."""

    def __init__(self, wire: Wire):
        self.wire, self.times, self.closed_at_end = wire, [], []

    def begin_step(self) -> None:
        self.wire.phase = "weights"
        self.wire.calls.clear()
        self.times.append(time.process_time())

    def progress(self, step: int):
        return contextlib.nullcontext()

    def __getattr__(self, name: str):
        return lambda *arguments, **named: {}


class Unstopped:
    """No signal comes, and nobody is asked for one."""

    votes, BY_CALLBACK = (), 0

    def decide(self, votes: list[float]) -> None:
        return None


def loop_of(config: RunConfig, world: World, wire: Wire, model: torch.nn.Module, optimizer: Any) -> Steps:
    """The loop of a run, with random data."""
    length = derive(config, mesh=world.shape)
    objective = load_class(config.objective, "objective")(**config.objective.arguments)
    schedule = load_class(config.schedule, "schedule")(length.steps, **config.schedule.arguments)
    sizes = length.sequences_per_rank, length.sequence_length, config.model.vocab_size
    rows = Rows(*sizes, length.micro_batch_size)
    loop = Steps(
        Job(config, world, SimpleNamespace(path=Path()), Console(prints=False), SimpleNamespace()),
        Data(length, rows, (), {}),
        model,
        objective,
        optimizer,
        schedule,
        LossScale(config.training),
        Beginnings(wire),
    )
    loop.wire = wire
    return loop


# ---- counting


def counted(file: Path, before: dict[str, str] | None = None) -> list[Call]:
    """The collectives of a run's last step, and a mark before each layer; this process is part of a world.

    Args:
        before: what groups are called of earlier runs in this process, and of this one. PyTorch goes on to use those of
            an equal mesh.
    """
    config = RunConfig.load(file)
    world = start_world(config.parallel)
    before = {} if before is None else before
    before |= names_of(world)
    wire = Wire(before)
    model, optimizer = build(config, world)
    for number, layer in enumerate(model.layers):
        if layer is not None:  # its parameters have been gathered when this is called
            layer.register_forward_pre_hook(lambda *_, name=f"layer {number}": wire.mark(name))
    loop = loop_of(config, world, wire, model, optimizer)
    with Received(), wire:
        outcome = loop.run(0)
    assert outcome.status == "finished", outcome
    return wire.calls


def counted_alone(files: Sequence[Path], ranks: int, rank: int = 0) -> list[list[Call]]:
    """`counted` of each, as one of so many imagined ranks."""
    with imagined(ranks, rank):
        names: dict[str, str] = {}
        return [counted(file, names) for file in files]


def counted_together(file: Path) -> list[Call]:
    """`counted`, as one of ranks that are there."""
    calls = counted(file)
    dist.barrier()
    dist.destroy_process_group()
    return calls
