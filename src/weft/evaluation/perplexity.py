"""Defines `evaluate_store`, which computes loss, perplexity and bits per byte of a model on a token store."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.evaluation.bits import bits_per_byte, bytes_per_token
from weft.evaluation.scoring_windows import count_predictions, scoring_batches, scoring_windows
from weft.evaluation.settings import Settings
from weft.generation.limits import check_length
from weft.generation.runners import eval_mode
from weft.headers import read_tokenizer_header
from weft.models.decoder import Decoder
from weft.models.forward import forward_of
from weft.observe.console import Console


@dataclass(frozen=True)
class StoreResult:
    """The result of an evaluation on one store, or on several stores combined.

    Attributes:
        store: path of the store, or of the raw data that were packed into it; "all" for combined stores.
        nats: sum of the negative log-probabilities of all predicted tokens, in nats.
        tokens: number of predicted tokens. If the store has a loss mask, only tokens with mask 1 are counted.
        bytes: number of UTF-8 bytes of the predicted tokens' text, estimated from the store's mean bytes per token;
            None if unknown.
    """

    store: str
    nats: float
    tokens: int
    bytes: float | None

    @property
    def loss(self) -> float:
        """The loss in nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The perplexity, e^loss; infinity if e^loss overflows."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The bits per byte; None if the number of bytes is unknown."""
        return bits_per_byte(self.nats, self.bytes) if self.bytes else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as JSON values."""
        return {
            "store": self.store,
            "loss": self.loss,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": None if self.bytes is None else round(self.bytes),
        }


def combine(results: Iterable[StoreResult]) -> StoreResult:
    """Combines the results of several stores. Every token has the same weight."""
    results = list(results)
    sizes = [one.bytes for one in results if one.bytes is not None]
    size = sum(sizes) if len(sizes) == len(results) else None
    return StoreResult("all", sum(one.nats for one in results), sum(one.tokens for one in results), size)


def evaluate_store(
    model: nn.Module, store: TokenStore, settings: Settings, console: Console | None = None, name: str | None = None
) -> StoreResult:
    """Evaluates a model on a token store. Every token except the first of each document is predicted exactly once.

    Args:
        settings: a result of `Settings.with_windows`.
        name: name of the store in the result, such as the path of raw data; default: the path of the store.

    Raises:
        UserError: the store does not fit the model, the store has no token to predict, or the loss is not finite.
    """
    console = console or Console(prints=False)
    if isinstance(model, Decoder) and model.config.num_labels:
        raise UserError("the model is a reward model, which predicts no tokens; use a store of preferences", store.path)
    length, stride, apart = settings.sequence_length, settings.stride, settings.documents == "apart"
    assert length is not None
    assert stride is not None
    check_length(model, length, "the evaluation windows need", "set a shorter sequence length")
    check_fit(model, store, settings.tokenizer)
    total = count_predictions(store, apart=apart)
    total = total if settings.max_tokens is None else min(total, settings.max_tokens)
    if total == 0:
        raise UserError("no token to predict: no document has two or more tokens; pack more text", store.path)
    info = store.info
    each = bytes_per_token(info.tokens, info.documents, info.bytes, info.eod_id)
    call, device = forward_of(model), next(model.parameters()).device
    nats, tokens, text, done = 0.0, 0.0, 0.0, 0
    progress = console.progress(total, f"evaluating {Path(name or store.path).name}", "token")
    with eval_mode(model), torch.no_grad(), progress as bar:
        windows = scoring_windows(store, length, stride, apart=apart, limit=settings.max_tokens)
        for batch in scoring_batches(store, windows, settings.batch_size * length):
            ids, labels, weight = (torch.from_numpy(batch[key]) for key in ("tokens", "labels", "weight"))
            logprobs = call({"tokens": ids.to(device), "labels": labels.to(device)})
            # `where` instead of a product with 0, because log-probabilities of padding can be infinite.
            nats -= torch.where(weight.to(device) > 0, logprobs, 0.0).sum(dtype=torch.float64).item()
            tokens += weight.sum(dtype=torch.float64).item()
            text += weight[labels != info.eod_id].sum(dtype=torch.float64).item()
            done += batch["predicted"]
            bar.update(done, loss=nats / max(tokens, 1))
    if not math.isfinite(nats):
        raise UserError("the model's loss is not finite; try `dtype` float32, or use another checkpoint")
    if tokens == 0:
        raise UserError(
            "no token to predict: the store's mask is 0 for all evaluated tokens; pack the store again, or use another",
            store.path,
        )
    size = text * each.mean if each is not None and text else None
    return StoreResult(name or str(store.path), nats, int(tokens), size)


def check_fit(model: nn.Module, store: TokenStore, tokenizer: str | Path | None) -> None:
    """Checks that a store was packed with the model's tokenizer. Warns if the store does not name its tokenizer.

    Args:
        tokenizer: the model's tokenizer; if None, only the vocabulary sizes are compared.

    Raises:
        UserError: the tokenizers or vocabulary sizes do not match.
    """
    info = store.info
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None and info.vocab_size > size:
        raise UserError(
            f"has a vocabulary of {info.vocab_size:,} tokens, larger than the model's {size:,}; pack the text with the "
            "model's tokenizer",
            store.path,
        )
    if tokenizer is None:
        return
    digest = read_tokenizer_header(tokenizer).digest
    if info.tokenizer_digest is None:
        warnings.warn(
            f"{store.path} does not name its tokenizer; check that it was packed with the model's tokenizer",
            stacklevel=3,
        )
    elif digest != info.tokenizer_digest:
        raise UserError(
            f"was packed with another tokenizer ({info.tokenizer_digest[:16]}) than the model's ({digest[:16]}, in "
            f"{tokenizer}); pack the text with the model's tokenizer",
            store.path,
        )
