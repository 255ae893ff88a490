"""A run that is continued on another number of ranks: the same samples in the same order, and the same losses."""

import shutil

import pytest
from running import losses

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize(
    "numbers",
    [pytest.param((3,), marks=pytest.mark.long), pytest.param((1, 2, 3, 8), marks=pytest.mark.chaos)],
    ids=lambda numbers: f"{len(numbers)}",
)
def test_a_run_begun_on_four_ranks_is_continued_on_another_number(run_yaml, tmp_path, ranks, numbers):
    def file(name, steps):
        return run_yaml(
            f"{name}-{steps}.yaml",
            run={"name": name},
            schedule={"type": "constant", "warmup_steps": 0},
            training={"steps": steps, "batch_tokens": 384, "micro_batch_size": 1, "dtype": "float64"},
            data={"validation": None},
            checkpoint={"every": 100},
            log={"trackers": []},
        )

    ranks.run(file("whole", 6), 1)
    expected = losses(tmp_path / "runs" / "whole")
    ranks.run(file("begun", 3), 4)
    for number in numbers:
        shutil.copytree(tmp_path / "runs" / "begun", tmp_path / "runs" / f"on-{number}")
        ranks.run(file(f"on-{number}", 6), number)
        found = losses(tmp_path / "runs" / f"on-{number}")
        assert [line[0] for line in found] == [1, 2, 3, 4, 5, 6]
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-9), number
