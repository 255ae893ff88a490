"""The orders of pipeline schedules, beside the tables of PyTorch's schedules."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from weft.config.mesh import ParallelSection
from weft.parallel.stages import stages_of_rank
from weft.planner.schedules import Action, rank_actions

CLASSES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


def section(name: str, virtual: int) -> ParallelSection:
    return ParallelSection(pp_schedule=name, stages_per_rank=virtual)


def of_pytorch(name: str, rank: int, ranks: int, virtual: int, micro_batches: int) -> list[Action]:
    """Returns the actions of PyTorch's table, without waits, and with the passes of a pair one after the other."""
    own = [
        SimpleNamespace(
            group_size=ranks,
            group_rank=rank,
            group=None,
            num_stages=ranks * virtual,
            stage_index=stage,
            stage_index_to_group_rank={},
            has_backward=False,
            is_first=stage == 0,
            is_last=stage == ranks * virtual - 1,
            submod=None,
        )
        for stage in stages_of_rank(section(name, virtual), rank, ranks)
    ]
    made = CLASSES[name](own if virtual > 1 else own[0], micro_batches)
    table = made.pipeline_order if virtual > 1 else made._get_pipeline_order()
    found = []
    for action in table[rank]:
        if action is not None:
            found += action.sub_actions or [action]
    # PyTorch's table for printing 1F1B counts the last rank's forward passes from 1; the passes that run, from 0.
    late = name == "1f1b" and rank == ranks - 1
    return [
        Action(kind, one.stage_index, one.microbatch_index - (late and kind == "F"))
        for one in found
        if (kind := one.computation_type.value) in ("F", "B", "I", "W")
    ]


@pytest.mark.parametrize("name", list(CLASSES))
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (3, 6), (4, 11)])
def test_orders_are_those_of_pytorch(name, ranks, micro_batches):
    virtual = 1 if name in ("gpipe", "1f1b") else 2
    if name.startswith("interleaved") and micro_batches % max(1, micro_batches // ranks):
        pytest.skip("PyTorch needs equal rounds")
    for rank in range(ranks):
        expected = of_pytorch(name, rank, ranks, virtual, micro_batches)
        assert rank_actions(section(name, virtual), rank, ranks, micro_batches) == expected
        assert len(expected) >= 2 * virtual * micro_batches


@pytest.mark.parametrize("name", ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"])
def test_orders_with_more_stages_on_a_rank_are_those_of_pytorch(name):
    for rank in range(4):
        assert rank_actions(section(name, 3), rank, 4, 8) == of_pytorch(name, rank, 4, 3, 8)
