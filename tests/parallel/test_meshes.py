"""The same run, whatever the ranks and the micro-batches: equal losses, gradients and weights."""

import pytest
from running import QUIET, assert_same_weights, finish, losses, start, train

DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


@pytest.fixture
def same_run(run_yaml, tmp_path):
    """Writes runs of 6 steps in float64 that differ in nothing but what is asked for."""

    def write(name, *, sequences=16, micro=4, model=None, parallel=None):
        file = run_yaml(
            f"{name}.yaml",
            run={"name": name},
            model=model or {},
            training={"steps": 6, "batch_tokens": sequences * 64, "micro_batch_size": micro, "dtype": "float64"},
            schedule={"warmup_steps": 2},
            parallel=parallel or {},
            validation={"every": 3, "tokens": 640},
            checkpoint={"every": 6},
            log=QUIET,
        )
        return file, tmp_path / "runs" / name

    return write


def assert_equal_runs(one, other):
    assert len(losses(one)) == 6
    assert [step for step, *_ in losses(one)] == [step for step, *_ in losses(other)]
    for (_, loss, norm), (_, other_loss, other_norm) in zip(losses(one), losses(other), strict=True):
        assert loss == pytest.approx(other_loss, rel=0, abs=1e-9)
        assert norm == pytest.approx(other_norm, rel=0, abs=1e-9)
    assert_same_weights(one, other, within=1e-9)


@pytest.mark.parametrize(
    ("sequences", "micro", "parallel"),
    [
        pytest.param(16, 4, {"dp_shard": 4}, id="4 shards"),
        # 6 sequences on 4 ranks: 2, 2, 2 and none.
        pytest.param(6, 2, {"dp_replicate": 2, "dp_shard": 2}, id="2 copies of 2 shards, uneven batch"),
    ],
)
def test_four_ranks_are_one_process(same_run, tmp_path, sequences, micro, parallel):
    alone, alone_run = same_run("alone", sequences=sequences, micro=micro, model=DROPOUT)
    four, four_run = same_run("four", sequences=sequences, micro=micro, model=DROPOUT, parallel=parallel)
    process = start(four, "--nproc", 4, cwd=tmp_path)
    assert train(alone) == 0
    code, errors = finish(process)
    assert code == 0, errors
    assert_equal_runs(alone_run, four_run)


def test_micro_batches_add_up_to_the_batch(same_run):
    whole, whole_run = same_run("whole", micro=16)
    single, single_run = same_run("single", micro=1)
    assert train(whole) == train(single) == 0
    assert_equal_runs(whole_run, single_run)
