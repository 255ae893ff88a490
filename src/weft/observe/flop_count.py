"""FLOPs per token by formula. Torch-free: `weft models` lists them."""

from __future__ import annotations

FLOPS_PER_TOKEN = "6 x matmul parameters + 12 x layers x width x sequence"


def flops_per_token(matmul_parameters: int, layers: int, width: int, sequence: int) -> int:
    """Returns the FLOPs of forward and backward for one token of a dense decoder (PaLM, appendix B; Chowdhery et al.,
    2022).

    `6 x matmul_parameters` (2 forward, 4 backward) and, for attention, `12 x layers x width x sequence`, without a
    discount for the causal mask.

    Args:
        matmul_parameters: parameters used in matmuls (an embedding table only if the head is tied to it).
        width: heads x head size, usually the hidden size.
        sequence: tokens per sequence.
    """
    return 6 * matmul_parameters + 12 * layers * width * sequence
