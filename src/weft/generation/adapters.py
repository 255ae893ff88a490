"""Applies low-rank adapters (LoRA) to linear layers, per sequence (Hu et al., 2021; Sheng et al., 2023)."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.adapter_start import check_adapter_fits, read_layers
from weft.checkpoint.huggingface.peft_files import PeftAdapter
from weft.checkpoint.load_model import checkpoint_of
from weft.errors import UserError
from weft.models.layers.lora import Lora
from weft.models.low_rank import LowRank

# Layers whose weights the model reads without calling the layer.
_UNCALLED = ("lm_head", "kv_b_proj")


Deltas = Mapping[str, LowRank | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, float]]
_MERGE = "merge the adapter into the model first (weft merge)"


class Change(NamedTuple):
    """The change of a linear layer's output: `gain * (out - bias) + bias + x @ a.T @ b.T`.

    Attributes:
        a, b: `[rank, in]` and `[out, rank]`, in the dtype of the layer's weight. `b` contains the scale and the gain.
        gain: `[out]`, by which DoRA scales the rows of the weight; None: without DoRA.
    """

    a: torch.Tensor
    b: torch.Tensor
    gain: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that was added to an engine: low-rank changes of the weights of linear layers.

    Attributes:
        root: the argument `parent` of `block_digest` for the first cache block of a sequence. Each adapter has a
            different root, so sequences share blocks only if they use the same adapter.
        deltas: name of a linear layer -> its change.
    """

    root: bytes
    deltas: dict[str, Change]


class Adapters:
    """The adapters of an engine, by name."""

    def __init__(self):
        self._by_name: dict[str, Adapter] = {}
        self._added = 0

    def add(self, model: nn.Module, name: str, deltas: Deltas | str | Path) -> None:
        """Adds an adapter. Raises UserError as `Engine.add_adapter` does."""
        if name in self._by_name:
            raise UserError(f"the engine has an adapter {name!r} already; remove it first, or choose another name")
        if not deltas:
            raise UserError(f"adapter {name!r} has no deltas; give at least one {{layer: LowRank(a, b, scale)}}")
        if any(isinstance(getattr(module, "lora", None), Lora) for module in model.modules()):
            raise UserError(
                f"adapter {name!r}: the model has an adapter already, to which no other can be added; use its base "
                "model, or merge the model (weft merge)"
            )
        given: Any = _read(model, deltas) if isinstance(deltas, str | Path) else deltas
        found = {layer.removesuffix(".weight"): LowRank(*delta) for layer, delta in given.items()}
        prepared = {layer: _prepare(model, name, layer, delta) for layer, delta in found.items()}
        # A later adapter with the same name must not use cached keys of this adapter.
        self._added += 1
        self._by_name[name] = Adapter(hashlib.sha256(f"adapter {self._added} {name}".encode()).digest(), prepared)

    def get(self, name: str | None) -> Adapter | None:
        """Returns the adapter with this name; None if `name` is None.

        Raises:
            UserError: there is no adapter with this name.
        """
        if name is not None and name not in self._by_name:
            known = ", ".join(map(repr, self._by_name))
            remedy = f"use one of {known}" if known else "the engine has no adapters; add it with Engine.add_adapter"
            raise UserError(f"there is no adapter {name!r}; {remedy}")
        return None if name is None else self._by_name[name]

    def remove(self, name: str, used: Sequence[Adapter | None]) -> None:
        """Removes an adapter.

        Args:
            used: the adapter of each unfinished continuation.

        Raises:
            UserError: there is no adapter with this name, or an unfinished continuation uses it.
        """
        adapter = self.get(name)
        if count := sum(one is adapter for one in used):
            raise UserError(
                f"adapter {name!r} is used by {count} unfinished continuations; read them to their end or cancel them"
            )
        del self._by_name[name]


