"""A token store as samples: its tokens end to end, cut into windows of one length."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.config.errors import UserError
from weft.data.store import TokenStore


class StoreDataset:
    """The windows of a token store: sample `i` is `tokens[i * length : (i + 1) * length + 1]`, end to end."""

    complete = True

    def __init__(self, store: TokenStore, sequence_length: int):
        self.store, self.length = store, sequence_length
        self.samples = (store.num_tokens - 1) // sequence_length
        if self.samples < 1:
            raise UserError(
                f"{store.num_tokens:,} tokens are shorter than one sequence of {sequence_length} and the token after "
                "it; shorten data.sequence_length or pack more text",
                store.path,
            )

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        window = np.asarray(self.store.tokens[index * self.length : (index + 1) * self.length + 1], np.int64)
        return {
            "tokens": window[:-1],
            "labels": window[1:],
            "weight": np.ones(self.length, np.float32),
            "positions": np.arange(self.length, dtype=np.int64),
        }
