"""Runs on preferences: the first loss, held-out margins, resuming, the recipes, and `weft evaluate` on their models."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from running import QUIET, assert_same_weights, losses, metrics, train

import weft
from weft.cli.main import main
from weft.config.run import RunConfig
from weft.errors import UserError

ROOT = Path(__file__).parents[2]
GOOD, BAD = ["Kalo mi.", "Ren sta tu.", "El vo shi pra."], ["Zx zx zx.", "Zx?", "Mi zx zx tu zx."]


def records(numbers):
    """Good answers have words, bad ones have zx."""
    return [{"prompt": f"Vo shi {n}?", "chosen": GOOD[n % 3], "rejected": BAD[n // 3 % 3]} for n in numbers]


@pytest.fixture
def prefs(tmp_path, monkeypatch):
    """A cache of the test's own, and files with records: prefs.jsonl and held-out.jsonl."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    for name, numbers in (("prefs", range(24)), ("held-out", range(24, 36))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records(numbers)))
    return tmp_path


@pytest.fixture
def write(prefs, hf_folder):
    """Writes the run file of a preference objective: `write("name", {"type": "dpo"}, adapter={...}) -> Path`."""

    def write(name, objective, model=None, adapter=None, **training):
        sections = {
            "run": {"name": name, "directory": str(prefs / "runs"), "seed": 3},
            "model": {"from": str(hf_folder)} | (model or {}),
            "data": {"train": str(prefs / "prefs.jsonl"), "validation": str(prefs / "held-out.jsonl")},
            "objective": objective,
            "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.0},
            "schedule": {"type": "constant"},
            "training": {"steps": 4, "batch_tokens": 512, "micro_batch_size": 2, "dtype": "float32"} | training,
            "validation": {"every": 4},
            "checkpoint": {"every": 2, "keep_last": 9},
            "log": {"every": 1, **QUIET},
        }
        sections["data"] |= {"sequence_length": 128, "chat_template": "plain"}
        sections |= {} if adapter is None else {"adapter": adapter}
        path = prefs / f"{name}.yaml"
        path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
        return path

    return write


@pytest.mark.parametrize(
    ("objective", "model"),
    [({"type": "dpo"}, {}), ({"type": "simpo"}, {}), ({"type": "orpo"}, {}), ({"type": "reward"}, {"num_labels": 1})],
    ids=lambda value: value.get("type", ""),
)
def test_margins_of_held_out_pairs_rise(write, prefs, capsys, objective, model):
    file = write("rise", objective, model, steps=12)
    assert train(file) == 0
    lines = metrics(prefs / "runs" / "rise")
    said = capsys.readouterr().err
    assert ("the head has new initial weights" in said) == bool(model)
    assert "24 preference pairs" in said
    if objective["type"] == "dpo":
        assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert lines[0]["margin"] == pytest.approx(0, abs=1e-6)
    held_out = [line for line in lines if "validation_margin" in line]
    assert held_out[-1]["validation_margin"] > held_out[0]["validation_margin"] + 0.1
    assert held_out[-1]["validation_accuracy"] == 1.0
    assert "validation_bits_per_byte" not in held_out[-1]
    assert ("logprob_chosen" in lines[-1]) != bool(model)

    # The same numbers by `weft evaluate` on the run's data, or on those of a reward model.
    options = {"dpo": {"reference": RunConfig.load(file).model.from_}, "simpo": {"per_token": True}}
    options["orpo"], scale = options["simpo"], {"dpo": 0.1, "simpo": 2.0, "orpo": 0.1, "reward": 1.0}
    found = weft.evaluate(prefs / "runs" / "rise", **options.get(objective["type"], {})).preferences[0]
    assert (found.pairs, found.accuracy) == (12, 1.0)
    margin = scale[objective["type"]] * found.margin
    assert margin == pytest.approx(held_out[-1]["validation_margin"], rel=1e-4)


