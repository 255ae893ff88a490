"""Reward models trained as adapters: the head is trained in full, and PEFT and Transformers compute the same scores."""

import json

import pytest
import torch
from rollout_runs import lines_of, settings, write_inputs
from running import QUIET, assert_same_weights, losses, metrics, train
from safetensors.torch import load_file

import weft
from weft.errors import UserError

IDS = torch.randint(1, 500, (3, 11), generator=torch.manual_seed(0))
GOOD, BAD = ["Kalo mi.", "Ren sta tu.", "El vo shi pra."], ["Zx zx zx.", "Zx?", "Mi zx zx tu zx."]


@pytest.fixture
def write(tmp_path, hf_folder, monkeypatch):
    """Writes the run file of a reward model with an adapter on a model that predicts tokens."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    for name, numbers in (("prefs", range(24)), ("held-out", range(24, 36))):
        pairs = [{"prompt": f"Vo shi {n}?", "chosen": GOOD[n % 3], "rejected": BAD[n // 3 % 3]} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))

    def write(name, adapter=None, base=hf_folder, **training):
        sections = {
            "run": {"name": name, "directory": str(tmp_path / "runs"), "seed": 3},
            "model": {"from": str(base), "num_labels": 1},
            "data": {"train": str(tmp_path / "prefs.jsonl"), "validation": str(tmp_path / "held-out.jsonl")},
            "objective": {"type": "reward"},
            "optimizer": {"type": "adamw", "lr": 0.02, "weight_decay": 0.0},
            "schedule": {"type": "constant"},
            "training": {"steps": 4, "batch_tokens": 512, "micro_batch_size": 2, "dtype": "float32"} | training,
            "validation": {"every": 4},
            "checkpoint": {"every": 2, "keep_last": 9},
            "log": {"every": 1, **QUIET},
            "adapter": {"r": 4, "alpha": 8.0} | (adapter or {}),
        }
        sections["data"] |= {"sequence_length": 128}
        path = tmp_path / f"{name}.yaml"
        path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
        return path

    return write


def with_peft(base, folder):
    """The scores of PEFT's model: an adapter of a folder on a base model without a head of its own."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    plain.config.pad_token_id = 0
    model = PeftModel.from_pretrained(plain, folder).eval()
    return model, model(IDS).logits[:, 0].detach()


@pytest.fixture
def peft_folder(hf_folder, tmp_path):
    """An adapter that PEFT made and saved, with random values, and its scores."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(5)
    plain = AutoModelForSequenceClassification.from_pretrained(hf_folder, num_labels=1, dtype=torch.float32)
    plain.config.pad_token_id = 0
    model = get_peft_model(plain, LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules="all-linear"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    model.eval().save_pretrained(tmp_path / "peft")
    return tmp_path / "peft", model(IDS).logits[:, 0].detach()


@pytest.mark.parametrize("adapter", [{}, pytest.param({"init": "pissa"}, marks=pytest.mark.long)], ids=str)
def test_peft_and_transformers_compute_the_same_scores(write, hf_folder, tmp_path, capsys, adapter):
    from transformers import AutoModelForSequenceClassification

    assert train(write("judge", adapter, steps=12)) == 0
    run = tmp_path / "runs" / "judge"
    assert "has no head `score`; the head has new initial weights" in capsys.readouterr().err
    held_out = [line["validation_margin"] for line in metrics(run) if "validation_margin" in line]
    assert held_out[-1] > held_out[0] + 0.1
    model = weft.load_model(run)
    scores = model(IDS)[:, -1].detach()
    assert scores.std() > 0.01

    weft.export_model(run, tmp_path / "peft-out", to="peft")
    assert json.loads((tmp_path / "peft-out" / "adapter_config.json").read_text())["modules_to_save"] == ["score"]
    theirs, found = with_peft(hf_folder, tmp_path / "peft-out")
    torch.testing.assert_close(found, scores, rtol=0, atol=1e-5)

    weft.merge_adapter(run, tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    merged.config.pad_token_id = 0
    torch.testing.assert_close(merged(IDS).logits[:, 0], scores, rtol=0, atol=1e-5)
    for name, tensor in theirs.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], tensor, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="reward model, which cannot generate"):
        weft.Engine(weft.load_model(hf_folder)).add_adapter("judge", run)


def test_a_run_with_an_adapter_is_a_reward_of_rollouts(write, run_yaml, tmp_path, monkeypatch):
    """It gives the rewards of the merged model, whose scores are those of Transformers."""
    assert train(write("judge", {"dora": True})) == 0
    weft.merge_adapter(tmp_path / "runs" / "judge", tmp_path / "merged")
    write_inputs(tmp_path, prompts=6)
    monkeypatch.chdir(tmp_path)
    (line,) = lines_of(
        run_yaml, tmp_path, **settings({"reward": {"runs/judge": 1.0, "merged": 0.5}}, training={"steps": 1})
    )
    assert line["reward/judge"] == pytest.approx(line["reward/merged"], abs=1e-5)
    assert abs(line["reward/judge"]) > 0.01
    assert line["reward_p90"] > line["reward_p10"]


def test_a_checkpoint_has_the_adapter_and_the_head(write, tmp_path):
    assert train(write("straight")) == 0
    broken = write("broken")
    assert train(broken, "training.steps=2") == 0
    assert train(broken, "training.steps=4") == 0
    runs = tmp_path / "runs"
    assert losses(runs / "straight") == losses(runs / "broken")
    assert_same_weights(runs / "straight", runs / "broken")
    saved = {}
    for file in (runs / "straight" / "checkpoints" / "step-00000004").glob("*.safetensors"):
        saved |= load_file(file)
    own = {name for name in saved if name.startswith("model.") and ".lora_" not in name}
    assert own == {"model.score.weight"}
    assert saved["model.score.weight"].dtype == torch.float32


def test_adapters_of_peft_are_merged_and_trained_further(write, hf_folder, tmp_path, peft_folder, capsys):
    folder, expected = peft_folder
    weft.merge_adapter(hf_folder, tmp_path / "merged", adapter=folder)
    torch.testing.assert_close(weft.load_model(tmp_path / "merged")(IDS)[:, -1], expected, rtol=0, atol=1e-5)
    still = ["training.steps=1", "optimizer.lr=1e-9"]
    for name, file in (
        ("again", write("again", base=tmp_path / "merged")),
        ("further", write("further", {"from": str(folder)})),
    ):
        assert train(file, *still) == 0
        assert "new initial weights" not in capsys.readouterr().err
        scores = weft.load_model(tmp_path / "runs" / name)(IDS)[:, -1]
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    assert train(write("third", {"from": str(tmp_path / "runs" / "further")}), *still) == 0
    scores = weft.load_model(tmp_path / "runs" / "third")(IDS)[:, -1]
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
