"""Multi-head attention with grouped key/value heads (grouped-query attention)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from weft.config.model import ModelSection
from weft.kernels.attention import Scores, alibi_slopes, attention
from weft.models.layers.custom import custom_component
from weft.models.layers.dropout import Dropout
from weft.models.layers.norm import RMSNorm, RMSNorm1p

# Function that applies the rotary embedding: (q, k) -> (q, k), each [batch, heads, seq, head_dim].
Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Attention(nn.Module):
    """Grouped-query attention, with the projections of queries, keys, values and output."""

    def __init__(self, config: ModelSection, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.qk_head_dim
        heads, kv_heads = config.num_attention_heads, config.kv_heads
        self.kv_heads = kv_heads
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=config.output_bias)
        self.norm_all_heads = config.qk_norm and config.qk_norm_over == "width"  # normalizes all heads as one vector
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            norm = RMSNorm1p if config.norm == "rmsnorm1p" else RMSNorm
            self.q_norm = norm(self.head_dim * (heads if self.norm_all_heads else 1), config.rms_norm_eps)
            self.k_norm = norm(self.head_dim * (kv_heads if self.norm_all_heads else 1), config.rms_norm_eps)
        self.attend = CoreAttention(config)
        self.clip, self.hidden_dropout = config.clip_qkv, Dropout(config.hidden_dropout)

    def forward(self, x: torch.Tensor, rotary: Rotary | None = None, mask=None, cache=None) -> torch.Tensor:
        """Maps `x` `[batch, seq, hidden]` to `[batch, seq, hidden]`; other arguments are as in `Block.forward`."""
        batch, seq, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        norms = (self.q_norm, self.k_norm) if self.q_norm is not None and self.k_norm is not None else None
        if norms is not None and self.norm_all_heads:
            q, k = norms[0](q), norms[1](k)
        if self.clip is not None:
            q, k, v = (x.clamp(-self.clip, self.clip) for x in (q, k, v))
        q = q.view(batch, seq, -1, self.head_dim)  # [batch, seq, heads, head_dim]
        k = k.view(batch, seq, -1, self.head_dim)
        v = v.view(batch, seq, -1, self.head_dim).transpose(1, 2)  # [batch, kv_heads, seq, head_dim]
        if norms is not None and not self.norm_all_heads:
            q, k = norms[0](q), norms[1](k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if rotary is not None:
            q, k = rotary(q, k)
        out = self.attend(q, k, v, mask) if cache is None else cache.attend(self.layer, q, k, v, self.attend)
        return self.hidden_dropout(self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1)))


class CoreAttention(nn.Module):
    """Attention without the projections, as a separate module, so that `parallel/` can wrap it.

    With `attention_implementation: module:Class`, a custom component computes this attention.
    """

    def __init__(self, config: ModelSection):
        super().__init__()
        heads, chosen = config.num_attention_heads, config.attention_implementation
        self.scale, self.softcap = config.attention_multiplier, config.attn_logit_softcapping
        self.dropout = config.attention_dropout
        # Set by `parallel/`: this rank's heads, as a slice of all heads and of the heads whose parameters it has.
        self.num_heads, self.heads, self.local_heads = heads, slice(None), slice(None)
        # Set by `parallel/`: replaces `dropout` if attention weights are sharded.
        self.weights_dropout: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.alibi_bias_max = config.alibi_bias_max if config.position == "alibi" else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.attention_sinks else None
        self.own = custom_component(chosen, "attention", config) if ":" in chosen else None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask=None) -> torch.Tensor:
        """Computes the attention of queries to keys and values; shapes are as in `weft.kernels.attention.attention`.

        Args:
            q, k, v: queries, keys and values after their projections.
            mask: as in `Block.forward`.
        """
        if self.own is not None:
            return self.own(q, k, v, mask).to(v.dtype)
        slopes = None
        if self.alibi_bias_max is not None:
            slopes = alibi_slopes(self.num_heads, self.alibi_bias_max, q.device)[self.heads]
        dropout = self._dropout(q.device) if self.training else 0.0
        sinks = None if self.sinks is None else self.sinks[self.local_heads]
        scores = Scores(self.scale, self.softcap, slopes, sinks)
        return attention(q, k, v, causal=True, mask=mask, dropout=dropout, scores=scores)

    def _dropout(self, device: torch.device) -> float | Callable[[torch.Tensor], torch.Tensor]:
        """Returns the `dropout` argument of `attention` in training: the probability, or `weights_dropout`.

        `weights_dropout` is returned only if it is set and the device is a CPU, where no fused kernel has dropout.
        """
        replacement = self.weights_dropout if device.type == "cpu" and self.dropout else None
        return replacement or self.dropout
