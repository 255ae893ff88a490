"""How a model is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from weft.errors import UserError

OF_STORES = ("sequence_length", "stride", "documents", "max_tokens")
OF_TASKS = ("include_path", "num_fewshot", "limit", "apply_chat_template")


@dataclass(frozen=True)
class Settings:
    """How a model is measured.

    Attributes:
        sequence_length: tokens of a store read at once; default: as trained, else at most 1024.
        stride: how far each window of a store lies behind the one before it; default: the sequence length.
        documents: each "apart", or "joined" end to end; default: as trained, apart if that is not known.
        max_tokens: stop after so many predictions on each store.
        include_path: a folder with tasks of one's own.
        num_fewshot: examples before each question; default: the task's.
        limit: the first so many questions of each task.
        apply_chat_template: ask by the tokenizer's chat template.
        batch_size: sequences at once.
        tokenizer: the model's; default: the one that is with it.
        device, dtype: where and in what a model that is named by its path computes; default: a GPU if there is one, and
            as saved.
    """

    sequence_length: int | None = None
    stride: int | None = None
    documents: Literal["apart", "joined"] | None = None
    max_tokens: int | None = None
    include_path: str | Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    apply_chat_template: bool = False
    batch_size: int = 8
    tokenizer: str | Path | None = None
    device: str | torch.device | None = None
    dtype: torch.dtype | None = None

    def refuse_idle(self, *, stores: bool, tasks: bool, loaded: bool) -> None:
        """Raise UserError for a setting that would do nothing."""
        for names, asked, other in (
            (OF_STORES, stores, "store"),
            (OF_TASKS, tasks, "tasks"),
            (("device", "dtype"), not loaded, "the path of a model"),
        ):
            given = [name for name in names if getattr(self, name) not in (None, False)]
            if given and not asked:
                raise UserError(f"{given[0]} says something only beside {other}; leave it out, or add that")
