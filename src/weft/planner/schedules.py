"""Orders of forward and backward passes in PyTorch's pipeline schedules, without torch.

Each function returns what one pipeline rank does, in order. The tests compare the orders with the tables of
`torch.distributed.pipelining.schedules`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from operator import ge
from typing import Literal, NamedTuple

from weft.config.mesh import ParallelSection, Schedule
from weft.parallel.stages import stages_of_rank

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """A pass of one stage for one micro-batch.

    Attributes:
        kind: `F`: forward; `B`: backward; `I`, `W`: backward for the inputs, and for the weights.
        stage: index of the stage.
        micro_batch: index of the micro-batch.
    """

    kind: Kind
    stage: int
    micro_batch: int


def rank_actions(parallel: ParallelSection, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Returns the actions of a pipeline rank in order.

    Args:
        parallel: the schedule, and the number of stages on each rank.
        ranks: number of pipeline ranks.
        micro_batches: number of micro-batches of a step.
    """
    schedule, virtual = parallel.pp_schedule, parallel.virtual_stages
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        return _interleaved(rank, ranks, virtual, micro_batches, split=schedule == "interleaved_zero_bubble")
    if schedule == "zbv_zero_bubble":
        return _zbv(rank, ranks, micro_batches)
    if schedule == "dualpipev":
        return _DualPipeV(rank, ranks, micro_batches).actions
    stages, batches = stages_of_rank(parallel, rank, ranks), range(micro_batches)
    if schedule == "looped_bfs":
        forward = [Action("F", stage, number) for stage in stages for number in batches]
        return forward + [Action("B", stage, number) for stage in reversed(stages) for number in reversed(batches)]
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, ranks - 1 - rank)
    return _alternate(
        ahead, [Action("F", rank, number) for number in batches], [Action("B", rank, number) for number in batches]
    )


