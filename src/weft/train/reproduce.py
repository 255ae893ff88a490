"""Repeats steps of a run in another run directory, and compares each step with what the run recorded, bit by bit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weft.checkpoint.checkpoint_files import FOLDER, STATE, checkpoint_name, step_of
from weft.checkpoint.load import checkpoints, resolve
from weft.config.dump import read_saved
from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.files import hidden_folder, publish, read_json, refuse_existing, replace_file, report_write_errors
from weft.formatting import counted, first_few, flat
from weft.observe.events import read_events
from weft.observe.manifest import MANIFEST, check_run_directory, read_manifest
from weft.observe.metrics import METRICS, read_lines
from weft.train.given_batches import GivenBatches
from weft.train.loop import Loop
from weft.train.readings import Readings
from weft.train.saving import NoSaver
from weft.train.stop import Outcome, StopRequest
from weft.train.trainer import Trainer
from weft.train.watch.monitor import NoMonitor

REPORT = "reproduce.json"
CHOSEN = ("training.dtype", "training.threads", "training.determinism")
COMPARED = ("loss", "grad_norm")
OUTPUT = ("run.name", "run.directory", "log.", "samples.", "checkpoint.", "parallel.", *CHOSEN)
ROUNDING = 1e-3  # relative difference of a first differing step up to which rounding is the likely kind of cause


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a run recorded, and which of its steps are repeated.

    Attributes:
        run: the run directory.
        ranks: number of ranks of its last session.
        first: number of updates before the repeated steps; a checkpoint has them, unless it is 0.
        last: the last repeated step.
        lines: step -> its metrics, for the repeated steps that the run logged.
        skipped: the data that rollbacks skipped (see `Guard.windows`).
    """

    run: Path
    ranks: int
    first: int
    last: int
    lines: Mapping[int, Mapping[str, Any]]
    skipped: Sequence[tuple[int, int]] = ()


def read_recorded(run: Path, first: int, steps: int | None) -> Recorded:
    """Reads what a run recorded of the steps after `first`.

    Args:
        steps: number of steps to repeat. Default: all that the run logged.

    Raises:
        UserError: the directory is not that of a run, or the steps cannot be repeated from there: none of them is
            logged, the checkpoint of `first` is missing or damaged, or the config changed after it.
    """
    manifest = check_run_directory(run)
    lines = {line["step"]: line for line in read_lines(run / METRICS) if line["step"] > first}
    logged = max(lines, default=first)
    last = logged if steps is None else first + steps
    if steps is not None and last > logged:
        raise UserError(
            f"--steps {steps}: the run logged {counted(max(0, logged - first), 'step')} after step {first:,}; lower "
            "--steps",
            run / METRICS,
        )
    if not lines:
        raise UserError(f"no step after step {first:,} is logged, so nothing can be compared; lower --from", run)
    kept = ", ".join(str(step_of(path)) for path in checkpoints(run)) or "none"
    changed = [int(one["step"]) for one in manifest["sessions"] if one.get("changes") and first < one["step"]]
    if changed and last > min(changed):
        raise UserError(
            f"the config of this run changed after step {min(changed):,}, and config.yaml is that of the last session; "
            f"use --from {max(changed)} (checkpoints: {kept})",
            run,
        )
    if first:
        if not (run / FOLDER / checkpoint_name(first)).is_dir():
            raise UserError(f"--from {first}: this run has no checkpoint of this step (checkpoints: {kept})", run)
        resolve(run / FOLDER / checkpoint_name(first))
    repeated = {step: line for step, line in lines.items() if step <= last}
    return Recorded(run, manifest.get("ranks", 1), first, last, repeated, read_skipped(run))


def read_skipped(run: Path) -> list[tuple[int, int]]:
    """Returns the data that the rollbacks of a run skipped (see `Guard.windows`), from its newest checkpoint.

    Raises:
        UserError: the run has rolled back, and has no checkpoint.
    """
    if not any(event["action"] == "rollback" for event in read_events(run)):
        return []
    found = checkpoints(run)
    if not found:
        raise UserError("the run returned to a checkpoint and skipped data, which only its checkpoints record", run)
    windows = (read_json(found[-1] / STATE).get("watch") or {}).get("skipped_data", ())
    return [(int(step), int(count)) for step, count in windows]


