"""Runs that start with an adapter of PEFT or of another run, on meshes whose ranks hold different parts of it."""

import pytest
from compare import compare
from matrix import WITHIN, Case, mesh_name

import weft

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize(
    ("model", "way", "mesh"),
    [
        ("dense", "lora", {"pp": 2}),
        pytest.param("deepseek_v3", "lora_experts", {"dp_shard": 2, "tp": 2, "ep": 2}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_a_mesh_begins_with_an_adapter(runner, tmp_path, model, way, mesh):
    source = runner.reference(Case(model, way, layers=2), steps=2).path
    if way == "lora":
        weft.export_model(source, tmp_path / "peft", to="peft")
        source = tmp_path / "peft"
    runs = [
        runner.run(
            Case(model, way, one, 2), steps=2, name=f"from-{model}-{mesh_name(one)}", adapter={"from": str(source)}
        )
        for one in ({}, mesh)
    ]
    difference = compare(*runs)
    assert difference.largest <= WITHIN, difference.wrong()
