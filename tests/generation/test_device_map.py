"""Layers on several devices and in host memory, against the same model on one device."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

import weft
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.parallel.memory.device_map import plan_layers

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from checkpoint_cases import write

SHAPE = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 128, "initializer_range": 0.3, "sliding_window": 9, "sliding_window_pattern": 2,
}  # fmt: skip
LAYER = (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) * 4  # bytes
OUTSIDE = (2 * 60 * 16 + 16) * 4
PROMPTS = [[5], list(range(40)), [7, 8, 9]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device-map") / "run"
    section = ModelSection(**SHAPE)
    model = build_model(section)
    initialize(model, seed=3)
    write(folder, model, None, architecture=section.model_dump(mode="json", by_alias=True))
    yield folder
    shutil.rmtree(folder)


def plan(**budgets):
    with torch.device("meta"):
        return plan_layers(build_model(ModelSection(**SHAPE)), {k.replace("_", ":"): v for k, v in budgets.items()})


def test_layers_fill_the_devices_in_their_order():
    assert plan(a_0=OUTSIDE + 5 * LAYER) == ["a:0"] * 5
    assert plan(a_0=OUTSIDE + 2 * LAYER, a_1=9 * LAYER) == ["a:0"] * 2 + ["a:1"] * 3
    # copies of two layers need space on the first device
    assert plan(a_0=OUTSIDE + 4 * LAYER, a_1=LAYER, cpu=2 * LAYER) == ["a:0"] * 4 + ["a:1"]
    assert plan(a_0=OUTSIDE + 3 * LAYER, a_1=LAYER, cpu=3 * LAYER) == ["a:0", "a:1", "cpu", "cpu", "cpu"]


def test_weights_that_the_devices_together_do_not_hold():
    for budgets in ({"a_0": OUTSIDE + LAYER, "cpu": 9 * LAYER}, {"a_0": OUTSIDE + 2 * LAYER, "cpu": 4 * LAYER}):
        with pytest.raises(UserError, match=r"weights need 51.9 kB, of which 25.41 kB on a:0, but a:0 has .*, cpu has"):
            plan(**budgets)
    with pytest.raises(UserError, match="no device besides the host"):
        plan(cpu=1e9)


def check(run, budgets, on_host):
    plain, mapped = weft.load_model(run), weft.load_model(run, device_map=budgets)
    device = next(mapped.parameters()).device
    assert sum(p.device.type == "cpu" for p in mapped.layers.parameters()) >= on_host
    engine = weft.Engine(mapped)
    for settings in ({"temperature": 0}, {"temperature": 0.8, "seed": 2}):
        streams = [engine.submit(prompt, weft.Sampling(8, **settings)) for prompt in PROMPTS]
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            wanted = weft.generate(plain, prompt, max_new_tokens=8, ignore_eos=True, **settings)
            assert [piece.token for piece in stream] == wanted
    tokens = torch.tensor([PROMPTS[1]])
    torch.testing.assert_close(mapped(tokens.to(device)).cpu(), plain(tokens), atol=1e-4, rtol=1e-4)
    assert {name: p.shape for name, p in mapped.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}


def test_a_model_on_several_devices_generates_the_same(run):
    """Names of the CPU stand for devices: budgets are followed, and layers on "cpu" are copied."""
    check(run, {"cpu:0": OUTSIDE + 3 * LAYER, "cpu:1": LAYER, "cpu": 3 * LAYER}, 3)


@pytest.mark.gpu
def test_layers_on_a_gpu_and_in_host_memory(run):
    check(run, {"cuda:0": OUTSIDE + 3 * LAYER, "cpu": 4 * LAYER}, 4)
    check(run, "auto", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_auto_needs_a_gpu(run):
    with pytest.raises(UserError, match="no GPU"):
        weft.load_model(run, device_map="auto")
