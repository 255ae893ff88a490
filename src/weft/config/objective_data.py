"""Finds out which data an objective learns from, from the source of its class."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

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
        inherits_dropout: whether the dropout of the model in `model.from` stays on.
    """

    kind: str = "text"
    fields: tuple[str, ...] = ()
    inherits_dropout: bool = True

    @property
    def whole(self) -> bool:
        """Whether documents must not be split."""
        return self.kind == "preferences" or bool(self.fields)


def objective_data(type_: str, argument: Callable[[str], Any] = lambda name: None) -> ObjectiveData:
    """Returns what the objective named `type_` declares with its attributes `data` and `fields`.

    Reads the source of the class and does not import it. `inherits_dropout` is an attribute, too. Returns the defaults
    for an unknown class, and for values that are no literals. `fields` can depend on an argument: `{...} if margin else
    {...}`.

    Args:
        argument: returns the value of an argument of the objective in the run file; None if the argument is not set.
    """
    try:
        found = find_component(type_, "objective")
        source = find_class(found.module, found.name)
    except (UserError, NotFound):  # reported elsewhere
        return ObjectiveData()
    if source is None:
        return ObjectiveData()
    kind, fields = assigned_value(source, "data"), assigned_value(source, "fields")
    if isinstance(fields, ast.IfExp) and isinstance(fields.test, ast.Name) and fields.test.id in found.arguments:
        given = argument(fields.test.id)
        fields = fields.body if (found.arguments[fields.test.id].default if given is None else given) else fields.orelse
    names = []
    for key, value in zip(fields.keys, fields.values, strict=True) if isinstance(fields, ast.Dict) else ():
        keywords = value.keywords if isinstance(value, ast.Call) and last_name(value.func) == "Field" else []
        per_document = any(one.arg == "per_document" and getattr(one.value, "value", None) is True for one in keywords)
        if per_document and isinstance(key, ast.Constant):
            names.append(str(key.value))
    dropout = getattr(assigned_value(source, "inherits_dropout"), "value", True) is not False
    return ObjectiveData(str(kind.value) if isinstance(kind, ast.Constant) else "text", tuple(names), dropout)


def mismatch(objective: str, needs: ObjectiveData, kind: str, fields: Collection[str]) -> str | None:
    """Returns why an objective cannot learn from a token store, as the end of a message; None if it can.

    Args:
        objective: the value of `objective.type`.
        kind: kind of the store.
        fields: names of the fields of the store's documents.
    """
    declare = ', or set data = "preferences" in its class' if ":" in objective else ""
    if kind == "preferences" and needs.kind != kind:
        return (
            f"is a store of preference pairs, but the objective {objective} learns from text; use a store of texts or "
            f"conversations, or an objective that learns from pairs, such as dpo{declare}"
        )
    if needs.kind == "preferences" and needs.kind != kind:
        return (
            f"is a store of {'texts' if kind == 'text' else kind}, but the objective {objective} learns from "
            "preference pairs; use records with a chosen and a rejected answer, or another objective"
        )
    missing = [name for name in needs.fields if name not in fields]
    if missing:
        return (
            f"has no field {missing[0]!r} of its documents, which the objective {objective} needs; pack records that "
            f"have this key with `weft data pack --document-fields {','.join(needs.fields)}`, or give a custom dataset"
        )
    return None


def would_split(objective: str, needs: ObjectiveData) -> str:
    """Returns the message about `data.packing: concatenate` for an objective that needs whole documents."""
    what = "preference pairs" if needs.kind == "preferences" else f"documents, of which {objective} needs all tokens"
    return f"concatenate would split {what}; set best_fit or pad"
