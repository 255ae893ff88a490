"""The page of reinforcement learning and its recipe: the command runs with the files of the page."""

import json
import shlex

from tutorial import DOCS, commands, files

from weft.cli.main import main

PAGE = (DOCS / "tuning" / "reinforcement.md").read_text(encoding="utf-8")
RECIPE = DOCS.parent / "configs" / "grpo.yaml"
SMALL = {
    "training": {"steps": 2},
    "schedule.warmup_fraction": 0,
    "data.sequence_length": 96,
    "objective.max_new_tokens": 4,
    "objective.prompts": 2,
    "objective.group": 2,
    "objective.reward": {"my_reward:correct": 1.0, "my_reward:brief": 0.1},
    "log.trackers": [],
}


def test_the_recipe_trains_with_the_prompts_and_the_rewards_of_the_page(tmp_path, hf_folder, monkeypatch):
    for name, text in files(PAGE).items():
        (tmp_path / name).write_text(text)
    for name, path in {"configs": RECIPE.parent, "HF_DIR": hf_folder}.items():
        (tmp_path / name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (command,) = (one.text for one in commands(PAGE))
    assert f"#   {command}\n" in RECIPE.read_text()
    assert len(RECIPE.read_text().splitlines()) < 25
    changes = [f"{key}={json.dumps(value)}" for key, value in SMALL.items()]
    assert main([*shlex.split(command)[1:], *changes]) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs" / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {"reward/correct", "reward/brief", "completion_length", "equal_rewards"} <= lines[0].keys()
    page = (tmp_path / "runs" / "grpo" / "report.html").read_text()
    assert "reward_p90" in page
