"""The adapter with which the training of an adapter starts (`adapter.from`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from weft.checkpoint.adapter_record import AdapterRecord, read_record
from weft.checkpoint.base_model import Section
from weft.checkpoint.huggingface.peft_files import PeftAdapter, read_peft
from weft.checkpoint.load import load, resolve
from weft.config.adapter import AdapterSection, adapted_layers, decoder_layers, is_stacked, layer_of
from weft.config.model import CustomModelSection, ModelSection
from weft.errors import UserError
from weft.families.peft_config import ADAPTER_CONFIG
from weft.models.adapter import initial_adapter_value, is_adapter
from weft.models.low_rank import LowRank
from weft.parallel.local_parameters import set_full_value
from weft.parallel.model_state import BaseModel


@dataclass(frozen=True)
class AdapterStart:
    """An adapter that was trained before.

    Attributes:
        path: the checkpoint or PEFT folder.
        base: the base model that the adapter was trained on; None: unknown.
        layers: the changes in a PEFT folder; None for a checkpoint.
    """

    path: Path
    base: BaseModel | None
    layers: dict[str, LowRank] | None

    def record(self, section: AdapterSection) -> AdapterRecord | None:
        """Returns the record with which `load_base` checks the base model; None if the base model is unknown."""
        return None if self.base is None else AdapterRecord(section, self.base)

    @torch.no_grad()
    def fill(self, model: nn.Module, section: AdapterSection, seed: int) -> None:
        """Loads the adapter into a model with an adapter, sharded or not. Every rank must call this function.

        Args:
            section: the run's section `adapter`.
            seed: seed of the rows of A that the adapter does not have, because the rank of its layer is lower.

        Raises:
            UserError: the adapter changes other layers than the model's adapter.
        """
        if self.layers is None:
            load(self.path, model=model, select=is_adapter)
            return
        for name, parameter in model.named_parameters():
            if (found := layer_of(name)) is None:
                continue
            if found[0] not in self.layers:
                raise UserError(
                    f"the adapter has no matrices for {found[0]}; set adapter.targets to its layers", self.path
                )
            change = self.layers[found[0]]
            rank = change.a.shape[-2]
            value = initial_adapter_value(name, parameter.shape, section, seed, parameter.dtype)
            if found[1] == "lora_a":
                assert value is not None
                value[..., :rank, :] = change.a
            elif found[1] == "lora_b":
                assert value is not None
                value[..., :rank] = change.b * (change.scale / section.scale)
            else:
                assert change.magnitude is not None
                value = change.magnitude
            set_full_value(parameter, value)


def open_start(adapter: AdapterSection, model: Section) -> AdapterStart | None:
    """Opens the adapter that `adapter.from` names; None if the key is not set.

    Args:
        adapter: the run's section `adapter`, with the keys of the adapter.
        model: the run's section `model`.

    Raises:
        UserError: there is no such adapter, or it does not fit the model.
    """
    if adapter.from_ is None:
        return None
    path = Path(adapter.from_)
    if not (path / ADAPTER_CONFIG).is_file():
        path = resolve(path)
        record = read_record(path)
        if record is None:
            raise UserError("adapter.from: this model has no adapter; name a run of an adapter or a PEFT folder", path)
        return AdapterStart(path, record.base, None)
    if isinstance(model, CustomModelSection):
        raise UserError(
            f"adapter.from: PEFT's names of the layers of a custom model ({model.type}) are not known", path
        )
    found = read_peft(path, model)
    if isinstance(model, ModelSection):
        layers = decoder_layers(model)
        expected = set(adapted_layers(adapter, layers, [name for name in layers if is_stacked(name)]))
        if wrong := sorted(found.layers.keys() ^ expected):
            what = "cannot be trained" if wrong[0] in found.layers else "is not in the adapter's files"
            raise UserError(f"adapter.from: the adapter of {wrong[0]} {what}; merge the adapter (weft merge)", path)
    if found.weights:
        name = min(found.weights)
        raise UserError(
            f"adapter.from: the adapter replaces the full weight {name}, which a run with an adapter cannot train; "
            "merge it first (weft merge MODEL OUT --adapter DIR), and train another adapter",
            path,
        )
    return AdapterStart(path, base_of(found), found.layers)


def base_of(adapter: PeftAdapter) -> BaseModel | None:
    """Returns the base model of an adapter in PEFT's files; None if another tool than Weft wrote them."""
    return None if adapter.digest is None else BaseModel(Path(adapter.config.base or "the base model"), adapter.digest)
