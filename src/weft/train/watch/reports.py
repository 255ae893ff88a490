"""Reports the findings of the watch: warnings, events, and errors of batches that the user's own loop passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.observe.events import append_event
from weft.parallel.ranks import error_on_all_ranks
from weft.train.given_batches import GivenBatches
from weft.train.rollouts.source import RolloutSource
from weft.train.watch.guard import Finding, Guard

if TYPE_CHECKING:
    from weft.train.recorder import Recorder


def raise_unless_possible(guard: Guard, source: object, sync_every: int) -> None:
    """Raises UserError if the config asks for rollbacks, but the run cannot skip its training data; or if
    `Trainer.step`, which returns the loss of each step, must not wait for the loss of each step.
    """
    if sync_every > 1 and isinstance(source, GivenBatches):
        raise error_on_all_ranks(
            f"training.sync_every: {sync_every}, but Trainer.step returns the loss of each step; remove the key"
        )
    if guard.may_roll_back and isinstance(source, GivenBatches | RolloutSource):
        what = "Trainer.step passes the batches" if isinstance(source, GivenBatches) else "the model generates its data"
        raise error_on_all_ranks(f"watch: a rollback cannot skip the data, because {what}; set skip or stop")


def record(recorder: Recorder, step: int, kind: str, action: str, text: str, **values: Any) -> None:
    """Records an event, and passes it to alerts and the endpoint for Prometheus. Only the first rank calls it.

    Raises:
        UserError: the disk is full, or the file cannot be written.
    """
    event = append_event(recorder.job.run.path, step, kind, action, text, **values)
    for listen in recorder.listeners:
        listen({"run": recorder.job.run.path.name, **event})


def react(recorder: Recorder, found: Finding, step: int, data_step: int) -> None:
    """Warns of a finding and records it as an event.

    Args:
        step: number of updates before the step.
        data_step: the step whose samples the batch has.

    Raises:
        UserError: the run must stop, and the batch was passed to `Trainer.step`.
    """
    source, training = recorder.source, recorder.config.training
    if found.kind == "corruption":
        _report_corruption(recorder, found, step)
        return
    made = found.updates or found.late  # with training.sync_every, before the numbers were read
    what = f"step {step + 1}: {found.text}" + ("" if made else ". The update was not made")
    remedy = (
        "optimizer.lr, lengthen the warm-up or lower training.grad_clip"
        f"{', compute in bfloat16' if training.dtype == 'float16' else ''}"
    )
    given = isinstance(source, GivenBatches)
    values = dict(found.values)
    if not given:
        samples = source.samples(data_step)
        values["samples"] = [int(samples[0]), int(samples[-1])]
    values["data_step"] = data_step
    recorder.world.agree(lambda: record(recorder, step + 1, found.kind, found.action, what, **values), only_first=True)
    if given and found.action == "stop":
        raise error_on_all_ranks(f"{what}; lower {remedy}, or skip this batch")
    where = f" (samples of this batch: {samples[0]:,} to {samples[-1]:,})" if not given else ""
    weights = f"the checkpoint of step {step} has the weights before it"
    if found.late:
        weights = "the run ends without a new checkpoint, because updates were made since (training.sync_every)"
    then = {
        "warn": "",
        "skip": "",
        "rollback": "; the run returns to a checkpoint and skips these data",
        "stop": f"; {weights}. Lower {remedy}, then run the same command again",
    }[found.action]
    recorder.console.warning(f"{what}{then}{where}")


def _report_corruption(recorder: Recorder, found: Finding, step: int) -> None:
    """Warns of a corruption, and records it as an event. Raises UserError as `react` does."""
    what = f"step {step + 1}: {found.text}"
    recorder.world.agree(
        lambda: record(recorder, step + 1, found.kind, found.action, what, **found.values), only_first=True
    )
    cause = "test the memory and the processors of these hosts, or set training.determinism: exact"
    if found.action == "stop" and isinstance(recorder.source, GivenBatches):
        raise error_on_all_ranks(f"{what}; do not save these weights; {cause}")
    then = {
        "warn": "",
        "rollback": "; the run returns to the newest checkpoint from before it, and repeats the steps",
        "stop": "; the run ends without a new checkpoint",
    }[found.action]
    recorder.console.warning(f"{what}{then}; {cause}")


def warn_of_no_loss(recorder: Recorder, step: int) -> None:
    """Warns, once in a run, that no token of a batch has a loss."""
    what, remedy = "all tokens of the batch are masked", "check the masks"
    if isinstance(recorder.source, RolloutSource):
        what = "nothing can be learned, as all rewards of each prompt are equal or all completions are truncated"
        remedy = "check the reward and objective.max_new_tokens"
    recorder.warn_once(f"step {step + 1}: {what}, so the loss is 0; {remedy}")