def check_base(model: nn.Module, deltas: Deltas | str | Path) -> None:
    """Checks the base model of an adapter in a folder, if `weft.load_model` loaded the model.

    Hashes the files of the model, once.

    Raises:
        UserError: as `check_adapter_fits`.
    """
    if not isinstance(deltas, str | Path) or type(model) in weakref.ProxyTypes:  # `weft.generate` checks by itself
        return
    if (checkpoint := checkpoint_of(model)) is not None:
        check_adapter_fits(deltas, checkpoint)


def _read(model: nn.Module, folder: str | Path) -> dict[str, LowRank]:
    """Reads an adapter from a folder. Raises UserError if it also replaces full weights of the model."""
    adapter = read_layers(folder, model)
    if not isinstance(adapter, PeftAdapter):
        return adapter
    if adapter.weights:
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, weight in adapter.weights.items():
            if name not in own or not torch.equal(own[name], weight.to(own[name])):
                raise UserError(f"the adapter replaces the full weight {name}; {_MERGE}", folder)
    return adapter.layers


def _prepare(model: nn.Module, name: str, layer: str, delta: LowRank) -> Change:
    """Checks a delta, and prepares it on the layer's device, in the dtype of the layer's weight.

    Args:
        model: the model that contains the layer.
        name: name of the adapter.
        layer: name of the linear layer.
        delta: the change of the layer's weight.

    Raises:
        UserError: there is no such linear layer, the layer is sharded, or the delta has wrong shapes.
    """
    linears = {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "in_features") and path.rpartition(".")[2] not in _UNCALLED
    }
    if delta.a.dim() == 3 or layer.endswith((*_UNCALLED, ".router")):
        raise UserError(
            f"adapter {name!r}: {layer} is not a linear layer that can be adapted for each request; {_MERGE}"
        )
    if layer not in linears:
        near = get_close_matches(layer, linears, 1)
        hint = f"did you mean {near[0]!r}?" if near else "use the name of a module of type nn.Linear"
        raise UserError(f"adapter {name!r}: {layer!r} is not a linear layer that can be adapted; {hint}")
    linear: Any = linears[layer]
    a, b, scale, magnitude = delta
    if isinstance(next(linear.parameters(), None), DTensor):
        raise UserError(f"adapter {name!r}: {layer} is sharded; adapters need a model on a single rank")
    sizes, rank = (linear.in_features, linear.out_features), a.shape[0] if a.ndim else 0
    if a.shape != (rank, sizes[0]) or b.shape != (sizes[1], rank):
        raise UserError(
            f"adapter {name!r}: {layer} has {sizes[0]} inputs and {sizes[1]} outputs, but A is {list(a.shape)} and B "
            f"is {list(b.shape)}; A must be [rank, {sizes[0]}] and B [{sizes[1]}, rank]"
        )
    like = next(linear.parameters(), a)
    dtype = like.dtype if like.dtype.is_floating_point else a.dtype
    gain, b = None, scale * b.detach()
    if magnitude is not None:
        if magnitude.shape != (sizes[1],):
            raise UserError(
                f"adapter {name!r}: the magnitude of {layer} is {list(magnitude.shape)}; it must be [{sizes[1]}]"
            )
        if not isinstance(linear.weight, torch.Tensor) or not linear.weight.is_floating_point():
            raise UserError(
                f"adapter {name!r}: DoRA needs the full weight of {layer}, which is quantized; omit quantize"
            )
        gain = delta.gain(linear.weight)
        assert gain is not None
        b = gain.unsqueeze(-1) * b.to(gain)
    return Change(a.detach().to(like.device, dtype), b.to(like.device, dtype), gain)


