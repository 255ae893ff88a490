"""The decoder-only transformer that all built-in families are configurations of."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from weft.config.components import load_class
from weft.config.model import ModelSection
from weft.kernels.attention import alibi_slopes
from weft.kernels.cross_entropy import cap, token_logprobs
from weft.kernels.masks import attention_mask, cached_pattern_mask
from weft.models.layers.attention import Attention, Turn
from weft.models.layers.custom import own_part
from weft.models.layers.dropout import Dropout
from weft.models.layers.latent import LatentAttention
from weft.models.layers.mlp import MLP
from weft.models.layers.moe import MixtureOfExperts
from weft.models.layers.norm import make_norm
from weft.models.layers.position import turns_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from weft.kernels.flash import FlashMask


class Cache(Protocol):
    """What a decoder asks of a store of earlier keys and values (`weft.generation.cache` has one)."""

    length: int  # tokens held before this forward

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, kv_heads, seq, head_dim]`; returns all keys and values that the queries may look at."""
        ...

    def mask(self, seq: int, device: torch.device, window: int | None = None) -> torch.Tensor | None:
        """bool `[batch or 1, 1, seq, keys]` for the next `seq` queries; None where causality says all.

        With a sliding `window` a query sees so many keys at the most, its own with them.
        """
        ...

    def advance(self, seq: int) -> None:
        """All layers have been given `seq` more tokens."""
        ...


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); or with the norms after the parts, or around them.

    The MLP may be a mixture of experts, and attention latent.
    """

    def __init__(self, config: ModelSection, layer: int):
        super().__init__()
        before, after = config.norm_placement != "post", config.norm_placement != "pre"
        self.attention_norm = make_norm(config) if before else None
        self.attention = Attention(config, layer) if config.mla is None else LatentAttention(config, layer)
        self.attention_post_norm = make_norm(config) if after else None
        self.mlp_norm = make_norm(config) if before else None
        self.has_experts = config.has_experts(layer)
        self.mlp = MixtureOfExperts(config) if self.has_experts else MLP(config)
        self.mlp_post_norm = make_norm(config) if after else None
        self.parallel, self.multiplier = config.use_parallel_residual, config.residual_multiplier

    def forward(
        self,
        x: torch.Tensor,
        turn: Turn | None = None,
        mask: torch.Tensor | BlockMask | FlashMask | None = None,
        cache: Cache | None = None,
        loss_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer.

        Args:
            x: `[batch, seq, width]`.
            turn: what positions do to queries and keys; None: nothing.
            mask: bool `[batch or 1, 1, seq, keys]`, true where a query sees a key, or `attention_mask`'s; None: causal.
            cache: earlier keys and values, extended by these.
            loss_weights: as in `Decoder.forward`.

        Returns:
            `[batch, seq, width]`
        """
        inner = self.cast(x if self.attention_norm is None else self.attention_norm(x))
        attended = self.added(self.attention(inner, turn, mask, cache), self.attention_post_norm)
        seen = x if self.parallel else x + attended
        inner = self.cast(seen if self.mlp_norm is None else self.mlp_norm(seen))
        through = self.mlp(inner, loss_weights) if self.has_experts else self.mlp(inner)
        out = seen + self.added(through, self.mlp_post_norm)
        return out + attended if self.parallel else out

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """To the dtype of the weights that multiply it: the residual stream may be wider."""
        return x.to(self.attention.o_proj.weight.dtype)

    def added(self, out: torch.Tensor, post_norm: nn.Module | None) -> torch.Tensor:
        """What a part's output adds to the residual stream."""
        if post_norm is not None:
            out = post_norm(out)
        return out if self.multiplier == 1.0 else out * self.multiplier


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
        self.embed_tokens = nn.Embedding(config.vocab_size, width, config.pad_token_id)
        learned = config.position == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, width) if learned else None
        self.position = own_part(config.position, "position", config) if ":" in config.position else None
        self.embedding_dropout = Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_norm(config)
        slides = any(config.slides(layer) for layer in range(config.num_hidden_layers))
        self.window = config.sliding_window if slides else None
        pattern = config.attention_pattern
        self.pattern = pattern and load_class(pattern, "attention_pattern")(**pattern.arguments)
        self.token_logprobs, self.logits = token_logprobs, F.linear  # seams: compiled, or over a split vocabulary
        self.heads = slice(None)  # a seam: those of attention's heads that are computed here
        # Seams: a stage of a pipeline need not begin with the embedding or end with the head; other stages' layers are
        # None in it, and what it is given does not tell the dtype of its computing.
        self.begins, self.ends = True, True
        self.dtype: torch.dtype | None = None
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(width, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        cache: Cache | None = None,
        labels: torch.Tensor | None = None,
        loss_weights: torch.Tensor | None = None,
        last_only: bool = False,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model.

        Args:
            tokens: int64 `[batch, seq]`; in a stage that does not begin with the embedding what the one before it gave.
            positions: `[batch, seq]`, each token's place in its document; default: counted along the row, after what
                the cache holds.
            segments: `[batch, seq]`, each token's document: attention stays inside it. Not beside a cache.
            cache: keys and values of earlier tokens; these are appended.
            labels: `[batch, seq]`.
            loss_weights: `[batch]`, each sequence's share of the step's loss, which scales its auxiliary losses. In
                training; None: no auxiliary losses.
            lengths: `[batch]`, of the rows, where `tokens` are some of a row's (`parallel/axes/context.py`).
            last_only: logits of each row's last position alone, `[batch, 1, vocab]`: all that generating needs.

        Returns:
            Logits `[batch, seq, vocab]`; with `labels` their log-probabilities `[batch, seq]`, in nats, for which the
            logits of all positions are never held at once. At least float32. In a stage that does not end with the
            head: `[batch, seq, width]`.
        """
        config, seq = self.config, tokens.shape[1]
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + seq, device=tokens.device).unsqueeze(0)
        x = self.embed(tokens, positions) if self.begins else tokens  # [batch, seq, width]
        dtype = self.dtype or x.dtype
        turns = turns_of(config, self.position, positions, dtype, lengths)
        masks = self.masks(tokens if self.begins else positions, positions, segments, cache, dtype)
        for number, layer in enumerate(self.layers):
            if layer is not None:
                slides = config.slides(number)
                x = layer(x, turns[slides] if config.rotates(number) else None, masks[slides], cache, loss_weights)
        if cache is not None:
            cache.advance(seq)
        return self.outputs(x, labels, last_only) if self.ends else x

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids `[batch, seq]` at their positions -> `[batch, seq, width]`."""
        config = self.config
        x = self.embed_tokens(tokens)
        if config.embedding_multiplier != 1.0:  # rounded to the embedding's dtype first, as Gemma does
            x = x * torch.tensor(config.embedding_multiplier, dtype=x.dtype)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if (embed := getattr(self.position, "embed", None)) is not None:
            x = embed(x, positions).to(x.dtype)
        return self.embedding_dropout(x)

    def outputs(self, x: torch.Tensor, labels: torch.Tensor | None, last_only: bool = False) -> torch.Tensor:
        """The last layer's `[batch, seq, width]` -> what `forward` returns."""
        config = self.config
        head = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        x = self.norm(x[:, -1:] if last_only else x).to(head.dtype)
        if config.logits_scaling != 1.0:
            x = x / config.logits_scaling
        if labels is not None:
            return self.token_logprobs(x, head, labels, config.logit_softcap)
        logits = self.logits(x, head)
        return cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), config.logit_softcap)

    def masks(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: torch.Tensor | None,
        cache: Cache | None,
        dtype: torch.dtype,
    ) -> tuple[Any, Any]:
        """What the queries of layers that see all may look at, and those of layers with a sliding window."""
        config, seq, window = self.config, tokens.shape[1], self.window
        if cache is not None:
            full = cache.mask(seq, tokens.device)
            if self.pattern is not None:
                full = cached_pattern_mask(self.pattern, positions, cache.length + seq, full)
            return full, full if window is None else cache.mask(seq, tokens.device, window)
        slopes = None
        if config.position == "alibi":
            slopes = alibi_slopes(config.num_attention_heads, config.alibi_bias_max, tokens.device)[self.heads]
        make = partial(
            attention_mask,
            tokens,
            segments,
            dtype=dtype,
            head_dim=config.qk_head_dim,
            dropout=config.attention_dropout if self.training else 0.0,
            plain=config.attn_logit_softcapping is None and not config.attention_sinks,
            slopes=slopes,
            implementation=config.attention_implementation,
        )
        full = make(sparse=self.pattern)
        return full, full if window is None else make(sparse=window)
