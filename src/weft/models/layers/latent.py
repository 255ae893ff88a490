"""Multi-head latent attention (DeepSeek-AI, 2024): keys and values are projected from one latent vector per token."""

from __future__ import annotations

import torch
from torch import nn

from weft.config.model import ModelSection
from weft.models.layers.attention import CoreAttention, Rotary
from weft.models.layers.dropout import Dropout
from weft.models.layers.lora import full_weight
from weft.models.layers.norm import RMSNorm

EPS = 1e-6  # epsilon of the norms of latents, as published; not that of the residual stream's norms


class LatentAttention(nn.Module):
    """Attention in which each head projects its keys and values from one latent vector per token.

    All heads share one rotary key per token. The cache contains only the latent vector and the rotary key:
    `kv_lora_rank + qk_rope_head_dim` elements per token.
    """

    def __init__(self, config: ModelSection, layer: int):
        super().__init__()
        mla = config.mla
        assert mla is not None
        self.layer, self.heads = layer, config.num_attention_heads
        self.nope, self.rope, self.v_head_dim = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        self.rank, self.interleaved = mla.kv_lora_rank, mla.rope_interleave
        width, bias, q_width = config.hidden_size, config.attention_bias, self.heads * config.qk_head_dim
        self.low_rank = mla.q_lora_rank is not None
        if mla.q_lora_rank is not None:
            self.q_a_proj = nn.Linear(width, mla.q_lora_rank, bias=bias)
            self.q_a_norm = RMSNorm(mla.q_lora_rank, EPS)
            self.q_b_proj = nn.Linear(mla.q_lora_rank, q_width, bias=False)
        else:
            self.q_proj = nn.Linear(width, q_width, bias=False)
        self.kv_a_proj = nn.Linear(width, self.rank + self.rope, bias=bias)
        self.kv_a_norm = RMSNorm(self.rank, EPS)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v_head_dim, width, bias=config.output_bias)
        self.scale = config.attention_multiplier or config.qk_head_dim**-0.5
        self.attend = CoreAttention(config.model_copy(update={"attention_multiplier": self.scale}))
        self.hidden_dropout = Dropout(config.hidden_dropout)

    def forward(self, x: torch.Tensor, rotary: Rotary | None = None, mask=None, cache=None) -> torch.Tensor:
        """Maps `x` `[batch, seq, hidden]` to `[batch, seq, hidden]`; other arguments are as in `Block.forward`."""
        batch, seq, _ = x.shape
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))) if self.low_rank else self.q_proj(x)
        q_nope, q_rope = q.view(batch, seq, self.heads, -1).transpose(1, 2).split((self.nope, self.rope), dim=-1)
        latent, k_rope = self.kv_a_proj(x).unsqueeze(1).split((self.rank, self.rope), dim=-1)  # [batch, 1, seq, ...]
        latent = self.kv_a_norm(latent)
        if rotary is not None:
            q_rope, k_rope = rotary(self.half_split(q_rope), self.half_split(k_rope))
        q = torch.cat((q_nope, q_rope), dim=-1)
        attend = self.attend_latents
        out = attend(q, latent, k_rope, mask) if cache is None else cache.attend(self.layer, q, latent, k_rope, attend)
        return self.hidden_dropout(self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1)))

    def attend_latents(
        self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes the attention of queries to latents.

        Args:
            q: `[batch, heads, seq, head_dim]`.
            latent: `[batch, 1, keys, kv_lora_rank]`.
            k_rope: `[batch, 1, keys, qk_rope_head_dim]`, the rotary keys that all heads share.
            mask: the `mask` of `Block.forward`.

        Returns:
            `[batch, heads, seq, v_head_dim]`.
        """
        if q.shape[2] == 1 < latent.shape[2]:  # a new token of a cached sequence
            return self.absorbed(*q.split((self.nope, self.rope), dim=-1), latent, k_rope, mask)
        kv = self.kv_b_proj(latent.squeeze(1)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_nope, v = kv.split((self.nope, self.v_head_dim), dim=-1)
        return self.attend(q, torch.cat((k_nope, k_rope.expand(-1, self.heads, -1, -1)), dim=-1), v, mask)

    def half_split(self, x: torch.Tensor) -> torch.Tensor:
        """Reorders rotary pairs into the half-split layout of `apply_rotary`; a no-op if pairs are not interleaved."""
        return x.unflatten(-1, (-1, 2)).mT.flatten(-2) if self.interleaved else x

    def absorbed(self, q_nope, q_rope, latent, k_rope, mask):
        """Computes the attention of one new token to latents, without projecting the latents to keys and values.

        Instead, queries and outputs are projected: for a query q, a latent c and a projection W, q (W c) = (q W) c, and
        W (sum of c) = sum of (W c). So the latents are the only key/value head, which all query heads share.

        Args:
            q_nope, q_rope: the dimensions of the queries without and with rotary embedding.
            latent, k_rope, mask: as in `attend_latents`.
        """
        k_weight, v_weight = (
            full_weight(self.kv_b_proj).view(self.heads, -1, self.rank).split((self.nope, self.v_head_dim), dim=1)
        )
        wide, dtype = k_weight.dtype, latent.dtype  # with an adapter, `wide` is at least float32
        q_nope = torch.einsum("bhsn,hnr->bhsr", q_nope.to(wide), k_weight).to(dtype)
        q = torch.cat((q_nope, q_rope), dim=-1)
        out = self.attend(q, torch.cat((latent, k_rope), dim=-1), latent, mask)  # [batch, heads, 1, rank]
        return torch.einsum("bhsr,hvr->bhsv", out.to(wide), v_weight).to(dtype)
