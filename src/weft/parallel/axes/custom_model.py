"""Checks the `weft_sharding` table of a custom model before `tp` applies it (`weft.models.sharding`).

A wrong table mostly gives wrong sums, not errors. So names and sizes are checked, and on CPUs the sharded model must
give the outputs of the unsharded one for a few tokens, and the same gradients of replicated parameters.
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

TOLERANCE = 1e-3  # relative to the largest output; a wrong table differs by more, another order of summation by less
GRADIENT_TOLERANCE = 1e-2  # relative to the largest gradient of a parameter
NOISE = 1e-5  # relative to the largest of all gradients: some are 0 up to rounding, as that of a bias before a softmax

Results = tuple[torch.Tensor, dict[str, torch.Tensor]]  # outputs, gradients of replicated parameters by name


class CustomModelCheck:
    """Checks a custom model's table, and on CPUs computes results of the unsharded model to compare with.

    Args:
        model: unsharded, on the CPU, with its values.

    Raises:
        UserError: its class has no table, or one that does not fit the model.
    """

    def __init__(self, model: nn.Module, state: ModelState):
        self.model, self.state, self.ranks = model, state, state.world.shape.tp
        self.sharded = False
        self.table: dict[str, ShardingRule] = state.world.agree(lambda: checked_table(model, self.ranks))
        self.expected: Results | None = None
        if state.world.device.type == "cpu":
            self.tokens = _tokens(model, self.table, self.ranks, state.plan.sequence)
            self.zeros = _randomize_zeros(model)
            self.expected = self.results()

    def compare(self) -> None:
        """Compares results of the sharded model. Raises UserError if they differ."""
        if self.expected is None:
            return
        self.sharded, expected = True, self.expected
        self.state.world.agree(lambda: self._compare(*expected))
        self.expected = None
        parameters = dict(self.model.named_parameters())
        for name in self.zeros:
            parameters[name].detach().zero_()

    def results(self) -> Results:
        """Outputs in evaluation mode, and gradients of a seeded weighted sum of them, summed over `tp`.

        Leaves the model in training mode.
        """
        tokens, model = self.tokens, self.model
        inputs = {"tokens": tokens, "positions": torch.arange(tokens.shape[1]).expand_as(tokens), "segments": None}
        if "labels" in inspect.signature(model.forward).parameters:
            inputs["labels"] = tokens
        try:
            outputs = LocalParameters(model, (), self.state).wrap(forward_of(model.eval()))(inputs)
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
        if self.sharded:  # scalars are not DTensors yet
            dist.all_reduce(grad, group=self.state.world.group("tp"))
        return grad

    def _compare(self, expected: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
        model, sharded = self.model, f"sharded over {self.ranks} ranks, the model"
        remedy = "check which modules are 'part', which matrices are sharded, and that biases after the sum are 'added'"
        try:
            outputs, found = self.results()
        except Exception as error:
            what = f"{sharded} fails{_line(model, error)}: {type(error).__name__}: {error}".splitlines()[0]
            raise _error(model, f"{what}; {remedy}") from error
        if expected.shape != outputs.shape:
            shapes = f"{list(outputs.shape)} instead of {list(expected.shape)}"
            raise _error(model, f"{sharded} returns outputs of shape {shapes}; {remedy}")
        if difference := _difference(expected, outputs, TOLERANCE):
            raise _error(model, f"{sharded} returns other outputs ({difference}); {remedy}")
        noise = NOISE * max((float(grad.abs().max()) for grad in gradients.values()), default=0.0)
        for name, grad in gradients.items():
            other = found.get(name, torch.zeros_like(grad))
            if difference := _difference(grad, other, GRADIENT_TOLERANCE, noise):
                what = f"{sharded} has other gradients of {name} ({difference})"
                raise _error(model, f"{what}; outside of parts compute each token independently, in backward too")


def _difference(expected: torch.Tensor, found: torch.Tensor, tolerance: float, noise: float = 0.0) -> str:
    """By how much two tensors differ, in words; empty if within the tolerance."""
    difference, largest = (expected - found).abs().max().item(), expected.abs().max().item()
    within = difference <= tolerance * largest + noise  # false for NaN
    return "" if within else f"by up to {difference:.2g}, the largest is {largest:.2g}"


def checked_table(model: nn.Module, ranks: int) -> dict[str, ShardingRule]:
    """The sharding table of a model's class, with the rules that module kinds imply.

    Args:
        ranks: size of `tp`.

    Raises:
        UserError: there is no table, a pattern matches nothing, a dimension is not divisible, or a part has no shards.
    """
    table = getattr(model, "weft_sharding", None)
    if not isinstance(table, dict):
        what = "missing" if table is None else f"must be a dictionary, not {type(table).__name__}"
        raise _error(model, f"{what}, and parallel.tp: {ranks} needs it (docs/parallel-own-model.md); or set tp to 1")
    if problem := next(_problems(model, table, ranks), None):
        raise _error(model, problem)
    return _completed(table)


def _completed(table: dict[str, ShardingRule]) -> dict[str, ShardingRule]:
    """Adds the rules of parameters whose module's kind shards their rows."""
    kinds = ("embedding", "head", "norm")
    implied: dict[str, ShardingRule] = {f"{pattern}.*": 0 for pattern, kind in table.items() if kind in kinds}
    return implied | table