@contextmanager
def adapted(model: nn.Module, owners: Sequence[tuple[Adapter | None, int]]) -> Iterator[None]:
    """Applies adapters to the linear layers of a model during one forward pass.

    Args:
        owners: (adapter or None, number of tokens) for each group of consecutive tokens with the same adapter.

    Raises:
        UserError: the model does not call an adapted layer, or the layer's input does not contain all tokens.
    """
    rows: dict[Adapter, list[int]] = {}
    tokens = 0
    for adapter, count in owners:
        if adapter is not None:
            rows.setdefault(adapter, []).extend(range(tokens, tokens + count))
        tokens += count
    if not rows:
        yield
        return
    device = next(model.parameters()).device
    changes: dict[str, list[tuple[torch.Tensor | None, Change]]] = {}
    for adapter, indices in rows.items():
        index = None if len(indices) == tokens else torch.tensor(indices, device=device)
        for layer, change in adapter.deltas.items():
            changes.setdefault(layer, []).append((index, change))
    with _hooks(model, changes, tokens) as uncalled:
        yield
    _raise_if_uncalled(uncalled)


@contextmanager
def with_adapter(model: nn.Module, deltas: Deltas | str | Path) -> Iterator[None]:
    """Context in which all forward passes of a model use an adapter.

    Args:
        deltas: as in `Engine.add_adapter`.

    Raises:
        UserError: as `Engine.add_adapter`; or, at the end, the model did not call an adapted layer.
    """
    check_base(model, deltas)
    adapters = Adapters()
    adapters.add(model, "adapter", deltas)
    added = adapters.get("adapter")
    assert added is not None
    with _hooks(model, {layer: [(None, change)] for layer, change in added.deltas.items()}, None) as uncalled:
        yield
    if len(uncalled) < len(added.deltas):  # otherwise there was no forward pass
        _raise_if_uncalled(uncalled)


@contextmanager
def _hooks(
    model: nn.Module, changes: Mapping[str, list[tuple[torch.Tensor | None, Change]]], tokens: int | None
) -> Iterator[set[str]]:
    """Context in which layers of a model are changed. Yields the names of the changed layers that were not called yet.

    Args:
        changes: name of a layer -> the arguments `parts` of `_change`.
        tokens: number of tokens in the forward pass; None: any.
    """
    uncalled = set(changes)
    with ExitStack() as hooks:
        for layer, parts in changes.items():
            hook: Callable = partial(_change, layer, parts, tokens, uncalled)
            hooks.callback(model.get_submodule(layer).register_forward_hook(hook).remove)
        yield uncalled


def _raise_if_uncalled(uncalled: Collection[str]) -> None:
    if uncalled:
        raise UserError(
            f"the model does not call the layer {min(uncalled)}; remove the weights of this layer from the adapter"
        )


def _change(
    layer: str,
    parts: list[tuple[torch.Tensor | None, Change]],
    tokens: int | None,
    uncalled: set[str],
    module: Any,
    inputs: tuple[torch.Tensor],
    output: torch.Tensor,
) -> torch.Tensor:
    """Adds low-rank products to a layer's output.

    `_hooks` binds the first four arguments, and registers the function as a forward hook of the layer.

    Args:
        layer: name of the layer.
        parts: for each adapter, the indices of the tokens that use the adapter (None: all tokens), and its change.
        tokens: number of tokens in the forward pass; None: any.
        uncalled: names of layers that were not called yet; this layer's name is removed.
    """
    x, out = inputs[0].flatten(0, -2), output.flatten(0, -2)
    if tokens is not None and len(x) != tokens:
        raise UserError(
            f"the input of the layer {layer} does not contain all tokens; remove this layer from the deltas of the "
            "adapter"
        )
    uncalled.discard(layer)
    for index, (a, b, gain) in parts:
        index = index if index is None else index.to(x.device)
        change = F.linear(F.linear(x if index is None else x[index], a.to(x)), b.to(x)).to(out.dtype)
        if gain is not None:
            product = out if index is None else out[index]
            product = product if module.bias is None else product - module.bias
            change = change + ((gain.to(x.device) - 1) * product).to(out.dtype)
        out = out + change if index is None else out.index_add(0, index, change)
    return out.view_as(output)
