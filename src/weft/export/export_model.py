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
from weft.export.custom_transformers import exportable
from weft.files import refuse_existing
from weft.observe.console import Console

# Types in annotations of options -> names in messages.
_KINDS = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "text", "None": "null"}


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
        to: the format: "hf" (a Hugging Face folder), "peft" (the adapter of a run, for PEFT), another format of `weft
            export --help`, the name of a plugin's format, or `module:function`.
        console: prints warnings and progress. Default: no output.
        options: options of the format. For "hf": `dtype`, the dtype of the weights (default: as saved), and
            `max_shard_size`, the maximum size of a file, in bytes or as a text such as "5GB" (the default). For "peft":
            `base`, the name of the base model to write (default: its path). `weft export --help` lists all options.

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
            f"{to!r} is not an export format; use a format of `weft export --help`, the name of a plugin's format, or "
            "module:function"
        )
    parameters = inspect.signature(target).parameters.items()
    known = {name: one for name, one in parameters if one.kind is one.KEYWORD_ONLY}
    for name, value in options.items():
        if name not in known:
            raise UserError(
                f"{name}: not an option of the format {to}; its options are {', '.join(sorted(known)) or 'none'}"
            )
        _check_value(name, value, known[name])
    return _call(target, to, resolve(source), Path(out), console or Console(prints=False), options)


def _check_value(name: str, value: Any, parameter: inspect.Parameter) -> None:
    """Checks an option against the annotation of its parameter; without annotation, against the type of its default.

    Raises:
        UserError: the annotation is bool, int, float, str, None or a union of these, and the value has another type.
    """
    annotation = parameter.annotation
    if annotation is parameter.empty and parameter.default not in (parameter.empty, None):
        annotation = type(parameter.default)
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    kinds = [kind.strip() for kind in text.split("|")]
    if any(kind not in _KINDS for kind in kinds):
        return
    given = type(value).__name__.replace("NoneType", "None")
    same = {"int": "float", "PosixPath": "str"}.get(given)
    if given not in kinds and same not in kinds:
        remedy = "; put the value in quotes" if "str" in kinds else ""
        raise UserError(f"{name}: must be {' or '.join(map(_KINDS.__getitem__, kinds))}, not {value!r}{remedy}")


def _call(target: Any, to: str, source: Path, out: Path, console: Console, options: dict[str, Any]) -> Any:
    """Calls an export function. Converts exceptions of custom functions to UserErrors with file and line."""
    try:
        inspect.signature(target).bind(source, out, console, **options)
    except TypeError as error:
        what = f"--to {to}: {error}; Weft calls export(source, out, console, ...), with key=value as keyword arguments"
        raise UserError(what) from None
    refuse_existing(out, "choose another path")
    try:
        with exportable(source, out, console) as folder:
            return target(folder, out, console, **options)
    except UserError:
        raise
    except Exception as error:
        module = str(getattr(target, "__module__", ""))
        description = describe_user_exception(error, getattr(sys.modules.get(module), "__file__", None))
        if description is None or module.startswith("weft."):
            raise
        raise UserError(f"{description} (in --to {to})") from error
