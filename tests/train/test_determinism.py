"""`training.determinism`: what torch is asked for, and that an operation without a deterministic kernel is named."""

import os

import pytest
import torch
from running import QUIET, losses, train

from weft.config.training import TrainingSection
from weft.train.auto_settings import EXACT_ENVIRONMENT, choose, kernels_of, prepare_environment

# It has no deterministic kernel in torch, on any device.
UNPOOL = """
import torch

def unpool():
    return torch.nn.functional.max_unpool1d(torch.rand(1, 2, 2), torch.tensor([[[0, 1], [0, 1]]]), 2)

class Unpool:
    def step(self, state):
        state.log({"exact": float(torch.are_deterministic_algorithms_enabled())})
        if state.step == 2:
            unpool()
"""
SHORT = {"training": {"steps": 3}, "schedule": {"warmup_steps": 1}, "data": {"validation": None}, "log": QUIET}


def test_cpus_are_exact_and_gpus_keep_the_order_unless_the_file_says_otherwise(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert choose(TrainingSection(), torch.device("cpu")).determinism == "exact"
    assert choose(TrainingSection(), torch.device("cuda")).determinism == "order"
    assert choose(TrainingSection(determinism="exact"), torch.device("cuda")).determinism == "exact"


def test_libraries_of_gpus_are_reported_before_they_start_and_what_the_user_set_stays(monkeypatch):
    for name in EXACT_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    prepare_environment(TrainingSection(determinism="order"))
    assert not EXACT_ENVIRONMENT.keys() & os.environ.keys()
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    prepare_environment(TrainingSection(determinism="exact"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")  # the two that torch accepts
    assert os.environ["NCCL_ALGO"] == "Tree"
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]


def test_settings_of_torch_hold_within_a_run_only():
    torch.use_deterministic_algorithms(False)
    with kernels_of(TrainingSection(determinism="exact")):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    with pytest.raises(RuntimeError, match="of another kind"), kernels_of(TrainingSection(determinism="exact")):
        raise RuntimeError("of another kind")
    assert not torch.are_deterministic_algorithms_enabled()
    with kernels_of(TrainingSection(determinism="order")):
        assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_kernel_is_named(run_yaml, tmp_path, monkeypatch, capsys):
    (tmp_path / "unpool_for_determinism.py").write_text(UNPOOL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    file = run_yaml(**SHORT, callbacks=["unpool_for_determinism:Unpool"])
    assert train(file) == 2  # exact is the default on CPUs
    said = capsys.readouterr().err
    assert "training.determinism: exact" in said
    assert "max_unpooling2d" in said
    assert "training.determinism: order" in said
    assert "Traceback" not in said
    assert not torch.are_deterministic_algorithms_enabled()

    assert train(file, "training.determinism=order", "run.name=order") == 0
    assert len(losses(tmp_path / "runs" / "order")) == 3
    assert "determinism: order" in (tmp_path / "runs" / "order" / "config.yaml").read_text()
