"""Defines the settings of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from weft.errors import UserError

WINDOWS = ("sequence_length", "stride", "documents")
OF_STORES = (*WINDOWS, "max_tokens")
OF_PAIRS = ("reference", "per_token")
OF_TASKS = ("include_path", "num_fewshot", "limit", "apply_chat_template")
_LEAST = {"sequence_length": 1, "batch_size": 1, "max_tokens": 1, "limit": 1, "num_fewshot": 0}


@dataclass(frozen=True)
class Settings:
    """The settings of an evaluation.

    Attributes:
        sequence_length: maximum number of input tokens of a window. Default: as in training; if unknown, 1024 or the
            model's maximum, whichever is smaller.
        stride: distance in tokens between consecutive windows. Default: the sequence length.
        documents: "apart" evaluates each document separately; "joined" concatenates documents. Default: as in training;
            if unknown, "apart".
        max_tokens: maximum number of tokens to predict in each store.
        reference: path of a model whose log-probabilities are subtracted on stores of preferences. Default: none.
        per_token: whether log-probabilities are divided by the length of the answer on stores of preferences.
        include_path: folder with custom tasks.
        num_fewshot: number of examples before each question. Default: the number that the task sets.
        limit: maximum number of questions per task; the task's first questions are used.
        apply_chat_template: whether to format questions with the tokenizer's chat template.
        batch_size: number of sequences per batch.
        tokenizer: tokenizer of the model. Default: the tokenizer in the model's folder.
        device: device for a model that is loaded from a path. Default: a GPU if available.
        dtype: dtype for a model that is loaded from a path. Default: as saved.
        quantize: "int8" or "int4": quantizes the weights of a model that is loaded from a path. Default: no change.
        adapter: an adapter that is added to the model: a folder that PEFT's `save_pretrained` wrote, or a run with an
            adapter. Default: no adapter.

    Raises:
        UserError: a value is out of range.
    """

    sequence_length: int | None = None
    stride: int | None = None
    documents: Literal["apart", "joined"] | None = None
    max_tokens: int | None = None
    reference: str | Path | None = None
    per_token: bool = False
    include_path: str | Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    apply_chat_template: bool = False
    batch_size: int = 8
    tokenizer: str | Path | None = None
    device: str | torch.device | None = None
    dtype: torch.dtype | None = None
    quantize: str | None = None
    adapter: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            number = getattr(self, name)
            if number is not None and number < least:
                raise UserError(f"{name} is {number}; set it to at least {least}")
        length, stride = self.sequence_length, self.stride
        if length is not None and stride is not None and not 1 <= stride <= length:
            raise UserError(f"stride is {stride}; set it to a number from 1 to {length:,} (the sequence length)")

    def with_windows(self, model: nn.Module, data: Mapping[str, Any]) -> Settings:
        """Returns settings in which defaults replace None for `sequence_length`, `stride` and `documents`.

        Args:
            model: the model to evaluate.
            data: the `data` section of the run that trained the model; {} if unknown.
        """
        length = self.sequence_length
        if length is None:
            length = data.get("sequence_length")
        if not isinstance(length, int):
            length = min(1024, getattr(getattr(model, "config", None), "max_position_embeddings", None) or 1024)
        apart = not data or data.get("packing") == "best_fit" or data.get("document_attention") is True
        return replace(
            self,
            sequence_length=length,
            stride=length if self.stride is None else self.stride,
            documents=self.documents or ("apart" if apart else "joined"),
        )

    def refuse_unused(self, *, stores: bool, tasks: bool, loaded: bool) -> None:
        """Raises UserError if a setting would have no effect.

        Args:
            stores: whether the model is evaluated on stores.
            tasks: whether the model is evaluated on tasks.
            loaded: whether the model is already loaded, so that `device`, `dtype` and `quantize` have no effect.
        """
        self._refuse(OF_STORES, stores, "store")
        self._refuse(OF_PAIRS, stores, "store")
        self._refuse(OF_TASKS, tasks, "tasks")
        self._refuse(("device", "dtype", "quantize"), not loaded, "the path of a model")

    def refuse_unused_on(self, kinds: Sequence[str]) -> None:
        """Raises UserError if a setting has no effect on stores of the given kinds (`StoreInfo.kind`)."""
        texts = not kinds or any(kind != "preferences" for kind in kinds)
        self._refuse(("stride", "documents", "max_tokens"), texts, "a store of texts or conversations")
        self._refuse(OF_PAIRS, "preferences" in kinds, "a store of preferences")

    def _refuse(self, names: tuple[str, ...], used: bool, needed: str) -> None:
        given = [name for name in names if getattr(self, name) is not None and getattr(self, name) is not False]
        if given and not used:
            raise UserError(f"{given[0]} has an effect only with {needed}; omit {given[0]}, or add {needed}")
