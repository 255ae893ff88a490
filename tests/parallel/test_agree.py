"""What fails on one rank fails on all of them, with one report."""

import agree_parts
import pytest
from matrix import Case, write_run

pytestmark = pytest.mark.xdist_group("ranks")


def test_an_exception_of_one_rank_is_raised_on_all(runner):
    message = "list index out of range"
    assert runner.pool.call(agree_parts.agree_on_an_exception, 3) == [
        (("IndexError", message, None, True), 0, 0),
        (("IndexError", message, None, False), 1, 0),
        (("IndexError", message, None, True), 2, 0),
    ]


def test_weights_that_one_host_lacks(runner, tmp_path, monkeypatch):
    start = runner.run(Case("dense", "plain"), name="start", steps=1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start").symlink_to(start.path)
    (tmp_path / "elsewhere").mkdir()
    file = write_run(tmp_path, Case("dense", "plain", {"dp_shard": 2}), name="lacks", model={"from": "start"})
    found = runner.pool.call(agree_parts.fit, 2, file, tmp_path / "elsewhere")
    assert [quiet for _, _, quiet, _ in found] == [False, True]
    for name, text, *_ in found:
        assert name == "UserError"
        assert text == "rank 1: start: this path does not exist; give a run directory or a checkpoint"


def test_a_tracker_that_cannot_be_made_on_the_first_rank(runner, tmp_path):
    case = Case("dense", "plain", {"dp_shard": 2})
    file = write_run(tmp_path, case, name="refuses", log={"trackers": [{"type": "agree_parts:Refuses"}]})
    found = runner.pool.call(agree_parts.fit, 2, file, tmp_path)
    assert found == [("ValueError", "no room for this tracker", None, rank == 1) for rank in range(2)]
