"""Computes the FLOPs per token of a decoder. This module does not import torch, so that `weft models` starts fast."""

from __future__ import annotations

FLOPS_PER_TOKEN = "6 x matmul parameters + 12 x layers x width x sequence"


def flops_per_token(matmul_parameters: int, layers: int, width: int, sequence: int, frozen: int = 0) -> int:
    """Returns the FLOPs of the forward and backward pass for one token of a dense decoder.

    This is the sum of `6 x matmul_parameters` (2 forward, 4 backward) and, for attention, `12 x layers x width x
    sequence`, without a discount for the causal mask (PaLM, appendix B; Chowdhery et al., 2022). Of the four operations
    in backward, two are for the gradient of the parameter, which a frozen parameter does not have.

    Args:
        matmul_parameters: number of parameters used in matmuls (an embedding table only if it is tied to the head).
        layers: number of layers.
        width: number of heads x head size, usually the hidden size.
        sequence: number of tokens per sequence.
        frozen: number of frozen parameters among `matmul_parameters`.
    """
    return 6 * matmul_parameters - 2 * frozen + 12 * layers * width * sequence
