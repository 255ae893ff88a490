"""`weft.export_model`: writes a trained model in the format of another tool."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from weft import export as targets
from weft import plugins
from weft.checkpoint.load import resolve
from weft.errors import UserError
from weft.observe.console import Console


def export_model(
    source: str | Path, out: str | Path, to: str = "hf", *, console: Console | None = None, **options: Any
) -> Any:
    """Writes a model in the format of another tool.

    >>> made = weft.export_model("runs/run", "exported", to="hf", dtype="bfloat16")
    >>> made.files
    1

    Args:
        source: a run (its newest checkpoint), a checkpoint, an imported folder, or a Hugging Face folder.
        out: the path to write; it must not exist.
        to: the target: "hf" (`weft.export.hf`), a plugin's name, or `module:function`.
        console: prints warnings and progress. Default: no output.
        options: of the target. For "hf": `dtype` (default: as saved), and `max_shard_size` of one file, in bytes or as
            "5GB" (the default).

    Returns:
        The result of the target; for "hf" an object with the numbers `tensors`, `files` and `bytes`.

    Raises:
        UserError: there is no model, it is damaged or not supported by the target; no such target or option; or `out`
            cannot be written.
    """
    found = plugins.find("export", to, targets, "export")
    target = getattr(found, "export", None) if isinstance(found, ModuleType) else found
    if not callable(target):
        raise UserError(f"{to!r} is not an export target; name a module with a function export, or module:function")
    known = {name for name, one in inspect.signature(target).parameters.items() if one.kind is one.KEYWORD_ONLY}
    for name in options:
        if name not in known:
            raise UserError(f"{name}: no option of the export to {to}; it has {', '.join(sorted(known)) or 'none'}")
    return target(resolve(source), Path(out), console or Console(speaks=False), **options)
