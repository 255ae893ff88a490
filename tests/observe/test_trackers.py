"""What trackers wrote, read back with their own readers; and a tracker that fails beside a run that does not."""

import io
import math
import sys

import pytest

from weft.errors import UserError
from weft.observe.console import Console
from weft.observe.run_info import RunInfo, scalars
from weft.observe.trackers.tensorboard import TensorBoard


def line(step):
    return {"step": step, "loss": 1 / step, "mfu": 0.5, "tokens_per_second": 100.0 * step, "validation_loss": 2 / step}


def test_names():
    assert scalars(
        {"step": 3, "loss": 1.0, "mfu": 0.5, "validation_bits_per_byte": 2, "note": "x", "on": True, "no": None}
    ) == {
        "train/loss": 1.0,
        "speed/mfu": 0.5,
        "validation/bits_per_byte": 2.0,
    }


@pytest.fixture
def first_files(monkeypatch):
    """TensorBoard reads files of one second by the text of their number in the process: 10 would come before 9."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.mark.usefixtures("first_files")
def test_tensorboard_hides_the_steps_that_are_made_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(RunInfo(tmp_path, "demo", {}))
    for step in range(1, 8):
        tracker.log(step, line(step))
    tracker.close()
    tracker = TensorBoard(RunInfo(tmp_path, "demo", {}, resumed_step=4))
    for step in range(5, 10):
        tracker.log(step, line(step))
    tracker.text(9, "0", "def main():\n    **bold**")
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "validation/loss", "speed/mfu", "speed/tokens_per_second"}
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 10))
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx([1 / s for s in range(1, 10)])
    (text,) = events.Tensors("samples/0/text_summary")
    assert text.tensor_proto.string_val[0] == b"    def main():\n        **bold**"


@pytest.mark.usefixtures("first_files")
def test_tensorboard_begins_again_where_nothing_was_saved(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # killed before the first checkpoint: the second session begins at step 1, too
        tracker = TensorBoard(RunInfo(tmp_path, "demo", {}))
        for step in range(1, 4):
            tracker.log(step, {"loss": math.nan if step == 2 else 1.0})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3]


def test_wandb_offline_follows_one_run_through_its_sessions(tmp_path):
    pytest.importorskip("wandb")
    from weft.observe.trackers.wandb import WandB

    ids = []
    for resumed in (None, 2):
        tracker = WandB(RunInfo(tmp_path, "demo", {"run": {"seed": 7}}, resumed), mode="offline", tags=["t"])
        assert tracker.place.startswith("wandb sync ")
        for step in range((resumed or 0) + 1, (resumed or 0) + 3):
            tracker.log(step, line(step))
        tracker.text(step, "0", "<b>")
        tracker.close()
        ids.append((tmp_path / "wandb" / "run-id.txt").read_text().strip())
    assert ids[0] == ids[1]
    folders = list((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}"))
    assert folders
    assert any(folder.glob("*.wandb") for folder in folders)


def test_mlflow_keeps_one_value_a_step(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    from weft.observe.trackers.mlflow import MLflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for resumed in (None, 3):
        tracker = MLflow(RunInfo(tmp_path, "demo", {"optimizer": {"lr": 0.1}}, resumed))
        for step in range((resumed or 0) + 1, 6 if resumed is None else 9):
            tracker.log(step, line(step))
        tracker.text(step, "a b", "text")
        tracker.close()
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("weft").experiment_id])
    assert run.data.params == {"optimizer.lr": "0.1"}
    assert run.info.status == "FINISHED"
    history = sorted(client.get_metric_history(run.info.run_id, "train/loss"), key=lambda m: m.step)
    assert [(m.step, m.value) for m in history] == [(step, 1 / step) for step in range(1, 9)]
    assert (
        tmp_path / "mlflow-artifacts" / run.info.run_id / "artifacts" / "samples" / "step-00000008-a-b.txt"
    ).exists()


def test_mlflow_sends_the_metrics_of_a_failed_request_again(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from weft.observe.trackers.mlflow import MLflow

    sent, failing = [], [False, True]

    class Client:
        get_experiment_by_name = set_terminated = lambda self, _: SimpleNamespace(experiment_id="1")

        def __init__(self, tracking_uri):
            self.create_run = lambda *_, **__: SimpleNamespace(info=SimpleNamespace(run_id="2"))

        def log_batch(self, run_id, params=(), metrics=()):
            if metrics and failing.pop(0):
                raise ConnectionError
            sent.extend(metric[3] for metric in metrics)

    contents = {
        "mlflow.entities": {"Metric": lambda *values: values, "Param": lambda *_: None},
        "mlflow.exceptions": {"MlflowException": OSError},
        "mlflow.tracking": {"MlflowClient": Client},
    }
    for name, members in {"mlflow": {}, **contents}.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    tracker = MLflow(RunInfo(tmp_path, "demo", {}), flush_seconds=0)
    tracker.log(1, {"loss": 1.0})
    with pytest.raises(ConnectionError):
        tracker.log(2, {"loss": 0.5})
    failing.append(False)
    tracker.close()
    assert sent == [1, 2]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, name):
    import importlib
    import sys

    for module in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    tracker = importlib.import_module(f"weft.observe.trackers.{name}")
    (found,) = [v for k, v in vars(tracker).items() if k.lower() == name and isinstance(v, type)]
    with pytest.raises(UserError, match=rf"pip install 'weft-train\[{name}\]'"):
        found(RunInfo(tmp_path, "demo"))


class Shaky:
    """A user's tracker whose server goes away at step 3 and comes back at step 6."""

    place = "http://localhost"
    seen: list

    def __init__(self, run: RunInfo, *, gone: int = 3):
        self.gone = gone
        Shaky.seen = []

    def log(self, step, metrics):
        if self.gone <= step < 6:
            raise ConnectionError("no route\nto host")
        if step == 8:
            raise ZeroDivisionError
        self.seen.append(step)

    def text(self, step, name, text):
        self.seen.append(text)

    def close(self):
        self.seen.append("closed")


@pytest.fixture
def _shaky(monkeypatch):
    tracking = pytest.importorskip("weft.observe.tracking")
    monkeypatch.setattr(tracking, "load_class", lambda name, room: Shaky)


@pytest.mark.usefixtures("_shaky")
def test_a_tracker_may_fail_and_the_run_goes_on():
    from pathlib import Path

    from weft.config.section import Component
    from weft.observe.tracking import Tracking

    err = io.StringIO()
    tracking = Tracking([Component(type="my:Shaky", gone=3)], RunInfo(Path("."), "demo"), Console(err=err))
    (guarded,) = tracking._trackers
    now = 0.0
    guarded.clock = lambda: now
    for step in range(1, 8):
        tracking.log(step, {"loss": 1.0})
        tracking.text(step, "0", f"text {step}")
        now += 40.0  # the pause is a minute: two steps
    with pytest.raises(ZeroDivisionError):  # a mistake in the tracker is not hidden
        tracking.log(8, {})
    tracking.close()
    tracking.close()
    assert Shaky.seen == [1, "text 1", 2, "text 2", 7, "text 7", "closed"]
    said = err.getvalue().splitlines()
    assert said[0] == "my:Shaky: http://localhost"
    assert said[1] == "warning: my:Shaky failed (no route); training continues; metrics.jsonl has all metrics"
    assert said[2:] == ["warning: my:Shaky missed 8 records; metrics.jsonl has all metrics"]
