"""The record in a checkpoint of an adapter: the section `adapter`, and the base model (`adapter.json`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from weft.checkpoint import checkpoint_files as files
from weft.config.adapter import AdapterSection
from weft.config.adapter_source import FIXED
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.files import read_json
from weft.models.adapter import saved_with_adapter
from weft.parallel.model_state import BaseModel, state_of


@dataclass(frozen=True)
class AdapterRecord:
    """What a checkpoint of an adapter says about the adapter and its base model (`adapter.json`).

    Attributes:
        section: the run's section `adapter`.
        base: the base model.
    """

    section: AdapterSection
    base: BaseModel

    def found_base(self, checkpoint: Path) -> Path:
        """Returns the path of the base model.

        Args:
            checkpoint: the adapter's checkpoint, for the message.

        Raises:
            UserError: the path does not exist.
        """
        if not self.base.path.exists():
            what = f"the base model of this adapter is not at {self.base.path}; move the model there, or train again"
            raise UserError(what, checkpoint)
        return self.base.path

    def content(self, checkpoint: Path) -> dict[str, Any]:
        """Returns the content of `adapter.json` for a checkpoint, which is or will be at this path."""
        base = self.base.path.absolute()
        relative = os.path.relpath(base, checkpoint.absolute())  # for runs that are moved together with their base
        section = self.section.model_dump(mode="json", by_alias=True)
        return {"adapter": section, "base": {"path": str(base), "relative": relative, "digest": self.base.digest}}


def read_adapter_record(checkpoint: Path) -> AdapterRecord | None:
    """Returns the record of an adapter's checkpoint; None if the path is a model or a checkpoint of all weights.

    Raises:
        UserError: the record cannot be read.
    """
    path = checkpoint / files.ADAPTER
    if is_huggingface(checkpoint) or not path.is_file():
        return None
    content = read_json(path)
    try:
        base = content["base"]
        section = AdapterSection.model_validate(content["adapter"])
        found = Path(base["path"])
        moved = Path(os.path.normpath(checkpoint.absolute() / base["relative"]))
        found = moved if moved.exists() and not found.exists() else found
        return AdapterRecord(section, BaseModel(found, base["digest"]))
    except (KeyError, TypeError, ValidationError) as error:
        what = "the record of the adapter is not valid in this version of Weft; use the version that saved it"
        raise UserError(what, path) from error


def saved_record(checkpoint: Path, section: AdapterSection) -> AdapterRecord:
    """Returns the record of a checkpoint from which a run with the section `adapter` resumes.

    Raises:
        UserError: the checkpoint has no adapter, or an adapter with other settings.
    """
    record = read_adapter_record(checkpoint)
    if record is None:
        what = "this run was started without an adapter; give the run another name, or remove the section adapter"
        raise UserError(what, checkpoint)
    for key in FIXED:
        saved, given = getattr(record.section, key), getattr(section, key)
        if saved != given:
            raise UserError(
                f"adapter.{key}: {given}, but the run was started with {saved}; set {saved}, or start another run "
                f"(adapter.from continues the training of an adapter)",
                checkpoint,
            )
    return record


def record_of(model: nn.Module) -> AdapterRecord | None:
    """Returns the record for a checkpoint of a model in training; None if the model has no adapter."""
    state = state_of(model)
    if state is None or state.plan.adapter is None:
        return None
    assert state.base is not None  # the weights of the base model are loaded before the first step
    return AdapterRecord(state.plan.adapter, state.base)


def saved_tensors(model: nn.Module) -> Callable[[str], bool] | None:
    """Returns a function that tells by its name whether a tensor of a model in training is in its checkpoints.

    None: all tensors are, because the model has no adapter.
    """
    state = state_of(model)
    return None if state is None or state.plan.adapter is None else saved_with_adapter(state.plan.model)
