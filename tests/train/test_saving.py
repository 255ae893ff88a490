"""`checkpoint.mode: async` and `checkpoint.local`: the same run as with ordinary checkpoints, whatever survives."""

import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from same_files import equal_files

from weft.checkpoint import late_copy
from weft.checkpoint.checkpoint_files import find_damage
from weft.checkpoint.load import checkpoints
from weft.cli.main import main
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.train.failure_record import last_checkpoint
from weft.train.trainer import Trainer


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


SHORT = {"training": {"steps": 6, "batch_tokens": 128, "micro_batch_size": 2}, "data": {"validation": None}}


@pytest.fixture
def train(tmp_path, run_yaml):
    def fit(name: str, *overrides: str, **changes) -> Path:
        path = run_yaml(**{**SHORT, "checkpoint": {"every": 2, "keep_last": 9}, **changes})
        assert main(["train", str(path), f"run.name={name}", *overrides]) == 0
        return tmp_path / "runs" / name

    return fit


def test_async_saves_are_those_of_sync_saves(train, capsys):
    sync, beside = train("sync"), train("async", "checkpoint.mode=async")
    assert losses(sync) == losses(beside)
    assert equal_files(sync / "checkpoints", beside / "checkpoints") > 3 * 5
    for one, two in zip(checkpoints(sync), checkpoints(beside), strict=True):
        assert main(["checkpoint", "diff", str(one), str(two)]) == 0
        assert main(["checkpoint", "verify", str(two)]) == 0


OWN_NORM = """
import torch
from torch import nn

class Norm(nn.RMSNorm):
    def __init__(self, width, eps):
        super().__init__(width, eps)

    def forward(self, x):
        self.weight.data.clamp_(0.9999, 1.0001)  # an operation that autograd does not see
        return super().forward(x)
"""


@pytest.fixture
def slow_copies(monkeypatch):
    """The thread that copies is still at it when the next step begins."""
    copy = np.copyto

    def slow(*arrays):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.01)
        copy(*arrays)

    monkeypatch.setattr(late_copy, "_SMALL", 0)
    monkeypatch.setattr(late_copy, "_BLOCK", 2**16)
    monkeypatch.setattr(late_copy.np, "copyto", slow)


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize(
    "writes", ["validation", *(pytest.param(one, marks=pytest.mark.long) for one in ("update", "forward"))]
)
def test_what_writes_to_weights_soon_after_a_save_does_not_change_it(
    train, tmp_path, monkeypatch, tiny_heldout, writes
):
    """A validation with averaged weights swaps them; a model's own code can write to them in the next step."""
    (tmp_path / "own_parts.py").write_text(OWN_NORM)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {
        "update": {},
        "validation": {
            "callbacks": [{"type": "ema", "decay": 0.5, "validate": True}],
            "data": {"validation": str(tiny_heldout)},
            "validation": {"every": 2, "tokens": 64},
        },
        "forward": {"model": {"norm": "own_parts:Norm"}},
    }[writes]
    sync, beside = (train(mode, f"checkpoint.mode={mode}", **changes) for mode in ("sync", "async"))
    assert losses(sync) == losses(beside)
    assert equal_files(sync / "checkpoints", beside / "checkpoints") > 3 * 5


@pytest.mark.usefixtures("slow_copies")
def test_the_users_own_loop_can_write_to_weights_soon_after_a_save(run_yaml, tmp_path):
    for mode in ("sync", "async"):
        overrides = [f"run.name={mode}", f"checkpoint.mode={mode}", "checkpoint.every=1", "checkpoint.keep_last=9"]
        with Trainer(RunConfig.load(run_yaml(**SHORT), overrides), batches="global") as trainer:
            for step in range(2):
                trainer.step({"tokens": torch.arange(128).reshape(2, 64) + step})
                for parameter in trainer.model.parameters():
                    parameter.data.add_(0.01)
    runs = tmp_path / "runs"
    assert equal_files(runs / "sync" / "checkpoints", runs / "async" / "checkpoints") > 2 * 5


