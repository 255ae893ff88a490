"""Checks keys of the section `watch` that depend on other keys."""

from __future__ import annotations

from weft.config.draft import Draft

EXACT = "repeated gradients are equal only with training.determinism: exact; set it, or remove watch.replay_every"


def check_watch(draft: Draft) -> None:
    """Reports a rollback to more checkpoints than the run keeps, an alert without receiver, and a repetition of steps
    that need not be equal.
    """
    wanted, kept = draft.get("watch.rollback_checkpoints"), draft.get("checkpoint.keep_last")
    if wanted is not None and kept is not None and wanted > kept:
        what = f"{wanted}, but the run keeps only {kept} checkpoints; lower the number, or raise checkpoint.keep_last"
        draft.report("watch.rollback_checkpoints", what, "checkpoint.keep_last")
    given = [draft.values.get(f"watch.alert.{name}", "no section") for name in ("webhook", "command")]
    if given == [None, None]:
        draft.report("watch.alert", "it has no receiver; set webhook or command")
    if draft.get("watch.replay_every") is not None and draft.get("training.determinism") == "order":
        draft.report("watch.replay_every", EXACT, "training.determinism")
