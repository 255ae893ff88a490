"""Runs that begin with the weights of a Hugging Face folder, on meshes whose ranks hold different parts of them."""

import pytest
import torch
from compare import compare
from matrix import MODELS, WITHIN, Case, mesh_name
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize(
    ("model", "mesh"),
    [pytest.param("dense", {"pp": 2}, marks=pytest.mark.long), ("tied", {"pp": 2, "tp": 2})],
    ids=str,
)
def test_a_mesh_begins_with_a_folders_weights(runner, tmp_path, model, mesh):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODELS[model])).save_pretrained(tmp_path / "folder")
    runs = [
        runner.run(
            Case(model, "plain", one),
            steps=2,
            name=f"folder-{model}-{mesh_name(one)}",
            model={"from": str(tmp_path / "folder")},
        )
        for one in ({}, mesh)
    ]
    difference = compare(*runs)
    assert difference.largest <= WITHIN, difference.wrong()
