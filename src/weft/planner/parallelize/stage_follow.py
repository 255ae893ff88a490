"""Follows a module's forward through pipeline stages: which calls belong to which stage, and what stages send.

A stage begins with the first call of a module that the plan names, and ends where the next stage begins. Each stage
runs the module's own forward: calls of earlier stages are skipped and return what the trace recorded, or what the stage
has received; where the next stage begins, the forward is left.

Functions of inputs and buffers alone, such as masks and positions, run on every stage instead of being sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.planner.parallelize.containers import map_tensors

READS_DEVICE = torch.Tensor.device.__get__  # not in traces: tensors without data have a property of their own


class Event(NamedTuple):
    """A call of a function or of a module, outside of modules that belong to one stage.

    Attributes:
        name: name of the function or module.
        out: the result, with tensors without data.
        local: whether every stage runs the call, because it depends on inputs and buffers alone.
    """

    name: str
    out: Any
    local: bool


@dataclass
class Trace:
    """What a module's forward does in each stage.

    Attributes:
        begins: names of the modules with whose call stages begin; the first is the module itself, "".
        spanning: names of the modules whose calls contain the beginning of a stage.
        events: the calls in order.
        sent: for each stage, the tensors (without data) that it gets from the stage before; none for the first.
        uses: name of a parameter -> the stages that use the parameter.
        written: name of a buffer -> the last stage that changes the buffer.
        returns: name of the type of the outputs.
        dtype: dtype of the outputs if they are a scalar loss; otherwise None.
    """

    begins: Sequence[str]
    spanning: set[str]
    events: list[Event] = field(default_factory=list)
    sent: list[dict[int, torch.Tensor]] = field(default_factory=list)
    uses: dict[str, set[int]] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    returns: str = ""
    dtype: torch.dtype | None = None


class EndOfStage(BaseException):
    """Leaves a forward where the next stage begins. No `except Exception` of a module catches it."""


def spanning_modules(begins: Sequence[str]) -> set[str]:
    """Returns the names of the modules around the modules with which stages begin."""
    found = {""}
    for name in begins:
        words = name.split(".")
        found |= {".".join(words[:count]) for count in range(1, len(words))}
    return found


class Follow(TorchFunctionMode):
    """A mode that sees the functions that a forward calls; `module` must be called around each call of a module.

    Attributes:
        stage: the present stage.
        inside: whether the forward is in a module that belongs to one stage.
        quiet: whether functions are those of the runtime instead of the module.
    """

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace, self.stage, self.inside, self.quiet = trace, 0, False, False

    def begins(self, name: str) -> bool:
        """Whether the next stage begins with this call of a module."""
        begins = self.trace.begins
        return not self.inside and self.stage + 1 < len(begins) and begins[self.stage + 1] == name

    @contextmanager
    def runtime(self, quiet: bool) -> Iterator[None]:
        """Context of functions of the runtime (`quiet`), or of the module."""
        before, self.quiet = self.quiet, quiet
        try:
            yield
        finally:
            self.quiet = before


class Player(Follow):
    """Runs one stage of a module's forward.

    Args:
        trace: the trace of the module, of inputs with the same shapes.
        stage: number of the stage to run.
        received: the tensors that the stage before has sent.
    """

    def __init__(self, trace: Trace, stage: int, received: Sequence[torch.Tensor]):
        super().__init__(trace)
        self.own, self.count = stage, 0
        self.received = dict(zip(trace.sent[stage], received, strict=True))
        self.wanted = trace.sent[stage + 1] if stage + 1 < len(trace.begins) else {}
        self.values = {key: value for key, value in self.received.items() if key in self.wanted}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.quiet or self.inside or func == READS_DEVICE:
            return func(*args, **(kwargs or {}))
        return self._event(getattr(func, "__name__", ""), lambda: func(*args, **(kwargs or {})))

    def module(self, name: str, module: nn.Module, forward: Callable, args: Any, kwargs: Any) -> Any:
        """Runs or skips a call of a module."""
        if self.begins(name):
            if self.stage == self.own:
                raise EndOfStage
            self.stage += 1
        if self.inside:
            return forward(*args, **kwargs)
        if name in self.trace.spanning:
            with self.runtime(quiet=True):
                return forward(*args, **kwargs)
        return self._event(name, lambda: self._block(forward, args, kwargs))

    def _block(self, forward: Callable, args: Any, kwargs: Any) -> Any:
        self.inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self.inside = False

    def _event(self, name: str, call: Callable[[], Any]) -> Any:
        event = self.trace.events[self.count] if self.count < len(self.trace.events) else None
        if event is None or event.name != name:
            raise RuntimeError(
                f"stages: the forward calls {name} where it called {event.name if event else 'nothing'} before with "
                "inputs of the same shapes; a module with stages must not branch on values of tensors"
            )
        self.count += 1
        if self.stage < self.own and not event.local:
            return map_tensors(lambda one: self.received.get(id(one), one), event.out)
        out = call()
        if self.stage == self.own and self.wanted:
            for recorded, value in zip(tensors_in(event.out), tensors_in(out), strict=True):
                if id(recorded) in self.wanted:
                    self.values[id(recorded)] = value
        return out

    def outputs(self) -> list[torch.Tensor]:
        """Returns the tensors that the next stage gets, after the stage has run."""
        return [self.values[key] for key in self.wanted]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in containers and dataclasses, in order."""
    found: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(add, value)
    return found
