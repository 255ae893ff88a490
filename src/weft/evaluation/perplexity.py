"""How well a model predicts a token store: loss, perplexity and bits per byte."""

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
from weft.evaluation.scoring_windows import batches, count, windows
from weft.evaluation.settings import Settings
from weft.generation.sample import check_length
from weft.headers import read_tokenizer_header
from weft.models.forward import forward_of
from weft.observe.console import Console


@dataclass(frozen=True)
class Measure:
    """What was found on a store, or on several together.

    Attributes:
        store: its path, or "all".
        nats: minus the log-probability of all predicted tokens.
        tokens: predicted tokens; where the store has a loss mask, those of them that it keeps.
        bytes: of the text that the predicted tokens stand for, in UTF-8, by the store's mean; None if not known.
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
        """e to the power of the loss; infinite where that is no float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """None if the bytes are not known."""
        return bits_per_byte(self.nats, self.bytes) if self.bytes else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "store": self.store,
            "loss": self.loss,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": None if self.bytes is None else round(self.bytes),
        }


def together(found: Iterable[Measure]) -> Measure:
    """Several stores as one: each token counts as much as any other."""
    found = list(found)
    sizes = [one.bytes for one in found if one.bytes is not None]
    size = sum(sizes) if len(sizes) == len(found) else None
    return Measure("all", sum(one.nats for one in found), sum(one.tokens for one in found), size)


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
) -> Measure:
    """Measure a model on a token store. Each token but the first of its document is predicted exactly once.

    >>> model = weft.load_model("runs/run")
    >>> found = weft.perplexity(model, "heldout", sequence_length=64, stride=32)
    >>> found.perplexity == math.exp(found.loss)
    True

    Args:
        model: as `weft.load_model` gives it; on any device. It is put into eval mode while this runs.
        store: of texts or conversations; of a conversation, what the loss mask keeps counts.
        sequence_length: the most tokens that are read at once; default: 1024, or what the model was made for if less.
        stride: how far each window of a longer document lies behind the one before it, in 1 .. `sequence_length`. Every
            token then has at least `sequence_length - stride` tokens before it, if its document has them. Default:
            `sequence_length`, so that no token is read twice.
        documents_apart: each document by itself; False: all end to end, and only the store's first is not predicted.
        batch_size: sequences of full length at once; shorter ones are more. The result does not depend on it, but for
            the last digits.
        max_tokens: stop after so many predictions.
        tokenizer: the model's, to be compared with the one that packed the store; None: only the number of ids is.

    Raises:
        UserError: a store that does not fit the model, settings out of range, nothing to predict, or a loss that is no
            number.
    """
    length = default_length(model) if sequence_length is None else sequence_length
    how = Settings(batch_size=batch_size, max_tokens=max_tokens)
    return measure(
        model,
        store,
        sequence_length=length,
        stride=length if stride is None else stride,
        documents="apart" if documents_apart else "joined",
        settings=how,
        tokenizer=tokenizer,
    )


def measure(
    model: nn.Module,
    store: str | Path | TokenStore,
    *,
    sequence_length: int,
    stride: int,
    documents: str,
    settings: Settings,
    tokenizer: str | Path | None,
    console: Console | None = None,
) -> Measure:
    """As `perplexity`; of `settings` it takes the batch size and how many tokens are enough."""
    console = console or Console(speaks=False)
    length, apart = sequence_length, documents == "apart"
    batch_size, max_tokens = settings.batch_size, settings.max_tokens
    _check(length, stride, batch_size, max_tokens)
    check_length(model, length, "windows of", "give a shorter sequence length")
    opened = store if isinstance(store, TokenStore) else TokenStore(store)
    check_fit(model, opened, tokenizer)
    total = count(opened, apart=apart)
    total = total if max_tokens is None else min(total, max_tokens)
    if total == 0:
        raise UserError("no token to predict: no document of two tokens or more; pack more text", opened.path)
    info = opened.info
    each = bytes_per_token(info.tokens, info.documents, info.bytes, info.eod_id)
    call, device = forward_of(model), next(model.parameters()).device
    nats, tokens, text, done = 0.0, 0.0, 0.0, 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), console.progress(total, f"evaluating {opened.path.name}", "token") as bar:
            found = windows(opened, length, stride, apart=apart, limit=max_tokens)
            for batch in batches(opened, found, batch_size * length):
                ids, labels, weight = (torch.from_numpy(batch[key]) for key in ("tokens", "labels", "weight"))
                logprobs = call({"tokens": ids.to(device), "labels": labels.to(device)})
                # What is not predicted is left out rather than multiplied by 0: filling may give what is no number.
                nats -= torch.where(weight.to(device) > 0, logprobs, 0.0).sum(dtype=torch.float64).item()
                tokens += weight.sum(dtype=torch.float64).item()
                text += weight[labels != info.eod_id].sum(dtype=torch.float64).item()
                done += batch["predicted"]
                bar.update(done, loss=nats / max(tokens, 1))
    finally:
        model.train(was_training)
    if not math.isfinite(nats):
        raise UserError(
            "the model gives losses that are no numbers; its weights may be damaged, or try --dtype float32"
        )
    if tokens == 0:
        raise UserError("no token to predict: the store's loss mask keeps none of them", opened.path)
    return Measure(str(opened.path), nats, int(tokens), text * each.mean if each is not None and text else None)


def default_length(model: nn.Module) -> int:
    """Tokens read at once where nobody says how many: 1024, or what the model was made for if less."""
    return min(1024, getattr(getattr(model, "config", None), "max_position_embeddings", None) or 1024)


def _check(length: int, stride: int, batch_size: int, max_tokens: int | None) -> None:
    """Raise UserError for settings that mean nothing."""
    for name, number in (("sequence_length", length), ("batch_size", batch_size), ("max_tokens", max_tokens)):
        if number is not None and number < 1:
            raise UserError(f"{name} is {number}; give at least 1")
    if not 1 <= stride <= length:
        raise UserError(f"stride is {stride}; give 1 to {length:,}, the sequence length")


def check_fit(model: nn.Module, store: TokenStore, tokenizer: str | Path | None) -> None:
    """Raise UserError if the store's ids are not the model's; warn if the store does not tell."""
    info = store.info
    if info.kind == "preferences":
        raise UserError("holds pairs of answers; name a store of texts or conversations", store.path)
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None and info.vocab_size > size:
        raise UserError(
            f"has ids of {info.vocab_size:,} tokens, and the model knows {size:,}; pack the text with the model's "
            "tokenizer",
            store.path,
        )
    if tokenizer is None:
        return
    own = read_tokenizer_header(tokenizer).digest
    if info.tokenizer_digest is None:
        warnings.warn(f"{store.path} does not say what packed it: its ids may not be the model's", stacklevel=3)
    elif own != info.tokenizer_digest:
        raise UserError(
            f"was packed with another tokenizer ({info.tokenizer_digest[:16]}) than the model's ({own[:16]}, in "
            f"{tokenizer}); pack the text with that one",
            store.path,
        )
