"""What must hold between the keys of precision."""

from __future__ import annotations

from weft.config.data_rules import run_steps
from weft.config.draft import Draft


def check_precision(draft: Draft, samples: int | None) -> None:
    """Note keys that the chosen dtypes, or the length of the run, leave without a meaning.

    Args:
        samples: in the training data; None if that is not known.
    """
    start, steps = draft.get("parallel.compress.start_step"), run_steps(draft, samples)
    if start is not None and steps is not None and start >= steps:
        what = f"{start:,} steps are exact, and the run has {steps:,}; lower it, or remove the section"
        draft.problem("parallel.compress.start_step", what, "training.steps")
    dtype, reduced = draft.get("training.dtype"), draft.get("training.reduce_dtype")
    if dtype is None or reduced is None:
        return
    if "float16" not in (dtype, reduced):
        for key in ("training.initial_loss_scale", "training.loss_scale_window"):
            if draft.get(key) is not None:
                what = f"the loss is scaled for float16 alone, and training.dtype is {dtype}; remove the key"
                draft.problem(key, what, "training.dtype")
    if reduced == "float16" and start is not None:
        what = "what copies tell is not scaled, and float16 is too narrow for it; choose bfloat16 or auto"
        draft.problem("training.reduce_dtype", what, "parallel.compress")
    if draft.get("training.fp8") and dtype not in ("auto", "bfloat16"):
        what = f"what 8 bits are not enough for is computed in bfloat16; set it, or auto, in place of {dtype}"
        draft.problem("training.dtype", what, "training.fp8")
