"""Reward models as rewards of rollouts, against scores that Transformers computes."""

import json

import pytest
import torch
from rollout_runs import lines_of, settings, write_inputs
from running import train

CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"


@pytest.fixture(autouse=True)
def _inputs(tmp_path, monkeypatch):
    write_inputs(tmp_path, prompts=6)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def reward_folder(hf_folder, tmp_path):
    """A reward model of Transformers with another architecture than the trained model, and a chat template."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(3)
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(vocab_size=512, num_labels=1, initializer_range=0.3, pad_token_id=0, **sizes)
    model = Qwen2ForSequenceClassification(config)
    model.save_pretrained(tmp_path / "judge")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (hf_folder / name).exists():
            (tmp_path / "judge" / name).write_text((hf_folder / name).read_text())
    return tmp_path / "judge", model.eval()


def scores_of(model, folder, pairs):
    """The score of each prompt and completion, one at a time: rendered by hand, encoded by Transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt, completion in pairs:
        ids = tokenizer(CHATML.format(prompt, completion), add_special_tokens=False)["input_ids"]
        ids += [tokenizer.eos_token_id]
        with torch.no_grad():
            hidden = model.model(torch.tensor([ids])).last_hidden_state
            found.append(float(model.score(hidden)[0, -1, 0]))
    return found


@pytest.mark.parametrize("kind", ["grpo", "online_dpo"])
def test_scores_are_those_of_transformers(kind, reward_folder, run_yaml, tmp_path):
    folder, model = reward_folder
    objective = {"type": kind, "reward": {str(folder): 0.5, "rollout_rewards:recorded": 1.0}, "group": 4, "prompts": 3}
    lines = lines_of(run_yaml, tmp_path, **settings(objective, training={"steps": 2}))
    calls = [json.loads(line) for line in (tmp_path / "recorded.jsonl").read_text().splitlines()]
    assert len(calls) == len(lines) == 2
    for line, (prompts, completions) in zip(lines, calls, strict=True):
        scores = scores_of(model, folder, zip(prompts, completions, strict=True))
        assert len(set(scores)) > 6
        assert line["reward/judge"] == pytest.approx(sum(scores) / len(scores), abs=1e-5)
        assert line["reward"] == pytest.approx(0.5 * line["reward/judge"], abs=1e-5)
        halves = torch.tensor(scores, dtype=torch.float64).quantile(0.5) / 2
        assert line["reward_p50"] == pytest.approx(float(halves), abs=1e-5)


def test_a_reward_model_that_changed_is_refused_on_resuming(reward_folder, run_yaml, capsys):
    folder, model = reward_folder
    assert train(run_yaml(**settings({"reward": str(folder)}, training={"steps": 1}))) == 0
    model.score.weight.data *= 2
    model.save_pretrained(folder)
    assert train(run_yaml(**settings({"reward": str(folder)}, training={"steps": 2}))) == 2
    error = capsys.readouterr().err
    assert "judge: this is not the reward model with which the run started" in error
    assert "Traceback" not in error


def test_what_is_no_reward_model_is_refused(run_yaml, hf_folder, capsys):
    for reward, part in (("nothing/here", "nor the path of a reward model"), (str(hf_folder), "not a reward model")):
        assert train(run_yaml(**settings({"reward": reward}))) == 2
        error = capsys.readouterr().err
        assert part in error
        assert reward in error
        assert "Traceback" not in error
