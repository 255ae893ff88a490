"""Initial weights are a function of the seed and of names: the same on every mesh, however unevenly it cuts them."""

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from weft.config.run import RunConfig
from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.parallel.world import start_world
from weft.train.build import build

# 4 ranks share 515 words, 3 key-value heads of 6 and 11 experts in parts of different sizes; norms begin at 1.
MODEL = {
    "preset": None, "vocab_size": 515, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "intermediate_size": 42, "attention_bias": True, "initialization": "scaled",
    "moe": {"num_experts": 11, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "correction_bias": True},
}  # fmt: skip
EVEN = {**MODEL, "vocab_size": 516, "num_key_value_heads": 2} | {"moe": MODEL["moe"] | {"num_experts": 12}}
MESHES = [
    ({}, MODEL),
    ({"dp_shard": 4, "offload": "parameters"}, MODEL),
    ({"dp_shard": 4, "ep": 2}, EVEN),
]
LONG = [  # of which other tests compare runs
    ({"dp_shard": 2}, MODEL),
    ({"dp_shard": 2, "tp": 2}, EVEN),
    ({"pp": 2, "dp_shard": 2}, EVEN),
]


def ranks_of(mesh: dict) -> int:
    ranks = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "tp"):
        ranks *= mesh.get(axis, 1)
    return ranks


def whole_weights(file: Path) -> dict[str, torch.Tensor]:
    """On a rank: what it has of the model's parameters and buffers, put together from all ranks."""
    config = RunConfig.load(file)
    world = start_world(config.parallel)
    model, _ = build(config, world)
    found = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }
    world.close()
    return found


def far_parts(file: Path, ranks: int, rank: int) -> dict[str, torch.Tensor]:
    """As one of many ranks that are not there: its own parts."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    config = RunConfig.load(file)
    model, _ = build(config, start_world(config.parallel))
    return {name: value.to_local().detach().clone() for name, value in model.named_parameters()}


def alone(file: Path) -> dict[str, torch.Tensor]:
    config = RunConfig.load(file)
    model = build_model(config.model)
    initialize(model, config.run.seed)
    return model.state_dict()


@pytest.fixture
def write(run_yaml):
    def write(mesh, model):
        training = {"steps": 1, "batch_tokens": 64 * 64, "micro_batch_size": 1}
        data = {"validation": None, "sequence_length": 64}
        parallel, schedule = {"dp_shard": 1} | mesh, {"warmup_steps": 0}
        return run_yaml("run.yaml", model=model, parallel=parallel, training=training, data=data, schedule=schedule)

    return write


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        *(pytest.param(mesh, model, id=str(mesh)) for mesh, model in MESHES),
        *(pytest.param(mesh, model, id=str(mesh), marks=pytest.mark.long) for mesh, model in LONG),
    ],
)
def test_every_mesh_begins_with_the_weights_of_one_process(runner, write, mesh, model):
    file = write(mesh, model)
    expected, seen = alone(file), set()
    for found in runner.pool.call(whole_weights, ranks_of(mesh), file):
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name
        seen |= found.keys()
    assert seen == expected.keys()


@pytest.mark.xdist_group("ranks")
def test_a_rank_of_64_has_its_part_of_them(runner, write):
    file = write({"dp_shard": 64}, MODEL)
    expected = alone(file)
    for rank in (0, 37, 63):
        (found,) = runner.pool.call(far_parts, 1, file, 64, rank)
        for name, value in found.items():
            parts = expected[name].chunk(64)
            own = parts[rank] if rank < len(parts) else expected[name][:0]
            assert torch.equal(value, own), name
