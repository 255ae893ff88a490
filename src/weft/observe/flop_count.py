"""How many operations a token takes, by formula. Torch-free: `weft models` lists them."""

from __future__ import annotations

FLOPS_PER_TOKEN = "6 x matmul parameters + 12 x layers x width x sequence"


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
