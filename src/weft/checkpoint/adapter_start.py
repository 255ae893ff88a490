"""Opens adapters that were trained before: in PEFT's files, or in the checkpoints of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from weft.checkpoint.adapter_record import AdapterRecord, read_adapter_record
from weft.checkpoint.adapter_weights import read_adapter
from weft.checkpoint.base_model import AnyModelSection, check_digest
from weft.checkpoint.huggingface.peft_files import PeftAdapter, read_peft
from weft.checkpoint.load import architecture, load, resolve
from weft.config.adapter import AdapterSection, adapted_layers, decoder_layers, is_stacked, layer_of, trained_heads
from weft.config.model import CustomModelSection, ModelSection
from weft.errors import UserError
from weft.families.peft_config import ADAPTER_CONFIG, read_peft_config
from weft.models.adapter import initial_adapter_value, is_adapter
from weft.models.low_rank import LowRank
from weft.parallel import ranks
from weft.parallel.local_parameters import set_full_value
from weft.parallel.model_state import BaseModel


@dataclass(frozen=True)
class AdapterStart:
    """An adapter that was trained before.

    Attributes:
        path: the checkpoint or PEFT folder.
        base: the base model that the adapter was trained on; None: unknown.
        layers: the changes in a PEFT folder; None for a checkpoint.
        heads: the head of a reward model, if the adapter has one: name -> its weight; for a checkpoint, None.
    """

    path: Path
    base: BaseModel | None
    layers: dict[str, LowRank] | None
    heads: dict[str, torch.Tensor | None]

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
            load(self.path, model=model, select=lambda name: is_adapter(name) or name in self.heads)
            return
        own = {found[0] for name, _ in model.named_parameters() if (found := layer_of(name)) is not None}
        layers = set().union(*ranks.all_gather_object(own))  # of all pipeline stages
        if wrong := sorted(self.layers.keys() ^ layers):
            raise ranks.error_on_all_ranks(f"{self.path}: {_other_layer(wrong[0], wrong[0] in self.layers)}")
        for name, parameter in model.named_parameters():
            if (head := self.heads.get(name)) is not None:
                set_full_value(parameter, head)
            if (found := layer_of(name)) is None:
                continue
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


def open_start(adapter: AdapterSection, model: AnyModelSection) -> AdapterStart | None:
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
        path, record = _recorded(path)
        own = trained_heads(model) if trained_heads(architecture(path)) else ()
        return AdapterStart(path, record.base, None, dict.fromkeys(own))
    if isinstance(model, CustomModelSection):
        raise UserError(
            f"adapter.from: PEFT's names of the layers of a custom model ({model.type}) are not known", path
        )
    found = read_peft(path, model)
    if isinstance(model, ModelSection):
        layers = decoder_layers(model)
        expected = set(adapted_layers(adapter, layers, [name for name in layers if is_stacked(name)]))
        if wrong := sorted(found.layers.keys() ^ expected):
            raise UserError(_other_layer(wrong[0], wrong[0] in found.layers), path)
    heads = {name: found.weights.pop(name) for name in trained_heads(model) if name in found.weights}
    if found.weights:
        name = min(found.weights)
        raise UserError(
            f"adapter.from: the adapter replaces the full weight {name}, which a run with an adapter cannot train; "
            "merge it first (weft merge MODEL OUT --adapter DIR), and train another adapter",
            path,
        )
    return AdapterStart(path, base_of(found), found.layers, {**heads})


def _other_layer(layer: str, stored: bool) -> str:
    """Returns the message for a layer that only the adapter's files (`stored`) or only the model's adapter changes."""
    what = "cannot be trained" if stored else "is not in the adapter's files"
    return f"adapter.from: the adapter of {layer} {what}; merge the adapter (weft merge)"


def read_layers(path: str | Path, model: nn.Module) -> PeftAdapter | dict[str, LowRank]:
    """Reads an adapter that is added to a model for generation.

    Args:
        path: a PEFT folder, or a run or checkpoint with an adapter.
        model: the model.

    Returns:
        For a PEFT folder its content; otherwise name of a weight, without `.weight` -> its change.

    Raises:
        UserError: there is no adapter, it does not fit the model, or it was trained on quantized weights.
    """
    path = Path(path)
    if (path / ADAPTER_CONFIG).is_file() or not path.is_dir():
        return read_peft(path, model)
    checkpoint, record = _recorded(path)
    if trained_heads(architecture(checkpoint)):
        raise UserError("this is the adapter of a reward model, which cannot generate; use another adapter", checkpoint)
    if record.section.quantize is not None:
        what = f"this adapter was trained on weights in {record.section.quantize}; use its run as the model"
        raise UserError(f"{what}, or export the adapter (weft export --to peft)", checkpoint)
    return read_adapter(checkpoint, record.section)


def check_adapter_fits(path: str | Path, checkpoint: Path) -> None:
    """Checks that an adapter can be added to a model. Reads the files of the model, not the loaded model.

    Args:
        path: a PEFT folder, or a run or checkpoint with an adapter.
        checkpoint: the model; a path that `resolve` returned.

    Raises:
        UserError: the model has an adapter already; or there is no adapter to add, it does not fit the model, or it was
            trained on another base model.
    """
    if (own := read_adapter_record(checkpoint)) is not None:
        what = f"the model has an adapter already, to which {path} cannot be added"
        raise UserError(f"{what}; use the base model {own.base.path}, or merge the model (weft merge)", checkpoint)
    section, path = architecture(checkpoint), Path(path)
    if (path / ADAPTER_CONFIG).is_file() or not path.is_dir():
        if isinstance(section, CustomModelSection):
            read_peft_config(path)
            return
        base = base_of(read_peft(path, section))
    else:
        base = _recorded(path)[1].base
    if base is not None:
        check_digest(section, checkpoint, base)


def _recorded(path: Path) -> tuple[Path, AdapterRecord]:
    """Returns the checkpoint of a run with an adapter, and its record. Raises UserError if it has no adapter."""
    checkpoint = resolve(path)
    record = read_adapter_record(checkpoint)
    if record is None:
        what = f"neither a folder of PEFT ({ADAPTER_CONFIG} is missing) nor a run with an adapter; use one of these"
        raise UserError(what, path)
    return checkpoint, record


def base_of(adapter: PeftAdapter) -> BaseModel | None:
    """Returns the base model of an adapter in PEFT's files; None if another tool than Weft wrote them."""
    return None if adapter.digest is None else BaseModel(Path(adapter.config.base or "the base model"), adapter.digest)