@pytest.mark.parametrize(
    "adapter", [pytest.param(None, marks=pytest.mark.long), {"r": 4, "dropout": 0.1}], ids=["all", "lora"]
)
def test_a_resumed_run_is_the_same_to_the_bit(write, prefs, adapter):
    for name in ("straight", "broken"):
        file = write(name, {"type": "dpo", "loss": "robust", "label_smoothing": 0.1}, adapter=adapter)
        assert not (name == "broken" and train(file, "training.steps=2"))
        assert train(file) == 0
    straight, broken = prefs / "runs" / "straight", prefs / "runs" / "broken"
    assert losses(straight) == losses(broken)
    assert [line["margin"] for line in metrics(straight)] == [line["margin"] for line in metrics(broken)]
    assert_same_weights(straight, broken)


@pytest.mark.parametrize("kind", ["built-in", pytest.param("hf", marks=pytest.mark.long)])
def test_dropout_of_the_checkpoint_is_off_and_that_of_the_file_is_on(write, prefs, tiny_tokenizer, capsys, kind):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 512, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128}  # GPT-2's dropouts: 0.1
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(prefs / "gpt2")
    for file in tiny_tokenizer.iterdir():
        shutil.copy(file, prefs / "gpt2")
    model = {"from": str(prefs / "gpt2")}
    if kind == "hf":
        model = {"from": None, "type": "hf", "path": str(prefs / "gpt2")}
    file = write("off", {"type": "dpo"}, model, steps=1)
    assert train(file) == 0
    assert losses(prefs / "runs" / "off")[0][1] == pytest.approx(math.log(2), abs=1e-6)
    said = capsys.readouterr().err
    assert "dropout is off for the objective dpo (" in said
    assert "0.1 in" in said
    asked = {"config": {"resid_pdrop": 0.2}} if kind == "hf" else {"hidden_dropout": 0.2}
    assert train(write("on", {"type": "dpo"}, model | asked, steps=1)) == 0
    assert losses(prefs / "runs" / "on")[0][1] != pytest.approx(math.log(2), abs=1e-4)
    # Fine-tuning and pretraining keep what the checkpoint has.
    kept = RunConfig.load(
        file, ["objective.type=pretrain", "data.train=null", "data.validation=null", "data.chat_template=null"]
    ).model
    assert (kept.config["resid_pdrop"] if kind == "hf" else kept.hidden_dropout) == 0.1


def test_a_cached_reference_gives_the_same_losses(write, prefs):
    for name in ("live", "cached"):
        objective = {"type": "dpo", "loss": "ipo", "cache_reference": name == "cached"}
        assert train(write(name, objective, micro_batch_size=1)) == 0
    live, cached = (losses(prefs / "runs" / name) for name in ("live", "cached"))
    assert len(live) == 4
    assert [loss for _, loss, _ in cached] == pytest.approx([loss for _, loss, _ in live], abs=1e-5)
    assert live[0] != live[-1]


def test_the_reference_of_a_trained_adapter_is_that_adapter(write, prefs):
    """TRL compared a resumed adapter with the base model (its issue 6591)."""
    assert train(write("first", {"type": "orpo"}, adapter={"r": 4})) == 0
    assert train(write("second", {"type": "dpo"}, adapter={"from": str(prefs / "runs" / "first")})) == 0
    assert metrics(prefs / "runs" / "second")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    found = weft.evaluate(prefs / "runs" / "second", reference=prefs / "runs" / "first").preferences[0]
    from_base = weft.evaluate(prefs / "runs" / "second", reference=RunConfig.load(prefs / "first.yaml").model.from_)
    last = metrics(prefs / "runs" / "second")[-1]["validation_margin"]
    assert 0.1 * found.margin == pytest.approx(last, rel=1e-4)
    assert abs(0.1 * from_base.preferences[0].margin - last) > 0.02


