"""How the watch judges a step, and which data a run takes after several rollbacks."""

import json
import random

import numpy as np
import pytest

from weft.config.watch import SpikeSection, WatchSection
from weft.train.watch.guard import Guard


def test_a_spike_is_what_numpy_finds_far_above_the_median():
    numbers = random.Random(5)
    guard, seen, found = Guard(WatchSection(spike=SpikeSection(window=20, factor=4.0)), {}), [], 0
    for _ in range(400):
        loss = 3 + numbers.gauss(0, 0.05) + (numbers.random() < 0.05) * numbers.random()
        recent = np.array(seen[-20:])
        expected = False
        if len(recent) >= 10:
            usual = np.median(recent)
            deviation = 1.4826 * np.median(np.abs(recent - usual))
            expected = bool(loss > usual + 4 * max(deviation, 0.01 * usual))
        finding = guard.judge(loss, 1.0)
        assert (finding is not None) == expected
        seen.append(loss)
        found += expected
    assert 5 < found < 40


@pytest.mark.parametrize("again", [2, 5, 7])
def test_windows_of_skipped_data_follow_a_run_that_returns_twice(again):
    """A list of the data steps that are left, from which each rollback removes those up to the bad one."""
    guard, left = Guard(WatchSection(), {}), list(range(60))
    for bad, checkpoint in ((8, 5), (9, again)):  # updates made so far, and those of the checkpoint
        assert guard.data_step(bad) == left[bad]
        guard.skip_data(checkpoint, guard.data_step(bad) + 1)
        del left[checkpoint : bad + 1]
    restored = Guard(WatchSection(), json.loads(json.dumps(guard.state())))
    assert [restored.data_step(step) for step in range(40)] == left[:40]
