"""`--template`: a text with fields of a record in it."""

from __future__ import annotations

import string

from weft.config.errors import UserError


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """(literal, the field behind it) pairs.

    Raises:
        UserError: braces that name no field.
    """
    help_ = 'write {field}, as in "{title}\\n{content}", and {{ or }} for a brace itself'
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"template {template!r}: {error}; {help_}") from None
    parts = []
    for literal, name, spec, conversion in parsed:
        if name is not None and (not name.strip() or "[" in name or spec or conversion):
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise UserError(f"template {template!r}: {{{shown}}} names no field; {help_}")
        parts.append((literal, name))
    if not any(name for _, name in parts):
        raise UserError(f"template {template!r}: it names no field; {help_}")
    return parts
