"""Decides which custom classes a checkpoint or a saved config may name. Building such a class runs its module's code.

Trusted are the classes of the configs that this user has trained with on this machine, classes whose module the program
has already imported, and classes that the environment variable WEFT_TRUST_CODE allows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.config.custom_components import custom_types
from weft.config.python_source import NotFound, find_module
from weft.errors import UserError
from weft.files import cache_folder, replace_file

VARIABLE = "WEFT_TRUST_CODE"


def remember_code(config: Mapping[str, Any]) -> None:
    """Records the custom classes of a config that the user trains with as trusted, each with the file of its module.

    Does nothing if the user's cache cannot be written.
    """
    known = _known()
    new = [[name, file] for _, name in custom_types(config) if (file := _file(name)) and [name, file] not in known]
    if new:
        with suppress(OSError):
            _record().parent.mkdir(parents=True, exist_ok=True)
            replace_file(_record(), json.dumps([*known, *new]), durable=False)


def raise_unless_trusted(config: Mapping[str, Any], where: Path) -> None:
    """Raises UserError if a config names a custom class that is not trusted.

    Args:
        config: the config of a run, or `{"model": ...}`, as plain data.
        where: the file with the config.
    """
    allowed = os.environ.get(VARIABLE, "").split(",")
    known = None
    for key, name in custom_types(config):
        if "1" in allowed or name in allowed or str(name).partition(":")[0] in sys.modules:
            continue
        known = _known() if known is None else known
        if [name, _file(name)] not in known:
            raise UserError(
                f"{key}: {name} is custom code that you have not trained with on this machine, and loading it runs its "
                f"module; read the module, then set {VARIABLE}={name} (or {VARIABLE}=1 for all custom code)",
                where,
            )


def _record() -> Path:
    return cache_folder() / "trusted-code.json"


def _known() -> list[list[str]]:
    with suppress(OSError, ValueError):
        found = json.loads(_record().read_bytes())
        return found if isinstance(found, list) else []
    return []


def _file(name: str) -> str | None:
    """Returns the source file of the module of `module:Class`; None if it has none, or does not exist."""
    with suppress(NotFound):
        found = find_module(str(name).partition(":")[0])
        return None if found is None else str(found.resolve())
    return None
