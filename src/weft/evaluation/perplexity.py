"""`weft.perplexity`: loss, perplexity and bits per byte of a model on a token store."""

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
from weft.generation.sample import check_length, eval_mode
from weft.headers import read_tokenizer_header
from weft.models.forward import forward_of
from weft.observe.console import Console


@dataclass(frozen=True)
class StoreResult:
    """The result on one store, or on several combined.

    Attributes:
        store: its path, or "all".
        nats: the negative log-probability of all predicted tokens.
        tokens: predicted tokens that the store's loss mask, if any, keeps.
        bytes: UTF-8 bytes of the text of the predicted tokens, by the store's mean; None if unknown.
    """

    store: str
    nats: float
    tokens: int
    bytes: float | None

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """e^loss; infinite if that overflows."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """None if the number of bytes is unknown."""
        return bits_per_byte(self.nats, self.bytes) if self.bytes else None

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {
            "store": self.store,
            "loss": self.loss,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": None if self.bytes is None else round(self.bytes),
        }


def combine(results: Iterable[StoreResult]) -> StoreResult:
    """Combines several stores; every token has the same weight."""
    results = list(results)
    sizes = [one.bytes for one in results if one.bytes is not None]
    size = sum(sizes) if len(sizes) == len(results) else None
    return StoreResult("all", sum(one.nats for one in results), sum(one.tokens for one in results), size)


def perplexity(
    model: nn.Module,
    store: str | Path | TokenStore,
    *,
    sequence_length: int | None = None,
    stride: int | None = None,
    documents_apart: bool = True,
    batch_size: int = 8,
    max_tokens: int | None = None,
    tokenizer: str | Path | None = None,
) -> StoreResult:
    """Evaluates a model on a token store. Each token except the first of its document is predicted exactly once.

    >>> model = weft.load_model("runs/run")
    >>> found = weft.perplexity(model, "heldout", sequence_length=64, stride=32)
    >>> found.perplexity == math.exp(found.loss)
    True

    Args:
        model: a module from `weft.load_model`, on any device. It is in eval mode during the call.
        store: of texts or conversations; of a conversation, the tokens that the loss mask keeps count.
        sequence_length: maximum input tokens of a window. Default: 1024, or the model's maximum if less.
        stride: distance of consecutive windows of a longer document, in 1 .. `sequence_length`. Every token then has at
            least `sequence_length - stride` tokens before it, if its document does. Default: `sequence_length`, so that
            no token is read twice.
        documents_apart: evaluate each document separately; False: concatenate them, and predict all tokens but the
            store's first.
        batch_size: full-length sequences per batch; of shorter ones there are more. Affects only rounding.
        max_tokens: predict at most this many tokens.
        tokenizer: the model's, to compare with the store's. None: compare only the vocabulary sizes.

    Raises:
        UserError: the store does not fit the model, a setting is out of range, there is nothing to predict, or the loss
            is not finite.
    """
    settings = Settings(
        sequence_length=sequence_length,
        stride=stride,
        documents="apart" if documents_apart else "joined",
        max_tokens=max_tokens,
        batch_size=batch_size,
        tokenizer=tokenizer,
    )
    return evaluate_store(model, store, settings.with_windows(model, {}))


def evaluate_store(
    model: nn.Module, store: str | Path | TokenStore, settings: Settings, console: Console | None = None
) -> StoreResult:
    """As `perplexity`, with the result of `Settings.with_windows`."""
    console = console or Console(speaks=False)
    length, stride, apart = settings.sequence_length, settings.stride, settings.documents == "apart"
    assert length is not None
    assert stride is not None
    check_length(model, length, "windows of", "give a shorter sequence length")
    opened = store if isinstance(store, TokenStore) else TokenStore(store)
    _check_fit(model, opened, settings.tokenizer)
    total = count_predictions(opened, apart=apart)
    total = total if settings.max_tokens is None else min(total, settings.max_tokens)
    if total == 0:
        raise UserError("no token to predict: no document of two tokens or more; pack more text", opened.path)
    info = opened.info
    each = bytes_per_token(info.tokens, info.documents, info.bytes, info.eod_id)
    call, device = forward_of(model), next(model.parameters()).device
    nats, tokens, text, done = 0.0, 0.0, 0.0, 0
    progress = console.progress(total, f"evaluating {opened.path.name}", "token")
    with eval_mode(model), torch.no_grad(), progress as bar:
        windows = scoring_windows(opened, length, stride, apart=apart, limit=settings.max_tokens)
        for batch in scoring_batches(opened, windows, settings.batch_size * length):
            ids, labels, weight = (torch.from_numpy(batch[key]) for key in ("tokens", "labels", "weight"))
            logprobs = call({"tokens": ids.to(device), "labels": labels.to(device)})
            # `where` rather than a product with 0: log-probabilities of padding may not be finite.
            nats -= torch.where(weight.to(device) > 0, logprobs, 0.0).sum(dtype=torch.float64).item()
            tokens += weight.sum(dtype=torch.float64).item()
            text += weight[labels != info.eod_id].sum(dtype=torch.float64).item()
            done += batch["predicted"]
            bar.update(done, loss=nats / max(tokens, 1))
    if not math.isfinite(nats):
        raise UserError("the model's loss is not finite; its weights may be damaged, or try --dtype float32")
    if tokens == 0:
        raise UserError("no token to predict: the store's loss mask keeps none of them", opened.path)
    return StoreResult(str(opened.path), nats, int(tokens), text * each.mean if each is not None and text else None)


def _check_fit(model: nn.Module, store: TokenStore, tokenizer: str | Path | None) -> None:
    """Raises UserError if the store's ids are not the model's; warns if that cannot be checked."""
    info = store.info
    if info.kind == "preferences":
        raise UserError("holds pairs of answers; name a store of texts or conversations", store.path)
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
        warnings.warn(f"{store.path} does not name its tokenizer: its ids may not be the model's", stacklevel=3)
    elif digest != info.tokenizer_digest:
        raise UserError(
            f"was packed with another tokenizer ({info.tokenizer_digest[:16]}) than the model's ({digest[:16]}, in "
            f"{tokenizer}); pack the text with that one",
            store.path,
        )
