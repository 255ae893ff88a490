"""Keys that are legal and have no effect, or that this machine refuses: each is a line that says what to do."""

import pytest
from config_cases import RUN, load, shows

from weft.config import warnings as module
from weft.config.mesh import MeshShape, least_ranks, mesh_shape
from weft.config.warnings import warnings


def told(*overrides, mesh=None, text=RUN):
    config = load(text, *overrides)
    return warnings(config, mesh or mesh_shape(config.parallel, least_ranks(config.parallel)), open_data=False)


def test_a_plain_run_has_none():
    assert told() == []
    assert told("parallel={pp: 2, dp_replicate: 2, pp_schedule: gpipe}") == []
    assert told("parallel.cp_method=ring", "parallel.cp=2") == []


def test_a_method_that_is_almost_a_hook(tmp_path, monkeypatch):
    (tmp_path / "hooks.py").write_text(
        "from weft.train.callbacks import Callback\n"
        "class Late(Callback):\n    def step(self, state): pass\n    def on_ended(self, state): pass\n"
        "    def helper(self): pass\n    def _ended(self): pass\n"
        "class Sure:\n    scalars = ('sure',)\n    def outputs(self, outputs, batch): pass\n    def steps(self): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert told("callbacks=[lr_monitor, {type: hooks:Late}]", "log.metrics=[{type: hooks:Sure}]") == [
        "callbacks[1] (hooks:Late): Weft does not call the method on_ended; did you mean ended?",
        "log.metrics[0] (hooks:Sure): Weft does not call the method steps; did you mean step?",
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["data.validation=null", "validation.tokens=64"],
            "validation.tokens: no effect without data.validation",
        ),
        (["data.validation=null", "validation.every=2"], "validation.every: no effect without"),
        (["data.validation=store"], "data.validation: store is training data ... weft data split"),
        (
            ["data.validation={a: ./store, b: heldout}"],
            "data.validation.a: ./store is training data ... weft data split",
        ),
        (
            ["data.validation={a: heldout, b: ./heldout}"],
            "data.validation.b: ./heldout is data.validation.a ... remove one",
        ),
        (
            ["parallel.pp_schedule=gpipe"],
            "parallel.pp_schedule: no effect, because parallel.pp is 1; remove the key, or set pp",
        ),
        (
            ["parallel.cp_method=ring"],
            "parallel.cp_method: no effect, because parallel.cp is 1; remove the key, or set cp",
        ),
        (
            ["parallel.reshard_after_forward=3"],
            "parallel.reshard_after_forward: 3 has no effect ... remove the key, or set dp_shard",
        ),
        (
            ["parallel.pp=2", "parallel.reduce_gradients=every"],
            "parallel.reduce_gradients: every ... a pipeline ... set last",
        ),
        (
            ["parallel.pp=2", "parallel.zero_stage=2"],
            "parallel.zero_stage: 2 ... every micro-batch ... set 1",
        ),
    ],
)
def test_keys_without_effect(overrides, said):
    (found,) = told(*overrides)
    assert shows(found, said)


def test_what_follows_from_the_number_of_ranks():
    shape = MeshShape(dp_shard=3)
    assert told("parallel.reshard_after_forward=3", mesh=shape) == []
    assert told("data.validation=null", "validation.every=2", "samples.prompts=[a]") == []  # samples too


@pytest.mark.parametrize("visible", [False, True])
def test_what_a_cpu_refuses(visible, monkeypatch):
    looked_for = module._gpu_visible
    monkeypatch.setattr(module, "_gpu_visible", lambda: visible)
    keys = [
        "training.dtype=auto",
        "training.fp8=true",
        "training.compile=true",
        "parallel.tp=2",
        "parallel.async_tp=true",
    ]
    said = "needs a GPU, but this machine has no visible GPU; remove the key to train on a CPU"
    assert told(*keys) == ([] if visible else [f"training.fp8: {said}", f"parallel.async_tp: {said}"])
    if visible:
        assert "training.fp8 is slow without training.compile" in told("training.dtype=auto", "training.fp8=true")[0]
        monkeypatch.setattr(module, "_gpu_visible", looked_for)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert len(told(*keys)) == 2


def test_check_prints_them(capsys):
    from weft.cli.main import main

    load(RUN)
    assert main(["config", "check", "run.yaml", "--no-data", "parallel.pp_schedule=gpipe"]) == 0
    assert "parallel.pp_schedule: no effect" in " ".join(capsys.readouterr().err.split())
