"""Checks the hidden states that an objective compares with those of a frozen model."""

from __future__ import annotations

from typing import Any

from weft.config.mesh import MeshShape
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.train.frozen_sources import check_sources


def hidden_projections(config: RunConfig, objective: Any, shape: MeshShape) -> dict[int, int]:
    """Returns the number of each hidden state that the trained model must project -> the size of the frozen model's.

    States of equal sizes need no projection. The result is {} if the objective has no attribute `hidden_layers`.

    Args:
        objective: its attribute `hidden_layers` maps numbers of the model's hidden states to numbers of the hidden
            states of the frozen model "teacher" (`Decoder.forward`).

    Raises:
        UserError: a model is not the built-in decoder, a number is out of range, the run has a pipeline, or an adapter
            freezes the projections.
    """
    pairs: dict[int, int] = getattr(objective, "hidden_layers", None) or {}
    if not pairs:
        return {}
    source = check_sources(config, objective)["teacher"]
    for name, section in (("model", config.model), (source.key, source.section)):
        if not isinstance(section, ModelSection):
            raise UserError(
                f"objective.hidden_weight: hidden states are those of the built-in decoder, but {name} has another "
                "type; remove the key"
            )
    if shape.pp > 1:
        raise UserError(
            "objective.hidden_weight: with parallel.pp the layers of student and teacher are in different stages, and "
            "only the last stage computes the loss; set parallel.pp: 1, or remove the key"
        )
    student, teacher = config.model, source.section
    assert isinstance(student, ModelSection)
    assert isinstance(teacher, ModelSection)
    found = {}
    for mine, other in pairs.items():
        for number, section, name in ((mine, student, "the model"), (other, teacher, "the teacher")):
            last = section.num_hidden_layers
            if not -last - 1 <= number <= last:
                raise UserError(
                    f"objective.hidden_layers: {name} has no hidden state {number}; use numbers from 0 (the embedding) "
                    f"to {last}, or -1 for the last"
                )
        if student.hidden_size != teacher.hidden_size:
            found[mine % (student.num_hidden_layers + 1)] = teacher.hidden_size
    if len({mine % (student.num_hidden_layers + 1) for mine in pairs}) < len(pairs):
        raise UserError("objective.hidden_layers: a hidden state of the model has two pairs; remove one")
    if found and config.adapter is not None:
        raise UserError(
            f"objective.hidden_weight: the projection from {student.hidden_size} to {teacher.hidden_size} dimensions "
            "must be trained, but the adapter freezes it; remove this key, or the section adapter"
        )
    return found
