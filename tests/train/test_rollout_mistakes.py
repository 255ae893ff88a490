"""What bad rewards and prompts of a run that generates its training data get."""

import json
import re

import pytest
import torch
from rollout_runs import settings, write_inputs
from running import train

from weft.cli.main import main
from weft.config.run import RunConfig
from weft.errors import ConfigError, UserError
from weft.train.rollouts.rewards import Rewards

ARGUMENTS = {
    "prompts": ["p", "q", "r"],
    "completions": ["aa", "", "aaaa"],
    "conversations": [[], [], []],
    "number": [1, 2, 3],
}
PLACES = ["completion 1 of p.jsonl:1", "completion 2 of p.jsonl:1", "completion 1 of p.jsonl:2"]


@pytest.fixture(autouse=True)
def _inputs(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_functions_over_the_batch_for_each_completion_and_async_have_weights():
    weights = {
        f"rollout_rewards:{name}": weight
        for name, weight in (("letters", 2.0), ("short", 1), ("slow_sum", 1), ("each", 3))
    }
    rewards = Rewards(weights, 10.0, ["number"])
    assert rewards.names == ["letters", "short", "slow_sum", "each"]
    assert rewards.weights == [2.0, 1, 1, 3]
    found = rewards(ARGUMENTS, PLACES)
    expected = [[0.25, 0, 0.5], [-0.02, 0, -0.04], [1, 2, 3], [0.5] * 3]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("raises", ("ZeroDivisionError", "3 completions", "p.jsonl:1")),
        ("raises_for_one", ("ValueError: no 1", "completion 1 of p.jsonl:1")),
        ("not_a_number", ("nan", "completion 1 of p.jsonl:2")),
        ("too_large", ("a finite number", "completion 1 of p.jsonl:1")),
        ("nothing", ("None", "completion 1 of p.jsonl:1")),
        ("too_few", ("1 values", "3 completions")),
        ("text", ("str", "list")),
        ("leaves", ("SystemExit: 3", "completion 2 of p.jsonl:1", "rollout_rewards.py")),
        ("leaves_later", ("SystemExit: 3", "completion 2 of p.jsonl:1")),
        ("hangs", ("0.2 seconds", "reward_timeout")),
    ],
)
def test_a_wrong_reward_names_its_function_and_the_completion(name, parts):
    with pytest.raises(UserError) as raised:
        Rewards({f"rollout_rewards:{name}": 1.0}, 0.2, ["number"])(ARGUMENTS, PLACES)
    message = str(raised.value)
    assert len(message) < 400
    assert re.match(r"\S*rollout_rewards\.py:\d+: reward ", message)
    assert all(part in message for part in (f"rollout_rewards:{name}", *parts)), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("reward", "columns", "missing", "part"),
    [
        ("letters", ["completions"], {}, "'completions', which is also a column"),
        ("slow_sum", ["number", "conversations"], {}, "'conversations', which is also a column"),  # by **columns
        ("short", ["number", "completion"], {}, "'completion', which is also a column"),
        ("short", ["number"], {"number": "p.jsonl:7"}, "p.jsonl:7: the record has no 'number'"),
    ],
)
def test_columns_that_cannot_be_arguments_are_refused(reward, columns, missing, part):
    with pytest.raises(UserError) as raised:
        Rewards({f"rollout_rewards:{reward}": 1.0}, 1.0, columns, missing)
    assert part in str(raised.value)
    # A function without the argument is not concerned.
    Rewards({"rollout_rewards:letters": 1.0}, 1.0, ["completion", "conversations", "number"], {"number": "p.jsonl:7"})


def test_a_record_that_lacks_an_argument_is_refused_with_its_line(run_yaml, capsys, tmp_path):
    with open(tmp_path / "prompts.jsonl", "a") as file:
        print(json.dumps({"prompt": "ka"}), file=file)
    assert train(run_yaml(**settings({"reward": "rollout_rewards:short"}))) == 2
    assert "prompts.jsonl:25: the record has no 'number'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objective", "training", "part"),
    [
        ({"kl": "k3"}, {}, "objective.kl: no effect with beta: 0; set beta, such as 0.04"),
        ({"reference": "run"}, {}, "objective.reference: no effect with beta: 0; set beta, such as 0.04"),
        ({"type": "online_dpo", "loss": "cdpo"}, {}, "objective.label_smoothing: the loss cdpo needs a value above 0"),
        ({"type": "online_dpo", "label_smoothing": 0.1}, {}, "objective.label_smoothing: no effect on the loss sigm"),
        ({}, {"qat": {"type": "int4"}}, "training.qat: answers are sampled from weights that are not rounded"),
        ({"type": "online_dpo"}, {"qat": {"type": "int4"}}, "training.qat: answers are sampled from weights that"),
    ],
)
def test_settings_without_effect_are_reported_by_the_check(objective, training, part, run_yaml, capsys):
    assert main(["config", "check", str(run_yaml(**settings(objective, training=training)))]) == 2
    assert part in capsys.readouterr().err


OBJECTIVE = """
from weft.data.batches.layout import Field
from weft.generation.rollouts import Rollouts
from weft.objectives.pretrain import Pretrain


class Odd(Pretrain):
    temperature, max_new_tokens = 1.0, 6

    def __init__(
        self, *, reward: str, updates_per_rollout: int = 1,
        parts: int = 1, field: str = "advantage", per_document: bool = True
    ):
        super().__init__()
        self.rollouts = Rollouts(reward=reward, group=2, prompts=4, minibatches=parts)
        self.updates_per_rollout = updates_per_rollout
        self.fields = {field: Field(per_document=per_document, seq_dim=0)}

    def advantages(self, rewards):
        return rewards
"""


