"""The host waits for the device once per step, or less often with `training.sync_every`."""

import host_reads
import pytest
from matrix import Case, write_run
from pool import Pool

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def reads(pool, folder, model, way="accumulation", **training):
    # float32, because experts in float64 take the slow reference, which loops over them on the host
    training = {"dtype": "float32", "grad_clip": 1.0, **training}
    sizes = {"batch_tokens": 2 * 32, "micro_batch_size": 1}  # an operation on the meta device takes a millisecond
    file = write_run(folder, Case(model, way), training=training | sizes, model={"num_hidden_layers": 2})
    (found,) = pool.call(host_reads.reads_of_steps, 1, file)
    return found


@pytest.mark.parametrize(
    ("recompute", "model"),
    [
        ("full", "moe"),
        *(
            pytest.param(*other, marks=pytest.mark.long)
            for other in (("none", "dense"), ("none", "moe"), ("full", "dense"))
        ),
    ],
)
def test_the_host_reads_once_per_step(pool, tmp_path, model, recompute):
    found = reads(pool, tmp_path, model, activation_checkpointing=recompute)
    assert [len(step) for step in found] == [1, 1, 1]
    # The loss, the norm and, of experts, five totals of their balance: in one copy.
    assert all(step == [f"_to_copy of ({7 if model == 'moe' else 2},)"] for step in found)


def test_the_host_reads_nothing_between_two_synchronizations(pool, tmp_path):
    found = reads(pool, tmp_path, "moe", sync_every=3)
    assert [len(step) for step in found] == [0, 0, 2]  # in the third, the numbers of the first two


@pytest.mark.gpu
@pytest.mark.parametrize("sync_every", [1, 4])
def test_a_gpu_makes_the_host_wait_once_per_step(pool, tmp_path, sync_every):
    """PyTorch's own warnings of operations that wait; the first step may allocate and load kernels."""
    file = write_run(
        tmp_path, Case("moe", "accumulation"), steps=8, training={"dtype": "bfloat16", "sync_every": sync_every}
    )
    (waits,) = pool.call(host_reads.waits_of_steps, 1, file)
    assert max(waits[1:]) <= 1
    assert sum(waits[1:]) <= 7 / sync_every + 2
