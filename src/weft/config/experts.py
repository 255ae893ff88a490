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

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts in place of an MLP."""
        if layer < self.first_k_dense_replace or layer in self.mlp_only_layers:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0


def wrong_experts(experts: int, each: int, groups: int | None, kept: int | None) -> tuple[str, str] | None:
    """What numbers of experts cannot be together: the key to change and what is wrong; None if all is well.

    Args:
        experts, each: how many there are, and how many a token goes through.
        groups, kept: groups of experts, and how many of them a token's are chosen from.
    """
    if each > experts:
        return "num_experts_per_tok", f"{each} of {experts} experts; choose at most {experts}"
    if not groups or not kept or groups == 1:
        return None
    if experts % groups:
        return "n_group", f"{experts} experts are no multiple of {groups} groups; change one"
    if kept > groups:
        return "topk_group", f"{kept} of {groups} groups; choose at most {groups}"
    if each > experts // groups * kept:
        what = f"{kept} groups of {experts // groups} experts have no {each} to choose; raise topk_group"
        return "topk_group", what
    return None


class LatentAttentionSection(Section):
    """Multi-head latent attention: keys and values are made of one short vector a token (DeepSeek-AI, 2024)."""

    q_lora_rank: int | None = Field(None, ge=1, description="width that queries go through; default: none")
    kv_lora_rank: int = Field(ge=1, description="width of the vector that keys and values are made of")
    qk_nope_head_dim: int = Field(ge=1, description="numbers of each head's queries and keys without positions")
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2, description="and of those that are rotated; all heads share it")
    v_head_dim: int = Field(ge=1, description="numbers of each head's values")
    rope_interleave: bool = Field(True, description="pairs that are rotated lie side by side")