@pytest.mark.xdist_group("ranks")
def test_async_on_two_ranks(train, run_yaml, tmp_path, ranks):
    one, two = train("one"), tmp_path / "runs" / "two"
    ranks.run(run_yaml(**SHORT, run={"name": "two"}, checkpoint={"every": 2, "keep_last": 9, "mode": "async"}), 2)
    assert [path.name for path in checkpoints(two)] == [path.name for path in checkpoints(one)]
    assert all(find_damage(path) is None for path in checkpoints(two))
    for step, loss in losses(one).items():
        assert losses(two)[step] == pytest.approx(loss, abs=1e-4)


def test_a_failed_async_save_ends_the_run_as_a_failed_sync_save(train, run_yaml, tmp_path, monkeypatch):
    from weft.checkpoint import save

    real = save._finish

    def fails(partial, *rest):
        if "step-00000002" in partial.name:
            raise OSError(28, "No space left on device")
        real(partial, *rest)

    monkeypatch.setattr(save, "_finish", fails)
    config = RunConfig.load(run_yaml(**SHORT), ["checkpoint.mode=async", "checkpoint.every=2"])
    with pytest.raises(UserError, match="No space left on device; no checkpoint is complete yet; free space"):
        Trainer(config).fit()
    assert not checkpoints(tmp_path / "runs" / "demo")


KILLED = """
import os, signal, sys
from weft.config.run import RunConfig
from weft.train.trainer import Trainer
from weft.train import loop
real = loop.Loop.after_update
def after(self, step):
    real(self, step)
    self.saver.finish()
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
loop.Loop.after_update = after
Trainer(RunConfig.load(sys.argv[1], sys.argv[2:])).fit()
"""


@pytest.mark.parametrize("survives", ["local", "durable"])
def test_a_run_resumes_from_what_survives(train, run_yaml, tmp_path, capsys, survives):
    undisturbed = train("sync")
    fast = tmp_path / "fast"
    overrides = ["run.name=killed", "checkpoint.mode=async", f"checkpoint.local={{steps: 1, directory: {fast}}}"]
    path = run_yaml(**SHORT, checkpoint={"every": 2, "keep_last": 9})
    done = forked.run(path, *overrides, program=KILLED)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = tmp_path / "runs" / "killed"
    assert [found.name for found in checkpoints(run)] == ["step-00000002", "step-00000004"]
    (local,) = fast.glob("weft-*/*/checkpoints/step-00000005")
    assert last_checkpoint(run)[0] == 5  # what the launcher announces, and logs/failures.jsonl counts from
    if survives == "durable":
        with open(local / "state.json", "r+b") as file:
            file.write(b"!")
    capsys.readouterr()
    assert main(["train", str(path), *overrides]) == 0
    assert ("resuming from the local checkpoint" in capsys.readouterr().err) == (survives == "local")
    assert losses(run) == losses(undisturbed)
    assert main(["checkpoint", "diff", str(run), str(undisturbed)]) == 0
    assert not list(fast.glob("weft-*/*"))  # a finished run leaves nothing in the host's memory


def test_local_checkpoints_of_a_run_that_starts_over_are_not_found(train, run_yaml, tmp_path):
    fast = tmp_path / "fast"
    overrides = ["run.name=killed", f"checkpoint.local={{steps: 1, directory: {fast}}}"]
    path = run_yaml(**SHORT)
    forked.run(path, *overrides, program=KILLED)
    assert list(fast.glob("weft-*/*/checkpoints/step-00000005"))
    config = RunConfig.load(path, [*overrides, "training.steps=2", "schedule.warmup_steps=1"])
    assert Trainer(config, fresh=True).fit().step == 2


