"""Checks keys of the section `watch` that depend on other keys."""

from __future__ import annotations

from weft.config.draft import Draft

EXACT = "repeated gradients are equal only with training.determinism: exact; set it, or remove watch.replay_every"


def check_watch(draft: Draft) -> None:
    """Reports a rollback to more checkpoints than the run keeps, an alert without receiver, updates that cannot be
    skipped, and a repetition of steps that need not be equal.
    """
    wanted, kept = draft.get("watch.rollback_checkpoints"), draft.get("checkpoint.keep_last")
    if wanted is not None and kept is not None and wanted > kept:
        what = f"{wanted}, but the run keeps only {kept} checkpoints; lower the number, or raise checkpoint.keep_last"
        draft.report("watch.rollback_checkpoints", what, "checkpoint.keep_last")
    given = [draft.values.get(f"watch.alert.{name}", "no section") for name in ("webhook", "command")]
    if given == [None, None]:
        draft.report("watch.alert", "it has no receiver; set webhook or command")
    every = draft.get("training.sync_every")
    if isinstance(every, int) and every > 1:
        for key in ("watch.spike.action", "watch.non_finite"):
            if draft.get(key) == "skip":
                what = f"skip, but with training.sync_every: {every} the update is made before the loss is read"
                draft.report(key, f"{what}; use rollback, or remove training.sync_every", "training.sync_every")
        for key in ("training.dtype", "training.reduce_dtype"):
            if draft.get(key) == "float16":
                what = f"float16 skips updates that overflow, but training.sync_every: {every} reads the norm later"
                draft.report(key, f"{what}; use bfloat16, or remove training.sync_every", "training.sync_every")
    if draft.get("watch.replay_every") is not None and draft.get("training.determinism") == "order":
        draft.report("watch.replay_every", EXACT, "training.determinism")
