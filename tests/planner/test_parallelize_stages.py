"""Plans with pipeline stages: all values are those of one process."""

import pytest
import stage_parts
import staged_modules
import torch

from weft.errors import UserError
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.read import read_plan
from weft.planner.parallelize.verify import verify_plan

pytestmark = pytest.mark.xdist_group("ranks")
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def check(ranks, number, cases):
    for found in ranks.call(stage_parts.equal_to_one_process, number, cases, seconds=900):
        for name, worst in found:
            assert worst < 1e-9, f"{name}: {worst}"


def test_two_stages_are_one_process(ranks):
    zero_bubble = {"schedule": "ZBVZeroBubble"}
    check(ranks, 2, [("gpt", {}), ("encoder-decoder", {}), ("unet", zero_bubble), ("dropout", {})])


def test_stages_with_data_and_tensor_parallelism_are_one_process(ranks):
    check(ranks, 4, [("gpt", {"dp": 2}), ("gpt", {"tp": 2, "schedule": "Interleaved1F1B"})])


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_schedules_are_one_process(ranks, schedule):
    names = ["gpt", "encoder-decoder", "unet", "dropout"]
    check(ranks, 2, [(name, {"schedule": schedule}) for name in names])
    cases = [(name, {"schedule": schedule, axis: 2}) for name in names for axis in ("dp", "tp")]
    check(ranks, 4, [one for one in cases if one != ("dropout", {"schedule": schedule, "tp": 2})])
    if schedule in ("GPipe", "1F1B"):
        check(ranks, 4, [(name, {"schedule": schedule}) for name in names])


def test_calls_that_stages_cannot_run_are_refused(ranks):
    for rows, forgotten, outputs, order in ranks.call(stage_parts.refusals, 2, seconds=240):
        assert "6 rows" in rows
        assert "multiple of 4" in rows
        assert "stage 1 uses" in forgotten
        assert "wte.weight" in forgotten
        assert "loss=" in outputs
        assert "does not call 'h' after ''" in order


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schedule": "2F2B"}, ["'2F2B'", "GPipe"]),
        ({"schedule": "ZBVZeroBubble"}, ["2 stages on 2 pipeline ranks", "needs 4"]),
        ({"stages": (("", ("wte",)), ("h.9", ("h.0",)))}, ["'h.9'", "TiedGPT"]),
        ({"stages": (("", ("wte",)), ("h.2", ("h.7..9",)))}, ["'h.7..9'"]),
        ({"recompute": ("*",), "stages": (("", ("wte",)), ("h.2.attn", ("h",)))}, ["recompute", "h.2"]),
    ],
)
def test_tables_of_stages_that_do_not_fit_are_refused(change, words):
    plan = {"pp": 2, "stages": stage_parts.TWO["gpt"], "micro_batches": 2} | change
    if "recompute" in change:
        plan["recompute"] = ("h.*",)
    with pytest.raises(UserError) as error:
        Plan(**plan).check(staged_modules.make("gpt"))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_stages_are_the_same_in_the_file_and_after_edits(tmp_path):
    plan = stage_parts.plan_of("gpt", 2)
    plan.write(tmp_path / "plan.py")
    assert read_plan(tmp_path / "plan.py") == read_plan(tmp_path / "plan.json") == plan
    text = (tmp_path / "plan.py").read_text()
    edited = text.replace('("wte", "wpe", "h.0..1")', '("wte", "wpe", "h.0..2")').replace(
        '("h.2", ("h.2..3"', '("h.3", ("h.3"'
    )
    assert edited != text
    (tmp_path / "plan.py").write_text(edited.replace("MICRO_BATCHES = 4", "MICRO_BATCHES = 8"))
    found = read_plan(tmp_path / "plan.py")
    assert found.stages == (("", ("wte", "wpe", "h.0..2")), ("h.3", ("h.3", "ln_f", "lm_head")))
    assert (found.micro_batches, found.pp, found.schedule) == (8, 2, "1F1B")


@pytest.mark.matrix
def test_verification_of_stages():
    ids = torch.randint(0, 32, (8, 6))
    stages = (("", ("wte", "wpe", "h.0")), ("h.1", ("h.1", "ln_f", "lm_head")))
    report = verify_plan(
        Plan(pp=2, dp=2, stages=stages, micro_batches=2), staged_modules.dropout, (ids, ids.roll(-1, 1))
    )
    assert report.equal, str(report)
    assert "dropout" in report.remark
    assert report.predicted is not None
    assert report.predicted.bytes == report.counted.bytes
    stages = (("", ("a",)), ("b", ("b",)))
    report = verify_plan(Plan(pp=2, stages=stages, micro_batches=2), staged_modules.Centered(), torch.randn(4, 4))
    assert not report.equal
    assert "not a mean over rows" in report.remark
