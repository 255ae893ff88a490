"""Built-in training objectives, and the classes that a custom objective imports (docs/own-components.md)."""

from weft.data.batches.batch import Batch
from weft.data.batches.layout import Field
from weft.parallel.objective import Forward, Loss, Objective

__all__ = ["Batch", "Field", "Forward", "Loss", "Objective"]
