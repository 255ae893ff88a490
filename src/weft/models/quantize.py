"""Replaces the matrices of a model by quantized matrices, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from weft.config.adapter import STACKED
from weft.errors import UserError
from weft.kernels.cross_entropy import cap, logprobs_of_logits
from weft.models.decoder import Decoder
from weft.models.layers.latent import LatentAttention
from weft.models.layers.moe import Experts
from weft.models.quantized import BITS, QuantizedLinear, QuantizedWeight

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # in float16, sums of integers would overflow
_ROUTERS = ("router", "gate")  # rounding must not change the choice of experts
_LOGITS = 1 << 24  # number of logits that are computed at a time


def check_quantize(how: str | None) -> None:
    """Raises UserError if `how` is neither None nor a key of `BITS` ("int8" or "int4")."""
    if how is not None and how not in BITS:
        raise UserError(f"quantize is {how!r}; use {' or '.join(BITS)}")


@torch.no_grad()
def quantize(model: Any, how: str) -> None:
    """Quantizes the linear layers, stacked experts and output head of a model, in place, one matrix after the other.

    Embeddings, norms, biases, routers and matrices that several layers share are unchanged. A decoder's head that is
    tied to the embedding is replaced by a quantized copy. Gradients are turned off for all parameters.

    Args:
        model: an unsharded model in eval mode. If it is on the meta device, fill it with `fill_quantized` afterwards.
        how: "int8" or "int4".

    Raises:
        UserError: the model has no linear layers, or a dtype other than bfloat16, float32 and float64.
    """
    check_quantize(how)
    bits = BITS[how]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = list(linears_to_quantize(model))
    if not found:
        raise UserError("quantize: the model has no linear layers (nn.Linear); load it without `quantize`")
    for parent, name, linear in found:
        setattr(parent, name, QuantizedLinear(_quantized(linear.weight, bits), linear.bias))
    for module in model.modules():
        if isinstance(module, Experts):
            for name in STACKED:
                weight = getattr(module, name)
                delattr(module, name)
                setattr(module, name, _quantized(weight, bits))
            module.product = _grouped
    if isinstance(model, Decoder):
        if model.lm_head is None and model.score is None:
            head_copy: Any = QuantizedLinear(_quantized(model.embed_tokens.weight, bits))
            model.lm_head = head_copy
        model.logits, model.token_logprobs = _logits, _token_logprobs
    elif head is not None and any(linear is head for _, _, linear in found):
        model.token_logprobs = _token_logprobs
    model.requires_grad_(False)


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has quantized weights."""
    return any(isinstance(module, QuantizedWeight) for module in model.modules())


@torch.no_grad()
def fill_quantized(model: nn.Module, blocks: Mapping[str, Callable[[], Iterable[torch.Tensor]]]) -> None:
    """Fills a decoder that was quantized on the meta device, block by block, so that float weights take little memory.

    Args:
        model: the decoder, whose tensors must be allocated already.
        blocks: name of a parameter or buffer of the unquantized decoder -> function that returns the tensor as blocks
            of consecutive rows.
    """
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    quantized = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}
    for name, read in blocks.items():
        weights = [quantized[name]] if name in quantized else []
        if (
            name == "embed_tokens.weight" and "lm_head.weight" in quantized and "lm_head.weight" not in blocks
        ):  # a tied head
            weights.append(quantized["lm_head.weight"])
        row = 0
        for block in read():
            if name in tensors:
                (tensors[name][row : row + len(block)] if block.dim() else tensors[name]).copy_(block)
            for weight in weights:
                weight.fill(block.flatten(0, -2), row * weight.shape[1] if block.dim() == 3 else row)
            row += len(block) if block.dim() else 0


def try_quantized(model: nn.Module) -> None:
    """Runs a quantized model once. Raises UserError if a layer does not run with quantized weights."""
    try:
        with torch.inference_mode():
            model(torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device))
    except Exception as error:  # such a layer can fail in any way
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"quantize: the model does not run with quantized weights ({what}); omit `quantize`") from error
    for module in model.modules():
        if isinstance(module, QuantizedWeight):
            module.forget_copy()


def linears_to_quantize(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yields (parent module, name of the layer in its parent, layer) for each linear layer to quantize."""
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is not nn.Linear or uses[id(module.weight)] > 1 or name in _ROUTERS:
                continue
            if isinstance(parent, LatentAttention) and name == "kv_b_proj":
                continue  # decoding multiplies by parts of this matrix, transposed (`absorbed`)
            if isinstance(parent, Decoder) and name == "score":
                continue  # a single row, and what the model is for
            yield parent, name, module


def _quantized(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    if weight.dtype not in _DTYPES:
        kind = str(weight.dtype).removeprefix("torch.")
        raise UserError(f"quantize: a weight has dtype {kind}; set dtype to bfloat16 or float32")
    found = QuantizedWeight(weight.shape, bits, weight.dtype, weight.device)
    if weight.device.type != "meta":
        found.fill(weight.flatten(0, -2))
    return found.eval()


def _grouped(x: torch.Tensor, weight: QuantizedWeight, ends: torch.Tensor) -> torch.Tensor:
    return weight.grouped(x, ends)


def _logits(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    return weight(x)


def _token_logprobs(
    hidden: torch.Tensor, weight: QuantizedWeight, labels: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Implements `weft.kernels.cross_entropy.token_logprobs` for a quantized head, without gradients."""
    tokens, rows = labels.flatten(), max(1, _LOGITS // weight.shape[0])
    found = []
    for part, ids in zip(hidden.flatten(0, -2).split(rows), tokens.split(rows), strict=True):
        logits = weight(part)
        found.append(logprobs_of_logits(cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap), ids))
    return torch.cat(found).view_as(labels)
