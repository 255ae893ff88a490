"""Pairs of our models and transformers' come from the models room's tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "models"))
