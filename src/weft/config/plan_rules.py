"""Checks the keys of planned runs: `parallel.auto`, `parallel.hardware` and `parallel.plan`."""

from __future__ import annotations

import os

from weft.config.draft import Draft
from weft.config.mesh import ParallelSection

# Keys of `parallel` that apply to plans of custom models. Those that such a plan decides must have the plan's values.
OF_MODULE_PLANS = ("auto", "hardware", "plan", "pp", "dp_shard", "tp", "pp_schedule", "stages_per_rank", "nccl")
TRAINING = ("compile", "fp8", "qat", "only_rows_from", "activation_checkpointing")


def check_planned(draft: Draft) -> None:
    """Reports keys of `parallel` that contradict each other, or that a plan of a custom model does not support."""
    auto, path, kind = draft.get("parallel.auto"), draft.get("parallel.plan"), draft.get("model.type")
    if draft.get("parallel.hardware") is not None and not auto:
        what = "only a planned run uses it; set parallel.auto: true, or remove the key"
        draft.report("parallel.hardware", what, "parallel.auto")
    if path is None and not (auto and is_custom(kind)):
        return
    if kind is not None and not is_custom(kind):
        what = "plans of `weft parallelize` are for custom models (model.type: module:Class); use parallel: auto here"
        draft.report("parallel.plan", what, "model.type")
        return
    if path is not None and not auto and not os.path.isfile(path):
        what = f"{path}: no such file; write a plan with: weft parallelize my:Net --inputs my:example --out {path}"
        draft.report("parallel.plan", what)
    decides = "the plan of a custom model decides it"
    for name, field in ParallelSection.model_fields.items():
        if name not in OF_MODULE_PLANS and draft.get(f"parallel.{name}") not in (None, field.default):
            draft.report(f"parallel.{name}", f"{decides}; remove the key", "parallel")
    lacks = "not supported with a plan of a custom model; remove one of the two"
    for name in TRAINING:
        if draft.get(f"training.{name}") not in (None, False, "none"):
            what = f"{decides}; remove the key" if name == "activation_checkpointing" else lacks
            draft.report(f"training.{name}", what, "parallel.plan", "parallel.auto")
    if draft.get("adapter") is not None:
        draft.report("adapter", lacks, "parallel.plan")


def is_custom(kind: str | None) -> bool:
    """Whether `model.type` names a custom model."""
    return kind is not None and ":" in kind
