"""What `training.compile` compiles."""

import pytest
import torch
from running import QUIET, losses, train

from weft.kernels import attention, cross_entropy, masks


def test_equal_blocks_are_compiled_once_to_the_same_numbers(run_yaml, tmp_path, monkeypatch):
    """Blocks of one class, in bfloat16: their inputs are in float32, and so is the first one's."""
    graphs, compile = [], torch.compile

    def keep(graph, inputs, **_):
        graphs.append(graph)
        return graph.forward

    def counting(function, **given):
        return compile(function, backend=keep, dynamic=given.get("dynamic"))

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", counting)
    sections = {
        "model": {"preset": "llama-tiny", "vocab_size": 512, "num_hidden_layers": 3},
        "training": {"steps": 2, "dtype": "bfloat16", "compile": True},
        "schedule": {"type": "cosine", "warmup_steps": 0},
        "data": {"validation": None},
    }
    assert train(run_yaml(run={"name": "compiled"}, **sections, log=QUIET)) == 0
    attention = ("scaled_dot_product_attention", "blocked_attention")  # the second on some processors
    attending = [graph for graph in graphs if any(name in graph.code for name in attention)]
    assert len(attending) == 1
    assert train(run_yaml(run={"name": "plain"}, **sections, log=QUIET), "training.compile=false") == 0
    plain, compiled = (losses(tmp_path / "runs" / name) for name in ("plain", "compiled"))
    assert plain == compiled  # the graphs run as they are


@pytest.mark.xdist_group("compiled")
@pytest.mark.parametrize("test", ["first", "second"])
def test_no_test_gets_functions_that_an_earlier_one_compiled(monkeypatch, test):
    """They keep the backend with which they were made: after a test with Inductor, the blocks above were traced, but
    the loss was compiled, and the gradient norm differed by 3e-8.
    """
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: asked.append(function) or function)
    for function in (cross_entropy._normalize, cross_entropy._differentiate):
        cross_entropy._compiled(function)
    attention._compiled_flex()
    masks._compiled_create_block_mask()
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("compiler", "why"), [("/no/g++", ""), ("false", ""), ("", ""), ("./g++", " (g++: no license)")]
)
def test_a_machine_without_a_compiler_is_named_in_one_line(run_yaml, monkeypatch, capfd, tmp_path, compiler, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g++").write_text("#!/bin/sh\necho g++: looking for a license >&2\necho g++: no license >&2\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("CXX", compiler)
    assert train(run_yaml(training={"steps": 9, "compile": True}, data={"validation": None}, log=QUIET)) == 2
    said = capfd.readouterr().err
    assert f"training.compile: CXX={compiler} is no C++ compiler that works{why}; install g++, or set" in said
    assert "Traceback" not in said