def _alternate(ahead: int, forward: list[Action], backward: list[Action]) -> list[Action]:
    """Returns `ahead` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    actions = forward[:ahead]
    for number, action in enumerate(forward[ahead:]):
        actions += [action, backward[number]]
    return actions + backward[len(forward) - ahead :]


def _interleaved(rank: int, ranks: int, virtual: int, micro_batches: int, *, split: bool) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al., 2021); with `split`, its zero-bubble form (Qi et al., 2023).

    Micro-batches go in rounds through all stages of the rank. With `split`, the gradients of weights are delayed by
    `rank` backward passes.
    """
    each = micro_batches // max(1, micro_batches // ranks)  # micro-batches in a round
    total = virtual * micro_batches
    ahead = min((virtual - 1) * each + (1 if split else 2) * (ranks - 1 - rank), total)

    def in_rounds(kind: Kind, place: Callable[[int], int]) -> list[Action]:
        seen: Counter[int] = Counter()
        actions = []
        for number in range(total):
            stage = place(number // each % virtual) * ranks + rank
            actions.append(Action(kind, stage, seen[stage]))
            seen[stage] += 1
        return actions

    forward = in_rounds("F", lambda place: place)
    backward = in_rounds("I" if split else "B", lambda place: virtual - 1 - place)
    actions = _alternate(ahead, forward, backward)
    if not split:
        return actions
    weights = iter([action._replace(kind="W") for action in backward])
    found, inputs = [], 0
    for action in actions:
        found.append(action)
        if action.kind == "I":
            inputs += 1
            if inputs > rank:
                found.append(next(weights))
    return [*found, *weights]


def _zbv(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Zero bubble with two stages in a V (Qi et al., 2023, "ZB-V")."""
    most = max(2 * ranks - 1, micro_batches)  # the pattern needs as many; those beyond the last are left out
    front, back = rank, 2 * ranks - 1 - rank
    next_of: Counter[tuple[str, int]] = Counter()
    actions: list[Action] = []

    def add(kinds: str, stage: int) -> None:
        for kind in kinds:
            actions.append(Action(kind, stage, next_of[kind, stage]))  # type: ignore[arg-type]
            next_of[kind, stage] += 1

    add("F" * (2 * (ranks - rank) - 1), front)
    for _ in range(rank):
        add("F", back)
        add("F", front)
    for _ in range(ranks - rank):
        add("FIW", back)
    while next_of["F", back] < next_of["F", front] or next_of["F", front] < most:
        if next_of["F", front] < most:
            add("F", front)
        add("IW", front)
        add("FIW", back)
    for _ in range(rank):
        add("I", front)
        add("I", back)
    for _ in range(ranks - rank):
        add("IW", front)
    for stage in (back, front):
        add("W" * (next_of["I", stage] - next_of["W", stage]), stage)
    return [action for action in actions if action.micro_batch < micro_batches]


class _DualPipeV:
    """DualPipeV (DeepSeek-AI, 2024): forward passes of one direction beside backward passes of the other.

    PyTorch runs the two passes of a pair one after the other.
    """

    def __init__(self, rank: int, ranks: int, micro_batches: int):
        self.actions: list[Action] = []
        self.next_of: Counter[tuple[str, int]] = Counter()
        self.waiting: deque[tuple[int, int]] = deque()  # (stage, micro-batch) without gradients of weights
        front, back, later = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
        for _ in range(2 * later):
            self.add("F", front)
        for _ in range(rank + 1):
            self.add("F", front)
            self.add("F", back)
        for _ in range(later):
            self.add("I", back)
            self.add_weights()
            self.add("F", back)
        for _ in range(micro_batches - 2 * ranks + rank + 1):
            self.add("F", front)
            self.add("B", back)
            self.add("F", back)
            self.add("B", front)
        for _ in range(later):
            self.add("B", back)
            self.add("F", back)
            self.add("B", front)
        splits = self._finish(rank, front, back)
        for _ in range(later):
            self.add_weights()
            self.add("I" if splits else "B", front)
        for _ in range(rank + 1):
            self.add_weights()

    def _finish(self, rank: int, front: int, back: int) -> bool:
        """Adds the last backward passes of both stages, of which the later half leaves gradients of weights waiting."""
        splits, middle = False, (rank + 1) // 2
        for number in range(rank + 1):
            splits = splits or (number == middle and rank % 2 == 1)
            self.add("I" if splits else "B", back)
            splits = splits or (number == middle and rank % 2 == 0)
            self.add("I" if splits else "B", front)
        return splits

    def add(self, kind: Kind, stage: int) -> None:
        """Adds the next pass of a stage."""
        counted = "F" if kind == "F" else "backward"
        number = self.next_of[counted, stage]
        self.next_of[counted, stage] += 1
        self.actions.append(Action(kind, stage, number))
        if kind == "I":
            self.waiting.append((stage, number))

    def add_weights(self) -> None:
        """Adds the gradients of weights that wait longest, if any wait."""
        if self.waiting:
            self.actions.append(Action("W", *self.waiting.popleft()))


@cache
def in_flight(schedule: Schedule, rank: int, ranks: int, virtual: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Returns the states of a pipeline rank in which a backward pass starts.

    Args:
        virtual: number of stages per rank.
        count: number of micro-batches.

    Returns:
        The states that can be peaks. Each state: the number of micro-batches that each of the rank's stages keeps, the
        place of the stage whose backward pass starts, among these stages, and whether it is the stage's first.
    """
    parallel = ParallelSection(pp=ranks, pp_schedule=schedule, stages_per_rank=virtual)
    stages, actions = stages_of_rank(parallel, rank, ranks), rank_actions(parallel, rank, ranks, count)
    live, found, begun = dict.fromkeys(stages, 0), dict[tuple[int, ...], None](), set[int]()
    splits = {(one.stage, one.micro_batch) for one in actions if one.kind == "W"}
    for action in actions:
        if action.kind == "F":
            live[action.stage] += 1
        elif action.kind in "BI":
            found[(*live.values(), stages.index(action.stage), action.stage not in begun)] = None
            begun.add(action.stage)
        if action.kind == "W" or (action.kind == "B" and (action.stage, action.micro_batch) not in splits):
            live[action.stage] -= 1
    # A state in which no stage keeps more than in another state, with the same backward pass, is not a peak.
    return tuple(
        state
        for state in found
        if not any(more != state and more[-2:] == state[-2:] and all(map(ge, more, state)) for more in found)
    )