def default_out(run: Path, name: str) -> Path:
    """Returns `RUN/NAME-N` for the lowest number that is free."""
    return next(out for n in itertools.count(1) if not os.path.lexists(out := run / f"{name}-{n}"))


def make_directory(recorded: Recorded, out: Path) -> None:
    """Makes the run directory of the repetition, with the checkpoint and the metrics to continue from, if any.

    The files of the checkpoint are hard links where the file system has them.

    Raises:
        UserError: the directory exists and is not empty, or cannot be written.
    """
    refuse_existing(out, "choose another --out")

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    with report_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        manifest = read_manifest(recorded.run)  # of which `choose_reductions` reads the choice of the run
        kept = {key: manifest[key] for key in ("mesh", "reduce_gradients") if key in manifest}
        replace_file(out / MANIFEST, json.dumps(kept) + "\n")
        if recorded.first:
            name = checkpoint_name(recorded.first)
            (out / FOLDER).mkdir()
            with hidden_folder(out / FOLDER / name) as made:
                shutil.copytree(recorded.run / FOLDER / name, made, copy_function=link, dirs_exist_ok=True)
                publish(made, out / FOLDER / name)
            shutil.copy2(recorded.run / METRICS, out / METRICS)


class ReproducingLoop(Loop):
    """A training loop that compares each step with a recorded one, and ends at the first difference.

    It saves no checkpoints.
    """

    new_saver, new_monitor = NoSaver, NoMonitor
    recorded: Recorded
    difference: dict[str, Any] | None = None

    def run(self, step: int, stop: StopRequest | None = None) -> Outcome:
        """Repeats the steps. The status of the outcome is "equal" or "differs", if no signal stopped the steps."""
        recorded, steps = self.recorded, self.length.steps
        assert steps is not None
        self.complete = recorded.last >= steps
        self.length = dataclasses.replace(self.length, steps=min(recorded.last, steps))
        self.guard.windows = list(recorded.skipped)
        self.readings = Readings(1)  # each step is compared
        outcome = super().run(step, stop)
        if outcome.status == "stopped":
            return outcome
        found = self.world.agree(partial(self.report, outcome), only_first=True)
        return dataclasses.replace(outcome, status="differs" if found else "equal", reason=None)

    def batches(self, step: int) -> Generator[Batch | None]:
        """Yields the batches of the updates from `step` on, without the data that the rollbacks of the run skipped."""
        steps = self.length.steps
        assert steps is not None
        assert not isinstance(self.data.source, GivenBatches)
        for end in (*(at for at, _ in self.guard.windows if step < at < steps), steps):
            first = self.guard.data_step(step)
            yield from self.data.source.iterate(first, first + end - step, self.config.data.workers)
            step = end

    def after_update(self, step: int) -> None:
        """Ends the step, and asks all ranks to stop if it differs from the recorded step."""
        super().after_update(step)
        if self.world.rank == 0 and self.difference is None and (line := self.recorded.lines.get(step)) is not None:
            # The last repeated step has a validation of its own, unless it is the last of the run.
            validated = self.complete or step < self.recorded.last
            keys = (*COMPARED, *(key for key in line if validated and key.startswith("validation_loss")))
            for key in keys:
                before, now = line.get(key), self.state.metrics.get(key)
                both_undefined = now != now and (before is None or before != before)  # files have null for NaN
                if before != now and not both_undefined:
                    self.difference = {"step": step, "metric": key, "recorded": before, "repeated": now}
                    self.state.request_stop("a step differs from the recorded one")
                    return

    def report(self, outcome: Outcome) -> bool:
        """Prints and writes the result. Returns whether a step differs."""
        recorded, difference = self.recorded, self.difference
        if difference is None and outcome.step < recorded.last:
            step = outcome.step + 1  # its loss is not finite
            line = recorded.lines.get(step, {})
            difference = {"step": step, "metric": "loss", "recorded": line.get("loss"), "repeated": None}
        equal = sum(difference is None or step < difference["step"] for step in recorded.lines)
        causes = [] if difference is None else likely_causes(recorded, difference, self.job.run.path)
        result = {
            "run": str(recorded.run),
            "after_step": recorded.first,
            "equal_steps": equal,
            "equal": difference is None,
            "first_difference": difference,
            "likely_causes": causes,
        }
        path = self.job.run.path / REPORT
        with report_write_errors(path):
            replace_file(path, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        show = self.job.console.result
        if difference is None:
            names = " and ".join(name.replace("grad_norm", "gradient norm") for name in COMPARED)
            show(f"{recorded.run}: equal, bit by bit: {names} of {counted(equal, 'logged step')}")
            return False
        show(
            f"{recorded.run}: differs first at step {difference['step']:,}, after {counted(equal, 'equal step')}: "
            f"{difference['metric']} {difference['repeated']!r}, recorded {difference['recorded']!r}"
        )
        for cause in causes:
            show(f"  likely cause: {cause}")
        return True


def likely_causes(recorded: Recorded, difference: Mapping[str, Any], out: Path) -> list[str]:
    """Returns what differs between the session that recorded a step and its repetition, most likely causes first."""
    sessions = [one for one in read_manifest(recorded.run)["sessions"] if one.get("step", 0) < difference["step"]]
    before, now = sessions[-1], read_manifest(out)["sessions"][-1]
    configs = (flat(read_saved(path / "config.yaml")) for path in (recorded.run, out))
    kept = ({key: value for key, value in one.items() if not key.startswith(OUTPUT)} for one in configs)
    exact = {  # what changes more than rounding
        "config": _differences(*kept),
        "data": _differences(before.get("data_digests"), now.get("data_digests"), short=True),
        "custom code": _differences(before.get("code"), now.get("code"), short=True),
        "commit of the working directory": _differences(
            *({"commit": (one.get("git") or {}).get("commit")} for one in (before, now)), short=True
        ),
        "uncommitted changes": _differences(
            *({"diff": (one.get("git") or {}).get("diff_sha256")} for one in (before, now)), short=True
        ),
    }
    kernels = ("cpu", "gpus", "cuda")
    rounding = {
        "mesh": _differences(before.get("mesh"), now.get("mesh")),
        "precision and threads": _differences(
            *({key.partition(".")[2]: one.get(key.partition(".")[2]) for key in CHOSEN} for one in (before, now))
        ),
        "versions": _differences(before.get("versions"), now.get("versions")),
        "hardware": _differences(
            *({key: one.get("hardware", {}).get(key) for key in kernels} for one in (before, now))
        ),
    }
    values = difference["recorded"], difference["repeated"]
    numbers = all(isinstance(value, int | float) for value in values)
    small = numbers and abs(values[0] - values[1]) <= ROUNDING * abs(values[0])
    ordered = rounding | exact if small else exact | rounding
    causes = [f"{what} ({text})" for what, text in ordered.items() if text]
    if now.get("determinism") == "order":
        causes.append("kernels without a fixed order of additions (training.determinism: order); train with exact")
    return causes or ["none that is recorded: a changed environment variable or library, or faulty hardware"]


def _differences(before: Mapping | None, now: Mapping | None, *, short: bool = False) -> str:
    """Returns what differs between two mappings as text; "" if nothing does.

    Args:
        short: whether values are digests, of which the first 12 characters are shown.
    """
    before, now = before or {}, now or {}
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]

    def show(value: Any) -> str:
        return str(value)[:12] if short else str(value)

    return first_few([f"{key}: {show(before.get(key))} -> {show(now.get(key))}" for key in changed], 6, ", ")


class ReproducingTrainer(Trainer):
    """The trainer of `weft reproduce`. `recorded` has the steps to repeat."""

    def __init__(self, config: Any, recorded: Recorded):
        super().__init__(config)
        self.loop = type("Reproducing", (ReproducingLoop,), {"recorded": recorded})
