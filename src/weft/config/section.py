"""The base of every section of a run's YAML file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)


@dataclass(frozen=True)
class Spelled(StringConstraints):
    """A text of some form: its `pattern`, and `words` that tell people of it."""

    words: str = ""
    WORDS: ClassVar[dict[str, str]] = {}  # pattern -> words

    def __post_init__(self) -> None:
        self.WORDS[str(self.pattern)] = self.words


@dataclass(frozen=True)
class Own(Spelled):
    """`module:Class` of the user's own, of one kind (a key of `components.ROOMS`), beside the names of built-ins."""

    pattern: str = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
    words: str = "module:Class"
    kind: str = ""


# A folder's path: `~` at its begin has been expanded.
Folder = Annotated[str, Spelled(pattern=r"\S", words="a folder")]


class Checking(Protocol):
    """What follows the check of a file: the context that its sections are validated with (`weft.config.draft`)."""

    def section(self, section: type[BaseModel], data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """A whole section, validated by `handler`."""

    def component(self, section: type[Component], data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """A component, validated by the signature of its class."""

    def field(self, section: type[BaseModel], name: str, value: Any) -> None:
        """Note the value of a field that is right, whatever the others are."""


class Section(BaseModel):
    """A frozen mapping with known keys only. Strict: `"3"` is not a number and `true` is not 1."""

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
            handler("true")  # pydantic takes true for the Literal 1; a text is neither, and says so
        if info.context is not None:
            info.context.field(cls, info.field_name or "", made)
        return made


_Known = TypeVar("_Known", bound=Section)


def known_section(kind: type[_Known], get: Callable[[str], Any], key: str, **more: Any) -> _Known:
    """A section as far as its values are known: of other keys the default, or None.

    Args:
        get: a checked value by its dotted key; None: not set, or it has a problem.
        more: values that take the place of those.
    """
    found = {name: get(f"{key}.{name}") for name in kind.model_fields} | more
    fields = kind.model_fields.items()
    return kind.model_construct(**{n: found[n] for n, info in fields if found[n] is not None or info.is_required()})


class Component(BaseModel):
    """A part chosen by `type:`: a built-in's short name, or `module:Class` of the user's own.

    The other keys are the class's keyword arguments; they are checked against its signature, which is read from its
    source without importing it, and completed with its defaults (`weft.config.components`).

    A section of one kind of component is a subclass that sets `kind`. A field that is a list of them, as
    `list[TrackerSection]`, takes mappings; a text stands for a mapping with that `type` alone.
    """

    kind: ClassVar[str] = ""  # a key of `components.ROOMS`

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, defer_build=True)

    type: str = Field(description="a built-in's short name, or module:Class of your own")

    _place: str | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _component(cls, data: Any, handler: ModelWrapValidatorHandler[Any], info: ValidationInfo) -> Any:
        return handler(data) if info.context is None else info.context.component(cls, data, handler)

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
