"""docs/plugins.md is true: its files are installed as a package, and its commands run."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft import plugins

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


def install(folder: Path) -> None:
    """What `pip install ./my_package` leaves: the package, and a .dist-info with its entry points."""
    project = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, re.S)[1])["project"]
    points = "\n".join(f"{name} = {value}" for name, value in project["entry-points"]["weft.plugins"].items())
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    assert (project["name"], project["version"]) == ("my-package", "1.0")
    (info / "entry_points.txt").write_text(f"[weft.plugins]\n{points}\n")
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    for name, text in zip(("count", "shapes", "arrays"), re.findall(r"```python\n(.*?)```", PAGE, re.S), strict=True):
        (folder / "my_package" / f"{name}.py").write_text(text)


def test_the_pages_export_target_runs(tmp_path, monkeypatch):
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    model.save_pretrained(tmp_path / "hf")
    plugins._installed.cache_clear()
    assert weft.export_model(tmp_path / "hf", tmp_path / "table", to="shapes", separator=",") == "12 tensors"
    assert weft.export_model(tmp_path / "hf", tmp_path / "arrays", to="arrays") == "12 arrays"
    for name, tensor in model.state_dict().items():
        assert np.array_equal(np.load(tmp_path / "arrays" / f"{name}.npy"), tensor.numpy())
    plugins._installed.cache_clear()
    lines = (tmp_path / "table").read_text().splitlines()
    assert {line.split(",")[0] for line in lines} == set(model.state_dict())


def test_the_pages_verb_runs(tmp_path):
    install(tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    def weft(*arguments):
        command = [sys.executable, "-m", "weft", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)

    assert weft("count", "abc").stdout == "3\n"
    assert weft("data", "count", "abc").stdout == "3\n"
    done = weft("count", "a1")
    assert done.returncode == 2
    assert "'a1'" in done.stderr
    assert "letters only" in done.stderr
