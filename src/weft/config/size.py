"""How many parameters a decoder has, by formula: no model is built."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.model import ModelSection


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters; `matmul`: of those in matrix products (a look-up is none, a tied head is one)."""

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
    width, layers, heads = section.hidden_size, section.num_hidden_layers, section.num_attention_heads
    groups, head = section.num_key_value_heads or heads, section.head_dim or width // heads
    inner = inner_width(section)
    norm = width * (2 if section.norm == "layernorm" else 1)
    matrices = width * head * (2 * heads + 2 * groups) + width * inner * (3 if section.mlp == "gated" else 2)
    vectors = norm * (4 if section.norm_placement == "both" else 2)
    if section.attention_bias:
        vectors += head * (heads + 2 * groups)
    if section.output_bias:
        vectors += width
    if section.mlp_bias:
        vectors += inner * (2 if section.mlp == "gated" else 1) + width
    if section.qk_norm:
        vectors += 2 * head if section.qk_norm_over == "head" else head * (heads + groups)
    embedding = vocabulary * width
    positions = section.max_position_embeddings * width if section.position == "learned" else 0
    head_matrix = 0 if section.tie_word_embeddings else embedding
    return ModelSize(
        parameters=embedding + positions + layers * (matrices + vectors) + norm + head_matrix,
        matmul=layers * matrices + embedding,
    )


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
