"""Makes the blocks' linear layers compute matrix products in 8 bits (Micikevicius et al., 2022), with torchao.

Weights are stored and saved in the same dtypes as without fp8. Before a product, each factor (with `tp`, this rank's
shard of the factor) is scaled and rounded. By tensors: one scale for each factor, by its largest absolute value;
activations and weights are rounded to e4m3, gradients to e5m2. By rows: one scale, a power of two, for each row or
column that the product sums over; all factors are rounded to e4m3, and FSDP2 gathers weights in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import UserError
from weft.kernels.compiler import compiled
from weft.parallel import collectives
from weft.parallel.local_parameters import local
from weft.parallel.torchao import quiet_import, raise_unless_installed

MULTIPLE = 16  # products in 8 bits need sizes that are multiples of 16
E4M3 = torch.float8_e4m3fn
LEAST = 1e-12  # a row of smaller numbers has the scale of this number, as in torchao
_ROUTERS = ("router", "gate")  # rounding must not change the choice of experts
_EXPONENT = -(1 << 23)  # mask of the sign and the exponent of a float32


def raise_unless_usable(device: torch.device) -> None:
    """Raises UserError if `device` cannot compute FP8 matrix products, or torchao is not installed."""
    problem = None
    if device.type != "cuda":
        problem = f"this run is on a {device.type.upper()}, but FP8 matrix products need an NVIDIA GPU"
    elif torch.cuda.get_device_capability(device) < (8, 9):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        problem = f"{torch.cuda.get_device_name(device)} has compute capability {found}; 8.9 is required"
    if problem is not None:
        raise UserError(f"training.fp8: {problem}; remove the key")
    raise_unless_installed("training.fp8", "fp8")


def use_fp8(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    scales: Literal[True, "rowwise"] = True,
    *,
    ranks: int = 1,
    emulate: bool = False,
) -> None:
    """Makes the blocks' linear layers multiply in 8 bits, in place. Parameters and their names do not change.

    Routers, and layers whose sizes per rank are not multiples of 16, do not change.

    Args:
        model: unsharded model, on any device.
        scales: True: of tensors; `rowwise`: of rows.
        ranks: number of `tp` ranks, over which matrices will be sharded.
        emulate: whether to round to 8 bits but multiply in higher precision, which works on any device.
    """
    with quiet_import():
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    inner = {module for block in blocks for module in block.modules() if module is not block}

    def fits(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or module not in inner or name.rpartition(".")[2] in _ROUTERS:
            return False
        return all(size % (MULTIPLE * ranks) == 0 for size in (module.in_features, module.out_features))

    config = Float8LinearConfig() if scales is True else Float8LinearConfig.from_recipe_name(scales)
    # Gradients of weights sum over tokens: zeros pad the number of tokens to a multiple of 16.
    config = replace(config, pad_inner_dim=True, emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=fits, config=config)


def weights_of_rows(module: nn.Module) -> set[nn.Parameter]:
    """Returns the weights below `module` that `use_fp8` rounds by rows."""
    linears = (child for child in module.modules() if type(child).__name__ == "Float8Linear")
    return {child.weight for child in linears if child.config.round_scales_to_power_of_2}  # pyright: ignore


class _Part(NamedTuple):
    """A parameter's shard in the buffer of an all-gather: `rows` x `columns` numbers, rounded by rows or not."""

    rows: int
    columns: int
    rounded: bool

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def bytes(self) -> int:
        return self.rows * (self.columns + 2) if self.rounded else 2 * self.size


