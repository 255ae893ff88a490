"""Whole runs are started and looked at as in tests/train."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "train"))
sys.path.append(str(Path(__file__).parent))

from elastic_hosts import hosts  # noqa: F401 (a fixture)
