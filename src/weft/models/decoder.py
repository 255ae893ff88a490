"""The decoder-only transformer that all built-in families are configurations of."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from weft.config.model import ModelSection
from weft.kernels.attention import document_mask
from weft.kernels.cross_entropy import cap, token_logprobs
from weft.models.layers.attention import Attention
from weft.models.layers.mlp import MLP
from weft.models.layers.norm import NORMS
from weft.models.layers.rope import rope_table


class Cache(Protocol):
    """What a decoder asks of a store of earlier keys and values (`weft.generate.cache` has one)."""

    length: int  # tokens held before this forward

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, kv_heads, seq, head_dim]`; returns all keys and values that the queries may look at."""
        ...

    def mask(self, seq: int, device: torch.device) -> torch.Tensor | None:
        """bool `[batch or 1, 1, seq, keys]` for the next `seq` queries; None where causality says all."""
        ...

    def advance(self, seq: int) -> None:
        """All layers have been given `seq` more tokens."""
        ...


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelSection, layer: int):
        super().__init__()
        norm = NORMS[config.norm]
        self.attention_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
        mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """One layer.

        Args:
            x: `[batch, seq, width]`.
            rope: `rope_table`'s rotations; None for other position schemes.
            mask: bool `[batch or 1, 1, seq, keys]`, true where a query sees a key, or `document_mask`'s; None: causal.
            cache: earlier keys and values, extended by these.

        Returns:
            `[batch, seq, width]`
        """
        x = x + self.attention(self.attention_norm(x), rope, mask, cache)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Token ids to logits, or to the log-probabilities of given labels.

    Args:
        config: its shape and parts; `vocab_size` must be known. Parameters are made on the current device ("meta" too)
            and hold no meaningful values before `weft.models.initialize` or a checkpoint has filled them.
    """

    def __init__(self, config: ModelSection):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set: give it, or take the tokenizer's")
        self.config = config
        width = config.hidden_size
        self.head_dim = config.head_dim or width // config.num_attention_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        learned = config.position == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, width) if learned else None
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = NORMS[config.norm](width, config.rms_norm_eps)
        self.token_logprobs = token_logprobs  # a seam: compiled, or over a split vocabulary
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(width, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        cache: Cache | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model.

        Args:
            tokens: int64 `[batch, seq]`.
            positions: `[batch, seq]`, each token's place in its document; default: counted along the row, after what
                the cache holds.
            segments: `[batch, seq]`, each token's document: attention stays inside it. Not beside a cache.
            cache: keys and values of earlier tokens; these are appended.
            labels: `[batch, seq]`.

        Returns:
            Logits `[batch, seq, vocab]`; with `labels` their log-probabilities `[batch, seq]`, in nats, for which the
            logits of all positions are never held at once. At least float32.
        """
        seq = tokens.shape[1]
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + seq, device=tokens.device).unsqueeze(0)
        x = self.embed_tokens(tokens)  # [batch, seq, width]
        rope = None
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        else:
            config = self.config
            rotary_dim = int(self.head_dim * config.partial_rotary_factor)
            rope = rope_table(positions, rotary_dim, config.rope_theta, x.dtype, config.rope_scaling)
        x = F.dropout(x, self.config.embedding_dropout, self.training)
        if cache is not None:
            mask = cache.mask(seq, tokens.device)
        elif segments is not None:
            dropout = self.config.attention_dropout if self.training else 0.0
            mask = document_mask(segments, dtype=x.dtype, head_dim=self.head_dim, dropout=dropout)
        else:
            mask = None
        for layer in self.layers:
            x = layer(x, rope, mask, cache)
        if cache is not None:
            cache.advance(seq)
        x = self.norm(x)
        head = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if labels is not None:
            return self.token_logprobs(x, head, labels, self.config.logit_softcap)
        logits = F.linear(x, head)
        return cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), self.config.logit_softcap)
