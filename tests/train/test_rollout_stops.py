"""A request to stop before or in the middle of a rollout ends the run without completing the rollout."""

import os
import signal

import pytest
from rollout_runs import settings, write_inputs
from running import assert_same_weights, losses, metrics, train

from weft.generation.engine import Engine


@pytest.mark.parametrize("before", [False, pytest.param(True, marks=pytest.mark.long)], ids=["during", "before"])
def test_sampling_stops_and_the_resumed_run_is_the_uninterrupted_run(before, run_yaml, tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    straight = run_yaml("a.yaml", run={"name": "straight"}, **settings(training={"steps": 3}))
    assert train(straight) == 0

    broken = run_yaml("b.yaml", run={"name": "broken"}, **settings(training={"steps": 3}))
    step, calls = Engine.step, []

    def stopping_step(engine):
        calls.append(1)
        found = step(engine)
        if len(calls) == (8 if before else 11):  # each rollout has 8 steps of at most 8 new tokens
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", stopping_step)
        assert train(broken) == 128 + signal.SIGTERM
    done = len(metrics(tmp_path / "runs" / "broken"))
    assert len(calls) == (8 if before else 11)
    assert done == (0 if before else 1)
    assert train(broken) == 0
    one, other = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"
    assert losses(one) == losses(other)
    assert [line["reward"] for line in metrics(one)] == [line["reward"] for line in metrics(other)]
    assert_same_weights(one, other)
