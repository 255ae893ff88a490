"""Whole runs are started and looked at as in tests/train."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "train"))


@pytest.fixture
def my_parts(tmp_path, monkeypatch):
    """The classes of `part_cases.PARTS` in `my_parts.py`, in the working directory."""
    from part_cases import PARTS

    (tmp_path / "my_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    yield
    sys.modules.pop("my_parts", None)
