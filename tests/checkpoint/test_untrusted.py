"""Checkpoints of somebody else: they run no code, and no name in them leads out of their folder."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from signing import sign

import weft
from weft.cli.main import main
from weft.errors import UserError

MODEL = """
from pathlib import Path

import torch

Path("it-ran").touch()

class Net(torch.nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.table = torch.nn.Embedding(512, width)
        self.head = torch.nn.Linear(width, 512)

    def forward(self, tokens):
        return self.head(self.table(tokens))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_store) -> Path:
    folder = tmp_path_factory.mktemp("untrusted")
    config = {
        "run": {"name": "demo", "directory": str(folder)},
        "model": {"preset": "llama-tiny", "vocab_size": 512, "num_hidden_layers": 1},
        "data": {"train": str(tiny_store), "sequence_length": 16},
        "training": {"steps": 1, "batch_tokens": 32, "dtype": "float32", "threads": 1},
        "log": {"trackers": []},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder / "demo"


@pytest.fixture
def step(trained, tmp_path) -> Path:
    """The checkpoint of a copy of the run."""
    copy = shutil.copytree(trained, tmp_path / "copy")
    return next((copy / "checkpoints").iterdir())


def command(*words, cwd: Path, **environment) -> subprocess.CompletedProcess:
    """`weft` in a process of its own, in which no custom module is imported."""
    return forked.run(*words, cwd=cwd, **environment)


def test_custom_code_is_run_only_for_those_who_trained_with_it_or_say_so(tmp_path, tiny_store, tiny_tokenizer):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "net_for_trust.py").write_text(MODEL)
    config = {
        "run": {"name": "demo"},
        "model": {"type": "net_for_trust:Net"},
        "tokenizer": str(tiny_tokenizer),
        "data": {"train": str(tiny_store), "sequence_length": 16},
        "training": {"steps": 1, "batch_tokens": 32, "dtype": "float32", "threads": 1},
        "log": {"trackers": []},
    }
    (mine / "run.yaml").write_text(json.dumps(config))
    assert command("train", "run.yaml", cwd=mine).returncode == 0
    words = ("evaluate", "runs/demo", "--store", tiny_store, "--max-tokens", 64)
    assert command(*words, cwd=mine).returncode == 0  # trained with this class in this file

    shutil.copytree(mine / "runs", theirs / "runs")
    for verb in (words, ("reproduce", "runs/demo")):
        done = command(*verb, cwd=theirs)
        assert done.returncode == 2, done.stderr
        assert "model: net_for_trust:Net is custom code" in done.stderr
        assert "WEFT_TRUST_CODE=net_for_trust:Net" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (theirs / "it-ran").exists()
    assert command(*words, cwd=theirs, WEFT_TRUST_CODE="other:Net").returncode == 2
    assert command(*words, cwd=theirs, WEFT_TRUST_CODE="net_for_trust:Net").returncode == 0
    assert (theirs / "it-ran").exists()


def test_a_component_that_a_checkpoint_names_is_code_too(step, monkeypatch):
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    content = json.loads((step / "model.json").read_bytes())
    (step / "model.json").write_text(json.dumps(content | {"norm": "antigravity:Norm"}))
    sign(step)
    with pytest.raises(UserError, match=r"model\.norm: antigravity:Norm is custom code"):
        weft.load_model(step)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("name", ["../../../outside.safetensors", "/etc/hostname", "sub/x.safetensors"])
def test_names_in_the_index_stay_in_the_checkpoint(step, tmp_path, name):
    shutil.copy(next(step.glob("*.safetensors")), tmp_path / "outside.safetensors")  # it would load
    content = json.loads((step / "index.json").read_bytes())
    content["files"] = [name] * len(content["files"])
    (step / "index.json").write_text(json.dumps(content))
    sign(step)
    with pytest.raises(UserError, match="outside the checkpoint"):
        weft.load_model(step)


@pytest.mark.parametrize("name", ["../run.yaml", "/etc/hostname"])
def test_names_in_the_checksums_stay_in_the_checkpoint(step, name):
    content = json.loads((step / "checksums.json").read_bytes())
    content["files"][name] = {"sha256": "0" * 64, "bytes": 1}
    content["digest"] = hashlib.sha256(json.dumps(content["files"], sort_keys=True).encode()).hexdigest()
    (step / "checksums.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="path outside the checkpoint"):
        weft.load_model(step)


def test_a_file_that_is_a_link_out_of_the_checkpoint_is_refused(step, tmp_path):
    shard = next(step.glob("*.safetensors"))
    shutil.move(shard, tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")  # the same bytes
    with pytest.raises(UserError, match="symbolic link that leaves the checkpoint"):
        weft.load_model(step)
    shard.unlink()
    shard.symlink_to(shard.name)  # it leads to itself
    with pytest.raises(UserError, match=shard.name):
        weft.load_model(step)


@pytest.mark.parametrize(
    "change",
    [
        {"pieces": [[0, [], []]]},
        {"shape": [-1, 2]},
        {"pieces": [[99, [0], [1]]]},
        {"dtype": "nn"},  # a name of torch that is no dtype
        [],
    ],
)
def test_an_index_of_another_form_is_refused(step, change):
    content = json.loads((step / "index.json").read_bytes())
    name, entry = next((name, entry) for name, entry in content["tensors"].items() if len(entry["shape"]) == 2)
    content["tensors"][name] = entry | change if isinstance(change, dict) else change
    (step / "index.json").write_text(json.dumps(content))
    sign(step)
    with pytest.raises(UserError, match="not the index of a checkpoint"):
        weft.load_model(step)
