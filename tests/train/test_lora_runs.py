"""Runs with an adapter: what is trained and saved, and from which base model."""

import json
import shutil

import pytest
import torch
from running import QUIET, assert_same_weights, losses, train, weights
from safetensors import safe_open

import weft
from weft.config.adapter import layer_of
from weft.errors import UserError


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the first test keeps a copy of the base model's run for the others."""
    return tmp_path_factory.mktemp("kept") / "base"


@pytest.fixture
def write(run_yaml, tmp_path, kept):
    """Writes runs of 4 steps with an adapter on `tmp_path/runs/base`, a run of one step that exists already."""
    common = {"data": {"validation": None}, "log": QUIET, "schedule": {"type": "constant", "warmup_steps": 0}}
    base = run_yaml("base.yaml", run={"name": "base"}, training={"steps": 1}, **common)
    if not kept.exists():
        assert train(base) == 0
        shutil.copytree(tmp_path / "runs" / "base", kept)
    shutil.copytree(kept, tmp_path / "runs" / "base", dirs_exist_ok=True)

    def write(name, adapter=None, **changes):
        sections = common | changes
        training = {"steps": 4, "batch_tokens": 512} | sections.pop("training", {})
        file = run_yaml(f"{name}.yaml", run={"name": name}, model=None, training=training, **sections)
        model = {"from": str(tmp_path / "runs" / "base")} | changes.get("model", {})
        with file.open("a") as text:
            text.write(
                f"\nmodel: {json.dumps(model)}\nadapter: {json.dumps({'r': 4, 'alpha': 8.0} | (adapter or {}))}\n"
            )
        return file

    return write


def saved_tensors(checkpoint):
    found = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def merged(run, scale=2.0):
    """The base model's weights plus the products of the adapter, by hand."""
    found, changed = weights(run), {}
    for name, value in found.items():
        if layer_of(name) is None:
            b, a = (found.get(name.removesuffix(".weight") + kind) for kind in (".lora_b", ".lora_a"))
            changed[name] = value if b is None else value + scale * b @ a
    return changed


def test_a_checkpoint_has_the_adapter_and_the_model_has_both(write, tmp_path):
    assert train(write("lora")) == 0
    run, base = tmp_path / "runs" / "lora", weights(tmp_path / "runs" / "base")
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    saved = saved_tensors(checkpoint)
    assert len(saved) == 4 * 2 * 2 * 7  # values, two moments and the step of A and B, of 7 layers in 2 blocks
    assert {name.rpartition(".lora_")[2].partition(".")[0] for name in saved} == {"a", "b"}
    model = weft.load_model(run)
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in base.items())
    tokens = torch.arange(40).view(2, 20)
    plain = weft.load_model(tmp_path / "runs" / "base")
    before = plain(tokens)
    plain.load_state_dict(merged(run))
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-5)
    assert (before - plain(tokens)).abs().max() > 0.01
    greedy = weft.Sampling(max_new_tokens=8, temperature=0.0)
    ids = [list(weft.Engine(one).submit([5, 6, 7], greedy)) for one in (model, plain)]
    assert [piece.token for piece in ids[0]] == [piece.token for piece in ids[1]]


