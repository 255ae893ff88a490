"""Writes a resolved config as YAML. Loading this YAML gives an equal config."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from weft.config.components import find_component
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.config.section import Component
from weft.config.suggest import RENAMED
from weft.config.tree import read_file, without_variables
from weft.errors import ConfigError, Problem, UserError
from weft.families import presets
from weft.formatting import secret_variable, secrets_of_environment

_PLAIN = re.compile(r"[A-Za-z][\w./-]*( [\w./-]+)*")
_COMMENT_COLUMN = 60


def dump_yaml(config: RunConfig, *, origins: bool = False) -> str:
    """Returns a config as YAML, with defaults and derived values.

    Args:
        config: a checked config.
        origins: whether the origin of each value is added as a comment.
    """
    lines: list[str] = []
    spell = partial(_spell, secrets=secrets_of_environment())
    for section, content in config.as_dict().items():
        if isinstance(content, dict):
            lines.append(f"{section}:")
            for key, value in content.items():
                if not _left_out(config, section, key, value):
                    _write(
                        lines,
                        config,
                        f"{section}.{key}",
                        f"  {spell(key)}: {spell(value, f'{section}.{key}')}",
                        origins,
                    )
            if lines[-1] == f"{section}:":
                lines[-1] += " {}"
        elif content is not None:
            _write(lines, config, section, f"{section}: {spell(content, section)}", origins)
    return "\n".join(lines) + "\n"


def dump_section(name: str, keys: Mapping[str, Any]) -> str:
    """Returns one section as YAML."""
    spell = partial(_spell, secrets=secrets_of_environment())
    lines = [f"{name}:", *(f"  {spell(key)}: {spell(value, f'{name}.{key}')}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _write(lines: list[str], config: RunConfig, key: str, line: str, origins: bool) -> None:
    place = config.origins.get(key, "default") if origins else None
    lines.append(line if place is None else f"{line:{_COMMENT_COLUMN}}  # {place}")


def _left_out(config: RunConfig, section: str, key: str, value: Any) -> bool:
    """Whether a key is omitted, because its value and its default are null and no preset sets it."""
    if value is not None:
        return False
    if section == "model" and isinstance(config.model, ModelSection):
        return key not in presets().get(config.model.preset or "", {})
    chosen = getattr(config, section)
    if isinstance(chosen, Component) and key in chosen.arguments:
        try:
            argument = find_component(chosen.type, chosen.kind).arguments.get(key)
        except UserError:
            return False
        return argument is not None and argument.default is None
    kind = type(chosen)
    field = kind.model_fields.get("from_" if key == "from" else key)
    return field is not None and field.default is None


def _spell(value: Any, key: str = "", *, secrets: Mapping[str, str]) -> str:
    """Returns a value as YAML 1.2, in a form that readers of YAML 1.1 read as the same value.

    Args:
        key: dotted key of the value.
        secrets: result of `secrets_of_environment`.
    """
    spell = partial(_spell, secrets=secrets)
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        if text in ("inf", "-inf", "nan"):
            return text.replace("inf", ".inf").replace("nan", ".nan")
        mantissa, e, exponent = text.partition("e")
        return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(spell(item, key) for item in value)}]"
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{spell(str(name))}: {spell(item, f'{key}.{name}')}" for name, item in value.items()) + "}"
        )
    if (variable := secret_variable(key, value, secrets)) is not None:  # read from the environment again
        return f'"${{{variable}}}"'
    text = without_variables(str(value))
    plain = _PLAIN.fullmatch(text) and text.lower() not in ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
    # YAML has JSON's escapes, except surrogate pairs: so characters are not escaped if they are printable.
    return text if plain else _quoted(text)


def _quoted(text: str) -> str:
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped)


def read_saved(path: str | Path) -> dict[str, Any]:
    """Returns a saved config as plain data, without checks, because another version of Weft can have written it.

    Keys of earlier versions are renamed to their current names.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
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
