"""Objectives: what is learned. A custom one needs these names, and `docs/own-components.md` says how."""

from weft.data.batches.batch import Batch
from weft.data.batches.layout import Field
from weft.parallel.objective import Forward, Loss, Objective

__all__ = ["Batch", "Field", "Forward", "Loss", "Objective"]
