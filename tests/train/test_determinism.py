"""`training.determinism`: what torch is asked for, and that an operation without a deterministic kernel is named."""

import json
import os
import subprocess
import sys

import pytest
import torch
from running import QUIET, losses, train

from weft.config.run import RunConfig
from weft.config.training import TrainingSection
from weft.train.auto_settings import (
    ALLOCATOR,
    EXACT_ENVIRONMENT,
    GPU_ENVIRONMENT,
    choose,
    kernels_of,
    prepare_environment,
)

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


def config(run_yaml, determinism: str, **parallel) -> RunConfig:
    return RunConfig.load(run_yaml(training={"determinism": determinism}, parallel=parallel))


@pytest.fixture
def clean(monkeypatch):
    """The environment variables without those of GPUs; at the end, as they were."""
    names = (*EXACT_ENVIRONMENT, *GPU_ENVIRONMENT, *ALLOCATOR, "TORCH_NCCL_HIGH_PRIORITY", "NCCL_NVLS_ENABLE")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return names


def test_libraries_of_gpus_are_prepared_before_they_start_and_what_the_user_set_stays(run_yaml, monkeypatch, clean):
    assert prepare_environment(config(run_yaml, "order"), gpu=False) == []
    assert not set(clean) & os.environ.keys()
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    (line,) = prepare_environment(config(run_yaml, "exact"), gpu=False)
    assert line.startswith("NCCL_ALGO=Tree of the environment is used")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")  # the two that torch accepts
    assert os.environ["NCCL_ALGO"] == "Tree"


def test_gpus_get_expandable_segments_and_the_settings_of_nccl(run_yaml, monkeypatch, clean):
    asked = config(run_yaml, "order", nccl={"NCCL_NVLS_ENABLE": 0})
    assert prepare_environment(asked, gpu=True) == []
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    assert "TORCH_NCCL_HIGH_PRIORITY" not in os.environ  # the given mapping replaces the default
    assert prepare_environment(asked, gpu=True) == []  # a second run in the process
    assert prepare_environment(config(run_yaml, "order"), gpu=True) == []
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "1"


def test_a_setting_of_nccl_goes_before_determinism_and_the_log_says_so(run_yaml, clean):
    (line,) = prepare_environment(config(run_yaml, "exact", nccl={"NCCL_ALGO": "Ring"}), gpu=True)
    assert line.startswith("parallel.nccl: NCCL_ALGO=Ring is used")
    assert os.environ["NCCL_ALGO"] == "Ring"


def test_an_allocator_that_the_user_has_set_by_either_name_stays_and_the_log_says_so(run_yaml, monkeypatch, clean):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:256")
    (line,) = prepare_environment(config(run_yaml, "order"), gpu=True)
    assert line == (
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:256 of the environment is used; without it, Weft would set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_the_manifest_has_these_variables_and_no_others(run_yaml, tmp_path, monkeypatch, clean):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("NCCL_COMM_ID", "secret:1")
    short = SHORT | {"training": {"steps": 3, "determinism": "exact"}}
    file = run_yaml(**short, run={"name": "run"}, parallel={"nccl": {"NCCL_NVLS_ENABLE": 0}})
    assert train(file) == 0
    manifest = json.loads((tmp_path / "runs" / "run" / "manifest.json").read_text())
    assert manifest["environment"] == EXACT_ENVIRONMENT | {"NCCL_NVLS_ENABLE": "1"}


def test_names_that_are_not_nccl_s_are_refused(run_yaml, capsys):
    assert train(run_yaml(parallel={"nccl": {"LD_PRELOAD": "x.so"}})) == 2
    assert "parallel.nccl" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_allocator_of_a_gpu_takes_the_setting(run_yaml, clean):
    program = """
import sys, torch
from weft.config.run import RunConfig
from weft.train.auto_settings import prepare_environment
prepare_environment(RunConfig.load(sys.argv[1]))
kept = torch.ones(1 << 20, device="cuda")
assert all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
"""
    file = str(run_yaml(training={"determinism": "order"}))
    subprocess.run([sys.executable, "-c", program, file], check=True)


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
