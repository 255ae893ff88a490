"""`--to stablehlo`, `--to tvm` and `--to executorch`, run by XLA, TVM and ExecuTorch in environments of their own."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

import weft
from weft.cli.main import main
from weft.errors import UserError

HERE = Path(__file__).parent
PACKAGES = {"stablehlo": "torchax", "tvm": "tvm", "executorch": "executorch"}
# Rotary and learned positions, sliding windows and soft-caps, norms of queries, parallel residuals, biases, experts.
FAMILIES = ("Llama", "Gemma2", "Qwen3", "GPT2", "GPTNeoX", "Mixtral")
CASES = [*((target, family) for target in PACKAGES for family in FAMILIES), ("stablehlo", "GptOss")]


@pytest.mark.export
@pytest.mark.parametrize(("target", "family"), CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path, environment, target, family):
    folders = [HERE.parents[1] / "src", HERE, HERE.parent, HERE.parent / "checkpoint", HERE.parent / "models"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [environment(target), str(HERE / "graph_tools.py"), target, str(tmp_path), family]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("target", PACKAGES)
def test_a_missing_package_is_named(tmp_path, hf_folder, target):
    if importlib.util.find_spec(PACKAGES[target]):
        pytest.skip(f"{PACKAGES[target]} is installed")
    with pytest.raises(UserError, match=rf"pip install 'weft-train\[{target}\]'"):
        weft.export_model(hf_folder, tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


def test_wrong_options(tmp_path, hf_folder, capsys):
    words = {"stablehlo": ("--platform", "gpu"), "executorch": ("--batch", "0")}
    for target, (flag, value) in words.items():
        assert main(["export", str(hf_folder), str(tmp_path / "out"), "--to", target, flag, value]) == 2
        assert f"{flag} {value}: " in capsys.readouterr().err
