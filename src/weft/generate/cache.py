"""Keys and values of earlier tokens, kept so that each new token costs one column of attention."""

from __future__ import annotations

import torch


class KVCache:
    """One contiguous buffer a layer for keys and one for values, allocated at the first write.

    Args:
        capacity: the most tokens a row will hold, padding included.
        starts: `[batch]`, how many slots of padding each row begins with; None: no padding anywhere.

    Attributes:
        length: slots filled so far, the same for all rows.
    """

    def __init__(self, capacity: int, starts: torch.Tensor | None = None):
        self.capacity, self.starts = capacity, starts
        self.length = 0
        self._keys: list[torch.Tensor] = []  # a layer's: [batch, kv_heads, capacity, head_dim]
        self._values: list[torch.Tensor] = []

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, kv_heads, seq, head_dim]` to a layer; returns all of it so far, as views."""
        batch, heads, seq, head_dim = k.shape
        end = self.length + seq
        if end > self.capacity:
            raise ValueError(f"a cache of {self.capacity} tokens cannot hold {end}")
        if layer == len(self._keys):  # dtype and device are those of what is written first
            self._keys.append(k.new_zeros(batch, heads, self.capacity, head_dim))
            self._values.append(v.new_zeros(batch, heads, self.capacity, v.shape[-1]))
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def mask(self, seq: int, device: torch.device, window: int | None = None) -> torch.Tensor | None:
        """bool `[batch or 1, 1, seq, keys]` for the next `seq` queries; None where plain causality says it all.

        Args:
            window: the most keys that a query sees, its own with them.
        """
        end = self.length + seq
        slides = window is not None and window < end
        if self.starts is None and not slides:
            return None
        keys = torch.arange(end, device=device)
        queries = keys[self.length :].unsqueeze(1)  # [seq, 1]
        seen = (keys <= queries).unsqueeze(0)  # [batch or 1, seq, keys]
        if self.starts is not None:
            seen = seen & (keys >= self.starts.to(device).view(-1, 1, 1))
        if slides:
            seen = seen & (keys > queries - window)
        # A padding query sees itself: a row without any key would be NaN.
        return (seen | (keys == queries)).unsqueeze(1)

    def advance(self, seq: int) -> None:
        """All layers have been given `seq` more tokens."""
        self.length += seq