def _problems(model: nn.Module, table: dict, ranks: int) -> Iterator[str]:
    modules = {name: module for name, module in model.named_modules() if name}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [*modules, *parameters]
    for pattern, rule in table.items():
        if rule not in get_args(Kind) and (not isinstance(rule, int) or isinstance(rule, bool) or rule < 0):
            yield f"{pattern!r}: {rule!r} is not a rule; give it a dimension or one of {', '.join(get_args(Kind))}"
        if not any(fnmatchcase(name, pattern) for name in names):
            general = [".".join("*" if key.isdigit() else key for key in name.split(".")) for name in names]
            remedy = did_you_mean(pattern, general) or "; remove it"
            yield f"{pattern!r} matches no module and no parameter of the model{remedy}"
    if "embedding" not in table.values():
        yield "it has no 'embedding'; add the module that takes the token ids"
    complete = _completed(table)
    rules: dict[str, ShardingRule | None] = {name: find_rule(complete, name) for name in parameters}
    for name, parameter in parameters.items():
        yield from _of_parameter(name, parameter, rules[name], ranks)
        for other, same in parameters.items():
            if same is parameter and rules[other] != rules[name]:
                yield f"{name} and {other} are tied, with rules {rules[name]} and {rules[other]}; give both the same"
    for name, module in modules.items():
        yield from _of_module(name, module, find_rule(complete, name), rules)


def _of_parameter(name: str, parameter: nn.Parameter, rule: ShardingRule | None, ranks: int) -> Iterator[str]:
    if isinstance(rule, str) and rule != "added":
        yield f"{name} is a parameter, and {rule!r} is a rule for modules; give it a dimension, or 'added'"
    elif isinstance(rule, int) and rule >= parameter.dim():
        yield f"{name} has no dimension {rule}: its shape is {tuple(parameter.shape)}; give it another"
    elif isinstance(rule, int) and parameter.shape[rule] % ranks:
        size = f"{parameter.shape[rule]:,}"
        yield f"parallel.tp: {ranks} does not divide dimension {rule} of {name}, which is {size}; change one of the two"


def _of_module(
    name: str, module: nn.Module, kind: ShardingRule | None, rules: Mapping[str, ShardingRule | None]
) -> Iterator[str]:
    inside = [rule for key, rule in rules.items() if key.startswith(f"{name}.")]
    if kind == "added":
        yield f"{name} is a module, and 'added' is a rule for parameters; name its parameters"
    elif kind == "part" and not any(isinstance(rule, int) for rule in inside):
        what = "is a 'part' without sharded parameters: each rank would add its full output"
        yield f"{name} {what}; name its matrices"
    elif kind in ("embedding", "head", "norm") and any(rule != 0 for rule in inside):
        yield f"{name}: {kind!r} shards dimension 0 of its parameters; remove their rules, or set them to 0"
    elif kind == "embedding" and not (
        isinstance(module, nn.Embedding) and module.padding_idx is None and module.max_norm is None
    ):
        yield f"{name} cannot be sharded; make it an nn.Embedding without padding_idx and max_norm"
    elif kind == "norm" and not isinstance(module, RMSNorm):
        yield f"{name} is not a weft.models.layers.norm.RMSNorm; remove its rule, or use that class"


# ---- the comparison on a few tokens


def _tokens(model: nn.Module, table: dict[str, ShardingRule], ranks: int, sequence: int) -> torch.Tensor:
    """Two sequences of token ids from the full vocabulary, `[2, seq]`."""
    embedding = next(m for name, m in model.named_modules() if name and find_rule(table, name) == "embedding")
    assert isinstance(embedding, nn.Embedding)
    seq = min(4 * ranks, sequence or 4 * ranks)
    return torch.arange(2 * seq).mul(7919).remainder(embedding.num_embeddings).view(2, seq)


def _randomize_zeros(model: nn.Module) -> list[str]:
    """Randomizes parameters that are all zeros (biases, output projections), to test them; returns their names."""
    generator, found = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.1, generator=generator)
                found.append(name)
    return found


def _line(model: nn.Module, error: Exception) -> str:
    """` in line 3`: the innermost line of the file of the model's class in the traceback."""
    file = inspect.getsourcefile(type(model))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""


def _error(model: nn.Module, what: str) -> UserError:
    """At the line of the model's class, if it can be found."""
    kind, path, line = type(model), None, None
    with contextlib.suppress(OSError, TypeError):
        path, line = inspect.getsourcefile(kind), inspect.getsourcelines(kind)[1]
    if path is not None and path.startswith(os.getcwd() + os.sep):
        path = os.path.relpath(path)
    return UserError(f"{kind.__name__}.weft_sharding: {what}", path, line)
