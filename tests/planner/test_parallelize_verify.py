"""`verify_plan`: the results of a plan beside those of one device, and predicted beside counted collectives."""

import pytest
import torch
import verify_parts
from torch.distributed.tensor import Shard

from weft.errors import UserError
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.verify import verify_plan

SPLIT = {"h.*.fc.*": Shard(0), "h.*.proj.weight": Shard(1), "wte.weight": Shard(0)}


@pytest.mark.long
def test_a_plan_is_equal_to_one_device_and_its_collectives_are_predicted(capfd):
    ids = torch.randint(0, 48, (8, 12))
    report = verify_plan(
        Plan(tp=2, parameters=SPLIT, recompute=("h.*",)), verify_parts.gpt, {"ids": ids, "targets": ids}
    )
    assert max(report.loss, report.gradients, report.parameters) < 1e-9
    assert report.predicted is not None
    assert report.predicted.counts == report.counted.counts
    assert report.predicted.bytes == report.counted.bytes
    assert sum(report.counted.counts.values()) > 0
    assert report.equal
    assert str(report).endswith("\nequal")
    assert "Traceback" not in capfd.readouterr().err  # of processes that end while others do


@pytest.mark.matrix
def test_a_module_that_depends_on_its_rank_is_not_equal():
    report = verify_plan(Plan(dp=2), verify_parts.Wrong(4, 4), torch.randn(4, 4))
    assert report.loss > 1e-3
    assert not report.equal
    assert str(report).endswith("\nNOT equal")


@pytest.mark.matrix
def test_a_module_that_does_not_run_is_reported():
    with pytest.raises(UserError, match=r"rank [01]: ValueError: no rows"):
        verify_plan(Plan(dp=2), verify_parts.fails, torch.randn(4, 4))


@pytest.mark.matrix
def test_a_killed_process_is_reported_at_once():
    with pytest.raises(UserError, match=r"rank 1 was killed by SIGKILL"):
        verify_plan(Plan(dp=2), verify_parts.killed, torch.randn(4, 4), seconds=60)
