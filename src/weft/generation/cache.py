"""Defines the key-value cache of generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from weft.config.model import ModelSection


class KVCache:
    """A key-value cache of all layers.

    Each layer has one contiguous buffer for keys and one for values, which are allocated at the first write. The
    buffers of a layer with full attention have `capacity` slots. Those of a layer with a sliding window have at most
    `window + window // 4` slots; when all are full, the latest `window - 1` tokens move to the front. Keys and values
    can have different sizes. Latent attention caches one short vector and one rotary key per token.

    Args:
        capacity: maximum number of tokens per sequence, including padding.
        starts: number of padding tokens at the beginning of each sequence, `[batch]`; None: no padding.
        windows: window size of each layer, counting the query itself; None in the list: full attention. If `windows` is
            None, all layers keep all tokens.

    Attributes:
        length: number of tokens per sequence in the cache, which is the same for all sequences.
    """

    def __init__(self, capacity: int, starts: torch.Tensor | None = None, windows: Sequence[int | None] | None = None):
        self.capacity, self.windows = capacity, windows
        self.starts = torch.zeros(1, dtype=torch.long) if starts is None else starts
        self.length = 0
        self._padding = int(self.starts.max())  # from this column on no sequence has padding
        self._layers: dict[int, _Layer] = {}

    @property
    def nbytes(self) -> int:
        """The allocated memory in bytes."""
        return sum(buffer.nbytes for layer in self._layers.values() for buffer in layer.buffers)

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values `[batch, kv_heads, seq, head_dim]` to a layer.

        Returns:
            The keys and values of the layer, in order, including the new ones. With a sliding window, at most
            `window - 1` earlier tokens are included. The tensors are valid until the next call.
        """
        if self.length + k.shape[2] > self.capacity:
            raise ValueError(f"a cache of {self.capacity} tokens is too small for {self.length + k.shape[2]} tokens")
        if layer not in self._layers:  # with the dtype and device of the first write
            window = None if self.windows is None else self.windows[layer]
            self._layers[layer] = _Layer(k, v, self.capacity, window)
        return self._layers[layer].append(k, v)

    def mask(self, seq: int, device: torch.device, window: int | None = None) -> torch.Tensor | None:
        """Returns a bool mask `[batch or 1, 1, seq, keys]` for the next `seq` queries; None if it is purely causal.

        Args:
            window: window size of the layer, counting the query itself; None: full attention. The keys are those that
                `update` returns for a layer with this window.
        """
        end = self.length + seq
        first = 0  # the column of the first key
        if window is not None and self.windows is not None and window in self.windows:
            first = max(0, self.length - window + 1)
        slides = window if window is not None and first < end - window else None
        padded = first < self._padding
        if slides is None and not padded:
            return None
        keys = torch.arange(first, end, device=device)
        queries = keys[self.length - first :].unsqueeze(1)  # [seq, 1]
        visible = (keys <= queries).unsqueeze(0)  # [batch or 1, seq, keys]
        if padded:
            visible = visible & (keys >= self.starts.to(device).view(-1, 1, 1))
        if slides is not None:
            visible = visible & (keys > queries - slides)
        # A padding query attends to itself, because a query without keys would give NaN.
        return (visible | (keys == queries)).unsqueeze(1)

    def advance(self, seq: int) -> None:
        """Increases `length` by `seq`. Must be called after `update` was called for all layers."""
        self.length += seq


class _Layer:
    """The buffers of one layer. Their first `filled` slots contain the latest keys and values."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, capacity: int, window: int | None):
        # With a quarter of the window to spare, about four tokens are moved per new token.
        slots = capacity if window is None else min(capacity, window + window // 4)
        self.buffers = [x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in (k, v)]
        self.slots, self.kept, self.filled = slots, capacity if window is None else window - 1, 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        earlier = min(self.filled, self.kept)
        begin, end = self.filled - earlier, self.filled + k.shape[2]
        if end <= self.slots:
            for buffer, new in zip(self.buffers, (k, v), strict=True):
                buffer[:, :, self.filled : end] = new
            self.filled = end
            keys, values = (buffer[:, :, begin:end] for buffer in self.buffers)
            return keys, values
        # The new queries need more keys than there are slots; later queries need only the last keys.
        pairs = zip(self.buffers, (k, v), strict=True)
        full = [torch.cat((buffer[:, :, begin : self.filled], new), dim=2) for buffer, new in pairs]
        self.filled = min(self.kept, end - begin)
        for buffer, x in zip(self.buffers, full, strict=True):
            buffer[:, :, : self.filled] = x[:, :, end - begin - self.filled :]
        return full[0], full[1]


def sliding_windows(model: nn.Module) -> list[int | None] | None:
    """Returns the sliding window of each layer of a built-in model (None: full attention); None for any other model."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelSection):
        return None
    return [config.sliding_window if config.slides(layer) else None for layer in range(config.num_hidden_layers)]
