"""Parses pickles without importing or calling anything that they name.

Checkpoints of torch.distributed.checkpoint and Megatron describe their tensors in pickles. Unpickling can run any
program. Here, each class and function that a pickle names becomes a record of its name and arguments.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, ClassVar

from weft.errors import UserError


class Record(dict):
    """An object of a pickle: the name of its class or function, and data.

    Items that the pickle adds to a mapping are the items of this dict.

    Attributes:
        name: module and name of the class or function, such as "torch._utils._rebuild_tensor_v2".
        arguments: positional arguments of the call.
        state: attributes of the object, by name; or the object's state, if the pickle has another value.
        added: items that the pickle appends to the object.
    """

    name: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any
    added: list[Any]

    def __new__(cls, *arguments: Any) -> Record:
        made = super().__new__(cls)
        made.arguments, made.state, made.added = arguments, {}, []
        return made

    def __init__(self, *arguments: Any):
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:  # type: ignore[override]  # records can be keys of the pickle's mappings
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def append(self, item: Any) -> None:
        self.added.append(item)

    def extend(self, items: Any) -> None:
        self.added.extend(items)

    add = append


def name_of(value: Any) -> str:
    """Returns the name of a class, a function or an object of a pickle; "" for other values."""
    is_class = isinstance(value, type) and issubclass(value, Record)
    return value.name if is_class or isinstance(value, Record) else ""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type("Record", (Record,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def parse_pickle(data: bytes, where: Any) -> Any:
    """Returns the content of a pickle. Each object is a `Record`, and each class or function a subclass of `Record`.

    Args:
        where: path for the error message.

    Raises:
        UserError: the pickle is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise any exception
        raise UserError(
            f"not a readable pickle ({type(error).__name__}: {error}); copy the file again", where
        ) from None
