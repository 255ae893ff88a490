"""The quickstart, on the standard library that runs this test, for a few seconds."""

import subprocess
import sys

import pytest

from weft.config.run import RunConfig


@pytest.mark.xdist_group("quickstart")
def test_from_the_standard_library_to_a_model_that_writes(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "weft", "quickstart", "--minutes", "0.05"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "gzip -9" in done.stdout
    assert "this model" in done.stdout
    assert "def " in done.stdout
    for verb in ("data train-tokenizer", "data pack", "train", "generate", "report"):
        assert f"$ weft {verb}" in done.stderr
    monkeypatch.chdir(tmp_path)
    assert RunConfig.load(tmp_path / "quickstart" / "run.yaml").training.steps >= 20
    held_out = (tmp_path / "quickstart" / "heldout.txt").read_text().splitlines()
    train = (tmp_path / "quickstart" / "train.txt").read_text().splitlines()
    assert not set(held_out) & set(train)
    assert 0.02 < len(held_out) / (len(train) + len(held_out)) < 0.09
