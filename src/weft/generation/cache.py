"""Keys and values of earlier tokens, kept so that each new token costs one column of attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from weft.config.model import ModelSection


class KVCache:
    """One contiguous buffer a layer for keys and one for values, allocated at the first write.

    A layer that sees everything has a slot for each of `capacity` tokens. One with a sliding window has `window +
    window // 4` at the most, however long the text gets: when they are full, the latest `window - 1` move to the
    front. Keys and values may differ in size, and are as the layer gives them: of latent attention one short vector and
    one rotated key a token.

    Args:
        capacity: the most tokens a row will hold, padding included.
        starts: `[batch]`, how many slots of padding each row begins with; None: no padding anywhere.
        windows: for each layer, the most keys that a query sees, its own with them; None: all. Without the list no
            layer forgets anything.

    Attributes:
        length: tokens a row so far, the same for all rows.
    """

    def __init__(self, capacity: int, starts: torch.Tensor | None = None, windows: Sequence[int | None] | None = None):
        self.capacity, self.windows = capacity, windows
        self.starts = torch.zeros(1, dtype=torch.long) if starts is None else starts
        self.length = 0
        self._padding = int(self.starts.max())  # columns from here on are padding in no row
        self._layers: dict[int, _Layer] = {}

    @property
    def nbytes(self) -> int:
        """The memory that it holds now, in bytes."""
        return sum(part.nbytes for layer in self._layers.values() for part in layer.parts)

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, kv_heads, seq, head_dim]` to a layer.

        Returns:
            Its keys and values in the order of the text, these last: all so far; with a window, `window - 1` earlier
            ones at the most. They are to be used before the next call.
        """
        if self.length + k.shape[2] > self.capacity:
            raise ValueError(f"a cache of {self.capacity} tokens cannot hold {self.length + k.shape[2]}")
        if layer not in self._layers:  # dtype and device are those of what is written first
            window = None if self.windows is None else self.windows[layer]
            self._layers[layer] = _Layer(k, v, self.capacity, window)
        return self._layers[layer].append(k, v)

    def mask(self, seq: int, device: torch.device, window: int | None = None) -> torch.Tensor | None:
        """bool `[batch or 1, 1, seq, keys]` for the next `seq` queries; None where plain causality says it all.

        Args:
            window: the most keys that a query sees, its own with them. The mask is for the keys that `update` returns
                for a layer with this window.
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
        seen = (keys <= queries).unsqueeze(0)  # [batch or 1, seq, keys]
        if padded:
            seen = seen & (keys >= self.starts.to(device).view(-1, 1, 1))
        if slides is not None:
            seen = seen & (keys > queries - slides)
        # A padding query sees itself: a row without any key would be NaN.
        return (seen | (keys == queries)).unsqueeze(1)

    def advance(self, seq: int) -> None:
        """All layers have been given `seq` more tokens."""
        self.length += seq


class _Layer:
    """The latest keys and values of one layer, in the first `filled` slots."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, capacity: int, window: int | None):
        # With a quarter of the window to spare, what is moved comes to four tokens for each new one.
        slots = capacity if window is None else min(capacity, window + window // 4)
        self.parts = [x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in (k, v)]
        self.slots, self.kept, self.filled = slots, capacity if window is None else window - 1, 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = min(self.filled, self.kept)  # of earlier ones
        begin, end = self.filled - seen, self.filled + k.shape[2]
        if end <= self.slots:
            for part, new in zip(self.parts, (k, v), strict=True):
                part[:, :, self.filled : end] = new
            self.filled = end
            keys, values = (part[:, :, begin:end] for part in self.parts)
            return keys, values
        # The new ones' queries need more than there are slots for; later ones will need the end of it alone.
        both = zip(self.parts, (k, v), strict=True)
        whole = [torch.cat((part[:, :, begin : self.filled], new), dim=2) for part, new in both]
        self.filled = min(self.kept, end - begin)
        for part, every in zip(self.parts, whole, strict=True):
            part[:, :, : self.filled] = every[:, :, end - begin - self.filled :]
        return whole[0], whole[1]


def windows_of(model: nn.Module) -> list[int | None] | None:
    """The sliding window of each layer of a built-in model; None: nothing is known of its layers."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelSection):
        return None
    return [config.sliding_window if config.slides(layer) else None for layer in range(config.num_hidden_layers)]
