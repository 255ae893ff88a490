"""Validations of runs that generate their training data: rewards of completions of held-out prompts."""

import json

import pytest
from rollout_runs import lines_of, settings, write_inputs
from running import train

import weft
from weft.cli.main import main
from weft.errors import UserError

REWARDS = '''

def held_out(completions, prompts):
    """Writes what it gets of held-out prompts, and rewards the letters."""
    if prompts[0].startswith("held"):
        with open("held.jsonl", "a") as file:
            print(json.dumps([prompts, completions]), file=file)
    return letters(completions)
'''


@pytest.fixture(autouse=True)
def _inputs(tmp_path, monkeypatch):
    write_inputs(tmp_path, prompts=8)
    # A module of its own: another test of this process may have imported `rollout_rewards`.
    (tmp_path / "held_out_rewards.py").write_text((tmp_path / "rollout_rewards.py").read_text() + REWARDS)
    lines = [json.dumps({"prompt": f"held {n} ka", "number": n}) for n in range(5)]
    (tmp_path / "held-out.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def run(objective=None, validation=None, sets="held-out.jsonl", **sections):
    found = settings(objective, training={"steps": 4}, **sections)
    found["objective"] |= {"prompts": 2, "group": 2, "reward": "held_out_rewards:held_out"} | (objective or {})
    return found | {
        "data": found["data"] | {"validation": sets},
        "validation": {"every": 2, "tokens": None, "prompts": 3} | (validation or {}),
    }


def test_greedy_completions_of_held_out_prompts_are_rewarded(run_yaml, tmp_path, capsys):
    lines = lines_of(run_yaml, tmp_path, **run())
    assert "validation reward" in capsys.readouterr().err
    held_out = {line["step"]: line for line in lines if "validation_reward" in line}
    assert sorted(held_out) == [2, 4]
    calls = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    assert [len(prompts) for prompts, _ in calls] == [3, 4, 1]  # 3 prompts, then all 5: at most 2 x 2 at once
    last = [text for _, completions in calls[1:] for text in completions]
    assert held_out[4]["validation_reward"] == pytest.approx(sum(text.count("a") / 8 for text in last) / 5)
    prompts = [prompt for given, _ in calls[1:] for prompt in given]
    expected = [weft.generate("runs/demo", prompt, max_new_tokens=8, temperature=0.0) for prompt in prompts]
    assert last == expected
    with pytest.raises(UserError, match="has only prompts; set `store`"):
        weft.evaluate("runs/demo")
    assert 0 < held_out[4]["validation_completion_length"] <= 8
    assert 0 <= held_out[4]["validation_truncated"] <= 1
    assert "validation_loss" not in held_out[4]


def test_training_does_not_depend_on_validations(run_yaml, tmp_path):
    both = {"held_out_rewards:held_out": 1.0, "held_out_rewards:slow_sum": 0.0}
    sets = {"first": "held-out.jsonl", "second": "held-out.jsonl"}
    sampled = run({"reward": both}, {"temperature": 1.0, "prompts": None}, sets)
    lines = lines_of(run_yaml, tmp_path, "with", **sampled)
    plain = settings({"reward": both, "prompts": 2, "group": 2}, training={"steps": 4})
    assert [line["loss"] for line in lines] == [
        line["loss"] for line in lines_of(run_yaml, tmp_path, "without", **plain)
    ]
    last = lines[-1]
    for name in ("reward", "reward/held_out", "completion_length"):
        assert last[f"validation_{name}"] == pytest.approx(last[f"validation_{name}/first"])  # equal sets and seeds
        assert last[f"validation_{name}/first"] == last[f"validation_{name}/second"]
    assert last["validation_reward/slow_sum"] == 2.0  # the mean of the column `number`


def test_early_stopping_by_a_reward_that_does_not_rise(run_yaml, tmp_path, capsys):
    stop = {"type": "early_stopping", "metric": "validation_reward", "mode": "max", "patience": 1, "min_delta": 9.0}
    assert train(run_yaml(**run(None, {"every": 1}, callbacks=[stop]))) == 0
    assert "validation_reward has not improved on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (["validation.tokens=9"], "validation.tokens: no effect on completions of held-out prompts"),
        (["data.validation=HELD_OUT"], "held-out prompts must be a file, a folder or a pattern"),
        (["objective={type: pretrain}"], "validation.prompts: no effect, because the model does not generate"),
    ],
)
def test_settings_without_effect_are_refused(run_yaml, capsys, tiny_heldout, changes, part):
    changes = [change.replace("HELD_OUT", str(tiny_heldout)) for change in changes]
    assert main(["config", "check", str(run_yaml(**run())), *changes]) == 2
    assert part in capsys.readouterr().err


def test_held_out_prompts_need_the_columns_of_the_reward(run_yaml, capsys, tmp_path):
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "ka", "number": 1}\n{"prompt": "ka"}\n')
    assert train(run_yaml(**run({"reward": "held_out_rewards:short"}))) == 2
    assert "held-out.jsonl:2: the record has no 'number'" in capsys.readouterr().err
