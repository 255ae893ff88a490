"""Sections below `model:`: mixtures of experts, latent attention, sparse attention and rotary scaling."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from weft.config.section import Component, Section

# Keys for training only: a checkpoint does not fix them, and a config.json need not have them.
BALANCE = ("capacity_factor", "router_aux_loss_coef", "router_z_loss_coef", "bias_update_speed")


class ExpertsSection(Section):
    """A mixture of experts in place of the MLP: each token goes through a few of the experts (Shazeer et al., 2017)."""

    num_experts: int = Field(ge=1)
    """Number of routed experts per layer."""
    num_experts_per_tok: int = Field(ge=1)
    """Number of experts that each token goes through."""
    moe_intermediate_size: int | None = Field(None, ge=1)
    """Hidden size of an expert. Default: `intermediate_size`."""
    n_shared_experts: int = Field(0, ge=0)
    """Number of experts that every token goes through, computed as one wider expert."""
    first_k_dense_replace: int = Field(0, ge=0)
    """Number of initial layers with an MLP instead of experts."""
    decoder_sparse_step: int = Field(1, ge=1)
    """N, where only every N-th layer has experts."""
    mlp_only_layers: list[int] = Field(default=[])
    """Further layers with an MLP, counted from 0."""

    scoring_func: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """How router logits become weights of experts. `softmax`: over all experts; `sigmoid`: for each expert;
    `softmax_of_chosen`: over the chosen experts.
    """
    norm_topk_prob: bool = True
    """Whether the weights of the chosen experts are normalized to sum 1."""
    routed_scaling_factor: float = Field(1.0, gt=0)
    """Factor of the weights of the experts."""
    n_group: int = Field(1, ge=1)
    """Number of groups of experts (DeepSeek-AI, 2024)."""
    topk_group: int = Field(1, ge=1)
    """Number of best groups from which a token's experts are chosen."""
    router_bias: bool = False
    """Whether the router has a bias."""
    expert_bias: bool = False
    """Whether the experts have biases."""
    swiglu_limit: float | None = Field(None, gt=0)
    """Clamp of gpt-oss's gate (up + 1) * gate * sigmoid(1.702 gate). Default: SwiGLU without a clamp."""

    capacity_factor: float | None = Field(None, gt=0)
    """Capacity of an expert in training, relative to an equal distribution of each sequence's tokens. Later tokens of
    the sequence are dropped (Fedus et al., 2021). Default: no limit.
    """
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the load balancing loss (Fedus et al., 2021), which each sequence has."""
    router_z_loss_coef: float = Field(0.0, ge=0)
    """Weight of the router z-loss, logsumexp(logits)^2 (Zoph et al., 2022)."""
    correction_bias: bool = False
    """Whether a bias on the choice of experts balances their load (Wang et al., 2024)."""
    bias_update_speed: float = Field(0.001, ge=0)
    """Change of the correction bias per step."""

    def parameters(self, hidden: int, inner: int, bias: bool) -> tuple[int, int, int]:
        """Returns a layer's parameters in matrices, those in matrices that a token uses, and those in vectors.

        Args:
            hidden: the model's hidden size.
            inner: the hidden size of an expert, unless `moe_intermediate_size` is set.
            bias: whether the model's MLPs, and so the shared experts, have biases.
        """
        inner = self.moe_intermediate_size or inner
        expert = 3 * hidden * inner
        always = hidden * self.num_experts + expert * self.n_shared_experts
        vectors = self.num_experts * (2 * inner + hidden) if self.expert_bias else 0
        vectors += self.num_experts if self.router_bias else 0
        if bias and self.n_shared_experts:
            vectors += 2 * inner * self.n_shared_experts + hidden
        return always + expert * self.num_experts, always + expert * self.num_experts_per_tok, vectors

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts in place of an MLP."""
        if layer < self.first_k_dense_replace or layer in self.mlp_only_layers:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0


