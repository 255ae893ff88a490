"""`weft.export_model`: a trained model for other tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from weft import export, plugins
from weft.checkpoint.load import resolve
from weft.errors import UserError
from weft.observe.console import Console


def export_model(
    source: str | Path, out: str | Path, to: str = "hf", *, console: Console | None = None, **options: Any
) -> Any:
    """Write a model for another tool.

    >>> made = weft.export_model("runs/run", "exported", to="hf", dtype="bfloat16")
    >>> made.files
    1

    Args:
        source: a run (its newest checkpoint is taken), a checkpoint, what `import_model` made, or a Hugging Face
            folder.
        out: what to make; it must not be there yet.
        to: the target: "hf" (`weft.export.hf`), a plugin's name, or `module:function`.
        console: where to warn and show progress; default: nowhere.
        options: the target's; for "hf" `dtype`, default: each tensor as it was saved, and `max_shard_size`, of one
            file, in bytes or as "5GB", the default.

    Returns:
        What the target made; for "hf" an object with the numbers `tensors`, `files` and `bytes`.

    Raises:
        UserError: no model there, a damaged one, one that the target cannot have; no such target; an option that it
            does not have; or `out` cannot be made.
    """
    target = find_target(to)
    known = {name for name, one in inspect.signature(target).parameters.items() if one.kind is one.KEYWORD_ONLY}
    for name in options:
        if name not in known:
            raise UserError(f"{name}: no option of the export to {to}; it has {', '.join(sorted(known)) or 'none'}")
    return target(resolve(source), Path(out), console or Console(speaks=False), **options)


def find_target(to: str) -> Callable[..., Any]:
    """The function of a target. Raises UserError if there is none of this name."""
    found = plugins.find("export", to, export, "export")
    target = getattr(found, "export", None) if isinstance(found, ModuleType) else found
    if not callable(target):
        raise UserError(f"{to!r} is no export target; name a module with a function export, or module:function")
    return target
