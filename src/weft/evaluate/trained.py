"""How a run was trained, where its evaluation goes by that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.dump import read_saved
from weft.config.errors import UserError


@dataclass(frozen=True)
class Trained:
    """What a run's saved config says.

    Attributes:
        path: the run directory.
        validation: its held-out token store; None if it had none, or a dataset of the user's own.
        sequence_length: tokens per sequence; None if it does not say.
        documents_apart: whether attention stayed inside documents.
    """

    path: Path
    validation: str | None
    sequence_length: int | None
    documents_apart: bool


def how_trained(checkpoint: Path) -> Trained | None:
    """What is known of the run that a checkpoint is of; None if it lies in no run directory."""
    run = checkpoint.absolute().parent.parent
    if checkpoint.absolute().parent.name != "checkpoints" or not (run / "config.yaml").is_file():
        return None
    data: Any = read_saved(run / "config.yaml").get("data") or {}
    validation, length = data.get("validation"), data.get("sequence_length")
    return Trained(
        run,
        validation if isinstance(validation, str) else None,
        length if isinstance(length, int) else None,
        data.get("packing") == "best_fit" or data.get("document_attention") is True,
    )


def held_out_store(checkpoint: Path, trained: Trained | None) -> str:
    """The token store on which a run was validated.

    Raises:
        UserError: there was none, or it is not there any more.
    """
    if trained is None:
        raise UserError("this model has no validation data of its own; name a token store with --store", checkpoint)
    if trained.validation is None:
        raise UserError("this run was validated on no token store; name one with --store", trained.path)
    if not Path(trained.validation).exists():
        raise UserError(
            f"its validation data {trained.validation} is not there; go to the folder in which it was trained, or name "
            "a token store with --store",
            trained.path,
        )
    return trained.validation
