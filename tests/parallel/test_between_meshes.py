"""A checkpoint of one mesh goes on on any other, as if there had been no other mesh."""

import pytest
from matrix import LAYERS, WITHIN, mesh_name, unknown

# Checkpoints from mesh to mesh: a run makes a step on each, and goes on from there on the next.
JOURNEYS = [
    ("dense", [{"dp_shard": 4}, {}, {"dp_replicate": 2, "dp_shard": 2}]),
    ("moe", [{"pp": 2, "tp": 2}, {"dp_shard": 2}, {"cp": 2, "ep": 2}, {}]),
    ("tied", [{"pp": 4}, {"dp_shard": 2, "tp": 2}, {}, {"pp": 2, "cp": 2}, {"tp": 4}]),
    (
        "gqa",
        [{"pp": 2, "pp_schedule": "dualpipev"}, {"cp": 4}, {"pp": 2, "pp_schedule": "interleaved_1f1b"}, {"tp": 2}],
    ),
    ("deepseek_v3", [{"dp_shard": 4, "ep": 4}, {"tp": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}, {"pp": 2}]),
    ("gpt_oss", [{}, {"dp_shard": 2, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}, {"dp_shard": 4}]),
    ("few_experts", [{"dp_shard": 8, "ep": 2}, {}, {"dp_shard": 8}, {"dp_shard": 2, "tp": 2, "ep": 2}]),
]


def journey(number, model, meshes):
    """A row of the table; `make test` takes the second, and `make test-long` the first."""
    marks = [pytest.mark.xdist_group("ranks")] if number < 2 else [pytest.mark.matrix]
    marks += [pytest.mark.long] if number == 0 else []
    reasons = [reason for mesh in meshes if (reason := unknown(mesh))]
    marks += [pytest.mark.skip(reason=f"there is no {reasons[0]}")] if reasons else []
    return pytest.param(
        model, meshes, 2 if number < 2 else LAYERS, id=f"{model}-{'-'.join(map(mesh_name, meshes))}", marks=marks
    )


@pytest.mark.parametrize(("model", "meshes", "layers"), [journey(number, *row) for number, row in enumerate(JOURNEYS)])
def test_a_run_goes_on_on_another_mesh(runner, model, meshes, layers):
    difference = runner.travel(model, meshes, layers)
    assert difference.largest <= WITHIN, difference.wrong()
