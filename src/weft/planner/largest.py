"""Finds the largest micro-batch, sequence or model that fits the memory of a number of devices, without torch.

A config fits if its own mesh needs at most the device's memory (`needed_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from weft.config.derive import batch_sequences, sequence_length
from weft.config.legal_mesh import sequence_unit
from weft.config.mesh import mesh_shape
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.formatting import byte_size
from weft.planner.hardware import Hardware
from weft.planner.plan import capacity, needed_bytes

What = Literal["micro_batch", "sequence", "model"]
LONGEST = 1 << 24  # tokens
LARGEST = 4096  # times the layers and the width of the config


@dataclass(frozen=True)
class Largest:
    """The largest that fits.

    Attributes:
        value: sequences of a micro-batch, tokens of a sequence, or parameters of a model.
        config: the config with this value.
        limited: True if a larger value is not possible for another reason than memory, such as the global batch.
    """

    value: int
    config: RunConfig
    limited: bool = False


def largest(what: What, config: RunConfig, devices: int, hardware: Hardware) -> Largest:
    """Finds the largest micro-batch, sequence or model that fits.

    Args:
        what: "micro_batch": sequences of a micro-batch, of the same global batch. "sequence": `data.sequence_length`,
            with as many tokens in the global batch as before, but at least one sequence for each data parallel rank,
            and with `micro_batch_size: 1`. "model": width and layers grow by the same factor, with the same size of
            heads and the same ratio of the MLP to the width.
        config: a checked config. Its mesh must be legal for the number of devices.
        devices: number of ranks.
        hardware: the hardware file.

    Raises:
        UserError: not even the smallest value fits.
    """
    change, start, most = {"micro_batch": _micro_batches, "sequence": _sequences, "model": _models}[what](
        config, devices
    )
    found = _bisect(lambda number: _fits(change(number), devices, hardware), start, most)
    if found is None:
        raise UserError(
            f"not even the smallest {what.replace('_', '-')} fits {devices:,} devices of "
            f"{byte_size(capacity(hardware))}; use more devices, or shard and recompute more "
            "(parallel, training.activation_checkpointing, parallel.offload)"
        )
    chosen = change(found)
    if what != "model":
        value = chosen.training.micro_batch if what == "micro_batch" else chosen.data.sequence_length
        assert value is not None
        return Largest(value, chosen, found == most)
    assert isinstance(chosen.model, ModelSection)
    return Largest(chosen.model.size().parameters, chosen)


def _fits(config: RunConfig, devices: int, hardware: Hardware) -> bool:
    return needed_bytes(config, devices, hardware) <= capacity(hardware)


def _bisect(fits: Callable[[int], bool], start: int, most: int) -> int | None:
    """Returns the largest number from 1 to `most` that fits, if all smaller numbers fit too; None if 1 does not.

    Args:
        start: a number that is tried first.
    """
    low, high = 0, most + 1
    number = min(start, most)
    while high - low > 1:
        if fits(number):
            low = number
        else:
            high = number
        number = min(2 * low, most) if high > most and 0 < low < most else (low + high) // 2
    return low or None


Change = tuple[Callable[[int], RunConfig], int, int]


def _micro_batches(config: RunConfig, devices: int) -> Change:
    most = math.ceil(batch_sequences(config) / mesh_shape(config.parallel, devices).data_ranks)

    def change(number: int) -> RunConfig:
        return config.model_copy(update={"training": config.training.model_copy(update={"micro_batch_size": number})})

    return change, 1, most


def _sequences(config: RunConfig, devices: int) -> Change:
    mesh = mesh_shape(config.parallel, devices)
    unit = math.lcm(128, sequence_unit(config, mesh))
    tokens = batch_sequences(config) * sequence_length(config)

    def change(number: int) -> RunConfig:
        length = unit * number
        training = {"micro_batch_size": 1, "batch_tokens": max(tokens, length * mesh.data_ranks)}
        model = config.model
        if isinstance(model, ModelSection) and model.max_position_embeddings < length:
            model = model.model_copy(update={"max_position_embeddings": length})
        return config.model_copy(
            update={
                "model": model,
                "data": config.data.model_copy(update={"sequence_length": length}),
                "training": config.training.model_copy(update=training),
            }
        )

    return change, 8, LONGEST // unit


def _models(config: RunConfig, devices: int) -> Change:
    model = config.model
    if not isinstance(model, ModelSection):
        raise UserError(f"model.type: {model.type}, but plans are for type: decoder; use weft parallelize")
    mesh, heads, groups = mesh_shape(config.parallel, devices), model.num_attention_heads, model.kv_heads
    counted = groups if groups > 1 else heads  # a single key/value head stays one
    unit = mesh.tp if counted % mesh.tp == 0 else counted

    def rounded(width: float) -> int:
        return max(1, round(width / (8 * mesh.tp))) * 8 * mesh.tp

    def change(number: int) -> RunConfig:
        """`number` is the number of key/value heads (or of query heads) of a tensor parallel rank."""
        factor = number * unit / counted
        changes: dict[str, Any] = {
            "num_key_value_heads": number * unit if groups > 1 else 1,
            "num_attention_heads": heads // counted * number * unit,
            "hidden_size": model.hidden_size // counted * number * unit,
            "num_hidden_layers": max(1, round(model.num_hidden_layers * factor / mesh.pp)) * mesh.pp,
            "head_dim": model.qk_head_dim if model.mla is None else model.head_dim,
            "intermediate_size": rounded(model.inner_width * factor),
        }
        if model.moe is not None and model.moe.moe_intermediate_size is not None:
            inner = rounded(model.moe.moe_intermediate_size * factor)
            changes["moe"] = model.moe.model_copy(update={"moe_intermediate_size": inner})
        return config.model_copy(update={"model": model.model_copy(update=changes)})

    return change, counted // unit, counted // unit * LARGEST
