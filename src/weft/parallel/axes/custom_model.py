"""A model of the user's own, cut over `tp` by the table of its class (`weft.models.sharding`), once that is checked.

What is wrong in a table is mostly a wrong sum, that is: no error, and another model. So its names and sizes are
checked. On CPUs the model is tried: for a few tokens its outputs, and the gradients of replicated parameters, must be
those of the unsharded model.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.suggest import did_you_mean
from weft.errors import UserError
from weft.models.forward import forward_of
from weft.models.layers.norm import RMSNorm
from weft.models.sharding import Kind, ShardingRule, find_rule
from weft.parallel.local_parameters import LocalParameters
from weft.parallel.model_state import ModelState

TOLERANCE = 1e-3  # of the largest output: a wrong table is wrong by much more, other orders of sums by less
GRADIENT_TOLERANCE = 1e-2  # of a parameter's largest gradient: what is wrong is wrong by a factor
NOISE = 1e-5  # of the largest of all gradients: some are 0 but for rounding, as that of a bias before a softmax


class CustomTrial:
    """A custom model's table, checked, and on CPUs what the whole model gives for a few tokens.

    Args:
        model: whole, on the CPU, with its values.

    Raises:
        UserError: its class has no table, or one that does not fit the model.
    """

    def __init__(self, model: nn.Module, state: ModelState):
        self.model, self.state, self.ranks = model, state, state.world.shape.tp
        self.sharded = False
        self.table: dict[str, ShardingRule] = state.world.agree(lambda: checked_table(model, self.ranks))
        self.before: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None
        if state.world.device.type == "cpu":
            self.tokens = _tokens(model, self.table, self.ranks, state.plan.sequence)
            self.zeros = _zeros(model)
            self.before = self.results()

    def results(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the model's outputs in evaluation, and the gradients of its replicated parameters by name.

        The gradients are those of a seeded weighted sum of the outputs, summed over the ranks. The model is left in
        training mode.
        """
        tokens, model = self.tokens, self.model
        inputs = {"tokens": tokens, "positions": torch.arange(tokens.shape[1]).expand_as(tokens), "segments": None}
        if "labels" in inspect.signature(model.forward).parameters:
            inputs["labels"] = tokens
        try:
            outputs = LocalParameters(model, (), self.state).around(forward_of(model.eval()))(inputs)
        finally:
            model.train()
        replicated = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not isinstance(find_rule(self.table, name), int)
        }
        if not replicated or not outputs.requires_grad:
            return outputs.detach(), {}
        weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
        found = torch.autograd.grad((outputs * weights).sum(), list(replicated.values()), allow_unused=True)
        gradients = {name: grad for name, grad in zip(replicated, found, strict=True) if grad is not None}
        return outputs.detach(), {name: self._summed(grad) for name, grad in gradients.items()}

    def _summed(self, grad: torch.Tensor) -> torch.Tensor:
        if isinstance(grad, DTensor):
            return grad.full_tensor()
        if self.sharded:  # scalars are no DTensors yet
            dist.all_reduce(grad, group=self.state.world.group("tp"))
        return grad

    def compare(self) -> None:
        """Once its parts are sharded. Raises UserError if outputs or gradients are no longer what they were."""
        if self.before is None:
            return
        self.sharded, before = True, self.before
        self.state.world.agree(lambda: self._compare(*before))
        self.before = None
        parameters = dict(self.model.named_parameters())
        for name in self.zeros:
            parameters[name].detach().zero_()

    def _compare(self, before: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
        model, over = self.model, f"cut over {self.ranks} ranks the model"
        check = "check which modules are parts, which matrices are cut, and that biases after the sum are 'added'"
        try:
            after, found = self.results()
        except Exception as error:
            what = f"{over} fails{_place(model, error)}: {type(error).__name__}: {error}".splitlines()[0]
            raise _wrong(model, f"{what}; {check}") from error
        if before.shape != after.shape:
            raise _wrong(model, f"{over} gives {list(after.shape)} in place of {list(before.shape)}; {check}")
        apart, largest = (before - after).abs().max().item(), before.abs().max().item()
        if not apart <= TOLERANCE * largest:
            raise _wrong(model, f"{over} gives other outputs (by {apart:.2g}, of up to {largest:.2g}); {check}")
        noise = NOISE * max((float(grad.abs().max()) for grad in gradients.values()), default=0.0)
        for name, grad in gradients.items():
            other = found.get(name, torch.zeros_like(grad))
            apart, largest = (grad - other).abs().max().item(), grad.abs().max().item()
            if not apart <= GRADIENT_TOLERANCE * largest + noise:
                what = f"{over} gives other gradients of {name} (by {apart:.2g}, of up to {largest:.2g})"
                raise _wrong(model, f"{what}; outside of parts, compute each token by itself, in backward too")


def checked_table(model: nn.Module, ranks: int) -> dict[str, ShardingRule]:
    """The table of a model's class, completed.

    Args:
        ranks: of `tp`.

    Raises:
        UserError: there is none; or a pattern fits nothing, a dimension cannot be cut, a part's output would be wrong.
    """
    table = getattr(model, "weft_sharding", None)
    if not isinstance(table, dict):
        what = "has no table" if table is None else f"is {type(table).__name__} and no dictionary"
        raise _wrong(model, f"{what}, which parallel.tp: {ranks} needs; see weft/models/sharding.py, or set tp to 1")
    if problem := next(_problems(model, table, ranks), None):
        raise _wrong(model, problem)
    return _completed(table)


def _completed(table: dict[str, ShardingRule]) -> dict[str, ShardingRule]:
    """With what follows from a module's kind: all its parameters are cut by rows."""
    kinds = ("embedding", "head", "norm")
    by_rows: dict[str, ShardingRule] = {f"{pattern}.*": 0 for pattern, kind in table.items() if kind in kinds}
    return by_rows | table


def _problems(model: nn.Module, table: dict, ranks: int) -> Iterator[str]:
    """What is wrong, in words."""
    modules = {name: module for name, module in model.named_modules() if name}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [*modules, *parameters]
    for pattern, kind in table.items():
        if kind not in get_args(Kind) and (not isinstance(kind, int) or isinstance(kind, bool) or kind < 0):
            words = ", ".join(get_args(Kind))
            yield f"{pattern!r}: {kind!r}; give it a dimension or one of {words}"
        if not any(fnmatchcase(name, pattern) for name in names):
            general = [".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names]
            remedy = did_you_mean(pattern, general) or "; remove it"
            yield f"{pattern!r} fits no part and no parameter of the model{remedy}"
    if "embedding" not in table.values():
        yield "it names no embedding; give the module that is given token ids: 'embedding'"
    whole = _completed(table)
    cuts: dict[str, ShardingRule | None] = {name: find_rule(whole, name) for name in parameters}
    for name, parameter in parameters.items():
        yield from _of_parameter(name, parameter, cuts[name], ranks)
        for other, same in parameters.items():
            if same is parameter and cuts[other] != cuts[name]:
                yield f"{name} is {other}, and cut in another way ({cuts[name]}, {cuts[other]}); give both the same"
    for name, module in modules.items():
        yield from _of_module(name, module, find_rule(whole, name), cuts)


def _of_parameter(name: str, parameter: nn.Parameter, cut: ShardingRule | None, ranks: int) -> Iterator[str]:
    if isinstance(cut, str) and cut != "added":
        yield f"{name} is a parameter, and {cut!r} is for modules; give it a dimension, or 'added'"
    elif isinstance(cut, int) and cut >= parameter.dim():
        yield f"{name} has no dimension {cut}, its shape is {tuple(parameter.shape)}; give it another"
    elif isinstance(cut, int) and parameter.shape[cut] % ranks:
        size = f"{parameter.shape[cut]:,}"
        yield f"parallel.tp: {ranks} does not divide dimension {cut} of {name}, which is {size}; change one of the two"


def _of_module(
    name: str, module: nn.Module, kind: ShardingRule | None, cuts: Mapping[str, ShardingRule | None]
) -> Iterator[str]:
    inside = {key: cut for key, cut in cuts.items() if key.startswith(f"{name}.")}
    if kind == "added":
        yield f"{name} is a module, and 'added' is for parameters; name these"
    elif kind == "part" and not any(isinstance(cut, int) for cut in inside.values()):
        yield f"{name} is a part of which nothing is cut, so each rank would add all of its output; name its matrices"
    elif kind in ("embedding", "head", "norm") and any(cut != 0 for cut in inside.values()):
        yield f"{name} is cut by its rows; leave its parameters out, or give them 0"
    elif kind == "embedding" and not (
        isinstance(module, nn.Embedding) and module.padding_idx is None and module.max_norm is None
    ):
        yield f"{name} cannot be cut; let it be an nn.Embedding without padding_idx and max_norm"
    elif kind == "norm" and not isinstance(module, RMSNorm):
        yield f"{name} is no weft.models.layers.norm.RMSNorm; leave it whole, or let it be one"


# ---- the trial


def _tokens(model: nn.Module, table: dict[str, ShardingRule], ranks: int, sequence: int) -> torch.Tensor:
    """Two rows of ids from all over the vocabulary, `[2, seq]`."""
    words = next(m for name, m in model.named_modules() if name and find_rule(table, name) == "embedding")
    assert isinstance(words, nn.Embedding)
    seq = min(4 * ranks, sequence or 4 * ranks)
    return torch.arange(2 * seq).mul(7919).remainder(words.num_embeddings).view(2, seq)


def _zeros(model: nn.Module) -> list[str]:
    """Give what begins as zeros (biases, output projections) values, so that it makes a difference; their names."""
    generator, found = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.1, generator=generator)
                found.append(name)
    return found


def _place(model: nn.Module, error: Exception) -> str:
    """` in my.py, line 3`: the last line of the model's own file that it came through."""
    file = inspect.getsourcefile(type(model))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""


def _wrong(model: nn.Module, what: str) -> UserError:
    """At the class's line, if that can be found."""
    kind, path, line = type(model), None, None
    with contextlib.suppress(OSError, TypeError):
        path, line = inspect.getsourcefile(kind), inspect.getsourcelines(kind)[1]
    if path is not None and path.startswith(os.getcwd() + os.sep):
        path = os.path.relpath(path)
    return UserError(f"{kind.__name__}.weft_sharding: {what}", path, line)
