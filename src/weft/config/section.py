"""The base of every section of a run's YAML file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints

# `module:Class` of the user's own, beside the names of built-ins.
OwnClass = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


@dataclass(frozen=True)
class Spelled(StringConstraints):
    """A text of some form: its `pattern`, and `words` that tell people of it."""

    words: str = ""


class Section(BaseModel):
    """A frozen mapping with known keys only. Strict: `"3"` is not a number and `true` is not 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


class Component(BaseModel):
    """A part chosen by `type:`: a built-in's short name, or `module:Class` of the user's own.

    The other keys are the class's keyword arguments; they are checked against its signature, which is read from its
    source without importing it, and completed with its defaults (`weft.config.components`).
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    type: str = Field(description="a built-in's short name, or module:Class of your own")

    _place: str | None = PrivateAttr(None)

    @property
    def place(self) -> str | None:
        """Where the `type` was written, as `run.yaml:4: optimizer.type`; None if it was not."""
        return self._place

    def __eq__(self, other: object) -> bool:
        """Equal if all keys are, wherever they were written."""
        if type(self) is not type(other) or not isinstance(other, Component):
            return NotImplemented
        return self.__dict__ == other.__dict__ and self.model_extra == other.model_extra

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the class's constructor."""
        return dict(self.model_extra or {})
