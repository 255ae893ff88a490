"""Plans with pipeline stages: all values are those of one process."""

import pytest
import stage_parts
import staged_modules
import torch
from planner_hardware import ideal

from weft.config.mesh import ParallelSection
from weft.errors import UserError
from weft.parallel.axes.pipeline import SCHEDULES as SHORT
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.read import read_plan
from weft.planner.parallelize.search import search_plan
from weft.planner.parallelize.stage_search import Passes, simulate
from weft.planner.parallelize.stage_table import V_SHAPED, fits_schedule, stages_of
from weft.planner.parallelize.verify import verify_plan

pytestmark = pytest.mark.xdist_group("ranks")
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def check(ranks, number, cases, steps=2):
    for found in ranks.call(stage_parts.equal_to_one_process, number, cases, steps, seconds=900):
        for name, worst in found:
            assert worst < 1e-9, f"{name}: {worst}"


@pytest.mark.parametrize(
    "names", [["encoder-decoder", "unet", "mixed"], pytest.param(["gpt", "dropout"], marks=pytest.mark.long)], ids=str
)
def test_two_stages_are_one_process(ranks, names):
    v_shaped = ("unet", "mixed")
    check(ranks, 2, [(name, {"schedule": "ZBVZeroBubble"} if name in v_shaped else {}) for name in names])


@pytest.mark.parametrize("options", [{"tp": 2, "schedule": "Interleaved1F1B"}, {"dp": 2}], ids=str)
@pytest.mark.long
def test_stages_with_data_and_tensor_parallelism_are_one_process(ranks, options):
    check(ranks, 4, [("gpt", options)], steps=1)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_schedules_are_one_process(ranks, schedule):
    names = ["gpt", "encoder-decoder", "unet", "dropout", "mixed"]
    check(ranks, 2, [(name, {"schedule": schedule}) for name in names])
    cases = [(name, {"schedule": schedule, axis: 2}) for name in names for axis in ("dp", "tp")]
    check(ranks, 4, [one for one in cases if one != ("dropout", {"schedule": schedule, "tp": 2})])
    if schedule in ("GPipe", "1F1B"):
        check(ranks, 4, [(name, {"schedule": schedule}) for name in names])


@pytest.mark.parametrize(
    "schedules",
    [["ZBVZeroBubble"], pytest.param([one for one in SCHEDULES if one[0] != "Z"], marks=pytest.mark.matrix)],
    ids=["zbv", "others"],
)
def test_gradients_of_micro_batches_are_summed_in_the_dtype_of_parameters(ranks, schedules):
    for found in ranks.call(stage_parts.rounding, 2, schedules, seconds=240):
        for schedule, error, in_bfloat16 in found:
            assert error < in_bfloat16 / 4, f"{schedule}: {error}, and {in_bfloat16} if summed in bfloat16"


def test_a_new_function_as_argument_is_not_traced_again(ranks):
    for traced, kept in ranks.call(stage_parts.calls_with_functions, 2, seconds=120):
        assert (traced, kept) == (1, 0)


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


def test_a_plan_allows_the_schedules_and_micro_batches_that_a_run_allows():
    for short, schedule in SHORT.items():
        section = ParallelSection(pp=4, pp_schedule=short)
        stages = 4 * section.virtual_stages
        found = [count for count in range(1, 40) if fits_schedule(schedule, 4, stages, count)]
        assert found == [count for count in range(1, 40) if section.supports(count, 4)], short
        assert (len(stages_of(4, [("", ())] * stages, schedule, 8).stages_of(0)), schedule in V_SHAPED) == (
            section.virtual_stages,
            short in ("zbv_zero_bubble", "dualpipev"),
        )


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


HOSTS = [
    {"name": "within", "devices": 4, "latency_us": 1, "bandwidth_gb_s": 400.0},
    {"name": "between", "latency_us": 20, "bandwidth_gb_s": 2.0},
]


@pytest.mark.long
def test_slow_links_between_hosts_get_stages_between_and_tensor_parallelism_within(ranks):
    ids = torch.zeros(2, 64, dtype=torch.int64, device="meta")
    plan, search, _ = search_plan(
        staged_modules.wide, (ids, ids), devices=8, hardware=ideal(HOSTS, tflops=10.0), memory=2e9, seconds=60
    )
    assert (plan.pp, plan.dp, plan.tp) == (2, 1, 4)
    assert plan.parameters
    assert plan.prediction["step_seconds"] < min(one.choice.cost for one in search.found)
    assert plan.micro_batches == 2
    assert plan.schedule == "ZBVZeroBubble"
    assert [begin for begin, _ in plan.stages] == ["", "h.2", "h.4", "h.6"]
    assert {"wte", "h.0..1"} <= set(plan.stages[0][1])
    assert {"h.6..7", "ln_f"} <= set(plan.stages[-1][1])
    plan.check(staged_modules.wide())
    fast = ideal([HOSTS[0] | {"devices": 8}, HOSTS[1]], tflops=10.0)
    more = torch.zeros(512, 64, dtype=torch.int64, device="meta")
    assert search_plan(staged_modules.wide, (more, more), devices=8, hardware=fast)[0].pp == 1


def test_simulated_schedules_have_the_bubble_of_their_papers():
    pp, count, seconds = 4, 8, 1.0
    whole, half = Passes(1 / 3, 2 / 3, 1 / 3), Passes(1 / 6, 1 / 3, 1 / 6)
    found = simulate("1f1b", 1, pp, count, [whole] * pp, 0.0, [1.0] * pp)
    assert found.seconds == pytest.approx((count + pp - 1) * seconds)
    assert found.peaks == [4.0, 3.0, 2.0, 1.0]  # micro-batches whose backward passes have not run
    assert simulate("gpipe", 1, pp, count, [whole] * pp, 0.0, [1.0] * pp).peaks == [count] * pp
    halves = simulate("interleaved_1f1b", 2, pp, count, [half] * 2 * pp, 0.0, [0.5] * 2 * pp)
    assert halves.seconds == pytest.approx((count + (pp - 1) / 2) * seconds)
    v_shaped = simulate("zbv_zero_bubble", 2, pp, count, [half] * 2 * pp, 0.0, [0.5] * 2 * pp)
    assert v_shaped.seconds == pytest.approx((count + (pp - 1) / 6) * seconds)  # only the forward passes before
    assert max(v_shaped.peaks) == pp  # as for 1F1B (Qi et al., 2024)
    attention = Passes(1 / 6, 1 / 3, 0.0)  # without weights, whose gradients would fill the bubble
    v_shaped = simulate("zbv_zero_bubble", 2, pp, count, [attention] * 2 * pp, 0.0, [0.5] * 2 * pp)
    assert v_shaped.seconds > (count + (pp - 1) / 4) * seconds


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


@pytest.mark.matrix
def test_stages_that_the_search_finds_are_one_process():
    ids = torch.randint(0, 32, (8, 6))
    slow = [HOSTS[0] | {"devices": 1}, HOSTS[1] | {"bandwidth_gb_s": 1e-3}]
    plan, _, _ = search_plan(staged_modules.TiedGPT, (ids, ids), devices=2, hardware=ideal(slow, tflops=1e-4))
    assert (plan.pp, len(plan.stages)) in ((2, 2), (2, 4))
    report = verify_plan(plan, staged_modules.TiedGPT, (ids, ids.roll(-1, 1)))
    assert report.equal, str(report)
