"""Whole runs of `model: {type: hf}`: against a loop by hand, on two ranks, resumed, exported, gone on from."""

import json
import shutil

import pytest
import torch
import transformers
from running import QUIET, assert_same_weights, losses, replaced, train
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import weft
from weft.cli.main import main
from weft.config.run import RunConfig
from weft.observe.console import Console
from weft.optim.schedules.cosine import Cosine
from weft.parallel.world import start_world
from weft.train.data import open_data

SIZES = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MIXTRAL = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 16}
OPT = SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "max_position_embeddings": 64}
SHORT = {
    "model": None,
    "data": {"validation": None},
    "training": {"steps": 4, "batch_tokens": 512, "micro_batch_size": 2},
    "schedule": {"warmup_steps": 1},
    "log": QUIET,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a small OPT and a small Mixtral, whose experts lie otherwise in memory than in the files."""
    root = tmp_path_factory.mktemp("hf")
    for name, config in (("opt", transformers.OPTConfig(**OPT)), ("mixtral", transformers.MixtralConfig(**MIXTRAL))):
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return root


@pytest.fixture
def hf_yaml(run_yaml, folders):
    """Writes a short run of one of the folders: `hf_yaml("opt", "name", model={...}, data=...) -> path`."""

    def write(model, name, model_keys=None, **changes):
        sections = SHORT | {k: SHORT[k] | v if isinstance(SHORT.get(k), dict) else v for k, v in changes.items()}
        file = run_yaml(f"{name}.yaml", run={"name": name}, **sections)
        return replaced(file, model={"type": "hf", "path": str(folders / model), **(model_keys or {})})

    return write


def by_hand(file) -> list[tuple[float, float]]:
    """Losses and gradient norms of transformers' own model, each document by itself, with PyTorch's AdamW."""
    config = RunConfig.load(file)
    data = open_data(config, start_world(config.parallel), Console(prints=False))
    model = AutoModelForCausalLM.from_pretrained(config.model.path).train()
    groups: dict[bool, list] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
        groups[not (name.endswith("bias") or kind.endswith("Norm"))].append(parameter)
    arguments = {key: config.optimizer.arguments[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(
        [{"params": groups[True]}, {"params": groups[False], "weight_decay": 0.0}], **arguments
    )
    schedule = Cosine(data.length.steps, **config.schedule.arguments)
    found = []
    for step, batch in zip(range(data.length.steps), data.source.iterate(0, data.length.steps, 0), strict=False):
        loss = 0.0
        for row in range(len(batch.tokens)):
            documents = torch.zeros_like(batch.tokens[row]) if batch.segments is None else batch.segments[row]
            for document in documents.unique():
                here = documents == document
                logits = model(batch.tokens[row, here].unsqueeze(0)).logits[0]
                each = F.cross_entropy(logits, batch.labels[row, here], reduction="none")
                loss = loss + (each * batch.weight[row, here]).sum() / batch.weight.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = arguments["lr"] * schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.parametrize("model", [pytest.param("opt", marks=pytest.mark.long), "mixtral"])
def test_a_run_is_the_loop_written_by_hand(hf_yaml, tmp_path, capsys, model):
    file = hf_yaml(model, "run", data={"document_attention": True})
    assert train(file) == 0
    said = capsys.readouterr().err
    assert (
        said.count("data parallel only; tensor, pipeline, context and expert parallelism need a built-in family") == 1
    )
    expected = by_hand(file)
    for (_, loss, norm), (their_loss, their_norm) in zip(losses(tmp_path / "runs" / "run"), expected, strict=True):
        assert loss == pytest.approx(their_loss, abs=2e-6)
        assert norm == pytest.approx(their_norm, rel=1e-5)


@pytest.mark.long
def test_the_same_numbers_otherwise(hf_yaml, tmp_path):
    ways = {
        "plain": ({}, 0.0),
        "checkpointed": ({"activation_checkpointing": "full"}, 1e-6),
        "selective": ({"activation_checkpointing": "selective"}, 1e-6),
        "budget": ({"activation_checkpointing": "budget-0.5"}, 1e-6),
        "bfloat16": ({"dtype": "bfloat16"}, 3e-3),
        "float64": ({"dtype": "float64"}, 2e-6),
    }
    found = {}
    for name, (training, _) in ways.items():
        assert train(hf_yaml("mixtral", name, training=training | {"steps": 2})) == 0
        found[name] = [loss for _, loss, _ in losses(tmp_path / "runs" / name)]
    for name, (_, close) in ways.items():
        assert found[name] == pytest.approx(found["plain"], abs=close), name


def test_a_run_goes_on_from_any_checkpoint_to_the_same_bits(hf_yaml, tmp_path):
    keep = {"checkpoint": {"every": 2, "keep_last": 9}}
    for name in ("straight", "broken"):
        assert train(hf_yaml("mixtral", name, **keep)) == 0
    straight, broken = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"
    shutil.rmtree(broken / "checkpoints" / "step-00000004")
    assert train(hf_yaml("mixtral", "broken", **keep)) == 0
    assert losses(broken) == losses(straight)
    assert_same_weights(broken, straight)
    assert {value.dtype for value in weft.load_model(broken).parameters()} == {torch.float32}


@pytest.mark.xdist_group("ranks")
def test_a_run_on_two_ranks_is_that_of_one_exported_generates_and_is_gone_on_from(
    ranks, hf_yaml, run_yaml, folders, tmp_path, capsys
):
    assert train(hf_yaml("mixtral", "plain", training={"steps": 2})) == 0
    ranks.run(hf_yaml("mixtral", "run", training={"steps": 2}), 2)
    run, out = tmp_path / "runs" / "run", tmp_path / "out"
    assert [loss for _, loss, _ in losses(run)] == pytest.approx(
        [loss for _, loss, _ in losses(tmp_path / "runs" / "plain")], abs=1e-6
    )
    assert main(["export", str(run), str(out), "--to", "hf"]) == 0
    model, theirs = weft.load_model(run), AutoModelForCausalLM.from_pretrained(out).eval()
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits = model(tokens)
        assert logits.shape == (2, 12, 512)
        assert torch.equal(logits, theirs(tokens).logits)
    assert len(AutoTokenizer.from_pretrained(out)) == 512
    # The files hold what transformers' own did: the same names, and config.json as it was.
    assert load_file(out / "model.safetensors").keys() == load_file(folders / "mixtral" / "model.safetensors").keys()
    assert json.loads((out / "config.json").read_text()) == json.loads((folders / "mixtral/config.json").read_text())

    capsys.readouterr()
    assert main(["generate", str(run), "Ka", "--max-new-tokens", "4", "--temperature", "0"]) == 0
    cached = capsys.readouterr().out
    assert main(["generate", str(run), "Ka", "--max-new-tokens", "4", "--temperature", "0", "--no-cache"]) == 0
    assert capsys.readouterr().out == cached

    # From a run: its weights, not the folder's; the folder is not needed any more.
    sections = SHORT | {"training": SHORT["training"] | {"steps": 1}, "optimizer": {"lr": 1e-12, "weight_decay": 0.0}}
    file = replaced(run_yaml("next.yaml", run={"name": "next"}, **sections), model={"from": str(run)})
    assert train(file) == 0
    assert_same_weights(run, tmp_path / "runs" / "next", within=1e-9)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"path": "nowhere"}, "model.path: nowhere: there is no such folder"),
        ({"path": None}, "model.path: required: the Hugging Face folder"),
        ({"pth": "x"}, "model.pth: unknown key; did you mean 'path'?"),
        ({"attn_implementation": "sdp"}, "model.attn_implementation: must be one of sdpa, eager"),
        ({"config": 3}, "model.config: must be a mapping, not 3"),
        ({"config": {"vocab_size": 100}}, "the model's embedding has 100 rows"),
        ({"config": {"max_position_embeddings": 32}}, "64 is more than the model's 32 positions"),
    ],
)
def test_mistakes_are_reported_before_anything_is_built(hf_yaml, capsys, keys, said):
    code = train(hf_yaml("opt", "run", keys))
    errors = capsys.readouterr().err
    assert code == 2
    assert said in errors
    assert len(errors.strip().splitlines()) == 1


def test_no_weights_and_pickled_weights_are_reported(hf_yaml, folders, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folders / "opt" / "config.json", bare)
    file = hf_yaml("opt", "run", {"path": str(bare)})
    assert train(file) == 2
    assert "no weights in this folder; set model.weights: false" in capsys.readouterr().err
    (bare / "pytorch_model.bin").write_bytes(b"")
    assert train(file) == 2
    said = capsys.readouterr().err
    assert "pickled" in said
    assert "model.weights: false" in said
    assert train(file, "model.weights=false", "training.steps=1") == 0


def test_what_a_built_in_family_would_give_is_said(hf_yaml, folders, tmp_path, capsys):
    config = transformers.LlamaConfig(**SIZES, intermediate_size=48)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    assert train(hf_yaml("opt", "run", {"path": str(tmp_path / "llama")}), "training.steps=1") == 0
    assert f"model: {{from: {tmp_path / 'llama'}}}" in capsys.readouterr().err
    run = replaced(hf_yaml("opt", "other"), model={"from": str(folders / "opt")})
    text = [line for line in run.read_text().splitlines() if '"type": "hf"' not in line]
    run.write_text("\n".join(text) + "\n")
    assert train(run) == 2
    said = capsys.readouterr().err
    assert "unknown architecture 'OPTForCausalLM'" in said
    assert "`model: {type: hf, path: ...}`" in said
