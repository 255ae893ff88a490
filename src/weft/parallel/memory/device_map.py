"""Distributes the layers of a decoder over the devices of one host, for inference with models too large for one device.

The first device has the first layers, the second device the next layers, and so on. The last layers, for which the
devices have no space, stay in host memory. To run such a layer, its parameters are copied to the first device. While
the layer runs, the parameters of the next layer in host memory are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from weft.errors import UserError
from weft.formatting import byte_size
from weft.models.decoder import Decoder
from weft.parallel.memory.free import free_memory
from weft.torch_private import parameters_of, tree_map_only

HOST = "cpu"
SHARE = 0.8  # part of a device's free memory for weights; the rest is for the cache and activations

Budgets = Mapping[str, float]


def free_budgets() -> Budgets:
    """Returns device -> bytes for weights: the fraction `SHARE` of the free memory of each GPU and the host ("cpu").

    Raises:
        UserError: there is no GPU.
    """
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if not gpus:
        raise UserError("device map: this machine has no GPU; remove the device map, or quantize the weights")
    return {device: SHARE * free_memory(device) for device in (*gpus, HOST)}


def plan_layers(model: Decoder, budgets: Budgets) -> list[str]:
    """Returns the device on which each layer is stored; "cpu" for layers in host memory.

    Args:
        model: the decoder, which can be on the meta device.
        budgets: device -> bytes for weights. The first device also has the embedding, the final norm and the head.

    Raises:
        UserError: the weights do not fit.
    """
    sizes = [_bytes_of(layer) for layer in model.layers]
    outside = _bytes_of(model) - sum(sizes)
    devices = [device for device in budgets if device != HOST]
    if not devices:
        raise UserError("device map: there is no device besides the host; name one, such as cuda:0")
    for copies in (0, 2 * max(sizes)):  # space for copies of two layers, if layers are in host memory
        left = {device: budgets[device] - (outside + copies) * (device == devices[0]) for device in devices}
        found, number = [], 0
        for size in sizes:
            while number < len(devices) and left[devices[number]] < size:
                number += 1
            found.append(devices[number] if number < len(devices) else HOST)
            if number < len(devices):
                left[devices[number]] -= size
        if HOST not in found:
            break
    rest = sum(size for size, device in zip(sizes, found, strict=True) if device == HOST)
    if outside + copies > budgets[devices[0]] or rest > budgets.get(HOST, 0):
        needed, always = byte_size(sum(sizes) + outside), byte_size(outside + copies)
        have = ", ".join(f"{device} has {byte_size(size)}" for device, size in budgets.items())
        raise UserError(
            f"device map: the weights need {needed}, of which {always} on {devices[0]}, but {have}; load them in a "
            "smaller dtype, or quantize them"
        )
    return found


def place_layers(model: Decoder, budgets: Budgets) -> None:
    """Allocates a decoder's layers on the devices that `plan_layers` returns, and other tensors on the first device.

    Assumes that the model is on the meta device. Each layer runs on its device; layers in host memory run on the first
    device. Sets `model.layer_devices`, the device on which each layer runs.

    Raises:
        UserError: the weights do not fit; or a custom position component would run on several devices.
    """
    places = plan_layers(model, budgets)
    first = torch.device(next(iter(budgets)))
    computes = [first if place == HOST else torch.device(place) for place in places]
    if model.position is not None and len(set(computes)) > 1:
        raise UserError("device map: a custom position component needs one device; name only one device")
    for module in (child for name, child in model.named_children() if name != "layers"):
        module.to_empty(device=first)
    for layer, place in zip(model.layers, places, strict=True):
        layer.to_empty(device=place)
        if place == HOST and first.type == "cuda":
            for parameter in layer.parameters():
                parameter.data = parameter.data.pin_memory()  # copies from pinned memory are asynchronous
    offloaded = [layer for layer, place in zip(model.layers, places, strict=True) if place == HOST]
    host, moved = _HostLayers(offloaded, first), _Moved()
    for layer, device in zip(model.layers, computes, strict=True):
        ends = first if layer is model.layers[-1] else None
        layer.forward = _on_device(layer.forward, device, moved, ends)
    for number, layer in enumerate(offloaded):
        layer.forward = host.wrap(layer.forward, number)
    if offloaded:
        model.register_forward_pre_hook(lambda *_: host.begin())
    model.layer_devices = computes  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def _bytes_of(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


class _Moved:
    """Copies `cos` and `sin` of the rotary embedding, and the mask, to a device: once for all layers on the device."""

    def __init__(self):
        self._copies: dict[torch.device, list[tuple[Any, Any]]] = {}

    def __call__(self, value: Any, device: torch.device) -> Any:
        copies = self._copies.setdefault(device, [])
        for source, copy in copies:
            if source is value:
                return copy
        move = partial(tree_map_only, torch.Tensor, partial(torch.Tensor.to, device=device))
        copy = partial(value.func, *move(value.args)) if isinstance(value, partial) else move(value)
        copies[:] = [*copies[-1:], (value, copy)]  # of layers with and without a sliding window
        return copy


def _on_device(forward: Callable, device: torch.device, moved: _Moved, ends: torch.device | None) -> Callable:
    """Wraps a layer's forward: moves the inputs to `device`, where the layer runs.

    Args:
        ends: device to which the output is moved; None does not move it.
    """

    @wraps(forward)
    def call(x, rotary=None, mask=None, *others):
        out = forward(x.to(device), moved(rotary, device), moved(mask, device), *others)
        return out if ends is None else out.to(ends)

    return call


class _HostLayers:
    """Layers in host memory. While a layer's forward runs, copies on a device replace the layer's parameters."""

    def __init__(self, layers: list[nn.Module], device: torch.device):
        self.slots = [
            [
                (parameters_of(module), name)
                for module in layer.modules()
                for name in dict(module.named_parameters(recurse=False))
            ]
            for layer in layers
        ]
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copies: dict[int, list[torch.Tensor]] = {}

    def begin(self) -> None:
        """Begins to copy the first of the layers in host memory, while the layers that are stored on devices run."""
        self.copies.clear()  # after a forward that failed
        self.fetch(0)

    def fetch(self, number: int) -> None:
        """Begins to copy a layer's parameters to the device. `number`: index of the layer among the host layers."""
        if number < len(self.slots) and number not in self.copies:
            with torch.cuda.stream(self.stream):
                self.copies[number] = [
                    parameters[name].detach().to(self.device, non_blocking=True, copy=True)
                    for parameters, name in self.slots[number]
                ]

    def wrap(self, forward: Callable, number: int) -> Callable:
        """Returns a function that runs the forward of layer `number` with the copied parameters."""

        @wraps(forward)
        def call(*arguments, **named):
            with self._copied(number):
                return forward(*arguments, **named)

        return call

    @contextmanager
    def _copied(self, number: int) -> Iterator[None]:
        self.fetch(number)
        copies, slots = self.copies.pop(number), self.slots[number]
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            for tensor in copies:
                tensor.record_stream(current)  # the allocator must not reuse the memory before the forward has ended
        self.fetch(number + 1)
        saved = [parameters[name] for parameters, name in slots]
        try:
            for (parameters, name), tensor in zip(slots, copies, strict=True):
                parameters[name] = tensor
            yield
        finally:
            for (parameters, name), tensor in zip(slots, saved, strict=True):
                parameters[name] = tensor
