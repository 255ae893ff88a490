"""Finds out which data an objective learns from, from the source of its class."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from weft.config.components import find_component
from weft.config.python_source import NotFound, find_class, last_name
from weft.config.signature import assigned_value
from weft.errors import UserError


@dataclass(frozen=True)
class ObjectiveData:
    """What an objective needs of the training data.

    Attributes:
        kind: "preferences" if it learns from pairs of a chosen and a rejected answer, else "text".
        fields: names of its fields with one number per document (`Field(per_document=True)`).
    """

    kind: str = "text"
    fields: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether documents must not be split."""
        return self.kind == "preferences" or bool(self.fields)


def objective_data(type_: str) -> ObjectiveData:
    """Returns what the objective named `type_` declares with its attributes `data` and `fields`.

    Reads the source of the class and does not import it. Returns the defaults for an unknown class, and for values that
    are not literals.
    """
    try:
        found = find_component(type_, "objective")
        source = find_class(found.module, found.name)
    except (UserError, NotFound):  # reported elsewhere
        return ObjectiveData()
    if source is None:
        return ObjectiveData()
    kind, fields = assigned_value(source, "data"), assigned_value(source, "fields")
    names = []
    for key, value in zip(fields.keys, fields.values, strict=True) if isinstance(fields, ast.Dict) else ():
        given = value.keywords if isinstance(value, ast.Call) and last_name(value.func) == "Field" else []
        per_document = any(each.arg == "per_document" and getattr(each.value, "value", None) is True for each in given)
        if per_document and isinstance(key, ast.Constant):
            names.append(str(key.value))
    return ObjectiveData(str(kind.value) if isinstance(kind, ast.Constant) else "text", tuple(names))


def mismatch(objective: str, needs: ObjectiveData, kind: str) -> str | None:
    """Returns why an objective cannot learn from a token store, as the end of a message; None if it can.

    Args:
        objective: the value of `objective.type`.
        kind: kind of the store.
    """
    if (kind == "preferences") == (needs.kind == "preferences"):
        return None
    declare = ', or set data = "preferences" in its class' if ":" in objective else ""
    if kind == "preferences":
        return (
            f"is a store of preference pairs, but the objective {objective} learns from text; use a store of texts or "
            f"conversations, or an objective that learns from pairs, such as dpo{declare}"
        )
    return (
        f"is a store of {'texts' if kind == 'text' else kind}, but the objective {objective} learns from preference "
        "pairs; use records with a chosen and a rejected answer, or another objective"
    )
