"""Imports torchao, an optional dependency."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from weft.errors import UserError


def raise_unless_installed(key: str, extra: str) -> None:
    """Raises UserError if torchao is not installed.

    Args:
        key: the configuration key that needs torchao.
        extra: the extra of Weft's package that installs torchao.
    """
    if find_spec("torchao") is None:
        raise UserError(f"{key}: torchao is not installed; run `pip install 'weft-train[{extra}]'` or remove the key")


@contextmanager
def quiet_import() -> Iterator[None]:
    """Context in which torchao is imported, without its warnings of optional libraries that it cannot load."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
