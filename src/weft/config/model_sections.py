"""Sections below `model:`: mixtures of experts, latent attention, sparse attention and rotary scaling."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from weft.config.section import Component, Section

# Keys for training only: they can differ from the checkpoint, and a config.json can omit them.
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
    """Number of shared experts, through which every token goes. They are computed as one wider expert."""
    first_k_dense_replace: int = Field(0, ge=0)
    """Number of initial layers with an MLP instead of experts."""
    decoder_sparse_step: int = Field(1, ge=1)
    """Interval N: only layers N, 2N, 3N, ... (counted from 1) have experts."""
    mlp_only_layers: list[int] = Field(default=[])
    """Indices of further layers with an MLP instead of experts, counted from 0."""

    scoring_func: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """Function that converts router logits to routing weights, the factors of the experts' outputs. `softmax`: over all
    experts; `sigmoid`: for each expert separately; `softmax_of_chosen`: over the chosen experts.
    """
    norm_topk_prob: bool = True
    """Whether the routing weights of a token's chosen experts are divided by their sum, so that they add up to 1."""
    routed_scaling_factor: float = Field(1.0, gt=0)
    """Number by which the routing weights are multiplied."""
    n_group: int = Field(1, ge=1)
    """Number of groups into which the experts are divided (DeepSeek-AI, 2024); see `topk_group`."""
    topk_group: int = Field(1, ge=1)
    """Number of groups from which a token's experts are chosen: the groups with the highest scores."""
    router_bias: bool = False
    """Whether the router has a bias."""
    expert_bias: bool = False
    """Whether the experts have biases."""
    swiglu_limit: float | None = Field(None, gt=0)
    """If set, experts use the activation of gpt-oss: `gate` is clamped to at most this limit, `up` to [-limit, limit],
    and the result is `(up + 1) * gate * sigmoid(1.702 * gate)`. Default: the activation is `hidden_act`, without a
    clamp.
    """

    capacity_factor: float | None = Field(None, gt=0)
    """Limits each expert in training to capacity_factor * sequence length * `num_experts_per_tok` / `num_experts`
    tokens of a sequence, rounded up. The length does not include padding. An expert skips the later tokens of a
    sequence that exceed this capacity (Fedus et al., 2021). Default: no limit.
    """
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the load balancing loss (Fedus et al., 2021), which is computed for each sequence."""
    router_z_loss_coef: float = Field(0.0, ge=0)
    """Weight of the router z-loss, logsumexp(logits)^2 (Zoph et al., 2022): the mean of a sequence without padding."""
    correction_bias: bool = False
    """Whether the router adds a bias to the scores by which it chooses experts. The bias is updated to balance the load
    of the experts (Wang et al., 2024).
    """
    bias_update_speed: float = Field(0.001, ge=0)
    """Amount by which the correction bias of an expert changes per step."""

    def parameters(self, hidden: int, inner: int, bias: bool) -> tuple[int, int, int]:
        """Counts the parameters of a layer. Returns three counts: in all matrices, in the matrices that one token uses,
        and in vectors.

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

    def ranks_per_token(self, ep: int) -> float:
        """Returns the expected number of ranks that have at least one of a token's experts.

        Assumes that a token chooses each set of experts with the same probability.

        Args:
            ep: number of ranks, each with `num_experts / ep` experts.
        """
        others = self.num_experts - self.num_experts // ep
        missed = math.comb(others, self.num_experts_per_tok) / math.comb(self.num_experts, self.num_experts_per_tok)
        return ep * (1 - missed)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts in place of an MLP."""
        if layer < self.first_k_dense_replace or layer in self.mlp_only_layers:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0


class LatentAttentionSection(Section):
    """Multi-head latent attention: keys and values are projections of one low-rank latent vector per token
    (DeepSeek-AI, 2024).
    """

    q_lora_rank: int | None = Field(None, ge=1)
    """Size of the latent vector of queries. Default: no latent vector; queries have a full-rank projection."""
    kv_lora_rank: int = Field(ge=1)
    """Size of the latent vector of keys and values."""
    qk_nope_head_dim: int = Field(ge=1)
    """Number of dimensions without rotary embedding in each query and key head."""
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2)
    """Number of dimensions with rotary embedding in each query and key head, in addition to `qk_nope_head_dim`. All key
    heads of a token have the same values in these dimensions.
    """
    v_head_dim: int = Field(ge=1)
    """Number of dimensions of a value head."""
    rope_interleave: bool = True
    """Whether the two dimensions of a rotated pair are adjacent. Otherwise they are `qk_rope_head_dim / 2` apart."""

    def parameters(self, hidden: int, heads: int, bias: bool) -> tuple[int, int]:
        """Counts the parameters of a layer. Returns the number of parameters in matrices, and the number in vectors.

        Args:
            hidden: the model's hidden size.
            heads: number of query heads.
            bias: whether the projections have biases.
        """
        made = self.kv_lora_rank + self.qk_rope_head_dim
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        matrices = hidden * made + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        matrices += heads * self.v_head_dim * hidden
        matrices += (hidden + queries) * self.q_lora_rank if self.q_lora_rank else hidden * queries
        vectors = self.kv_lora_rank + (self.q_lora_rank or 0)
        return matrices, vectors + (made + (self.q_lora_rank or 0) if bias else 0)


class AttentionPatternSection(Component):
    """A sparse attention pattern. Each file in `weft/kernels/patterns/` defines one built-in pattern.

    A pattern selects the tokens that a query attends to. All patterns are causal, and a query always attends to itself.
    With `data.document_attention`, positions are counted from the start of the document; otherwise the sequence counts
    as one document. GPUs skip blocks without selected keys (flex attention); CPUs use a mask. A custom class is called
    with two int64 tensors, the positions of queries and of keys, which broadcast against each other. It must return a
    bool tensor that is true where the query attends to the key.
    """

    kind: ClassVar[str] = "attention_pattern"


class RopeScaling(Section):
    """Scaling of rotary embeddings to longer sequences than a model was trained on: Hugging Face's `rope_scaling`."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """Scaling method. `linear`: divides all frequencies by `factor`; `dynamic`: increases the base with the sequence
    length; `llama3`: divides only low frequencies by `factor`; `yarn`: divides low frequencies by `factor`, and
    multiplies queries and keys by `attention_factor`; `longrope`: divides each frequency by its entry in `short_factor`
    or `long_factor`, and multiplies queries and keys by `attention_factor`.
    """
    factor: float = Field(gt=0)
    """Ratio of the new to the original maximum sequence length."""
    original_max_position_embeddings: int | None = Field(None, ge=1)
    """Original maximum sequence length in tokens, which every method except `linear` requires."""
    low_freq_factor: float = Field(1.0, gt=0)
    """`llama3`: frequencies with fewer than this number of rotations over the original length are divided by `factor`.
    """
    high_freq_factor: float = Field(4.0, gt=0)
    """`llama3`: frequencies with more than this number of rotations over the original length are not scaled. Between
    `low_freq_factor` and `high_freq_factor`, the scaling changes gradually.
    """
    beta_fast: float = Field(32.0, gt=0)
    """`yarn`: frequencies with more than this number of rotations over the original length are not scaled."""
    beta_slow: float = Field(1.0, gt=0)
    """`yarn`: frequencies with fewer than this number of rotations over the original length are divided by `factor`."""
    attention_factor: float | None = Field(None, gt=0)
    """`yarn`, `longrope`: number by which rotated queries and keys are multiplied. Default for `yarn`: 1 + log(factor)
    / 10, or the value that `mscale` gives. Default for `longrope`: sqrt(1 + log(factor) /
    log(original_max_position_embeddings)).
    """
    mscale: float | None = None
    """`yarn`: if `mscale` and `mscale_all_dim` are set, the default of `attention_factor` is f(mscale) /
    f(mscale_all_dim), where f(m) = 1 + m * log(factor) / 10 (DeepSeek).
    """
    mscale_all_dim: float | None = None
    """`yarn`: with `mscale`, sets the default of `attention_factor` (see `mscale`)."""
    truncate: bool = True
    """`yarn`: between `beta_slow` and `beta_fast` rotations, the scaling changes gradually with the index of the
    frequency. If `truncate` is true, the ends of this range of indices are rounded outward to integers.
    """
    short_factor: list[float] | None = None
    """`longrope`: divisor of each frequency, for sequences of up to the original length."""
    long_factor: list[float] | None = None
    """`longrope`: divisor of each frequency, for longer sequences."""

    def mistake(self, rotary_dim: int) -> str | None:
        """Returns a message if keys contradict each other or do not fit the heads; otherwise None.

        Args:
            rotary_dim: number of rotated dimensions per head.
        """
        if self.rope_type != "linear" and self.original_max_position_embeddings is None:
            return f"{self.rope_type} requires original_max_position_embeddings, the original sequence length; set it"
        if self.rope_type == "dynamic" and rotary_dim < 4:
            return "dynamic requires at least 4 rotated dimensions per head; set larger heads, or another rope_type"
        if self.rope_type == "longrope":
            for key in ("short_factor", "long_factor"):
                factors = getattr(self, key) or []
                if len(factors) != rotary_dim // 2 or not all(factor > 0 for factor in factors):
                    return f"{key} has {len(factors)} numbers; longrope requires {rotary_dim // 2}, all above 0; set it"
            if self.original_max_position_embeddings == 1:
                return "longrope requires original_max_position_embeddings above 1; set it"
        return None
