"""Fixtures of the tests of export targets."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment() -> Callable[[str], str]:
    """A function that returns the Python of a tool's environment, or skips the test if there is none.

    This is $WEFT_NAME_PYTHON, by default .venv-NAME/bin/python, which `make export-check` installs.
    """

    def find(name: str) -> str:
        python = Path(os.environ.get(f"WEFT_{name.upper()}_PYTHON") or ROOT / f".venv-{name}" / "bin" / "python")
        if not python.is_file():
            pytest.skip(f"{python} is missing; make export-check installs it")
        return str(python)

    return find
