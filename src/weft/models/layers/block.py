"""Blocks of the decoder: the transformer block, and the layer that predicts a token further ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from weft.config.model import ModelSection
from weft.models.layers.attention import Attention, Rotary
from weft.models.layers.latent import LatentAttention
from weft.models.layers.lora import weight_dtype
from weft.models.layers.mlp import MLP
from weft.models.layers.moe import MixtureOfExperts
from weft.models.layers.norm import make_norm

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from weft.kernels.flash import FlashMask


class Cache(Protocol):
    """The interface of a key/value cache (`weft.generation.cache`)."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    ) -> torch.Tensor:
        """Appends keys and values to a layer's cache, and computes the attention of each query to its sequence's keys.

        Args:
            layer: index of the layer.
            q: `[1, heads, tokens, head_dim]`. The tokens of all sequences are concatenated.
            k: `[1, kv_heads, tokens, head_dim]`.
            v: `[1, kv_heads, tokens, v_head_dim]`; with latent attention, `k` is the latent and `v` the rotary key.
            attention: computes the attention of a group of sequences from queries `[sequences, heads, seq, head_dim]`,
                keys, values, and a bool mask `[sequences, 1, seq, keys]` or None (causal).

        Returns:
            `[1, heads, tokens, v_head_dim]`.
        """
        ...


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    With `norm_placement: post`, the norms are after attention and MLP; with `both`, norms are before and after.
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
        rotary: Rotary | None = None,
        mask: torch.Tensor | BlockMask | FlashMask | None = None,
        cache: Cache | None = None,
        loss_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the block: `[batch, seq, hidden]` -> `[batch, seq, hidden]`.

        Args:
            x: the residual stream.
            rotary: function that applies the rotary embedding to queries and keys; None: no rotary embedding.
            mask: bool `[batch or 1, 1, seq, keys]`, true where a query sees a key, or a mask that `attention_mask`
                makes; None: causal.
            cache: earlier keys and values; the block appends its new keys and values.
            loss_weights: each sequence's or token's weight in the step's loss (`Decoder.forward`).
        """
        inner = self.cast(x if self.attention_norm is None else self.attention_norm(x))
        attended = self.residual_branch(self.attention(inner, rotary, mask, cache), self.attention_post_norm)
        middle = x if self.parallel else x + attended
        inner = self.cast(middle if self.mlp_norm is None else self.mlp_norm(middle))
        inner = self.mlp(inner, loss_weights) if self.has_experts else self.mlp(inner)
        out = middle + self.residual_branch(inner, self.mlp_post_norm)
        return out + attended if self.parallel else out

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """Casts to the weights' dtype, because the residual stream can have a wider dtype."""
        return x.to(weight_dtype(self.attention.o_proj))

    def residual_branch(self, out: torch.Tensor, post_norm: nn.Module | None) -> torch.Tensor:
        """Applies the post-norm and the residual multiplier to `out`, the output of attention or of the MLP."""
        if post_norm is not None:
            out = post_norm(out)
        return out if self.multiplier == 1.0 else out * self.multiplier


class PredictionLayer(Block):
    """A multi-token prediction layer (DeepSeek-V3; DeepSeek-AI, 2024, section 2.2): predicts a token further ahead.

    block(eh_proj([enorm(embedding of the next token); hnorm(hidden state)])), and a norm before the model's output
    head. The order in the concatenation is that of the published weights.
    """

    def __init__(self, config: ModelSection, layer: int):
        super().__init__(config, layer)
        self.enorm, self.hnorm, self.head_norm = make_norm(config), make_norm(config), make_norm(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, *arguments: Any, embedded: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the hidden states, after the norm, from which the output head predicts, `[batch, seq, hidden]`.

        Args:
            x: normalized hidden states of the model, or of the prediction layer before.
            arguments: as in `Block.forward`.
            embedded: embeddings of the tokens after those that `x` has seen, `[batch, seq, hidden]`.
        """
        assert embedded is not None
        both = self.cast(torch.cat((self.enorm(embedded), self.hnorm(x)), -1))
        return self.head_norm(super().forward(self.eh_proj(both).to(x.dtype), *arguments))
