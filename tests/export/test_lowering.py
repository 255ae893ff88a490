"""Custom components that `torch.export` or a tool's compiler cannot handle: one line names the cause."""

import json
import sys
from pathlib import Path

import pytest

import weft
from weft.cli.main import main

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from signing import sign

ACTIVATIONS = """
import torch


class Branches:
    def __call__(self, x):
        return x if x.sum() > 0 else -x


class Bessel:
    def __call__(self, x):
        return torch.special.bessel_j0(x)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Branches", "torch.export cannot capture this model with hidden_act: my_activations:Branches ("),
        pytest.param("Bessel", "--to onnx cannot compile this model (ConversionError: ", marks=pytest.mark.long),
    ],
)
def test_components_that_a_target_cannot_hold(tmp_path, hf_folder, monkeypatch, capsys, name, said):
    (tmp_path / "my_activations.py").write_text(ACTIVATIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WEFT_TRUST_CODE", "1")
    weft.import_model(hf_folder, tmp_path / "model")
    section = json.loads((tmp_path / "model/model.json").read_text())
    (tmp_path / "model/model.json").write_text(json.dumps(section | {"hidden_act": f"my_activations:{name}"}))
    sign(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), "--to", "onnx"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    monkeypatch.delitem(sys.modules, "my_activations")
