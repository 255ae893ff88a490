"""Checks of options that exclude each other, or name a file to write."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from weft.errors import UserError


def refuse_other_options(args: argparse.Namespace, option: str, *used: str) -> None:
    """Checks that only options are given that make sense together.

    Args:
        args: parsed arguments.
        option: an option that was given, such as `--diff`.
        used: names of the options that may be given beside it.

    Raises:
        UserError: another option is given.
    """
    given = [word.partition("=")[0] for word in args.words if word.startswith("--")]
    others = [word for word in given if word not in (option, *used)]
    if others:
        raise UserError(f"{option} does not use {others[0]}; remove one of them")


def check_output_file(option: str, file: str | None) -> None:
    """Checks that a file can be written, before the work whose result it gets.

    Args:
        option: the option that names the file, such as `--out`.
        file: its value; None if the option was not given.

    Raises:
        UserError: no file can be written there.
    """
    if file is None:
        return
    path = Path(file)
    folder = path.absolute().parent
    if path.is_dir():
        raise UserError(f"a directory, not a file; choose another name for {option}", path)
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist; create it, or choose another name for {option}", path)
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"cannot be written: permission denied; choose another name for {option}", path)
