"""When gradients are reduced is chosen by the memory of a rank, and does not change what is learned."""

import pytest
from matrix import Case, write_run
from pool import weft_command
from running import metrics  # pyright: ignore[reportMissingImports]

from weft.observe.manifest import read_manifest
from weft.parallel.gradients import reduction

pytestmark = pytest.mark.xdist_group("ranks")
RANKS, MICRO_BATCHES, STEPS = 2, 2, 2


def train(file, memory, verb="train", *options):
    """On a rank: trains with devices of `memory` bytes; returns what was printed, and the number of reductions."""
    import torch.distributed as dist

    counted, reduce_scatter = [0], dist.reduce_scatter_tensor

    def count(*arguments, **named):
        counted[0] += 1
        return reduce_scatter(*arguments, **named)

    reduction.device_memory, before = lambda _: memory, reduction.device_memory
    dist.reduce_scatter_tensor = count
    try:
        code, errors = weft_command(file.parent, [verb, str(file), *options])
    finally:
        reduction.device_memory, dist.reduce_scatter_tensor = before, reduce_scatter
    assert code == 0, errors
    return errors, counted[0]


@pytest.fixture
def run(runner, tmp_path):
    def run(name, memory, steps=STEPS, **parallel):
        training = {"batch_tokens": RANKS * MICRO_BATCHES * 32, "micro_batch_size": 1, "steps": steps}
        file = write_run(
            tmp_path, Case("gqa", "plain", {"dp_shard": RANKS, **parallel}, layers=2), name=name, training=training
        )
        (said, reduced), *_ = runner.pool.call(train, RANKS, file, memory)
        losses = [line["loss"] for line in metrics(tmp_path / name)]
        return said, reduced, losses

    return run


def test_gradients_are_reduced_with_every_micro_batch_where_memory_is_short(run):
    said, once, expected = run("large", 2**40)
    assert "gradients are reduced with the last micro-batch: unsharded, they take " in said
    assert "of the 1.1 TB of a rank" in said
    said, often, losses = run("small", 2**20)
    assert "gradients are reduced with every micro-batch: unsharded, they would take " in said
    assert often == MICRO_BATCHES * once
    assert losses == pytest.approx(expected, rel=0, abs=1e-12)
    said, given, losses = run("given", 2**20, reduce_gradients="last")
    assert "gradients are reduced" not in said
    assert given == once
    assert losses == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("memory", "later", "kept"),
    [(2**40, 2**20, "last"), pytest.param(2**20, 2**40, "every", marks=pytest.mark.long)],
    ids=["last", "every"],
)
def test_a_resumed_run_and_its_repetition_keep_the_choice_on_their_mesh(run, runner, tmp_path, memory, later, kept):
    run("run", memory)
    said, _, _ = run("run", later, steps=STEPS + 1)
    words = {"last": "the last", "every": "every"}[kept]
    assert f"gradients are reduced with {words} micro-batch (as in the last session)" in said
    assert read_manifest(tmp_path / "run")["reduce_gradients"] == kept
    (said, _), *_ = runner.pool.call(
        train, RANKS, tmp_path / "run", later, "reproduce", "--from", f"{STEPS}", "--out", f"{tmp_path}/again"
    )
    assert f"gradients are reduced with {words} micro-batch (as in the last session)" in said
    # Sums of another mesh round differently anyway: the memory decides again.
    said, _, _ = run("run", later, steps=STEPS + 2, dp_shard=1, cp=2)
    assert "as in the last session" not in said
    assert read_manifest(tmp_path / "run")["reduce_gradients"] != kept
    # What the config says is no choice of Weft's, and is not kept.
    run("run", later, steps=STEPS + 3, dp_shard=1, cp=2, reduce_gradients=kept)
    assert "reduce_gradients" not in read_manifest(tmp_path / "run")
