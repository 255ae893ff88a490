"""Defines `Probe`, which finds the first value of a step that is not finite, by hooks on all modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.checkpoint.tensors import plain_name
from weft.parallel.local_parameters import local
from weft.parallel.objective import Loss

if TYPE_CHECKING:
    from weft.parallel.passes import Passes

WEIGHTS, FORWARD, BACKWARD, REDUCED = range(4)  # phases of a step, in their order
KEPT = 8  # values that are not finite, of which the report lists the first ones
Range = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a step.

    Attributes:
        phase: number of the phase, of the constants above.
        micro_batch, stage: numbers of the micro-batch and of the pipeline stage.
        what: "weight", "input", "output", "loss", "output gradient", "input gradient", "weight gradient" or "norm".
        module: name of the module in whose code its values arise; "" for the model or the objective.
        type: class of the module or the objective.
        tensor: the tensor, in words.
        samples: the samples of the micro-batch.
        extremes: least and highest value of the inputs of that code.
    """

    phase: int
    micro_batch: int
    stage: int
    what: str
    module: str
    type: str
    tensor: str
    samples: Sequence[int] = ()
    extremes: Range | None = None


@dataclass
class Found:
    """A tensor with values that are not finite, on one rank.

    Attributes:
        order: by which the tensors of all ranks are sorted: phase, micro-batch, pipeline stage, number in time.
        what, module, type, tensor: see `Place`.
        values: the kinds of values: "nan", "inf", "-inf".
        count, size: number of values that are not finite, and of all values.
        dtype: dtype of the tensor.
        input_range: least and highest value of the inputs of the code; None without inputs.
        samples: the samples to which the values belong, if the tensor has a row for each sample.
        rank: rank of the process.
    """

    order: tuple[int, ...]
    what: str
    module: str
    type: str
    tensor: str
    values: list[str]
    count: int
    size: int
    dtype: str
    input_range: tuple[float, float] | None
    samples: list[int]
    rank: int

    def as_dict(self) -> dict[str, Any]:
        """Returns the attributes as JSON values, without the order."""
        return {key: value for key, value in asdict(self).items() if key != "order"}


