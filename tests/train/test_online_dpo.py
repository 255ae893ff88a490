"""Online DPO: pairs of the best and the worst answer that the model samples."""

import math

import pytest
import torch
from rollout_runs import lines_of, settings, write_inputs

from weft.objectives.online_dpo import OnlineDPO


def test_the_best_and_the_worst_answer_are_a_pair():
    rewards = torch.tensor([[0.5, 2.0, -1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    chosen = OnlineDPO().choose(rewards)
    assert rewards[0][chosen[0]].tolist() == [2, -1]
    assert chosen[1, 0] == chosen[1, 1]  # no preference


def test_answers_with_higher_rewards_become_more_likely(run_yaml, tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sections = settings({"group": 6, "temperature": 0.8}, training={"steps": 12})
    sections["objective"] |= {"type": "online_dpo", "updates_per_rollout": 2}
    lines = lines_of(run_yaml, tmp_path, **sections)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # the reference is the model itself
    assert lines[1]["loss"] < lines[0]["loss"]  # the second update with the same pairs
    assert lines[1]["accuracy"] > 0.7
    assert sum(line["reward"] for line in lines[-4:]) > 1.5 * sum(line["reward"] for line in lines[:4])
