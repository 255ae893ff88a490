"""Stores of known content come from the data room's tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "data"))
