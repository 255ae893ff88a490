"""Checks the `weft_sharding` table of a custom model before `tp` applies it (`weft.models.sharding`).

A wrong table usually does not fail, but gives wrong results. So this module checks names and sizes. On CPUs it also
compares the sharded model with the unsharded model on a few tokens: the outputs, and the gradients of replicated
parameters, must be equal.
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

TOLERANCE = 1e-3  # relative to the largest output; a wrong table differs by more, rounding by less
GRADIENT_TOLERANCE = 1e-2  # relative to the largest gradient of a parameter
NOISE = 1e-5  # relative to the largest of all gradients; some are 0 up to rounding (a bias before a softmax)

Results = tuple[torch.Tensor, dict[str, torch.Tensor]]  # outputs, gradients of replicated parameters by name


class CustomModelCheck:
    """Checks a custom model's sharding table, and on CPUs computes reference results of the unsharded model.

    Args:
        model: unsharded model on the CPU, with initialized parameters.

    Raises:
        UserError: if the model's class has no sharding table, or the table does not fit the model.
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
        """Compares the sharded model's results with those of the unsharded model.

        Does nothing on other devices than CPUs, because reference results are computed only on CPUs.

        Raises:
            UserError: if the results differ.
        """
        if self.expected is None:
            return
        self.sharded, expected = True, self.expected
        self.state.world.agree(lambda: self._compare(*expected))
        self.expected = None
        parameters = dict(self.model.named_parameters())
        for name in self.zeros:
            parameters[name].detach().zero_()

    def results(self) -> Results:
        """Returns the outputs of the model, and the gradients of the replicated parameters by name.

        The outputs are computed in evaluation mode. The gradients are those of a weighted sum of the outputs,
        with random weights from a fixed seed, and are summed over `tp`. Sets the model to training mode at the end.
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
        remedy = "check the rules: 'part' for modules, a dimension for each sharded matrix, 'added' for output biases"
        try:
            outputs, found = self.results()
        except Exception as error:
            what = f"{sharded} fails{_line(model, error)}: {type(error).__name__}: {error}".splitlines()[0]
            raise _error(model, f"{what}; {remedy}") from error
        if expected.shape != outputs.shape:
            shapes = f"{list(outputs.shape)} instead of {list(expected.shape)}"
            raise _error(model, f"{sharded} returns outputs of shape {shapes}; {remedy}")
        if difference := _difference(expected, outputs, TOLERANCE):
            raise _error(model, f"{sharded} returns wrong outputs ({difference}); {remedy}")
        noise = NOISE * max((float(grad.abs().max()) for grad in gradients.values()), default=0.0)
        for name, grad in gradients.items():
            other = found.get(name, torch.zeros_like(grad))
            if difference := _difference(grad, other, GRADIENT_TOLERANCE, noise):
                what = f"{sharded} has wrong gradients of {name} ({difference})"
                raise _error(model, f"{what}; in modules without the rule 'part', compute each token independently")


def _difference(expected: torch.Tensor, found: torch.Tensor, tolerance: float, noise: float = 0.0) -> str:
    """Returns a text that states by how much two tensors differ; "" if the difference is small enough.

    Args:
        tolerance: allowed difference, as a fraction of the largest absolute value in `expected`.
        noise: allowed absolute difference, in addition to `tolerance`.
    """
    difference, largest = (expected - found).abs().max().item(), expected.abs().max().item()
    within = difference <= tolerance * largest + noise  # false for NaN
    return "" if within else f"off by up to {difference:.2g}; the largest correct value is {largest:.2g}"


def checked_table(model: nn.Module, ranks: int) -> dict[str, ShardingRule]:
    """Checks and returns the table `weft_sharding` of a model's class, completed by the rules that it implies.

    For example, the rule 'embedding' for a module implies that dimension 0 of the module's weight is sharded.

    Args:
        ranks: number of `tp` ranks.

    Raises:
        UserError: if the class has no table, or the table does not fit the model: for example, a pattern matches no
            module or parameter, `ranks` does not divide a sharded dimension, or a module with the rule 'part' has no
            sharded parameter.
    """
    table = getattr(model, "weft_sharding", None)
    if not isinstance(table, dict):
        what = "missing" if table is None else f"must be a dictionary, not {type(table).__name__}"
        raise _error(model, f"{what}, but parallel.tp: {ranks} needs it; see docs/parallel-own-model.md, or set tp: 1")
    if problem := next(_problems(model, table, ranks), None):
        raise _error(model, problem)
    return _completed(table)


def _completed(table: dict[str, ShardingRule]) -> dict[str, ShardingRule]:
    """Returns a copy of the table, with rules that shard dimension 0 of all embedding, head and norm parameters."""
    kinds = ("embedding", "head", "norm")
    implied: dict[str, ShardingRule] = {f"{pattern}.*": 0 for pattern, kind in table.items() if kind in kinds}
    return implied | table


def _problems(model: nn.Module, table: dict, ranks: int) -> Iterator[str]:
    modules = {name: module for name, module in model.named_modules() if name}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [*modules, *parameters]
    for pattern, rule in table.items():
        if rule not in get_args(Kind) and (not isinstance(rule, int) or isinstance(rule, bool) or rule < 0):
            yield f"{pattern!r}: {rule!r} is not a rule; use a dimension or one of {', '.join(get_args(Kind))}"
        if not any(fnmatchcase(name, pattern) for name in names):
            general = [".".join("*" if key.isdigit() else key for key in name.split(".")) for name in names]
            remedy = did_you_mean(pattern, general) or "; remove it"
            yield f"{pattern!r} matches no module and no parameter of the model{remedy}"
    if "embedding" not in table.values():
        yield "the table has no 'embedding'; add this rule for the module that gets the token ids"
    complete = _completed(table)
    rules: dict[str, ShardingRule | None] = {name: find_rule(complete, name) for name in parameters}
    for name, parameter in parameters.items():
        yield from _of_parameter(name, parameter, rules[name], ranks)
        for other, same in parameters.items():
            if same is parameter and rules[other] != rules[name]:
                yield f"{name} and {other} are tied, but have rules {rules[name]} and {rules[other]}; use one rule"
    for name, module in modules.items():
        yield from _of_module(name, module, find_rule(complete, name), rules)


def _of_parameter(name: str, parameter: nn.Parameter, rule: ShardingRule | None, ranks: int) -> Iterator[str]:
    if isinstance(rule, str) and rule != "added":
        yield f"{name} is a parameter, but {rule!r} is a rule for modules; use a dimension or 'added'"
    elif isinstance(rule, int) and rule >= parameter.dim():
        yield f"{name} has no dimension {rule}: its shape is {tuple(parameter.shape)}; use a smaller dimension"
    elif isinstance(rule, int) and parameter.shape[rule] % ranks:
        size = f"{parameter.shape[rule]:,}"
        yield f"parallel.tp: {ranks} does not divide dimension {rule} of {name}, which is {size}; change tp or the size"


def _of_module(
    name: str, module: nn.Module, kind: ShardingRule | None, rules: Mapping[str, ShardingRule | None]
) -> Iterator[str]:
    inside = [rule for key, rule in rules.items() if key.startswith(f"{name}.")]
    if kind == "added":
        yield f"{name} is a module, but 'added' is a rule for parameters; use the names of its parameters"
    elif kind == "part" and not any(isinstance(rule, int) for rule in inside):
        what = "has the rule 'part', but no sharded parameter: each rank would add its full output"
        yield f"{name} {what}; add rules that shard its matrices"
    elif kind in ("embedding", "head", "norm") and any(rule != 0 for rule in inside):
        yield f"{name}: {kind!r} shards dimension 0 of its parameters; remove other rules for them"
    elif kind == "embedding" and not (
        isinstance(module, nn.Embedding) and module.padding_idx is None and module.max_norm is None
    ):
        yield f"{name} cannot be sharded; use an nn.Embedding without padding_idx and max_norm"
    elif kind == "norm" and not isinstance(module, RMSNorm):
        yield f"{name} is not a weft.models.layers.norm.RMSNorm; remove the rule, or use that class"


# ---- the comparison on a few tokens


def _tokens(model: nn.Module, table: dict[str, ShardingRule], ranks: int, sequence: int) -> torch.Tensor:
    """Returns token ids `[2, seq]` that are spread over the vocabulary.

    Args:
        table: the model's sharding table, by which the embedding is found.
        ranks: number of `tp` ranks. `seq` is 4 x `ranks`, or `sequence` if that is smaller.
        sequence: number of tokens per sequence of the run; 0 means unknown.
    """
    embedding = next(m for name, m in model.named_modules() if name and find_rule(table, name) == "embedding")
    assert isinstance(embedding, nn.Embedding)
    seq = min(4 * ranks, sequence or 4 * ranks)
    return torch.arange(2 * seq).mul(7919).remainder(embedding.num_embeddings).view(2, seq)


def _randomize_zeros(model: nn.Module) -> list[str]:
    """Randomizes parameters that are all zeros, so that the comparison tests them. Returns their names."""
    generator, found = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.1, generator=generator)
                found.append(name)
    return found


def _line(model: nn.Module, error: Exception) -> str:
    """Returns a text such as ` in line 3`: the line that raised `error` in the file of the model's class.

    Returns "" if no line of this file was involved.
    """
    file = inspect.getsourcefile(type(model))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""


def _error(model: nn.Module, what: str) -> UserError:
    """Returns an error about the sharding table, with the file and line of the model's class if they are known.

    Args:
        what: the text that follows `<class>.weft_sharding: ` in the message.
    """
    kind, path, line = type(model), None, None
    with contextlib.suppress(OSError, TypeError):
        path, line = inspect.getsourcefile(kind), inspect.getsourcelines(kind)[1]
    if path is not None and path.startswith(os.getcwd() + os.sep):
        path = os.path.relpath(path)
    return UserError(f"{kind.__name__}.weft_sharding: {what}", path, line)
