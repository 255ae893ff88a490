"""A teacher of another architecture, which has an adapter, says on a mesh what it says in one process."""

import json

import pytest
from compare import compare
from matrix import LAYERS, WITHIN, Case
from pool import RanksFailed


def train(runner, name, mesh, teacher, layers=LAYERS):
    """Steps beside a teacher."""
    objective = {"type": "objective_parts:Kept", "source": str(teacher.path)}
    return runner.run(Case("dense", "kept", mesh, layers), name=name, objective=objective)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("mesh", [{"pp": 2}, pytest.param({"pp": 2, "cp": 2}, marks=pytest.mark.long)], ids=str)
def test_a_teacher_on_a_mesh_is_that_of_one_process(runner, mesh):
    teacher = runner.reference(Case("gqa", "kept_lora", layers=2))
    one = train(runner, "taught", {}, teacher, layers=2)
    assert json.loads((one.path / "manifest.json").read_text())["frozen_models"]["kept"]["path"].startswith(
        str(teacher.path)
    )
    assert abs(one.metrics["kept"] - runner.reference(Case("dense", "kept", layers=2)).metrics["kept"]).max() > 0.01
    difference = compare(one, train(runner, "taught-on-a-mesh", mesh, teacher, layers=2))
    assert difference.largest <= WITHIN, difference.wrong()


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_a_teacher_on_further_meshes(runner, mesh):
    teacher = runner.reference(Case("moe", "kept_dora"))
    one = train(runner, "taught-by-experts", {}, teacher)
    difference = compare(one, train(runner, "taught-by-experts-on-a-mesh", mesh, teacher))
    assert difference.largest <= WITHIN, difference.wrong()


@pytest.mark.matrix
def test_a_teacher_that_does_not_fit_the_mesh_is_refused(runner):
    teacher = runner.reference(Case("two_groups", "plain"), steps=1)
    with pytest.raises(
        RanksFailed, match=r"objective\.source: .* does not fit the mesh: .* set parallel\.cp_method: all_gather"
    ):
        train(runner, "refused", {"cp": 2, "tp": 2}, teacher)
