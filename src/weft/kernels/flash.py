"""The flash-attn package's kernels (Dao, "FlashAttention-2", 2023), where it is installed: for GPUs, in 16 bits."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch

from weft.errors import UserError

DTYPES = (torch.bfloat16, torch.float16)


class FlashMask(NamedTuple):
    """What these kernels know of a mask, beside causality.

    Attributes:
        ends: int32 `[documents + 1]`: 0 and where each document ends, counted through all rows; None: rows are whole.
        window: the most keys that a query sees, its own with them; None: all before it.
    """

    ends: torch.Tensor | None
    window: int | None

    @classmethod
    def of(cls, segments: torch.Tensor | None, window: int | None) -> FlashMask:
        """Of segments `[batch, seq]`, a number for each token's document."""
        if segments is None:
            return cls(None, window)
        begins = torch.ones_like(segments, dtype=torch.bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        starts = begins.flatten().nonzero().squeeze(1)
        return cls(torch.cat((starts, starts.new_tensor([segments.numel()]))).to(torch.int32), window)


def flash_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can be called; where a gradient is wanted and they cannot, that is the user's to mend.

    Raises:
        UserError: (in training) what is missing.
    """
    if device.type != "cuda":
        lacks = f"flash-attn's kernels run on GPUs, and this is a {device.type}; set auto"
    elif dtype not in DTYPES:
        lacks = f"flash-attn's kernels know bfloat16 and float16, and this is {str(dtype)[6:]}; set training.dtype"
    elif find_spec("flash_attn") is None:
        lacks = "the package flash-attn is not installed; pip install flash-attn, or set auto"
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
    """`weft.kernels.attention.attention`, for a `FlashMask`."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    settings = {
        "dropout_p": dropout,
        "softmax_scale": scale,
        "causal": True,
        "window_size": (-1, -1) if mask.window is None else (mask.window - 1, 0),
        "softcap": softcap or 0.0,
        "alibi_slopes": slopes,
    }
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, seq, heads, head_dim]
    if mask.ends is None:
        return flash_attn_func(q, k, v, **settings).transpose(1, 2)
    batch, seq = q.shape[:2]
    # The longest document is told as a whole row's length: its own would have to come from the GPU in each forward.
    lengths = (mask.ends, mask.ends, seq, seq)
    out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *lengths, **settings)
    return out.unflatten(0, (batch, seq)).transpose(1, 2)
