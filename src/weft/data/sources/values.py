"""Extracts a document's text from a record: the text of one field, or a template filled with several fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from weft.data.sources.read_options import Reading, parse_template

Extractor = Callable[[Any], Any]


class SourceError(Exception):
    """Base class of Unfit and Broken.

    Args:
        reason: a short fixed description, by which errors are counted.
        hint: details of this error.
    """

    def __init__(self, reason: str, hint: str = ""):
        self.reason, self.hint = reason, hint
        super().__init__(reason)


class Unfit(SourceError):
    """The reason why a record yields no document. Raised, or returned in place of the record."""


def required_fields(reading: Reading) -> list[str] | None:
    """Returns the names of the fields that `reading` extracts; None if it extracts complete records."""
    if reading.records:
        return None
    if reading.template is None:
        return [reading.field]
    return list(dict.fromkeys(name for _, name in parse_template(reading.template) if name))


def make_extractor(reading: Reading) -> Extractor:
    """Returns a function that takes a record and returns the document's value: its text, or the complete record.

    The function raises Unfit if the record is not an object, lacks a field, or has a field that is not text.
    """
    if reading.records:
        return _require_object
    if reading.template is None:
        return lambda record: text_at(record, reading.field)
    parts = parse_template(reading.template)

    def fill(record: Any) -> str:
        return "".join(literal + (text_at(record, name) if name else "") for literal, name in parts)

    return fill


def make_checked_extractor(reading: Reading, *, escaped: bool = False) -> Extractor:
    """Returns a function like that of `make_extractor`, which also raises Unfit for lone surrogates.

    `escaped`: passed to `check_unicode`.
    """
    extract = make_extractor(reading)
    return lambda record: check_unicode(extract(record), escaped=escaped)


def text_at(record: Any, field: str) -> str:
    """Returns the text of a record's field. `field`: a key, or a dotted path into nested records."""
    return as_text(_lookup(record, field), field)


def as_text(value: Any, field: str) -> str:
    """Returns the value of the field `field` as text. Raises Unfit if the value is null, not text, or invalid UTF-8."""
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


def utf8_size(value: Any) -> int:
    """Returns the number of UTF-8 bytes of a text, or of a record serialized as JSON."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8"))
    return len(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS))


def check_unicode(value: Any, *, escaped: bool = False) -> Any:
    """Returns `value`; raises Unfit if one of its strings has lone surrogates, which UTF-8 cannot encode.

    `escaped`: whether invalid UTF-8 was decoded to lone surrogates (Python's "surrogateescape").
    """
    try:
        for text in _strings(value):
            if not text.isascii():
                text.encode("utf-8")
    except UnicodeEncodeError as error:
        if escaped and any("\udc80" <= c <= "\udcff" for c in error.object[error.start : error.end]):
            raise Unfit("invalid UTF-8") from None
        raise Unfit("a lone surrogate, which UTF-8 cannot encode") from None
    return value


def _strings(value: Any) -> Iterator[str]:
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


def _require_object(record: Any) -> dict:
    if not isinstance(record, dict):
        raise Unfit("not a JSON object")
    return record


def _lookup(record: Any, field: str) -> Any:
    value: Any = _require_object(record)
    if field in record:  # a key that contains dots has precedence
        return record[field]
    for part in field.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or part not in value:
            raise no_field(field, list(record))
        value = value[part]
    return value


def no_field(field: str, names: list[str]) -> Unfit:
    shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    return Unfit(
        f"no field {field!r}", f"the record has {shown or 'no fields'}; name a field with --field or --template"
    )