def test_changes_are_refused_also_if_only_a_local_checkpoint_would_be_resumed(run_yaml, tmp_path, capsys):
    overrides = [f"checkpoint.local={{steps: 1, directory: {tmp_path / 'fast'}}}"]
    path = run_yaml(**SHORT)
    forked.run(path, *overrides, program=KILLED)
    assert not checkpoints(tmp_path / "runs" / "demo")
    assert main(["train", str(path), *overrides, "optimizer.lr=0.1"]) == 2
    assert "1 change of config or data since step 5 would alter the training (optimizer.lr)" in capsys.readouterr().err
    assert main(["train", str(path), *overrides, "optimizer.lr=0.1", "--accept-changes"]) == 0


def test_a_folder_that_others_can_write_is_refused(run_yaml, tmp_path):
    fast = tmp_path / "fast"
    (fast / f"weft-{os.getuid()}").mkdir(parents=True)
    (fast / f"weft-{os.getuid()}").chmod(0o777)
    config = RunConfig.load(run_yaml(**SHORT), [f"checkpoint.local={{steps: 1, directory: {fast}}}"])
    with pytest.raises(UserError, match=r"other users can write this folder.*checkpoint.local.directory"):
        Trainer(config).fit()


def test_a_run_that_stops_before_its_first_step_saves_what_only_the_local_checkpoint_has(run_yaml, tmp_path):
    overrides = [f"checkpoint.local={{steps: 1, directory: {tmp_path / 'fast'}}}", "checkpoint.every=4"]
    path = run_yaml(**SHORT)
    forked.run(path, *overrides, program=KILLED)
    run = tmp_path / "runs" / "demo"
    assert [found.name for found in checkpoints(run)] == ["step-00000004"]
    with Trainer(RunConfig.load(path, overrides), batches="global") as trainer:
        assert trainer.step_number == 5
    assert [found.name for found in checkpoints(run)] == ["step-00000004", "step-00000005"]


def test_local_checkpoints_by_time(run_yaml, tmp_path, monkeypatch):
    """Due each moment, so one after each step; the last two are kept."""
    from weft.train import saving

    saved = []
    stage = saving.stage
    monkeypatch.setattr(saving, "stage", lambda *given: saved.append((given[0], given[1].step)) or stage(*given))
    fast = tmp_path / "fast"
    given = [f"checkpoint.local={{seconds: 1.0e-9, directory: {fast}}}", "checkpoint.every=3"]
    Trainer(RunConfig.load(run_yaml(**SHORT), given)).fit()
    run = tmp_path / "runs" / "demo"
    assert [step for where, step in saved if where == run] == [3, 6]
    assert [step for where, step in saved if where != run] == [1, 2, 4, 5]


@pytest.mark.xdist_group("ranks")
def test_replicas_divide_the_writing_evenly(run_yaml, tmp_path, ranks):
    """Two replicas of two shards: every element is written once, and each rank writes a quarter."""
    mesh, one_step = {"dp_replicate": 2, "dp_shard": 2}, {"steps": 1, "batch_tokens": 256, "micro_batch_size": 1}
    changes = {"data": {"validation": None}, "schedule": {"type": "constant", "warmup_steps": 0}}
    ranks.run(run_yaml(parallel=mesh, training=one_step, **changes), 4)
    (checkpoint,) = checkpoints(tmp_path / "runs" / "demo")
    index = json.loads((checkpoint / "index.json").read_text())
    written, elements = dict.fromkeys((1, 2, 3, 4), 0), 0
    for name, entry in index["tensors"].items():
        covered = torch.zeros(entry["shape"], dtype=torch.int8)
        for number, offset, shape in entry["pieces"]:
            covered[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))] += 1
            written[int(index["files"][number].split("-")[1])] += math.prod(shape)
        assert (covered == 1).all(), name
        elements += covered.numel()
    assert sum(written.values()) == elements
    assert max(written.values()) <= 1.2 * min(written.values()), written
