"""Finds blocks that repeat, such as the layers of a decoder, and runs only the first of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from weft.torch_private import children_of, tree_leaves, tree_map_only


class Repeats:
    """Calls of blocks of the same structure.

    Attributes:
        seen: shapes of the arguments of the first block of each group.
        form: result of the first block.
        skipped: number of calls of the others.
        chained: groups in which each block takes the result of the block before.
        last: result of the last call.
    """

    def __init__(self, groups: Sequence[tuple[str, ...]]):
        self.groups = groups
        self.seen: dict[tuple[str, ...], Any] = {}
        self.form: dict[tuple[str, ...], Any] = {}
        self.skipped: Counter[tuple[str, ...]] = Counter()
        self.chained = set(groups)
        self.last: dict[tuple[str, ...], Any] = {}

    def used(self) -> list[tuple[str, ...]]:
        """Returns the groups of which each block but the first was skipped once."""
        return [group for group in self.groups if self.skipped[group] == len(group) - 1]


def structure(module: nn.Module) -> tuple:
    """Returns what two modules of the same structure have in common: classes, names and shapes."""
    own = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters(recurse=False))
    buffers = tuple((name, tuple(b.shape), b.dtype) for name, b in module.named_buffers(recurse=False))
    children = tuple((name, structure(child)) for name, child in module.named_children())
    return type(module).__qualname__, "" if children else module.extra_repr(), own, buffers, children


def repeated_blocks(module: nn.Module) -> list[tuple[str, ...]]:
    """Returns groups of names of blocks with the same structure: siblings in a list, each with parameters."""
    groups: list[tuple[str, ...]] = []

    def visit(parent: nn.Module, path: str) -> None:
        alike: dict[tuple, list[str]] = {}
        for name, child in parent.named_children():
            inner = f"{path}.{name}".lstrip(".")
            grouped = isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict) and any(child.children())
            if grouped and any(True for _ in child.parameters()):
                alike.setdefault(structure(child), []).append(inner)
            else:
                visit(child, inner)
        for names in alike.values():
            if len(names) > 1:
                groups.append(tuple(names))
            else:
                visit(module.get_submodule(names[0]), names[0])

    visit(module, "")
    return groups


def _shapes(value: Any) -> Any:
    return [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in tree_leaves(value)
    ]


class DiffersError(Exception):
    """A block is called in another way than the first block of its group."""


class _Skipped(nn.Module):
    """Stands for a repeated block, without its parameters: returns its first input, in the form of its result."""

    def __init__(self, block: nn.Module, group: tuple[str, ...], repeats: Repeats):
        super().__init__()
        self.__dict__.update(block=block, group=group, repeats=repeats)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def _differs(self, *_: Any) -> Any:
        raise DiffersError(self.group)  # the model calls parts of the block

    __getitem__ = __iter__ = __len__ = __contains__ = _differs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.repeats.seen.get(self.group) != _shapes((args, kwargs)) or self.group not in self.repeats.form:
            raise DiffersError(self.group)
        self.repeats.skipped[self.group] += 1
        stream = _first_tensor(args, kwargs)
        if stream is not self.repeats.last[self.group]:
            self.repeats.chained.discard(self.group)
        self.repeats.last[self.group] = stream
        return tree_map_only(torch.Tensor, lambda _: stream, self.repeats.form[self.group])


def _first_tensor(args: tuple, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    return next((one for one in [*args, *kwargs.values()] if isinstance(one, torch.Tensor)), None)


@contextmanager
def repeated_once(module: nn.Module, groups: Sequence[tuple[str, ...]]) -> Iterator[Repeats]:
    """Context in which repeated blocks after the first of their group return their first input."""
    repeats = Repeats(groups)
    before: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
    for group in groups:
        block = module.get_submodule(group[0])
        block.forward = _remembering(block.forward, group, repeats)
        for path in group[1:]:
            parent, _, name = path.rpartition(".")
            children = children_of(module.get_submodule(parent))
            old = children[name]
            assert old is not None
            before.append((children, name, old))
            children[name] = _Skipped(old, group, repeats)
    try:
        yield repeats
    finally:
        for group in groups:
            del module.get_submodule(group[0]).forward
        for children, name, old in before:
            children[name] = old


def _remembering(forward: Callable, group: tuple[str, ...], repeats: Repeats) -> Callable:
    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        out, stream = forward(*args, **kwargs), _first_tensor(args, kwargs)
        repeats.seen[group] = _shapes((args, kwargs))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if stream is not None and len(tensors) == 1 and _shapes(tensors) == _shapes([stream]):
            repeats.form[group], repeats.last[group] = out, tensors[0]
        return out

    return call
