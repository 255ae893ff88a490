"""Assigns layers to pipeline stages, and stages to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from weft.config.mesh import V_SHAPED, ParallelSection
from weft.config.model import ModelSection


def stage_ranges(section: ModelSection, parallel: ParallelSection, sequence: int) -> list[range]:
    """Returns the range of layers of each stage.

    `parallel.stage_layers` sets the number of layers of each stage. If it is None, the layers are divided so that
    stages have similar costs of matrix products, including the head in the last stage, which also has the multi-token
    prediction layers. Embedding look-ups have no cost.

    Args:
        sequence: number of tokens per sequence, for the cost of attention.
    """
    counts = parallel.stage_layers
    if counts is None:
        costs = [section.layer_size(layer).matmul for layer in range(section.all_layers)]
        costs = [cost + 2 * section.attention_width * sequence for cost in costs]
        layers, heads = section.num_hidden_layers, 1 + section.num_nextn_predict_layers
        last = heads * (section.vocab_size or 0) * section.hidden_size + sum(costs[layers:])
        counts = balance_layers(costs[:layers], parallel.pp * parallel.virtual_stages, last)
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def balance_layers(costs: Sequence[float], stages: int, last: float = 0.0, first: float = 0.0) -> list[int]:
    """Returns the numbers of layers per stage (at least 1) that minimize the cost of the most expensive stage.

    Args:
        costs: cost of each layer.
        stages: number of stages.
        last: additional cost of the last stage.
        first: additional cost of the first stage.

    Raises:
        ValueError: if there are fewer layers than stages.
    """
    layers = len(costs)
    if layers < stages:
        raise ValueError(f"{layers} layers are fewer than {stages} stages; each stage needs at least one layer")
    return list(_balanced(tuple(costs), stages, last, first))


@lru_cache(maxsize=1024)  # the planner balances the same layers for many meshes
def _balanced(costs: tuple[float, ...], stages: int, last: float, first: float) -> tuple[int, ...]:
    layers, before = len(costs), [0.0, *accumulate(costs)]
    # highest[n]: lowest cost of the most expensive stage, if the stages so far have the first n layers. If several
    # assignments have this cost, the last stage starts as early as possible.
    highest, starts = [before[end] + first + (last if stages == 1 else 0.0) for end in range(layers + 1)], []
    for stage in range(1, stages):
        extra = last if stage == stages - 1 else 0.0
        new, start_of = [float("inf")] * (layers + 1), [0] * (layers + 1)
        start = stage
        for end in range(stage + 1, layers - stages + stage + 2):  # each later stage needs a layer
            # With a later start, the stages before cost more and this one costs less: the best start is where they
            # cross, and this place moves to the right with `end`.
            while start < end - 1 and highest[start] < before[end] - before[start] + extra:
                start += 1
            cost = max(highest[start], before[end] - before[start] + extra)
            earlier = before[end] - before[start - 1] + extra if start > stage else float("inf")
            early = max(highest[start - 1], earlier) <= cost
            new[end], start_of[end] = (max(highest[start - 1], earlier), start - 1) if early else (cost, start)
        highest = new
        starts.append(start_of)
    counts, end = [], layers
    for start_of in reversed(starts):
        counts.append(end - start_of[end])
        end = start_of[end]
    return (end, *reversed(counts))


def stages_of_rank(parallel: ParallelSection, rank: int, ranks: int) -> list[int]:
    """Returns the indices of the stages that pipeline rank `rank` runs.

    These are every `ranks`-th stage. With a V-shaped schedule, they are one stage from the front and the mirrored stage
    from the end.

    Args:
        ranks: number of pipeline ranks.
    """
    if parallel.pp_schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * number for number in range(parallel.virtual_stages)]


def rank_of_stage(parallel: ParallelSection, stage: int, ranks: int) -> int:
    """Returns the pipeline rank that runs the stage with index `stage`.

    Args:
        ranks: number of pipeline ranks.
    """
    if parallel.pp_schedule in V_SHAPED:
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks


def embeds_at_end(section: ModelSection) -> bool:
    """Whether the end of the model needs the embedding: as its head, or for multi-token prediction layers.

    Then the last pipeline stage has a copy of it, and FSDP2 gathers it with the rest outside of the blocks. Otherwise
    the embedding and the head are FSDP2 units.
    """
    return section.tie_word_embeddings or section.num_nextn_predict_layers > 0
