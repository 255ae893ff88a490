"""Defines `weft.export_model`, which writes a trained model in the format of another tool."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from weft import export as targets
from weft import plugins
from weft.checkpoint.load import resolve
from weft.errors import UserError, describe_user_exception
from weft.files import refuse_existing
from weft.observe.console import Console


def export_model(
    source: str | Path, out: str | Path, to: str = "hf", *, console: Console | None = None, **options: Any
) -> Any:
    """Writes a model in the format of another tool.

    >>> made = weft.export_model("runs/run", "exported", to="hf", dtype="bfloat16")
    >>> made.files
    1

    Args:
        source: a run directory (whose newest checkpoint is used), a checkpoint, an imported folder, or a Hugging Face
            folder.
        out: path of the output, which must not exist.
        to: the format: "hf" (a Hugging Face folder), "peft" (the adapter of a run, for PEFT), the name of a plugin's
            format, or `module:function`.
        console: prints warnings and progress. Default: no output.
        options: options of the format. For "hf": `dtype`, the dtype of the weights (default: as saved), and
            `max_shard_size`, the maximum size of a file, in bytes or as a text such as "5GB" (the default). For "peft":
            `base`, the name of the base model to write (default: its path).

    Returns:
        The return value of the export function; for "hf" an object with the numbers `tensors`, `files` and `bytes`.

    Raises:
        UserError: the model does not exist, is damaged or is not supported by the format; the format or an option is
            unknown; `out` exists or cannot be written; or a custom function raised an exception.
    """
    found = plugins.find("export", to, targets, "export")
    target = getattr(found, "export", None) if isinstance(found, ModuleType) else found
    if isinstance(found, ModuleType) and target is None:
        raise UserError(
            f"--to {to}: the module {found.__name__} has no function export(source, out, console, ...); add it"
        )
    if not callable(target):
        raise UserError(
            f"{to!r} is not an export format; use hf, peft, the name of a plugin's format, or module:function"
        )
    known = {name for name, one in inspect.signature(target).parameters.items() if one.kind is one.KEYWORD_ONLY}
    for name in options:
        if name not in known:
            raise UserError(
                f"{name}: not an option of the format {to}; its options are {', '.join(sorted(known)) or 'none'}"
            )
    return _call(target, to, resolve(source), Path(out), console or Console(prints=False), options)


def _call(target: Any, to: str, source: Path, out: Path, console: Console, options: dict[str, Any]) -> Any:
    """Calls an export function. Converts exceptions of custom functions to UserErrors with file and line."""
    try:
        inspect.signature(target).bind(source, out, console, **options)
    except TypeError as error:
        what = f"--to {to}: {error}; Weft calls export(source, out, console, ...), with key=value as keyword arguments"
        raise UserError(what) from None
    refuse_existing(out, "choose another path")
    try:
        return target(source, out, console, **options)
    except UserError:
        raise
    except Exception as error:
        module = str(getattr(target, "__module__", ""))
        description = describe_user_exception(error, getattr(sys.modules.get(module), "__file__", None))
        if description is None or module.startswith("weft."):
            raise
        raise UserError(f"{description} (in --to {to})") from error
