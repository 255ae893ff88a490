"""Computes FLOPs per token by formula. Does not import torch, because `weft models` uses this module."""

from __future__ import annotations

FLOPS_PER_TOKEN = "6 x matmul parameters + 12 x layers x width x sequence"


def flops_per_token(matmul_parameters: int, layers: int, width: int, sequence: int) -> int:
    """Returns the FLOPs of forward and backward for one token of a dense decoder (PaLM, appendix B; Chowdhery et al.,
    2022).

    `6 x matmul_parameters` (2 forward, 4 backward) and, for attention, `12 x layers x width x sequence`, without a
    discount for the causal mask.

    Args:
        matmul_parameters: number of parameters used in matmuls (an embedding table only if it is tied to the head).
        layers: number of layers.
        width: number of heads x head size, usually the hidden size.
        sequence: number of tokens per sequence.
    """
    return 6 * matmul_parameters + 12 * layers * width * sequence
