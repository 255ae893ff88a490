"""Raw data are packed once for all ranks, which train on them as one process does."""

# ruff: noqa: F811 (fixtures of another file)
import subprocess
import sys

import pytest
from running import losses, train
from test_raw_data import alpaca, cache, raw_yaml  # noqa: F401


@pytest.mark.matrix
def test_ranks_train_on_raw_data_as_one_process_does(raw_yaml, alpaca, tmp_path, cache):
    assert train(raw_yaml("one.yaml", train=str(alpaca))) == 0
    command = [sys.executable, "-m", "weft", "train", str(raw_yaml("two.yaml", train=str(alpaca))), "--nproc", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("records: alpaca") == 1  # once, by the launcher
    for ours, expected in zip(losses(tmp_path / "runs" / "two"), losses(tmp_path / "runs" / "one"), strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
