"""Runs that generate their training data: prompts, rewards of the user's own, and a tiny model."""

import json
from pathlib import Path

from running import QUIET, metrics, train

REWARDS = '''
import asyncio
import json
import time


def letters(completions):
    return [text.count("a") / 8 for text in completions]


def recorded(completions, prompts):
    """Appends what it gets to a file."""
    with open("recorded.jsonl", "a") as file:
        print(json.dumps([prompts, completions]), file=file)
    return [0.0] * len(completions)


def short(prompt, completion, number):
    return -len(completion) / 100 + 0 * number


async def slow_sum(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [float(number) for number in columns["number"]]


async def each(completion):
    await asyncio.sleep(0.01)
    return 0.5


def raises(prompts, completions):
    return [1 / 0 for _ in prompts]


def raises_for_one(completion, number):
    raise ValueError(f"no {number}")


def too_large(completions):
    return [10**400] * len(completions)


def not_a_number(completions):
    return [0.0, 1.0, float("nan"), *[0.0] * (len(completions) - 3)]


def nothing(completions):
    return [None for _ in completions]


def too_few(completions):
    return [0.0]


def text(completions):
    return "0.5"


def hangs(completions):
    time.sleep(30)


def leaves(completion, number):
    if number == 2:
        raise SystemExit(3)
    return 0.0


async def leaves_later(completion, number):
    await asyncio.sleep(0)
    return leaves(completion, number)


def wants(completions, solution):
    return [0.0 for _ in completions]


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def leave():
    """Ends the process."""
    raise SystemExit(3)
'''


def write_inputs(folder: Path, prompts: int = 24) -> None:
    """Writes `prompts.jsonl` and the module `rollout_rewards` into a folder."""
    lines = [json.dumps({"prompt": f"{number:02d} ka", "number": number}) for number in range(prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "rollout_rewards.py").write_text(REWARDS)


def settings(objective: dict | None = None, **sections) -> dict:
    """Returns the sections of a run file: 4 prompts and 8 completions of each, in one update per rollout."""
    plain = {"type": "grpo", "reward": "rollout_rewards:letters", "max_new_tokens": 8, "prompts": 4, "group": 8}
    data = {"train": "prompts.jsonl", "sequence_length": 32} | sections.pop("data", {})
    return {
        "data": data | {"validation": None},
        "objective": plain | (objective or {}),
        "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.0},
        "schedule": {"type": "constant", "warmup_steps": None},
        "training": {"batch_tokens": None, "micro_batch_size": None, "steps": 4} | sections.pop("training", {}),
        "log": QUIET,
        **sections,
    }


def lines_of(run_yaml, tmp_path, name: str = "demo", **sections) -> list[dict]:
    """Trains, and returns the lines of metrics."""
    file = run_yaml(f"{name}.yaml", run={"name": name}, **sections)
    assert train(file) == 0
    return metrics(tmp_path / "runs" / name)
