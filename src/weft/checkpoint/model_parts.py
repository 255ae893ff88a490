"""Parts of a model that a checkpoint lacks, and parts of a checkpoint that a model does not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.checkpoint.load import architecture
from weft.checkpoint.tensors import is_projection, layer_number
from weft.config.huggingface_config import checked_model
from weft.config.model import ModelSection
from weft.families.config_json import is_huggingface, read_config
from weft.formatting import counted

HEADS = ("score.weight", "lm_head.weight")  # of a reward model, and of a model that predicts tokens


def without_prediction_layers(section: Any) -> Any:
    """Returns a `model` section without multi-token prediction layers, which only training uses."""
    if not isinstance(section, ModelSection) or not section.num_nextn_predict_layers:
        return section
    return section.model_copy(update={"num_nextn_predict_layers": 0})


def new_parts(
    section: Any, checkpoint: Path, *, projects: bool = False
) -> tuple[Callable[[str], bool] | None, list[str]]:
    """Finds the parts of a run's model that the checkpoint in `model.from` lacks. They keep their initial values.

    These are the head `score`, in place of which the output head of the checkpoint is not loaded, multi-token
    prediction layers, and projections of hidden states, which are new in each run.

    Args:
        section: the `model` section of the run.
        checkpoint: a path that `resolve` returned.
        projects: whether the model has projections of hidden states.

    Returns:
        `select` for `load`, None if the model has no new part; and a message for each new part, beginning with its key.
    """
    if not isinstance(section, ModelSection):  # a model of Transformers, whose architecture may be unknown
        return None, []
    saved = architecture(checkpoint)
    if not isinstance(saved, ModelSection):
        return None, []
    heads = HEADS if section.num_labels and not saved.num_labels else ()
    found = ["model.num_labels: {} has no head `score`; the head has new initial weights"] if heads else []
    first = section.num_hidden_layers + _prediction_layers(saved, checkpoint)
    if number := max(0, section.all_layers - first):
        what = counted(number, "multi-token prediction layer has", "multi-token prediction layers have")
        found.append(f"model.num_nextn_predict_layers: {{}} lacks layers; {what} new initial weights")

    def select(name: str) -> bool:
        return name not in heads and layer_number(name) < first and not is_projection(name)

    return (select if found or projects else None), found


def _prediction_layers(saved: ModelSection, checkpoint: Path) -> int:
    """Returns the number of multi-token prediction layers of a checkpoint or, by its config.json, of a folder."""
    if is_huggingface(checkpoint):
        saved = checked_model(read_config(checkpoint))
    return saved.num_nextn_predict_layers
