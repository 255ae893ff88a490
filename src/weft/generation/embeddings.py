"""Computes embeddings of texts from the final hidden states of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from weft.errors import UserError
from weft.generation.adapters import Adapter, adapted
from weft.generation.limits import check_length, check_prompt
from weft.generation.runners import inference, shards_of
from weft.models.decoder import Decoder
from weft.models.transformers_model import TransformersModel

Pooling = Literal["mean", "last"]


def embed(model: nn.Module, ids: Sequence[int], pooling: Pooling, adapter: Adapter | None = None) -> list[float]:
    """Returns the embedding of one text: its pooled final hidden states, scaled to length 1, `hidden` numbers.

    Args:
        model: the model.
        ids: token ids of the text.
        pooling: "mean": the mean of the hidden states of all tokens; "last": the hidden state of the last token.
        adapter: an adapter of the model, or None.

    Raises:
        UserError: the text is empty or too long, has tokens outside the vocabulary, or the model has no hidden states
            on this rank.
    """
    check_prompt(model, ids)
    check_length(model, len(ids), "the text has", "shorten it")
    run: Any = model
    device = next(model.parameters()).device
    tokens = torch.tensor([list(ids)], device=device)
    with inference(model), adapted(model, [(adapter, len(ids))]):
        if isinstance(model, Decoder) and shards_of(model) == 1:
            hidden = run.norm(run.residual_stream(tokens))
        elif isinstance(model, TransformersModel):
            hidden = run.base_model(tokens, use_cache=False)[0]
        else:
            raise UserError("embeddings need a built-in or Transformers model that is not sharded; omit --tp")
        hidden = hidden[0].to(torch.promote_types(hidden.dtype, torch.float32))
        pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
        if not torch.isfinite(pooled).all():
            raise UserError("the hidden states are NaN or infinite; check the weights of the model, or the dtype")
        return torch.nn.functional.normalize(pooled, dim=0).tolist()
