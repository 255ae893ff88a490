"""`model.moe:` and `model.mla:`, the parts of a decoder that only some families have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.config.section import Section

# Keys that are about training alone: a checkpoint does not fix them, and no config.json needs to hold them.
BALANCE = ("capacity_factor", "router_aux_loss_coef", "router_z_loss_coef", "bias_update_speed")


class ExpertsSection(Section):
    """A mixture of experts in place of the MLP: each token goes through a few of many (Shazeer et al., 2017)."""

    num_experts: int = Field(ge=1, description="experts that are chosen from, in each layer")
    num_experts_per_tok: int = Field(ge=1, description="experts that each token goes through")
    moe_intermediate_size: int | None = Field(None, ge=1, description="width of an expert; default: intermediate_size")
    n_shared_experts: int = Field(0, ge=0, description="experts that every token goes through, as one so much wider")
    first_k_dense_replace: int = Field(0, ge=0, description="so many first layers have an MLP")
    decoder_sparse_step: int = Field(1, ge=1, description="every so-manieth layer has experts, the others an MLP")
    mlp_only_layers: list[int] = Field([], description="layers with an MLP all the same, counted from 0")

    scoring_func: Literal["softmax", "sigmoid", "softmax_of_chosen"] = Field(
        "softmax", description="experts' weights: softmax over all, each by itself, or softmax over those chosen"
    )
    norm_topk_prob: bool = Field(True, description="make the weights of the chosen experts sum to 1")
    routed_scaling_factor: float = Field(1.0, gt=0, description="the weights are multiplied by it")
    n_group: int = Field(1, ge=1, description="groups of experts (DeepSeek-AI, 2024)")
    topk_group: int = Field(1, ge=1, description="groups that a token's experts are chosen from: those that score best")
    router_bias: bool = Field(False, description="a bias on the router's scores")
    expert_bias: bool = Field(False, description="biases in the experts")
    swiglu_limit: float | None = Field(
        None, gt=0, description="gpt-oss's gate: (up + 1) * gate * sigmoid(1.702 gate), both clamped to it"
    )

    capacity_factor: float | None = Field(
        None,
        gt=0,
        description="in training an expert takes at most capacity_factor x (what it would get of a sequence, were all "
        "equal) of the sequence's tokens, the first ones (Fedus et al., 2021); default: all",
    )
    router_aux_loss_coef: float = Field(
        0.0, ge=0, description="weight of the balancing loss (Fedus et al., 2021), of each sequence by itself"
    )
    router_z_loss_coef: float = Field(0.0, ge=0, description="weight of logsumexp(scores)^2 (Zoph et al., 2022)")
    correction_bias: bool = Field(
        False, description="balance by a bias on the choice alone, without a loss (Wang et al., 2024)"
    )
    bias_update_speed: float = Field(0.001, ge=0, description="what correction_bias changes by in a step")

    def parameters(self, hidden: int, inner: int, bias: bool) -> tuple[int, int, int]:
        """A layer's parameters: in matrices, those of these that a token goes through, and in vectors.

        Args:
            hidden, inner: the model's hidden size, and an expert's width unless one is set.
            bias: whether the model's MLPs have biases; shared experts do then.
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
    """Multi-head latent attention: keys and values are made of one short vector a token (DeepSeek-AI, 2024)."""

    q_lora_rank: int | None = Field(None, ge=1, description="width that queries go through; default: none")
    kv_lora_rank: int = Field(ge=1, description="width of the vector that keys and values are made of")
    qk_nope_head_dim: int = Field(ge=1, description="numbers of each head's queries and keys without positions")
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2, description="and of those that are rotated; all heads share it")
    v_head_dim: int = Field(ge=1, description="numbers of each head's values")
    rope_interleave: bool = Field(True, description="pairs that are rotated lie side by side")

    def parameters(self, hidden: int, heads: int, bias: bool) -> tuple[int, int]:
        """A layer's parameters, its biases on queries, keys and values among them: in matrices, and in vectors."""
        made = self.kv_lora_rank + self.qk_rope_head_dim
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        matrices = hidden * made + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        matrices += heads * self.v_head_dim * hidden
        matrices += (hidden + queries) * self.q_lora_rank if self.q_lora_rank else hidden * queries
        vectors = self.kv_lora_rank + (self.q_lora_rank or 0)
        return matrices, vectors + (made + (self.q_lora_rank or 0) if bias else 0)