def test_a_reward_model_scores_the_last_token_and_is_no_reference(write, prefs, tmp_path, capsys):
    """As Transformers does, which reads the exported model."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert train(write("reward", {"type": "reward", "center": 0.01}, {"num_labels": 1})) == 0
    weft.export_model(prefs / "runs" / "reward", tmp_path / "out")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    margins = []
    for one in records(range(24, 36)):
        scores = []
        for answer in (one["chosen"], one["rejected"]):
            messages = [{"role": "user", "content": one["prompt"]}, {"role": "assistant", "content": answer}]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            scores.append(theirs(torch.tensor([ids])).logits.item())
        margins.append(scores[0] - scores[1])
    found = weft.evaluate(prefs / "runs" / "reward").preferences[0]
    assert found.margin == pytest.approx(sum(margins) / len(margins), abs=1e-5)
    assert found.accuracy == sum(one > 0 for one in margins) / len(margins)

    reward = prefs / "runs" / "reward"
    assert train(write("refused", {"type": "dpo", "reference": str(reward)})) == 2
    said = capsys.readouterr().err
    assert f"objective.reference: {reward} is a reward model" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "recipe", ["dpo", *(pytest.param(name, marks=pytest.mark.long) for name in ("simpo", "orpo")), "kto", "reward"]
)
def test_recipes(prefs, hf_folder, recipe, monkeypatch):
    monkeypatch.chdir(prefs)
    with (prefs / "labels.jsonl").open("w") as file:
        for one in records(range(24)):
            for key in ("chosen", "rejected"):
                answer = {"prompt": one["prompt"], "completion": one[key], "label": key == "chosen"}
                file.write(json.dumps(answer) + "\n")
    path, data = ROOT / "configs" / f"{recipe}.yaml", "labels.jsonl" if recipe == "kto" else "prefs.jsonl"
    command = f"weft train configs/{recipe}.yaml data.train={data} model.from=HF_DIR\n"
    assert f"#   {command}" in path.read_text()
    assert f"$ {command}" in (ROOT / "docs" / "tuning" / "preferences.md").read_text()
    assert len(path.read_text().splitlines()) < 25
    small = ["training.epochs=null", "training.steps=3", "data.sequence_length=128", "log.trackers=[]"]
    more = ["data.chat_template=plain", f"data.validation={data}", "optimizer.lr=0.01", "training.batch_tokens=512"]
    assert train(path, f"model.from={hf_folder}", *more, *small) == 0
    last = metrics(prefs / "runs" / recipe)[-1]
    assert last["step"] == 3
    assert last["validation_accuracy"] > 0.5
    if recipe == "kto":
        assert last["kl"] >= 0
        assert last["validation_reward_chosen"] > last["validation_reward_rejected"]
        assert "validation_bits_per_byte" not in last


@pytest.mark.parametrize("label", [7, 0.5, -1])
def test_labels_are_true_or_false(write, prefs, capsys, label):
    answers = [{"prompt": f"Vo {n}?", "completion": "Kalo mi.", "label": n == 1} for n in range(8)]
    lines = [json.dumps(one) for one in (*answers, answers[0] | {"label": label})]
    (prefs / "prefs.jsonl").write_text("\n".join(lines) + "\n")
    assert train(write("labels", {"type": "kto"}), "data.validation=null") == 2
    said = capsys.readouterr().err
    assert f"the field 'label' of the documents must be 0 or 1, but is {label}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["objective.type=reward"], r"model\.num_labels: required by the objective reward; set num_labels: 1"),
        (["model.num_labels=1"], r"num_labels: the model returns scores, which the objective dpo cannot train"),
        (["objective.loss=cdpo"], r"label_smoothing: the loss cdpo needs a value above 0"),
        (["objective.label_smoothing=0.1"], r"label_smoothing: no effect on the loss sigmoid"),
    ],
)
def test_contradictions_are_reported_by_the_check(write, capsys, changes, told):
    file = write("wrong", {"type": "dpo"})
    assert main(["config", "check", str(file), *changes]) == 2
    assert re.search(told, capsys.readouterr().err)


def test_settings_of_evaluation_without_effect_are_refused(write, prefs, tiny_heldout):
    assert train(write("one", {"type": "reward"}, {"num_labels": 1}), "training.steps=1") == 0
    run = prefs / "runs" / "one"
    for settings, told in (
        ({"per_token": True}, "`per_token` has no effect on a reward model"),
        ({"stride": 4}, "stride has an effect only with a store of texts"),
        ({"store": tiny_heldout, "reference": run}, "reference has an effect only with a store of preferences"),
        ({"store": tiny_heldout}, "reward model, which predicts no tokens"),
    ):
        with pytest.raises(UserError, match=told):
            weft.evaluate(run, **settings)
