"""On every kind of mesh, the files of asynchronous checkpoints are those of synchronous ones. `make chaos`."""

import pytest
from same_files import equal_files

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("ranks")]
MESHES = [
    {"pp": 2},
    {"tp": 2},
    {"ep": 2, "dp_shard": 2},
    {"dp_replicate": 2, "dp_shard": 1},
    {"dp_shard": 2, "offload": "optimizer"},
    {"dp_shard": 2, "offload": "parameters"},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_async_saves_are_those_of_sync_saves(run_yaml, tmp_path, ranks, mesh):
    model = {"model": {"moe": {"num_experts": 4, "num_experts_per_tok": 2}}} if "ep" in mesh else {}
    changes = {"data": {"validation": None}, "parallel": mesh} | model
    for mode in ("sync", "async"):
        training = {"steps": 6, "batch_tokens": 128, "micro_batch_size": 1}
        checkpoint = {"every": 1, "keep_last": 9, "mode": mode}
        ranks.run(run_yaml(run={"name": mode}, training=training, checkpoint=checkpoint, **changes), 2)
    runs = tmp_path / "runs"
    assert equal_files(runs / "sync" / "checkpoints", runs / "async" / "checkpoints") >= 6 * 6