class LatentAttentionSection(Section):
    """Multi-head latent attention: keys and values share one short vector per token (DeepSeek-AI, 2024)."""

    q_lora_rank: int | None = Field(None, ge=1)
    """Width of the latent vector of queries. Default: none, a full-rank projection."""
    kv_lora_rank: int = Field(ge=1)
    """Width of the latent vector of keys and values."""
    qk_nope_head_dim: int = Field(ge=1)
    """Dimensions of a query or key head without rotary embedding."""
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2)
    """Further dimensions with rotary embedding, whose keys all heads share."""
    v_head_dim: int = Field(ge=1)
    """Dimensions of a value head."""
    rope_interleave: bool = True
    """Whether the two dimensions of a rotated pair are adjacent."""

    def parameters(self, hidden: int, heads: int, bias: bool) -> tuple[int, int]:
        """Returns a layer's parameters in matrices and in vectors; `bias`: whether the projections have biases."""
        made = self.kv_lora_rank + self.qk_rope_head_dim
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        matrices = hidden * made + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        matrices += heads * self.v_head_dim * hidden
        matrices += (hidden + queries) * self.q_lora_rank if self.q_lora_rank else hidden * queries
        vectors = self.kv_lora_rank + (self.q_lora_rank or 0)
        return matrices, vectors + (made + (self.q_lora_rank or 0) if bias else 0)


class AttentionPatternSection(Component):
    """A sparse attention pattern. Built-in patterns are the files of `weft/kernels/patterns/`.

    A pattern selects the keys that a query attends to, counted from the start of its document; a query always attends
    to itself. GPUs skip blocks without selected keys (flex attention); CPUs use a mask. A custom class is called with
    the positions of queries and keys.
    """

    kind: ClassVar[str] = "attention_pattern"


class RopeScaling(Section):
    """Scaling of rotary embeddings to longer sequences than a model was trained on: Hugging Face's `rope_scaling`."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """Method. `linear`: all frequencies alike; `dynamic`: a larger base for longer sequences; `llama3`: low frequencies
    only; `yarn`: low frequencies, and scaled attention; `longrope`: a factor for each frequency, from one of two lists
    by sequence length.
    """
    factor: float = Field(gt=0)
    """Ratio of the new to the original maximum sequence length."""
    original_max_position_embeddings: int | None = Field(None, ge=1)
    """Original maximum sequence length in tokens. Every method but `linear` requires it."""
    low_freq_factor: float = Field(1.0, gt=0)
    """`llama3`: frequencies with fewer rotations over the original length are scaled in full."""
    high_freq_factor: float = Field(4.0, gt=0)
    """`llama3`: frequencies with more rotations over the original length are not scaled."""
    beta_fast: float = Field(32.0, gt=0)
    """`yarn`: frequencies with more rotations over the original length are not scaled."""
    beta_slow: float = Field(1.0, gt=0)
    """`yarn`: frequencies with fewer rotations over the original length are scaled in full."""
    attention_factor: float | None = Field(None, gt=0)
    """`yarn`, `longrope`: factor of rotated queries and keys. Default: 1 + log(factor) / 10 (yarn), sqrt(1 +
    log(factor) / log(original_max_position_embeddings)) (longrope).
    """
    mscale: float | None = None
    """`yarn`: with `mscale_all_dim`, replaces `attention_factor` as in DeepSeek's models."""
    mscale_all_dim: float | None = None
    """`yarn`: see `mscale`."""
    truncate: bool = True
    """`yarn`: whether the bounds of the interpolated frequencies are rounded."""
    short_factor: list[float] | None = None
    """`longrope`: factors of the frequencies for sequences of up to the original length."""
    long_factor: list[float] | None = None
    """`longrope`: factors of the frequencies for longer sequences."""

    def mistake(self, rotary_dim: int) -> str | None:
        """Returns what does not fit together, for heads with `rotary_dim` rotated dimensions; else None."""
        if self.rope_type != "linear" and self.original_max_position_embeddings is None:
            return f"{self.rope_type} requires original_max_position_embeddings, the original sequence length"
        if self.rope_type == "dynamic" and rotary_dim < 4:
            return "dynamic requires at least 4 rotated dimensions per head"
        if self.rope_type == "longrope":
            for key in ("short_factor", "long_factor"):
                factors = getattr(self, key) or []
                if len(factors) != rotary_dim // 2 or not all(factor > 0 for factor in factors):
                    return f"{key} has {len(factors)} numbers; longrope requires {rotary_dim // 2}, all above 0"
            if self.original_max_position_embeddings == 1:
                return "longrope requires original_max_position_embeddings above 1"
        return None