@pytest.mark.parametrize(
    ("odd", "part"),
    [
        ({"parts": 3}, "objective.minibatches: 3 minibatches do not divide the 4 prompts"),
        ({"parts": 2}, "objective.minibatches: 2 minibatches do not divide the 1 updates_per_rollout"),
        ({"field": "foo"}, "no field 'foo' of documents, only advantage, truncated"),
        ({"per_document": False}, "no field 'advantage' of tokens, only"),
    ],
)
def test_wrong_objectives_are_refused_before_anything_is_generated(odd, part, run_yaml, capsys, tmp_path):
    (tmp_path / "rollout_odd.py").write_text(OBJECTIVE)
    objective = {"type": "rollout_odd:Odd", "reward": "rollout_rewards:letters", **odd}
    assert train(run_yaml(**(settings() | {"objective": objective}))) == 2
    error = capsys.readouterr().err
    assert part in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("reward", "part"),
    [
        ("rollout_rewards:wants", "'solution'"),
        ("rollout_rewards:missing", "'missing'"),
        ("no_such_module:reward", "no_such_module"),
        ("rollout_rewards:REWARDS", "REWARDS"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_before_training(reward, part, run_yaml, capsys):
    assert train(run_yaml(**settings({"reward": reward}))) == 2
    error = capsys.readouterr().err
    assert part in error
    assert "Traceback" not in error


def test_a_reward_that_fails_ends_the_run_with_one_line(run_yaml, capsys, tmp_path):
    assert train(run_yaml(**settings({"reward": "rollout_rewards:raises_for_one"}))) == 2
    error = capsys.readouterr().err
    assert "rollout_rewards.py" in error
    assert "prompts.jsonl:" in error
    assert "Traceback" not in error


def test_long_prompts_are_dropped_and_counted_or_refused(run_yaml, capsys, tmp_path):
    with open(tmp_path / "prompts.jsonl", "a") as file:
        print(json.dumps({"prompt": "ka lo mi " * 20, "number": 0}), file=file)
    assert train(run_yaml(**settings(training={"steps": 1}))) == 0
    error = capsys.readouterr().err
    assert "dropped 1 of 25 prompts" in error
    assert "24 prompts" in error
    assert train(run_yaml(**settings(data={"overlong": "refuse"})), "--fresh") == 2
    assert "prompts.jsonl:25: the prompt has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ({"question": "1+1"}, "question"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [{"role": "user", "content": "1"}]}, "template"),
    ],
)
def test_a_record_without_a_prompt_is_refused(record, part, run_yaml, capsys, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps(record) + "\n")
    assert train(run_yaml(**settings())) == 2
    error = capsys.readouterr().err
    assert part in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("sections", "key", "part"),
    [
        ({"objective": {"reward": None}}, "objective.reward", "required"),
        ({"objective": {"reward": "letters"}}, "objective.reward", "module:function"),
        ({"objective": {"reward": ["rollout_rewards:each"] * 2}}, "objective.reward", "rollout_rewards:each: 2.0}"),
        ({"objective": {"max_new_tokens": 32}}, "objective.max_new_tokens", "no room"),
        ({"objective": {"updates_per_rollout": 3, "minibatches": 2}}, "objective.updates_per_rollout", "multiple"),
        ({"objective": {"minibatches": 3, "updates_per_rollout": 3}}, "objective.minibatches", "divide"),
        ({"objective": {"max_turns": 2}}, "objective.max_turns", "tools"),
        ({"objective": {"tools": ["rollout_rewards:add"]}}, "objective.max_turns", "no room"),
        ({"training": {"batch_tokens": 64}}, "training.batch_tokens", "no effect"),
        ({"training": {"steps": None, "tokens": 1000}}, "training.tokens", "training.steps"),
        ({"data": {"packing": "best_fit"}}, "data.packing", "no effect"),
        ({"schedule": {"type": "constant", "warmup_steps": 9}}, "schedule.warmup_steps", "4"),
        ({"data": {"overlong": "truncate"}}, "data.overlong", "refuse"),
    ],
)
def test_settings_without_effect_are_refused(sections, key, part, run_yaml):
    with pytest.raises(ConfigError) as raised:
        RunConfig.load(run_yaml(**settings(**sections)))
    found = {problem.key: problem.what for problem in raised.value.problems}
    assert part in found[key]


def test_a_token_store_and_a_wrong_weight_are_one_mistake_each(run_yaml, tiny_store):
    with pytest.raises(ConfigError) as raised:
        RunConfig.load(run_yaml(**settings(data={"train": str(tiny_store)})))
    assert [problem.key for problem in raised.value.problems] == ["data.train"]
    with pytest.raises(ConfigError) as raised:
        RunConfig.load(run_yaml(**settings({"reward": {"rollout_rewards:letters": "two"}})))
    assert [problem.key for problem in raised.value.problems] == ["objective.reward.rollout_rewards:letters"]
    for wrong in ({"reward": ""}, {"tools": "x", "max_turns": 2}, {"group": 10**30}):
        with pytest.raises(ConfigError) as raised:
            RunConfig.load(run_yaml(**settings(wrong)))
        assert [problem.key for problem in raised.value.problems] == [f"objective.{next(iter(wrong))}"]


@pytest.mark.parametrize("data", [{"train": "missing.jsonl"}, {"validation": "missing.jsonl"}])
def test_missing_prompts_are_one_mistake(data, run_yaml):
    with pytest.raises(ConfigError) as raised:
        RunConfig.load(run_yaml(**settings() | {"data": settings()["data"] | data}))
    assert [problem.key for problem in raised.value.problems] == [f"data.{next(iter(data))}"]
    assert "missing.jsonl" in str(raised.value)
