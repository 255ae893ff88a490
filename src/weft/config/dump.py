"""A resolved config as YAML that loads again to the same config."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.config.components import find_part
from weft.config.model import ModelSection
from weft.config.section import Component
from weft.config.sections import RunSections
from weft.config.suggest import RENAMED
from weft.config.tree import read_file, without_variables
from weft.errors import ConfigError, Problem, UserError
from weft.families import presets

_PLAIN = re.compile(r"[A-Za-z][\w./-]*( [\w./-]+)*")
_ABOUT = 60  # where comments begin, if the line is shorter


def dump_yaml(config: RunSections, *, origins: bool = False) -> str:
    """The whole config, defaults and derived values too.

    Args:
        config: a checked config.
        origins: a comment on each line with where the value came from.

    Returns:
        YAML that `RunConfig.load` reads again to an equal config.
    """
    lines: list[str] = []
    for section, content in config.as_dict().items():
        if isinstance(content, dict):
            lines.append(f"{section}:")
            for key, value in content.items():
                if not _left_out(config, section, key, value):
                    _write(lines, config, f"{section}.{key}", f"  {_spell(key)}: {_spell(value)}", origins)
            if lines[-1] == f"{section}:":
                lines[-1] += " {}"
        elif content is not None:
            _write(lines, config, section, f"{section}: {_spell(content)}", origins)
    return "\n".join(lines) + "\n"


def dump_section(name: str, keys: Mapping[str, Any]) -> str:
    """One section by itself as YAML, which a run's file can hold or extend."""
    return "\n".join([f"{name}:", *(f"  {_spell(key)}: {_spell(value)}" for key, value in keys.items())]) + "\n"


def _write(lines: list[str], config: RunSections, key: str, line: str, origins: bool) -> None:
    place = config.origins.get(key, "default") if origins else None
    lines.append(line if place is None else f"{line:{_ABOUT}}  # {place}")


def _left_out(config: RunSections, section: str, key: str, value: Any) -> bool:
    """Nothing is said of a key that is None by default, unless a preset would set it."""
    if value is not None:
        return False
    if section == "model" and isinstance(config.model, ModelSection):
        return key not in presets().get(config.model.preset or "", {})
    chosen = getattr(config, section)
    if isinstance(chosen, Component) and key in chosen.arguments:
        try:
            argument = find_part(chosen.type, chosen.kind).arguments.get(key)
        except UserError:
            return False
        return argument is not None and argument.default is None
    kind = type(chosen)
    field = kind.model_fields.get("from_" if key == "from" else key)
    return field is not None and field.default is None


def _spell(value: Any) -> str:
    """A value as YAML 1.2, which older readers take for the same."""
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        if text in ("inf", "-inf", "nan"):
            return text.replace("inf", ".inf").replace("nan", ".nan")
        mantissa, e, exponent = text.partition("e")
        return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_spell, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_spell(str(key))}: {_spell(item)}" for key, item in value.items()) + "}"
    text = without_variables(str(value))
    plain = _PLAIN.fullmatch(text) and text.lower() not in ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
    # JSON's escapes are YAML's; but a lone surrogate half of a pair is not, so characters stand for themselves.
    return text if plain else _quoted(text)


def _quoted(text: str) -> str:
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped)


def read_saved(path: str | Path) -> dict[str, Any]:
    """A saved config as plain data, not checked: another version of Weft may have written it.

    Keys that an earlier version called otherwise have their names of today.

    Raises:
        ConfigError: it is not YAML.
    """
    problems: list[Problem] = []
    node = read_file(Path(path), str(path), problems)
    if node is None or problems:
        raise ConfigError(problems)
    saved = node.plain()
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        keys = saved.get(section)
        if isinstance(keys, dict) and key in keys:
            keys[new.partition(".")[2]] = keys.pop(key)
    return saved
