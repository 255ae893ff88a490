"""Multi-head attention with grouped keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from weft.config.model import ModelSection
from weft.kernels.attention import attention
from weft.models.layers.norm import RMSNorm, RMSNorm1p
from weft.models.layers.rope import rotate


class Attention(nn.Module):
    """Projects to queries, keys and values, attends, projects back."""

    def __init__(self, config: ModelSection, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=config.output_bias)
        self.norm_together = config.qk_norm and config.qk_norm_over == "width"  # all heads as one vector
        together = self.norm_together
        norm = RMSNorm1p if config.norm == "rmsnorm1p" else RMSNorm
        self.q_norm = norm(self.head_dim * (heads if together else 1), config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = (
            norm(self.head_dim * (kv_heads if together else 1), config.rms_norm_eps) if config.qk_norm else None
        )
        self.scale, self.softcap = config.attention_multiplier, config.attn_logit_softcapping
        self.attention_dropout, self.hidden_dropout = config.attention_dropout, config.hidden_dropout

    def forward(self, x: torch.Tensor, rope=None, mask: torch.Tensor | None = None, cache=None) -> torch.Tensor:
        """`[batch, seq, width]` -> `[batch, seq, width]`; the other arguments as in `Block.forward`."""
        batch, seq, _ = x.shape
        q, k = self.q_proj(x), self.k_proj(x)
        if self.norm_together:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(batch, seq, -1, self.head_dim)  # [batch, seq, heads, head_dim]
        k = k.view(batch, seq, -1, self.head_dim)
        v = self.v_proj(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)  # [batch, kv_heads, seq, head_dim]
        if self.q_norm is not None and not self.norm_together:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # all keys and values so far
        dropout = self.attention_dropout if self.training else 0.0
        out = attention(q, k, v, causal=True, mask=mask, dropout=dropout, scale=self.scale, softcap=self.softcap)
        out = self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))
        return F.dropout(out, self.hidden_dropout, self.training)
