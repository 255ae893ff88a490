"""From a record to a document's text: a field, or a template of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from weft.data.sources.read_options import Reading, template_parts

Take = Callable[[Any], Any]


class Unfit(Exception):
    """A record that gives no document. Args: the reason; a hint."""

    def __init__(self, reason: str, hint: str = ""):
        self.reason, self.hint = reason, hint
        super().__init__(reason)


def fields_of(reading: Reading) -> list[str] | None:
    """The fields that `reading` needs; None: all of them."""
    if reading.records:
        return None
    if reading.template is None:
        return [reading.field]
    return list(dict.fromkeys(name for _, name in template_parts(reading.template) if name))


def taker(reading: Reading) -> Take:
    """A function from a record to the document's value.

    It raises Unfit where the record is no object, lacks a field, or has null or something else than text there.
    """
    if reading.records:
        return _whole
    if reading.template is None:
        return lambda record: text_at(record, reading.field)
    parts = template_parts(reading.template)

    def fill(record: Any) -> str:
        return "".join(literal + (text_at(record, name) if name else "") for literal, name in parts)

    return fill


def checking(reading: Reading, *, escaped: bool = False) -> Take:
    """`taker`, whose values are `checked`."""
    take = taker(reading)
    return lambda record: checked(take(record), escaped=escaped)


def text_at(record: Any, field: str) -> str:
    """The text at `field`, a key or a dotted path into nested records."""
    return as_text(_at(record, field), field)


def as_text(value: Any, field: str) -> str:
    """`value` if it is text; it raises Unfit otherwise."""
    if value is None:
        raise Unfit(f"field {field!r} is null")
    if isinstance(value, bytes):  # Parquet and Arrow columns without a text type
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise Unfit("invalid UTF-8") from None
    if not isinstance(value, str):
        raise Unfit(f"field {field!r} is not text")
    return value


def size_of(value: Any) -> int:
    """UTF-8 bytes of a text, or of a record as JSON."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8"))
    return len(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS))


def checked(value: Any, *, escaped: bool = False) -> Any:
    """`value` if UTF-8 can hold it; it raises Unfit for lone surrogates, which it cannot.

    Args:
        escaped: bytes that are no UTF-8 were decoded as lone surrogates (Python's "surrogateescape").
    """
    try:
        for text in _texts(value):
            if not text.isascii():
                text.encode("utf-8")
    except UnicodeEncodeError as error:
        if escaped and any("\udc80" <= c <= "\udcff" for c in error.object[error.start : error.end]):
            raise Unfit("invalid UTF-8") from None
        raise Unfit("a lone surrogate, which no UTF-8 text can hold") from None
    return value


def _texts(value: Any):
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, str):
            yield top
        elif isinstance(top, dict):
            stack += top.keys()
            stack += top.values()
        elif isinstance(top, list):
            stack += top


def _whole(record: Any) -> dict:
    if not isinstance(record, dict):
        raise Unfit("not a JSON object")
    return record


def _at(record: Any, field: str) -> Any:
    if not isinstance(record, dict):
        raise Unfit("not a JSON object")
    if field in record:  # a key that has dots itself comes first
        return record[field]
    value: Any = record
    for part in field.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or part not in value:
            keys = ", ".join(repr(key) for key in list(record)[:8]) + (", ..." if len(record) > 8 else "")
            raise Unfit(f"no field {field!r}", f"it has {keys or 'none'}; --field or --template names another")
        value = value[part]
    return value
