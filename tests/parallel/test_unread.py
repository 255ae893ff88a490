"""Stages of a pipeline that need nothing of the data do not read them."""

from types import SimpleNamespace

import numpy as np
import pytest

from weft.config.mesh import MeshShape
from weft.config.run import RunConfig
from weft.data.sequences.placeholder import PlaceholderDataset
from weft.train.data import needs_sequences, open_train


class World:
    def __init__(self, stage: int, pp: int):
        self.shape, self.stage = MeshShape(pp=pp), stage

    def axis_rank(self, axis: str) -> int:
        return self.stage


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, False, False, True]),
        ({"parallel": {"pp": 4, "pp_schedule": "interleaved_1f1b"}}, [True, False, False, True]),
        ({"parallel": {"pp": 4, "pp_schedule": "zbv_zero_bubble"}}, [True, False, False, False]),
        ({"data": {"document_attention": True}}, [True] * 4),
        ({"model": {"moe": {"num_experts": 4, "num_experts_per_tok": 2}}}, [True] * 4),
    ],
)
def test_only_ends_read_rows(run_yaml, changes, expected):
    model = {"num_hidden_layers": 8} | changes.pop("model", {})
    training = {"steps": 9, "batch_tokens": 64 * 16, "micro_batch_size": 1}
    file = run_yaml("run.yaml", **{"parallel": {"pp": 4}} | changes, model=model, training=training)
    config = RunConfig.load(file)
    train, _ = open_train(config)
    assert [needs_sequences(train, config, World(stage, 4)) for stage in range(4)] == expected
    assert needs_sequences(train, config, SimpleNamespace(shape=MeshShape()))


def test_what_is_not_read_has_the_shape_of_what_is(run_yaml):
    config = RunConfig.load(run_yaml("run.yaml"))
    train, _ = open_train(config)
    unread, indices = PlaceholderDataset(train, config.data.sequence_length), np.array([3, 0])
    one, other = train.read(indices), unread.read(indices)
    assert len(unread) == len(train)
    for name, part in other.items():
        assert part.shape == one[name].shape
        assert part.dtype == one[name].dtype
    assert (other["positions"] == one["positions"]).all()
