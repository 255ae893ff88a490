"""Traces a module's forward through pipeline stages, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from weft.errors import UserError
from weft.planner.parallelize.containers import first_float, map_tensors
from weft.planner.parallelize.stage_follow import Event, Follow, Trace, spanning_modules, tensors_in
from weft.planner.parallelize.torch_private import FakeTensorMode, buffers_of, is_fake, parameters_of

# Functions that draw random numbers: their results are sent, so that all stages have the same.
RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "multinomial", "normal", "normal_", "uniform_", "random_", "exponential_", "dropout", "dropout_", "dropout1d",
    "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax",
    "poisson", "log_normal_", "geometric_", "cauchy_",
}  # fmt: skip


class Recorder(Follow):
    """Makes a trace.

    Args:
        names: parameters without data -> their names.
        islands: names of modules that run on plain tensors; they are not run here.
    """

    def __init__(self, trace: Trace, names: Mapping[torch.Tensor, Sequence[str]], islands: Callable[[str], Any]):
        super().__init__(trace)
        self.names, self.islands = names, islands
        self.made: dict[int, tuple[int, bool]] = {}  # id of a tensor -> stage, and whether every stage makes it
        self.kept: list[Any] = []  # so that ids stay unique
        self.local = True  # of the present block
        self.constants: Mapping[torch.Tensor, str] = {}
        self.last_stage: dict[str, int] = {}  # of the calls of a module
        trace.sent = [{} for _ in trace.begins]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.quiet:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        out = func(*args, **(kwargs or {}))
        makes = bool(tensors_in(out))
        local = name not in RANDOM and self._use(tensors_in((args, kwargs)), makes)
        if _writes(name) and args and id(args[0]) not in self.made:
            local = False  # a buffer, which one stage changes
        if self.inside:
            self.local = self.local and local
        else:
            self._record(name, out, local)
        return out

    def module(self, name: str, module: nn.Module, forward: Callable, args: Any, kwargs: Any) -> Any:
        """Runs and records a call of a module."""
        if self.begins(name):
            self.stage += 1
        self.last_stage[name] = self.stage
        if self.inside or name in self.trace.spanning:
            return forward(*args, **kwargs)
        with self.runtime(quiet=True):
            local = self._use(tensors_in((args, kwargs)))
            local = self._use(list(module.parameters())) and local and self.islands(name) is None
        self.inside, self.local = True, local
        try:
            out = forward(*args, **kwargs) if self.islands(name) is None else self._island(args, kwargs)
        finally:
            self.inside = False
        self._record(name, out, self.local)
        return out

    def _island(self, args: Any, kwargs: Any) -> torch.Tensor:
        with self.runtime(quiet=True):
            like = first_float(args, kwargs)
            like = tensors_in((args, kwargs))[0] if like is None else like
            return torch.empty_like(like).requires_grad_(like.is_floating_point()).clone()

    def given(self, value: Any) -> None:
        """Registers inputs of the module, which every stage has."""
        for tensor in tensors_in(value):
            self._made(tensor, local=True)

    def _made(self, tensor: torch.Tensor, local: bool) -> None:
        self.made[id(tensor)] = self.stage, local
        self.kept.append(tensor)

    def _record(self, name: str, out: Any, local: bool) -> None:
        self.trace.events.append(Event(name, out, local))
        for tensor in tensors_in(out):
            if tensor not in self.names:
                self._made(tensor, local)

    def _use(self, leaves: Sequence[torch.Tensor], values: bool = True) -> bool:
        """Notes that the present stage uses tensors. Returns whether every stage has all of them.

        Args:
            values: whether the stage uses their values, and not only their shapes.
        """
        local = True
        for leaf in leaves:
            if not values:
                continue
            if leaf in self.names:
                local = False
                for name in self.names[leaf]:
                    self.trace.uses.setdefault(name, set()).add(self.stage)
            elif id(leaf) in self.made:
                stage, every = self.made[id(leaf)]
                local = local and every
                if not every:
                    for later in range(stage + 1, self.stage + 1):
                        self.trace.sent[later][id(leaf)] = leaf
            elif self.inside:
                continue
            elif is_fake(leaf) and leaf not in self.constants:
                raise UserError(
                    f"stages: the forward uses a tensor of shape {tuple(leaf.shape)} that a module did not return, or "
                    "that an autograd function made; compute it in a module that returns it"
                )
        return local


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def trace_stages(
    model: nn.Module,
    begins: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    islands: Callable[[str], Any] = lambda name: None,
    forwards: Mapping[str, Callable] | None = None,
    dtype: torch.dtype | None = None,
) -> Trace:
    """Returns the trace of a module's forward. The module is not changed.

    Args:
        begins: names of the modules with whose call stages begin; the first is "".
        args: positional inputs of one micro-batch; only shapes, dtypes and devices count.
        kwargs: keyword inputs likewise.
        loss: outputs -> loss.
        islands: name of a module -> not None for modules that run on plain tensors.
        forwards: name of a module -> its own forward; by default, the present one.
        dtype: dtype of the parameters in the computation.

    Raises:
        UserError: the forward does not call the modules in this order.
    """
    trace = Trace(tuple(begins), spanning_modules(begins))
    with FakeTensorMode(allow_non_fake_inputs=True), _without_data(model, dtype) as names, torch.enable_grad():
        recorder = Recorder(trace, names, islands)
        recorder.constants = {tensor: name for name, tensor in model.named_buffers(remove_duplicate=False)}
        args, kwargs = map_tensors(_fake, (args, kwargs))
        recorder.given((args, kwargs))
        forwards = forwards or {name: one.forward for name, one in model.named_modules()}
        for name, module in model.named_modules():
            module.forward = _recording(recorder, name, module, forwards[name])
        before = {name: (one, one._version) for name, one in model.named_buffers()}
        with recorder:
            out = model(*args, **kwargs)
            out = out if loss is None else loss(out)
        recorder._use(tensors_in(out))
        for name, one in model.named_buffers():
            first, version = before.get(name, (None, 0))
            if one is not first or one._version != version:
                last = recorder.last_stage.get(name.rpartition(".")[0], 0)
                trace.written[name] = recorder.made.get(id(one), (last, False))[0]
    if recorder.stage + 1 != len(begins):
        raise UserError(
            f"stages: the forward does not call {begins[recorder.stage + 1]!r} after {begins[recorder.stage]!r}; name "
            "the modules in the order in which the forward calls them"
        )
    if isinstance(out, torch.Tensor) and not out.dim() and out.is_floating_point():
        trace.dtype = out.dtype
    trace.returns = type(out).__name__
    return trace


def _recording(recorder: Recorder, name: str, module: nn.Module, forward: Callable) -> Callable:
    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return recorder.module(name, module, forward, args, kwargs)

    return call


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)


@contextmanager
def _without_data(model: nn.Module, dtype: torch.dtype | None) -> Iterator[dict[torch.Tensor, list[str]]]:
    """Context in which parameters and buffers have no data. Attributes that the forward sets are restored.

    The value of the context has the parameters without data with their names.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    names: dict[torch.Tensor, list[str]] = {}
    before: list[tuple[dict, dict]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        before.append((module.__dict__, dict(module.__dict__)))
        for tensors in (parameters_of(module), buffers_of(module)):
            before.append((tensors, dict(tensors)))
            for name, old in tensors.items():
                if old is None or is_fake(old):  # of a module that was visited before
                    new = old
                elif old not in made:
                    casts = dtype is not None and tensors is parameters_of(module) and old.is_floating_point()
                    new = _fake(old)
                    new = new.to(dtype) if casts else new
                    new = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                    made[old] = new
                else:
                    new = made[old]
                tensors[name] = new
                if new is not None and tensors is parameters_of(module):
                    names.setdefault(new, []).append(f"{path}.{name}".lstrip("."))
    try:
        yield names
    finally:
        for values, old in reversed(before):
            values.clear()
            values.update(old)
