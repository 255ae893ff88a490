"""How many parameters and operations a decoder has, by formula: no model is built."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.experts import ExpertsSection
from weft.config.model import ModelSection

FLOPS_PER_TOKEN = "6 x matmul parameters + 12 x layers x width x sequence"


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters.

    Attributes:
        matmul: those that a token is multiplied with: a look-up is none, a tied head is one, and of a mixture of
            experts only those count that a token goes through.
    """

    parameters: int
    matmul: int


def model_size(section: ModelSection, vocab_size: int | None = None) -> ModelSize:
    """A decoder's size.

    Args:
        section: its shape.
        vocab_size: used if the section has none.

    Raises:
        ValueError: neither has one.
    """
    vocabulary = section.vocab_size or vocab_size
    if vocabulary is None:
        raise ValueError("vocab_size is not known")
    width, layers = section.hidden_size, section.num_hidden_layers
    norm = width * (2 if section.norm == "layernorm" and section.norm_bias else 1)
    norms = norm * (4 if section.norm_placement == "both" else 2)
    attention, vectors = _attention(section)
    parameters = matmul = layers * attention
    parameters += layers * (vectors + norms)
    for layer in range(layers):
        moe = section.moe if section.has_experts(layer) else None
        held, used, vectors = _mlp(section) if moe is None else _experts(section, moe)
        parameters += held + vectors
        matmul += used
    embedding = vocabulary * width
    positions = section.max_position_embeddings * width if section.position == "learned" else 0
    head = 0 if section.tie_word_embeddings else embedding
    return ModelSize(parameters=parameters + embedding + positions + norm + head, matmul=matmul + embedding)


def layer_matmul(section: ModelSection, layer: int) -> int:
    """Parameters of one layer, counted from 0, that a token is multiplied with."""
    moe = section.moe if section.has_experts(layer) else None
    return _attention(section)[0] + (_mlp(section) if moe is None else _experts(section, moe))[1]


def flops_per_token(matmul_parameters: int, layers: int, width: int, sequence: int) -> int:
    """Floating-point operations of forward and backward for one token of a dense decoder.

    `6 x matmul_parameters` (2 forward, 4 backward) and, for the scores and sums of attention, `12 x layers x width x
    sequence`; the causal half is not taken off. This is the count of PaLM's appendix B (Chowdhery et al., 2022).

    Args:
        matmul_parameters: parameters used in matrix products (an embedding table only if it is also the head).
        layers, width: number of blocks; heads x head size (the hidden size, usually).
        sequence: tokens per sequence.
    """
    return 6 * matmul_parameters + 12 * layers * width * sequence


def _attention(section: ModelSection) -> tuple[int, int]:
    """Parameters of one layer's attention: in matrices, and others."""
    width, heads, groups, mla = section.hidden_size, section.num_attention_heads, section.kv_heads, section.mla
    head = section.qk_head_dim
    vectors = heads if section.attention_sinks else 0
    if section.output_bias:
        vectors += width
    if mla is not None:
        made = mla.kv_lora_rank + mla.qk_rope_head_dim
        matrices = width * made + mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        matrices += heads * mla.v_head_dim * width
        matrices += (width + heads * head) * mla.q_lora_rank if mla.q_lora_rank else width * heads * head
        vectors += mla.kv_lora_rank + (mla.q_lora_rank or 0)
        if section.attention_bias:
            vectors += made + (mla.q_lora_rank or 0)
        return matrices, vectors
    if section.attention_bias:
        vectors += head * (heads + 2 * groups)
    if section.qk_norm:
        vectors += 2 * head if section.qk_norm_over == "head" else head * (heads + groups)
    return width * head * (2 * heads + 2 * groups), vectors


def _mlp(section: ModelSection) -> tuple[int, int, int]:
    """Parameters of one layer's MLP: in matrices, the same once more, and others."""
    width, inner, into = section.hidden_size, inner_width(section), 2 if section.mlp == "gated" else 1
    matrices = width * inner * (into + 1)
    return matrices, matrices, inner * into + width if section.mlp_bias else 0


def _experts(section: ModelSection, moe: ExpertsSection) -> tuple[int, int, int]:
    """Parameters of one layer's experts: in matrices, those of these that a token goes through, and others."""
    width, inner = section.hidden_size, moe.moe_intermediate_size or inner_width(section)
    always = width * moe.num_experts + 3 * width * inner * moe.n_shared_experts
    expert = 3 * width * inner
    vectors = moe.num_experts * (2 * inner + width) if moe.expert_bias else 0
    vectors += moe.num_experts if moe.router_bias else 0
    if section.mlp_bias and moe.n_shared_experts:
        vectors += 2 * inner * moe.n_shared_experts + width
    return always + expert * moe.num_experts, always + expert * moe.num_experts_per_tok, vectors


def inner_width(section: ModelSection) -> int:
    """The MLP's width: as set; else 4 times the residual stream's, or 8/3 for a gated one, up to a multiple of 8."""
    if section.intermediate_size is not None:
        return section.intermediate_size
    return 4 * section.hidden_size if section.mlp == "plain" else -(-8 * section.hidden_size // 24) * 8


def in_words(count: int) -> str:
    """`134.1M`, `8.03B`, `163.9k`."""
    for limit, unit, digits in ((1e9, "B", 2), (1e6, "M", 1), (1e3, "k", 1)):
        if count >= limit:
            return f"{count / limit:.{digits}f}{unit}"
    return str(count)
