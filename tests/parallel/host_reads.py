"""What a step's host reads from its device, counted without a GPU: the device is PyTorch's meta device.

Tensors on it have shapes but no numbers, and the host's tensors are real. So a read of the device is an operation that
has to answer with a number, or with a tensor on the CPU.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from imagined import Unstopped, loop_of
from torch.utils._python_dispatch import TorchDispatchMode
from wire import Wire

from weft.config.run import RunConfig
from weft.parallel.world import start_world
from weft.train.build import build

# Operations whose result's shape is a number on the device: the host waits for it.
SHAPED_BY_VALUES = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "is_nonzero", "equal"}


class Reads(TorchDispatchMode):
    """Records, and answers, each operation by which the host learns a number of a tensor on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, op.overloadpacket.__name__
        on_device = [x for x in args if isinstance(x, torch.Tensor) and x.is_meta]
        if on_device and name == "_local_scalar_dense":
            self.found.append(name)
            return 1.0 if on_device[0].is_floating_point() else 1
        to_host = name == "_to_copy" and torch.device(kwargs.get("device") or "meta").type == "cpu"
        if on_device and (to_host or (name == "copy_" and not args[0].is_meta)):
            self.found.append(f"{name} of {tuple(on_device[0].shape)}")
            if name == "copy_":
                return args[0].fill_(1)
            return torch.ones(on_device[0].shape, dtype=kwargs.get("dtype") or on_device[0].dtype)
        counts = name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3
        if on_device and (counts or name in SHAPED_BY_VALUES):
            self.found.append(name)
        return op(*args, **kwargs)


def reads_of_steps(file: Path) -> list[list[str]]:
    """Makes the steps of a run by its own loop on the meta device. Returns what the host read in each."""
    config = RunConfig.load(file)
    world = dataclasses.replace(start_world(config.parallel), device=torch.device("meta"))
    reads, found = Reads(), []
    try:
        # The meta device has no autocast.
        with (
            mock.patch("weft.parallel.apply.fill"),
            mock.patch.object(torch, "is_autocast_enabled", return_value=False),
        ):
            model, optimizer = build(config, world)
            loop = loop_of(config, world, Wire({}), model, optimizer)
            update = loop.update

            def counted(*given: Any) -> Any:
                reads.found = []
                result = update(*given)
                found.append(reads.found)
                return result

            loop.update = counted
            with reads:
                outcome = loop.run(0, Unstopped())
    finally:
        world.close()
    assert outcome.status == "finished"
    return found


def waits_of_steps(file: Path) -> list[int]:
    """Makes the steps of a run by its own loop on a GPU. Returns how often PyTorch saw the host wait in each."""
    config = RunConfig.load(file)
    world, found = start_world(config.parallel), []
    try:
        model, optimizer = build(config, world)
        loop = loop_of(config, world, Wire({}), model, optimizer)
        update = loop.update

        def counted(*given: Any) -> Any:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    return update(*given)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                    found.append(sum("synchronizing CUDA operation" in str(one.message) for one in seen))

        loop.update = counted
        loop.run(0, Unstopped())
    finally:
        world.close()
    return found
