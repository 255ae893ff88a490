"""Repeats a step whose loss or gradients were not finite, and finds where the first such value arises."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.checkpoint_files import STATE, step_of
from weft.checkpoint.load import checkpoints
from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.files import read_json, replace_file, report_write_errors
from weft.formatting import counted, first_few
from weft.observe.events import EVENTS, read_events
from weft.observe.manifest import check_run_directory, read_manifest
from weft.observe.metrics import METRICS, read_lines
from weft.parallel.gradients.clip import clip_gradients
from weft.parallel.ranks import all_gather_object
from weft.train.loop import Loop
from weft.train.non_finite import REDUCED, Found, Place, Probe, likely_cause
from weft.train.readings import Readings
from weft.train.reproduce import Recorded, ReproducingLoop, read_skipped
from weft.train.stop import Outcome, StopRequest
from weft.train.sums import BatchSums
from weft.train.trainer import Trainer
from weft.train.watch.guard import Finding

REPORT = "debug-nan.json"
SEARCHED = "searched"  # status of the outcome
NAMED = 5  # tensors after the first one that the text names


def read_failure(run: Path, step: int | None, start: int | None) -> Recorded:
    """Reads which step of a run to repeat, from which checkpoint, and with which data.

    Args:
        step: the step. Default: the first step whose loss or gradient norm was not finite.
        start: step of the checkpoint to begin with; 0: the beginning of the run. Default: the nearest one.

    Raises:
        UserError: the directory is not that of a run, no such step is recorded, the run did not make the step, or it
            has no such checkpoint.
    """
    manifest = check_run_directory(run)
    events = [event for event in read_events(run) if event["event"] == "non-finite"]
    if step is None:
        if not events:
            raise UserError(
                "no event `non-finite` is recorded: all losses and gradients were finite; use --step to look at a step",
                run / EVENTS,
            )
        step = int(events[0]["step"])
    made = max((line["step"] for line in (*events, *read_lines(run / METRICS))), default=0)
    if step > made:
        raise UserError(f"--step {step}: the run has made {counted(made, 'step')}; lower --step", run)
    event = next((event for event in events if event["step"] == step), None)
    skipped = read_skipped(run) if event is None else event.get("skipped_data", ())
    windows = [(int(at), int(count)) for at, count in skipped]
    starts = [*(number for number in _starts(run, windows) if number < step), 0]
    if start is not None and start not in starts:
        found = ", ".join(str(number) for number in reversed(starts))
        raise UserError(f"--from {start}: not a step from which step {step:,} can be repeated; use one of {found}", run)
    return Recorded(run, manifest.get("ranks", 1), starts[0] if start is None else start, step, {}, windows)


def _starts(run: Path, windows: list[tuple[int, int]]) -> list[int]:
    """Returns the steps of checkpoints, newest first, up to which the run had skipped the same data."""
    found = []
    for path in reversed(checkpoints(run)):
        step = step_of(path) or 0
        saved = (read_json(path / STATE).get("watch") or {}).get("skipped_data", ())
        before = [(int(at), int(count)) for at, count in saved if at < step]
        if before == [window for window in windows if window[0] < step]:
            found.append(step)
    return found


class SearchingLoop(ReproducingLoop):
    """A training loop that repeats the steps before a bad step, and searches the bad step.

    It ends at the first weight, loss or gradient that is not finite.
    """

    found: Found | None = None
    spread: list[Found]
    weights_at: int | None = None  # number of updates after which a weight was found to be bad

    def run(self, step: int, stop: StopRequest | None = None) -> Outcome:
        """Repeats the steps. The status of the outcome is `SEARCHED`, if no signal stopped the steps."""
        self.spread = []
        assert self.length.steps is not None
        self.length = dataclasses.replace(self.length, steps=min(self.recorded.last, self.length.steps))
        self.guard.windows = list(self.recorded.skipped)
        self.readings = Readings(1)
        outcome = Loop.run(self, step, stop)
        if outcome.status == SEARCHED:
            self.world.agree(self.report_found, only_first=True)
        return outcome

    def due(self, step: int, every: int | None) -> bool:
        """Whether to validate: only for callbacks whose state depends on it."""
        return self.callbacks.depend_on_validations and every is not None and step % every == 0

    def after_update(self, step: int) -> None:
        """Ends a step as the run did."""
        Loop.after_update(self, step)

    def update(self, batch: Batch, sums: BatchSums) -> Finding | None:
        """Makes one step, or searches the bad step."""
        ended = Finding(SEARCHED, "stop", "")
        probe = Probe(self.passes, self.world.rank)
        probe.check_parameters(self.model.named_parameters())  # a buffer, such as a mask, can be infinite on purpose
        if self.gather(probe):
            self.weights_at = self.state.step
            return ended
        if self.state.step + 1 < self.recorded.last and super().update(batch, sums) is None:
            return None
        self.search(probe, batch, sums)
        return ended

    def search(self, probe: Probe, batch: Batch, sums: BatchSums) -> None:
        """Computes the gradients of a step with hooks, without an update."""
        self.state.batch = batch
        with probe.watching():
            loss = self.accumulate_gradients(batch, sums.weight, sums.learned, self.state.step)[0].item()
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        probe.check_parameter_gradients(named)
        self.frozen_rows.clear_gradients()
        self.scale.unscale(self.parameters)
        norm = clip_gradients(self.parameters, None, self.world.pp_group, self.world.device)
        self.state.loss = loss / (sums.weight or 1.0)
        if not self.gather(probe) and norm - norm != 0:
            place = Place(REDUCED, 0, 0, "norm", "", "norm", "the norm of all gradients")
            self.found = Found(
                (place.phase,), place.what, "", place.type, place.tensor, [str(norm)], 1, 1, "float32", None, [], 0
            )

    def gather(self, probe: Probe) -> bool:
        """Finds the first tensors of all ranks. Returns whether any is not finite. Every rank must call it."""
        found = [one for ones in all_gather_object(probe.found) for one in ones]
        found.sort(key=lambda one: (*one.order, one.rank))
        if found:
            self.found, self.spread = found[0], found[1:]
        return bool(found)

    def report_found(self) -> None:
        """Prints and writes the result."""
        step, found, show = self.state.step + 1, self.found, self.job.console.result
        data_step = self.guard.data_step(self.state.step)
        samples = self.data.source.samples(data_step)  # pyright: ignore[reportAttributeAccessIssue]
        batch = [int(samples[0]), int(samples[-1])]
        result: dict[str, Any] = {
            "run": str(self.recorded.run),
            "step": step,
            "after_step": self.recorded.first,
            "data_step": data_step,
            "batch_samples": batch,
            "loss": self.state.loss,
            "found": None if found is None else found.as_dict(),
            "likely_cause": None if found is None else self.cause(found),
            "then": [one.as_dict() for one in self.spread],
        }
        path = self.job.run.path / REPORT
        with report_write_errors(path):
            replace_file(path, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        where = f"{self.recorded.run}: step {step:,}"
        if found is None:
            show(f"{where}: the loss and all gradients are finite in this repetition (loss {self.state.loss:.5g})")
            show("  likely cause: kernels without a fixed order of additions, another environment, or faulty hardware")
            return
        for line in self.lines(where, found, result):
            show(line)

    def lines(self, where: str, found: Found, result: Mapping[str, Any]) -> list[str]:
        """Returns the result as lines of text."""
        owner = f"{found.module or ('the model' if found.what in ('input', 'output') else 'the objective')}"
        arises = {
            "weight": "it is not finite before the step",
            "weight gradient": f"it belongs to {owner}",
            "norm": "all gradients are finite",
        }.get(found.what, f"it arises in the code of {owner} ({found.type})")
        first, last = result["batch_samples"]
        lines = [
            f"{where}: first not finite: {found.tensor}; {arises}",
            f"  values: {found.count:,} of {found.size:,} are {', '.join(found.values)} ({found.dtype}, rank "
            f"{found.rank})",
            f"  batch: samples {first:,} to {last:,} (data of step {result['data_step'] + 1:,})",
        ]
        if found.samples:
            lines.append(f"  bad samples: {first_few([str(one) for one in found.samples], 8, ', ')}")
        if found.input_range is not None:
            lines.append(f"  inputs of this code: {found.input_range[0]:.5g} to {found.input_range[1]:.5g}")
        lines.append(f"  likely cause: {result['likely_cause']}")
        then = list(dict.fromkeys(one.tensor for one in self.spread))
        if then:
            lines.append(f"  then: {first_few(then, NAMED, '; ')}")
        return lines

    def cause(self, found: Found) -> str:
        """Returns the likely cause of the first value."""
        if found.what == "weight":
            if self.weights_at == self.recorded.first:
                start = f"the checkpoint of step {self.weights_at:,}" if self.weights_at else "the initial weights"
                return f"{start} already has it; --from begins with an earlier checkpoint, to find the update"
            return f"the update of step {self.weights_at:,}, or a callback after it: its gradients were finite"
        if found.what == "input" and found.tensor == "the input of the model":
            return "the data: a field of the batch is not finite"
        return likely_cause(found)


class SearchingTrainer(Trainer):
    """The trainer of `weft debug nan`. `recorded` has the step to repeat."""

    def __init__(self, config: Any, recorded: Recorded):
        super().__init__(config)
        self.loop = type("Searching", (SearchingLoop,), {"recorded": recorded})


def changed_at(recorded: Recorded) -> int | None:
    """Returns the last step from the checkpoint on after which the config of the run changed; None if it did not."""
    sessions = read_manifest(recorded.run)["sessions"]
    return max((one["step"] for one in sessions if one.get("changes") and one["step"] >= recorded.first), default=None)
