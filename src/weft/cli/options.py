"""Checks of options that exclude each other."""

from __future__ import annotations

import argparse

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
