"""`--stop-within`: a run that is told to stop is gone in time, and loses no step if the host's memory can take it."""

import forked
import pytest
from running import assert_same_weights, losses, train

# A run whose disk gets stuck, and that is told to stop in step 3.
STUCK = """
import os, signal, sys, time
from weft.checkpoint.save import StagedSave
from weft.cli.main import main
from weft.train import loop

write, after = StagedSave.write, loop.Loop.after_update

def stuck(self, *rest, **options):
    if "runs" in self.target.parts and os.environ.get("STUCK"):
        time.sleep(60)
    return write(self, *rest, **options)

def asked(self, step):
    after(self, step)
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)

StagedSave.write, loop.Loop.after_update = stuck, asked
sys.exit(main(["train", *sys.argv[1:]]))
"""


def stop(tmp_path, *arguments, **environment):
    return forked.run(*arguments, cwd=tmp_path, program=STUCK, **environment)


SHORT = {
    "training": {"steps": 6, "batch_tokens": 128, "micro_batch_size": 2},
    "schedule": {"warmup_steps": 0},
    "data": {"validation": None},
    "checkpoint": {"every": 6},
    "log": {"trackers": []},
}


def test_the_last_step_survives_a_disk_that_is_too_slow(run_yaml, tmp_path, capsys, monkeypatch):
    fast = tmp_path / "fast"
    file = run_yaml(run={"name": "stopped"}, **{**SHORT, "checkpoint": {"every": 6, "local": {"directory": str(fast)}}})
    run = tmp_path / "runs" / "stopped"
    done = stop(tmp_path, file, "--stop-within", "4", STUCK="1")
    assert done.returncode == 143, done.stderr
    assert "step 3 is not saved in" in done.stderr
    assert "within 4 s (--stop-within)" in done.stderr
    assert [path.name for path in fast.glob("weft-*/*/checkpoints/*")] == ["step-00000003"]
    assert not list((run / "checkpoints").glob("step-*"))

    monkeypatch.chdir(tmp_path)
    assert train(file) == 0
    assert "resuming from the local checkpoint" in capsys.readouterr().err
    assert train(run_yaml("whole.yaml", run={"name": "whole"}, **SHORT)) == 0
    assert losses(run) == losses(tmp_path / "runs" / "whole")
    assert_same_weights(run, tmp_path / "runs" / "whole")
    assert not list(fast.glob("weft-*/*"))


def test_a_save_in_time_leaves_nothing_in_memory(run_yaml, tmp_path, capsys, monkeypatch):
    fast = tmp_path / "fast"
    file = run_yaml(**SHORT | {"checkpoint": {"every": 1000, "local": {"seconds": 1000, "directory": str(fast)}}})
    done = stop(tmp_path, file, WEFT_STOP_WITHIN="40")
    assert done.returncode == 143, done.stderr
    run = tmp_path / "runs" / "demo"
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000003"]
    assert list(fast.glob("*"))  # a first save has no known time
    assert not list(fast.glob("*/*"))
    assert not (run / "local-checkpoints.json").exists()
    monkeypatch.chdir(tmp_path)
    assert train(file) == 0
    assert "gone on all hosts" not in capsys.readouterr().err


@pytest.mark.parametrize("given", ["0", "-3", "soon"])
def test_a_wrong_deadline_is_refused(run_yaml, capsys, monkeypatch, given):
    monkeypatch.setenv("WEFT_STOP_WITHIN", given)
    assert train(run_yaml()) == 2
    assert f"WEFT_STOP_WITHIN: {given} is not a number of seconds above 0" in capsys.readouterr().err