class AllGatherInFP8:
    """FSDP2's all-gather of a unit that sends some weights in 8 bits: 1 byte for a number and 2 for a row.

    Weights are scaled and rounded like the weights of products by rows. Rounding twice changes nothing, because scales
    are powers of two. So the products of forward are those of gathered weights in 16 bits; the gradients of inputs
    are products with the same rounded weights, scaled and rounded once more by columns. Other parameters are gathered
    in 16 bits. ZeRO++ (Wang et al., 2023) gathers blocks of numbers in 8-bit integers.

    Args:
        parameters: parameter of the unit, before FSDP2 shards it -> whether FSDP2 shards dimension 0, in FSDP2's order.
        rounded: the weights that are gathered in 8 bits.
        ranks: number of ranks over which FSDP2 shards.
        compile: whether rounding is compiled.
    """

    def __init__(
        self, parameters: Mapping[nn.Parameter, bool], rounded: set[nn.Parameter], ranks: int, *, compile: bool = False
    ):
        self.parts = tuple(_part(p, p in rounded, ranks, by_rows=by_rows) for p, by_rows in parameters.items())
        self.size = sum(part.size for part in self.parts)
        self.encode, self.decode = (compiled(_encode), compiled(_decode)) if compile else (_encode, _decode)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a buffer of FSDP2."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gathers `input_tensor`, of all parameters of the unit; on return, the stream has what it waits for.

        With `reshard_after_forward: N`, backward gathers parts of parameters that forward had rounded: in 16 bits.
        """
        if input_tensor.dtype != torch.bfloat16 or input_tensor.numel() != self.size:
            collectives.ALL_GATHER(output_tensor, input_tensor, group=group)
            return
        sent = self.encode(input_tensor, self.parts)
        received = sent.new_empty(group.size() * sent.numel())
        collectives.ALL_GATHER(received, sent, group=group)
        self.decode(received.view(group.size(), -1), output_tensor.view(group.size(), -1), self.parts)


def _part(parameter: nn.Parameter, rounded: bool, ranks: int, *, by_rows: bool) -> _Part:
    """Returns the part of a parameter. Along dimension 0, FSDP2 pads all shards to the same number of rows."""
    shape = local(parameter).shape
    if not by_rows:
        return _Part(1, shape.numel() // ranks, False)
    rows = -(-shape[0] // ranks)
    columns = shape[1:].numel()
    return _Part(rows, columns, rounded)


def round_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales each row of a matrix by a power of two, so that its largest number is at most that of e4m3, and rounds.

    Returns:
        The rounded matrix in e4m3, and the factor of each row to multiply it with, in bfloat16.
    """
    weight = weight.float()
    largest = weight.abs().amax(-1, keepdim=True).double()  # as in torchao: compiled division in float32 is not exact
    scale = (torch.finfo(E4M3).max / largest.clamp(min=LEAST)).float()
    scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)  # rounded down to a power of two
    return (weight * scale).to(E4M3), scale.reciprocal().to(torch.bfloat16)


def _encode(flat: torch.Tensor, parts: tuple[_Part, ...]) -> torch.Tensor:
    """Returns the bytes that a rank sends of its shards, which are one after another in `flat`."""
    pieces = []
    for shard, part in zip(flat.split([part.size for part in parts]), parts, strict=True):
        if part.rounded:
            shard, factors = round_rows(shard.view(part.rows, part.columns))
            pieces += [shard.view(torch.uint8).flatten(), factors.view(torch.uint8).flatten()]
        else:
            pieces.append(shard.view(torch.uint8))
    return torch.cat(pieces)


def _decode(received: torch.Tensor, out: torch.Tensor, parts: tuple[_Part, ...]) -> None:
    """Writes what `_encode` of all ranks returned, [ranks, bytes], as bfloat16 to `out`, [ranks, numbers]."""
    shards = out.split([part.size for part in parts], 1)
    for found, shard, part in zip(received.split([part.bytes for part in parts], 1), shards, parts, strict=True):
        if part.rounded:
            numbers, factors = found.split([part.size, 2 * part.rows], 1)
            numbers = numbers.view(E4M3).to(shard.dtype).unflatten(1, (part.rows, part.columns))
            shard.copy_((numbers * factors.view(shard.dtype).unsqueeze(-1)).flatten(1))
        else:
            shard.copy_(found.view(shard.dtype))
