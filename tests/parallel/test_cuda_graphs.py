"""`training.compile: reduce-overhead`: which runs have CUDA graphs, what the compiler is asked for, and losses."""

import numpy as np
import pytest
import torch
from running import QUIET, losses, train
from torch._dynamo.utils import counters

from weft.config.mesh import ParallelSection
from weft.config.model import ModelSection
from weft.config.training import TrainingSection
from weft.models.build import build_model
from weft.parallel.apply import compiler_options
from weft.parallel.model_state import ModelPlan
from weft.train.auto_settings import warn_of_no_graphs

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("mode", "dtype", "device", "graphs"),
    [
        ("reduce-overhead", torch.bfloat16, "cuda", True),
        ("reduce-overhead", torch.bfloat16, "cpu", False),
        ("reduce-overhead", torch.float32, "cuda", False),  # `dtype: auto` on a GPU without bfloat16
        (True, torch.bfloat16, "cuda", False),
    ],
)
def test_the_compiler_is_asked_for_graphs_on_gpus_in_16_bits(mode, dtype, device, graphs):
    model = ModelSection(**SIZES)
    plan = ModelPlan(model, ParallelSection(), dtype=dtype, compile=mode)
    options = compiler_options(build_model(model).layers[0], plan, torch.device(device))
    assert options.get("triton.cudagraphs", False) is graphs


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"training": {"dtype": "float32"}}, "training.dtype: float32, but CUDA graphs"),
        ({"training": {"reduce_dtype": "bfloat16"}}, "training.reduce_dtype: bfloat16, but CUDA graphs"),
        ({"parallel": {"offload": "parameters"}}, "does not work with parallel.offload: parameters"),
        ({"parallel": {"tp": 2}}, "parallel.tp is 2; set training.compile: true, or tp: 1"),
        ({"parallel": {"pp": 2}}, "parallel.pp is 2"),
        ({"parallel": {"dp_shard": 2}}, "parallel.dp_shard is 2; set training.compile: true, or dp_replicate: -1"),
    ],
)
def test_runs_that_cannot_have_graphs_are_refused(run_yaml, capsys, sections, says):
    training = {"compile": "reduce-overhead", "dtype": "auto"} | sections.get("training", {})
    assert train(run_yaml(training=training, parallel=sections.get("parallel", {}))) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def test_a_gpu_that_takes_float32_is_told_that_there_are_no_graphs():
    settings = TrainingSection(compile="reduce-overhead", dtype="float32")
    assert "float32 on this GPU; set compile: true" in (warn_of_no_graphs(settings, torch.device("cuda")) or "")
    narrow = settings.model_copy(update={"dtype": "bfloat16"})
    assert warn_of_no_graphs(narrow, torch.device("cuda")) is None
    assert warn_of_no_graphs(settings, torch.device("cpu")) is None  # another warning says so


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_losses_are_those_without_graphs(run_yaml, tmp_path, checkpointing):
    found = {}
    for number, mode in enumerate((True, "reduce-overhead")):
        name = f"graphs-{checkpointing}-{number}"
        training = {"dtype": "bfloat16", "compile": mode, "micro_batch_size": 1, "determinism": "order"}
        training["activation_checkpointing"] = checkpointing
        file = run_yaml(f"{name}.yaml", run={"name": name}, training=training, log=QUIET)
        counters.clear()
        assert train(file) == 0
        assert counters["inductor"]["cudagraph_skips"] == 0  # else this would compare runs without graphs
        found[mode] = [loss for _, loss, _ in losses(tmp_path / "runs" / name)]
        torch._dynamo.reset()
    np.testing.assert_allclose(found["reduce-overhead"], found[True], rtol=1e-4)