@pytest.mark.parametrize(
    "adapter",
    [
        {"dropout": 0.1, "dora": True, "rslora": True, "quantize": "int8"},
        pytest.param({"init": "pissa"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_to_the_bit(write, tmp_path, adapter):
    assert train(write("straight", adapter)) == 0
    broken = write("broken", adapter)
    assert train(broken, "training.steps=2") == 0
    assert train(broken, "training.steps=4") == 0
    straight, broken = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"
    assert losses(straight) == losses(broken)
    assert_same_weights(straight, broken)


def test_a_run_says_how_much_it_trains(write, tmp_path, capsys):
    for name, adapter in (("plain", {"init": "pissa"}), ("small", {"quantize": "nf4"})):
        capsys.readouterr()
        assert train(write(name, adapter), "training.steps=1") == 0
        assert "167.4k parameters (9.3k trained)" in capsys.readouterr().err
    counts = [json.loads((tmp_path / "runs" / name / "manifest.json").read_text()) for name in ("plain", "small")]
    assert counts[0]["flops_per_token"] == counts[1]["flops_per_token"]


def test_accumulation_changes_nothing(write, tmp_path):
    for name, size in (("one", 8), ("many", 2)):
        training = {"dtype": "float64", "micro_batch_size": size}
        assert train(write(name, {"targets": ["q_proj", "down_proj"]}, training=training)) == 0
    assert_same_weights(tmp_path / "runs" / "one", tmp_path / "runs" / "many", within=1e-11)


def test_dora_and_pissa_begin_as_the_base_model(write, tmp_path):
    for adapter in ({"dora": True}, {"init": "pissa"}):
        file = write("new", adapter, optimizer={"type": "adamw", "lr": 1e-30, "weight_decay": 0.0})
        assert train(file, "training.steps=1", "--fresh") == 0
        base, new = (weft.load_model(tmp_path / "runs" / name) for name in ("base", "new"))
        tokens = torch.arange(40).view(2, 20)
        torch.testing.assert_close(base(tokens), new(tokens), rtol=0, atol=2e-6)
    values = new.state_dict()
    weight = base.get_parameter("layers.0.mlp.up_proj.weight").detach()
    a, b = (values[f"layers.0.mlp.up_proj.lora_{kind}"] for kind in "ab")
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(2.0 * b @ a, u[:, :4] * s[:4] @ v[:4], rtol=0, atol=1e-5)
    torch.testing.assert_close(a.norm(dim=1), (s[:4] / 2).sqrt(), rtol=1e-4, atol=0)
    loaded = weft.load_model(tmp_path / "runs" / "new", dtype=torch.bfloat16)
    a, b = (values[f"layers.0.mlp.up_proj.lora_{kind}0"] for kind in "ab")  # not rounded, as in training
    expected = (weight.bfloat16().float() - 2.0 * (b @ a)).bfloat16()
    assert torch.equal(loaded.get_parameter("layers.0.mlp.up_proj.weight"), expected)


def test_another_base_model_is_refused(write, tmp_path, capsys):
    file = write("lora")
    assert train(file, "training.steps=2") == 0
    assert train(tmp_path / "base.yaml", "training.steps=2", "checkpoint.keep_last=1", "checkpoint.every=1") == 0
    capsys.readouterr()
    assert train(file) == 2
    message = capsys.readouterr().err
    assert "not the weights that the adapter was trained on" in message
    assert "step-00000001" in message
    with pytest.raises(UserError, match=r"the base model of this adapter is not at .*base/checkpoints/step-00000001"):
        weft.load_model(tmp_path / "runs" / "lora")


def test_a_base_model_that_its_run_can_delete_is_a_warning(write, tmp_path, capsys):
    file, manifest = write("lora"), tmp_path / "runs" / "base" / "manifest.json"
    content = json.loads(manifest.read_text())
    for status, every, warned in (("finished", None, False), ("stopped", None, True), ("stopped", 1, False)):
        content["sessions"][-1]["status"] = status
        manifest.write_text(json.dumps(content))
        if every is not None:
            saved = tmp_path / "runs" / "base" / "config.yaml"
            saved.write_text(saved.read_text().replace("keep_last: 2", f"keep_last: 2\n  keep_every: {every}"))
        assert train(file, "training.steps=1", "--fresh") == 0
        said = capsys.readouterr().err
        assert ("runs/base is not finished and can delete this checkpoint" in said) == warned


def test_an_adapter_is_no_model_and_its_settings_stay(write, tmp_path, capsys):
    file = write("lora")
    assert train(file, "training.steps=1") == 0
    for override, message in (("adapter.alpha=16.0", "adapter.alpha: 16.0, but"), ("adapter=null", "only an adapter")):
        assert train(file, override, "--accept-changes") == 2
        assert message in capsys.readouterr().err
    assert train(file, "run.name=other", f"model.from={tmp_path / 'runs' / 'lora'}") == 2
    assert "weft merge" in capsys.readouterr().err