class Probe:
    """Hooks on the modules of a model, which note the first tensors that are not finite on this rank.

    The inputs of a module are checked before its forward, and its outputs after it. A bad output of a module whose
    inputs and inner modules are finite comes from its own code. A bad input comes from the code of the module that
    calls it. The gradients of the same tensors are checked in backward: a bad gradient of an input comes from the
    module's own code, and a bad gradient of an output from the code that uses it.

    Inputs that have no gradient, such as masks, can contain infinite values on purpose, and are not checked.

    Args:
        passes: the passes of the training loop.
        rank: rank of this process.

    Attributes:
        found: the first tensors, in the order of time.
    """

    def __init__(self, passes: Passes, rank: int):
        self.passes, self.rank = passes, rank
        self.found: list[Found] = []
        self._count = itertools.count()
        self._micro_batch, self._stage = -1, 0
        self._samples: list[int] = []
        self._entered: list[tuple[str, nn.Module]] = []  # the modules whose forward runs
        self._outputs: Range | None = None  # of the model

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the hooks are registered."""
        passes, objective = self.passes, self.passes.objective
        stages = getattr(passes, "stages", {0: None})
        with ExitStack() as cleanup:
            for stage, root in zip(stages, passes.root_modules, strict=True):
                for name, module in root.named_modules():
                    enter, leave = partial(self._enter, plain_name(name), stage), partial(self._leave, plain_name(name))
                    cleanup.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                    cleanup.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
            begin: Callable = partial(self._begin, passes.seed_micro_batch)
            wrapped: list[tuple[Any, str, Callable]] = [(passes, "seed_micro_batch", begin)]
            if passes.compute is not None:
                wrapped.append((passes, "compute", partial(self._loss, passes.compute)))
            else:
                wrapped.append((objective, "loss", partial(self._loss, objective.loss)))
            for owner, name, wrapper in wrapped:
                cleanup.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, wrapper)
            yield

    # ---- called in a step

    def _begin(self, seed: Callable, micro_batch: Any, *rest: Any) -> None:
        self._micro_batch += 1
        self._samples = micro_batch.samples.tolist()
        self._entered.clear()
        seed(micro_batch, *rest)

    def _enter(
        self, name: str, stage: int, module: nn.Module, given: tuple, named: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        if not name:
            self._entered.clear()  # a recomputation can end within a forward
            self._stage = stage
        caller, owner = self._entered[-1] if self._entered else ("", module)
        words = f"the input of {name or 'the model'}"
        for tensor in _tensors((given, named)):
            if tensor.requires_grad or not self._entered:
                self._check(self._place(FORWARD, "input", caller, owner, words), tensor)
        self._entered.append((name, module))
        extremes = _range(_inputs(given, named))
        place = self._place(BACKWARD, "input gradient", name, module, f"the gradient of {words}", extremes)

        def alias(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                tensor = tensor.view_as(tensor)  # whose gradient is that of this use of the tensor alone
                tensor.register_hook(partial(self._check, place))
            return tensor

        return _mapped(given, alias), _mapped(named, alias)

    def _leave(self, name: str, module: nn.Module, given: tuple, named: dict[str, Any], outputs: Any) -> None:
        while self._entered and self._entered.pop()[0] != name:
            pass
        words = f"the output of {name or 'the model'}"
        place = self._place(FORWARD, "output", name, module, words, _range(_inputs(given, named)))
        caller, owner = self._entered[-1] if self._entered else ("", self.passes.objective)
        extremes = _range(_tensors(outputs))
        used = self._place(BACKWARD, "output gradient", caller, owner, f"the gradient of {words}", extremes)
        for tensor in _tensors(outputs):
            self._check(place, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._check, used))
        if not name:
            self._outputs = extremes

    def _loss(self, compute: Callable, *arguments: Any, **named: Any) -> Any:
        found = compute(*arguments, **named)
        loss = found.sum if isinstance(found, Loss) else found
        if isinstance(loss, torch.Tensor):
            place = self._place(FORWARD, "loss", "", self.passes.objective, "the loss", self._outputs)
            self._check(place, loss)
        return found

    def check_parameters(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Checks this rank's shards of weights."""
        for name, tensor in named:
            owner, _, last = plain_name(name).rpartition(".")
            words = f"the weight {plain_name(name)}"
            self._check(Place(WEIGHTS, 0, 0, "weight", owner, last, words), tensor.detach())

    def check_parameter_gradients(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Checks the gradients of this rank's shards of parameters, after they are reduced."""
        for name, parameter in reversed(list(named)):  # the order of backward
            if parameter.grad is not None:
                owner, _, last = plain_name(name).rpartition(".")
                words = f"the gradient of the parameter {plain_name(name)}"
                self._check(Place(REDUCED, 0, 0, "weight gradient", owner, last, words), parameter.grad)

    def _place(self, phase: int, what: str, name: str, owner: Any, words: str, extremes: Range | None = None) -> Place:
        kind = type(owner).__name__.removeprefix("FSDP")  # FSDP2 makes a subclass
        stage = -self._stage if phase == BACKWARD else self._stage  # backward goes through the stages in reverse
        return Place(phase, max(0, self._micro_batch), stage, what, name, kind, words, self._samples, extremes)

    def _check(self, place: Place, tensor: torch.Tensor) -> None:
        """Notes a tensor if it is not finite, and if there is room."""
        plain = local(tensor)
        if len(self.found) >= KEPT or not plain.is_floating_point() or (finite := torch.isfinite(plain)).all():
            return
        rows: list[int] = []
        if plain.ndim > 1 and len(plain) == len(place.samples):
            good = finite.flatten(1).all(1).tolist()
            rows = [sample for sample, fine in zip(place.samples, good, strict=True) if not fine and sample >= 0]
        self.found.append(
            Found(
                order=(place.phase, place.micro_batch, place.stage, next(self._count)),
                what=place.what,
                module=place.module,
                type=place.type,
                tensor=place.tensor,
                values=kinds(plain),
                count=int((~finite).sum()),
                size=plain.numel(),
                dtype=str(plain.dtype).removeprefix("torch."),
                input_range=None if place.extremes is None else (float(place.extremes[0]), float(place.extremes[1])),
                samples=rows,
                rank=self.rank,
            )
        )


def kinds(tensor: torch.Tensor) -> list[str]:
    """Returns which of "nan", "inf" and "-inf" a tensor has."""
    tests = (("nan", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf))
    return [name for name, test in tests if test(tensor).any()]


def likely_cause(found: Found) -> str:
    """Returns the likely cause of the first values that are not finite, from their kinds and the code's inputs."""
    low, high = found.input_range or (1.0, 1.0)
    largest, highest = torch.finfo(getattr(torch, found.dtype)).max, max(abs(low), abs(high))
    has_zero = low <= 0 <= high
    infinite, half = found.values != ["nan"], found.dtype in ("float16", "bfloat16")
    limit = f"{found.dtype}, whose largest value is {largest:.4g}"
    if found.what == "weight gradient":
        return f"the sum over tokens or ranks exceeds {limit}"
    if found.what == "norm":
        return "the squares of finite gradients exceed their dtype; look at the loss of the steps before"
    if highest**2 > largest or (infinite and half and not (has_zero and highest < 1e3)):
        return f"overflow of {limit}"
    if found.what.endswith("gradient"):
        at = "at 0" if has_zero else "at an input"
        return f"the derivative {at} is not finite, as that of a root, a norm, a logarithm or a division"
    if infinite:
        return "a division by 0, the logarithm of 0, or an overflow of an exponential"
    return "the root or logarithm of a negative number, 0/0, or inf - inf (as in a row of attention without keys)"


def _tensors(value: Any, *, integers: bool = False) -> Iterator[torch.Tensor]:
    """Yields the floating-point tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        if value.numel() and (value.is_floating_point() or (integers and value.dtype != torch.bool)):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, integers=integers)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item, integers=integers)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns nested plain tuples, lists and dicts with `change` applied to all tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    return {key: _mapped(item, change) for key, item in value.items()} if type(value) is dict else value


def _inputs(given: tuple, named: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the inputs of a module that have a gradient or, without such inputs, its positional ones."""
    found = [tensor for tensor in _tensors((given, named)) if tensor.requires_grad]
    return found or list(_tensors(given, integers=True))


@torch.no_grad()
def _range(tensors: Iterable[torch.Tensor]) -> Range | None:
    """Returns the least and the highest value of tensors as scalars on their device; None without tensors."""
    pairs: Sequence[Any] = [torch.aminmax(local(tensor)) for tensor in tensors if not tensor.is_complex()]
    if not pairs:
        return None
    low, high = (torch.stack([pair[end].double() for pair in pairs]) for end in (0, 1))
    return low.min(), high.max()
