"""Which layers each stage of a pipeline has: as equal work as whole layers allow."""

from __future__ import annotations

from collections.abc import Sequence

from weft.config.mesh import V_SHAPED, ParallelSection
from weft.config.model import ModelSection


def stage_ranges(section: ModelSection, parallel: ParallelSection, sequence: int) -> list[range]:
    """The layers of each stage, first to last: as `parallel.stage_layers` says, or balanced by counted operations.

    The last stage has the head, too. A look-up of embeddings costs next to nothing.
    """
    counts = parallel.stage_layers
    if counts is None:
        costs = [section.layer_size(layer).matmul for layer in range(section.num_hidden_layers)]
        costs = [cost + 2 * section.attention_width * sequence for cost in costs]
        head = (section.vocab_size or 0) * section.hidden_size
        counts = balanced(costs, parallel.pp * parallel.virtual_stages, head)
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def balanced(costs: Sequence[float], stages: int, last: float = 0.0) -> list[int]:
    """How many of the layers each stage gets, so that the dearest stage costs least; each at least one.

    Args:
        costs: of each layer, first to last.
        last: what the last stage costs besides.

    Raises:
        ValueError: fewer layers than stages.
    """
    layers = len(costs)
    if layers < stages:
        raise ValueError(f"{layers} layers for {stages} stages")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # dearest[n]: of the best way to give the first n layers to the stages so far; of equal ones the earlier cut.
    dearest, cuts = [0.0] + [float("inf")] * layers, []
    for stage in range(stages):
        besides = last if stage == stages - 1 else 0.0
        new, cut = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for start in range(stage, end):
                worst = max(dearest[start], before[end] - before[start] + besides)
                if worst < new[end]:
                    new[end], cut[end] = worst, start
        dearest = new
        cuts.append(cut)
    counts, end = [], layers
    for cut in reversed(cuts):
        counts.append(end - cut[end])
        end = cut[end]
    return counts[::-1]


def stages_of_rank(parallel: ParallelSection, rank: int, ranks: int) -> list[int]:
    """The numbers of a pipeline rank's stages: every so-manieth, or one from each end."""
    if parallel.pp_schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * turn for turn in range(parallel.virtual_stages)]


def rank_of_stage(parallel: ParallelSection, stage: int, ranks: int) -> int:
    """The pipeline rank that has a stage."""
    if parallel.pp_schedule in V_SHAPED:
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks
