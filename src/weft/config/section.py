"""Defines the base classes of the sections of a run's YAML file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)


@dataclass(frozen=True)
class TextPattern(StringConstraints):
    """A type for strings that match `pattern`; messages and docs/configuration.md describe the type by `words`."""

    words: str = ""
    WORDS: ClassVar[dict[str, str]] = {}  # pattern -> words

    def __post_init__(self) -> None:
        self.WORDS[str(self.pattern)] = self.words


@dataclass(frozen=True)
class CustomClass(TextPattern):
    """A type for strings `module:Class`, which name a custom component.

    Attributes:
        kind: the kind of component, a key of `components.COMPONENT_KINDS`.
    """

    pattern: str = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
    words: str = "module:Class"
    kind: str = ""


# The path of a folder; a leading `~/` is already expanded.
Folder = Annotated[str, TextPattern(pattern=r"\S", words="a folder")]


class Section(BaseModel):
    """A frozen mapping of known keys with strict types: `"3"` is not a number, and `true` is not 1.

    While a file is checked, the validation context is a `weft.config.draft.Draft`, which records values and defaults.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, populate_by_name=True, allow_inf_nan=False, defer_build=True
    )

    @model_validator(mode="wrap")
    @classmethod
    def _section(cls, data: Any, handler: ModelWrapValidatorHandler[Any], info: ValidationInfo) -> Any:
        return handler(data) if info.context is None else info.context.section(cls, data, handler)

    @field_validator("*", mode="wrap")
    @classmethod
    def _field(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        made = handler(value)
        if isinstance(value, bool) and type(made) is int:
            handler("true")  # pydantic accepts true for the Literal 1; a text raises the error that lists the choices
        if info.context is not None:
            info.context.field(cls, info.field_name or "", made)
        return made


_Known = TypeVar("_Known", bound=Section)


def partial_section(kind: type[_Known], get: Callable[[str], Any], key: str, **more: Any) -> _Known:
    """Returns a section with the values that are known; other keys have their default, or None if they are required.

    Args:
        kind: the class of the section.
        get: returns a checked value by its dotted key; None if the key is not set, or has a problem.
        key: dotted key of the section.
        more: values by key of the section, which take precedence over the values that `get` returns.
    """
    found = {name: get(f"{key}.{name}") for name in kind.model_fields} | more
    fields = kind.model_fields.items()
    return kind.model_construct(**{n: found[n] for n, info in fields if found[n] is not None or info.is_required()})


class Component(BaseModel):
    """A component chosen by `type`: the short name of a built-in, or a custom `module:Class`.

    The other keys are keyword arguments of the class. They are checked against its signature, which is read from source
    without importing the class, and completed with its defaults (`weft.config.components`).

    Each kind of component has a subclass that sets `kind`. In a list field, such as `list[TrackerSection]`, a string
    stands for a mapping with this `type`.
    """

    kind: ClassVar[str] = ""  # a key of `components.COMPONENT_KINDS`

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, defer_build=True)

    type: str
    """Name of a built-in class, or a custom class `module:Class`."""

    _place: str | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _component(cls, data: Any, handler: ModelWrapValidatorHandler[Any], info: ValidationInfo) -> Any:
        return handler(data) if info.context is None else info.context.component(cls, data, handler)

    @property
    def place(self) -> str | None:
        """Where `type` is set, such as `run.yaml:4: optimizer.type`; None if `type` is a default."""
        return self._place

    def __eq__(self, other: object) -> bool:
        """Whether two components have equal keys; the places of the keys are not compared."""
        if type(self) is not type(other) or not isinstance(other, Component):
            return NotImplemented
        return self.__dict__ == other.__dict__ and self.model_extra == other.model_extra

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the class's constructor."""
        return dict(self.model_extra or {})
