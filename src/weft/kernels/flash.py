"""Attention with the flash-attn package (Dao, "FlashAttention-2", 2023), on CUDA devices and in 16-bit dtypes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch

from weft.errors import UserError

DTYPES = (torch.bfloat16, torch.float16)


class FlashMask(NamedTuple):
    """A causal mask in the form that the flash-attn package takes.

    Attributes:
        ends: int32 `[documents + 1]`, cumulative document lengths in the flattened batch, starting with 0; None if
            each sequence is one document.
        window: sliding window size, counting the query itself; None if there is no window.
    """

    ends: torch.Tensor | None
    window: int | None

    @classmethod
    def of(cls, segments: torch.Tensor | None, window: int | None) -> FlashMask:
        """Makes the mask from `segments` `[batch, seq]`, the index of each token's document.

        If `segments` is None, each sequence is one document.
        """
        if segments is None:
            return cls(None, window)
        begins = torch.ones_like(segments, dtype=torch.bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        starts = begins.flatten().nonzero().squeeze(1)
        return cls(torch.cat((starts, starts.new_tensor([segments.numel()]))).to(torch.int32), window)


def flash_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash-attn can run with this device and dtype.

    Without gradients, `attention_mask` selects another kernel if flash-attn cannot run.

    Raises:
        UserError: flash-attn cannot run, and gradients are enabled.
    """
    if device.type != "cuda":
        lacks = f"flash-attn needs a CUDA device, not {device.type}; set it to auto"
    elif dtype not in DTYPES:
        lacks = f"flash-attn supports bfloat16 and float16, not {str(dtype)[6:]}; set training.dtype to one of them"
    elif find_spec("flash_attn") is None:
        lacks = "the package flash-attn is not installed; run `pip install flash-attn`, or set it to auto"
    else:
        return True
    if torch.is_grad_enabled():
        raise UserError(f"model.attention_implementation: flash: {lacks}")
    return False


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: FlashMask,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention with the flash-attn package. Arguments are as in `weft.kernels.attention.attention`."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    settings = {
        "dropout_p": dropout,
        "softmax_scale": scale,
        "causal": True,
        "window_size": (-1, -1) if mask.window is None else (mask.window - 1, 0),
        "softcap": softcap or 0.0,
        "alibi_slopes": slopes,
        "deterministic": torch.are_deterministic_algorithms_enabled(),  # in backward
    }
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, seq, heads, head_dim]
    if mask.ends is None:
        return flash_attn_func(q, k, v, **settings).transpose(1, 2)
    batch, seq = q.shape[:2]
    # The sequence length bounds the longest document: its exact length would need a device synchronization.
    lengths = (mask.ends, mask.ends, seq, seq)
    out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *lengths, **settings)
    return out.unflatten(0, (batch, seq)).transpose(1, 2)
