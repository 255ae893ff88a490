"""Mutated run files: each is refused in lines that name the place, or loads, is written and loads again as itself."""

import json
import random
import shutil
from pathlib import Path

import pytest
from fuzzing import mutated_bytes, mutated_tree, within
from ruamel.yaml import YAML

from weft.cli.main import main
from weft.config.dump import dump_yaml
from weft.config.run import RunConfig
from weft.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
MANY = {
    "run": {"name": "demo", "directory": "runs", "seed": 7},
    "model": {"preset": "llama-tiny", "vocab_size": 512, "moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    "data": {"train": [{"store": "store", "weight": 0.5}, {"store": "heldout", "weight": 0.5}], "sequence_length": 64},
    "objective": {"type": "pretrain", "z_loss": 1e-4},
    "optimizer": {"type": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "lr_multipliers": {"lm_head": 0.1}},
    "schedule": {"type": "wsd", "warmup_steps": 5},
    "training": {"steps": 30, "batch_tokens": 1024, "dtype": "float32", "freeze": ["embed_tokens"]},
    "validation": {"every": 5},
    "samples": {"prompts": [], "every": 3},
    "parallel": {"dp_shard": 2, "tp": 2, "pp": 1},
    "callbacks": [{"type": "ema"}, "lr_monitor"],
    "checkpoint": {"every": 10, "keep_last": 2},
    "log": {"every": 1, "trackers": ["tensorboard"]},
}
# Files of configs/ that need neither a model nor prompts that exist.
VALID = [f"{name}.yaml" for name in ("gpt2", "llama-60m", "mixture", "moe-300m", "muon-wsd", "qwen3-30b-a3b", "tiny")]
# What a mutated file of a run that trains may not make larger than these.
LARGEST = 4096


def check(number: int) -> str:
    """Loads mutated config `number`. Returns "refused" or "accepted"."""
    rng = random.Random(number)
    if number % 3 == 0:
        Path("run.yaml").write_bytes(mutated_bytes(rng, (CONFIGS / rng.choice(VALID)).read_bytes()))
    else:
        tree = MANY if number % 3 == 1 else YAML(typ="safe", pure=True).load(CONFIGS / rng.choice(VALID))
        Path("run.yaml").write_text(json.dumps(mutated_tree(rng, tree)))
    refusal = None
    try:
        with within(20):
            config = RunConfig.load("run.yaml", check_data=number % 8 == 0)
    except UserError as error:
        refusal = str(error)
    if refusal is not None:
        assert refusal.strip()
        assert "Traceback" not in refusal
        return "refused"
    Path("again.yaml").write_text(dump_yaml(config), encoding="utf-8")
    again = RunConfig.load("again.yaml", check_data=False)
    # Without a section `data`, the sequence length is not known; the written file has the section.
    assert again == config or config.data.sequence_length is None, number
    return "accepted"


def check_all(numbers) -> None:
    failed, counts = [], {"refused": 0, "accepted": 0}
    for number in numbers:
        try:
            counts[check(number)] += 1
        except Exception as error:  # all are listed at the end
            failed.append(f"{number}: {type(error).__name__}: {str(error)[:200]}")
    assert not failed, "\n".join(failed[:40]) + f"\n{len(failed)} of {len(numbers)}"
    assert min(counts.values()) > 0, counts  # else the mutations are too strong, or do nothing
    print(counts)


@pytest.fixture
def place(tmp_path, monkeypatch):
    for file in CONFIGS.glob("*.yaml"):  # which extend each other
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_sample_of_mutated_configs(place):
    check_all(range(60))


@pytest.mark.fuzz
def test_5000_mutated_configs(place):
    check_all(range(1000, 6000))


def small(tree) -> bool:
    """Whether no number of a config makes a run of minutes."""
    if isinstance(tree, dict | list):
        return all(small(value) for value in (tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, bool | None | str) or (-LARGEST <= tree <= LARGEST)


@pytest.mark.fuzz
def test_mutated_configs_train_or_are_refused(place, run_yaml, capsys):
    """100 runs of two steps: each ends with exit code 0, 1 (a loss that is not finite) or 2, in bounded time."""
    plain = {
        key: json.loads(value)
        for key, _, value in (
            line.partition(": ")
            for line in run_yaml(training={"steps": 2}, log={"trackers": []}).read_text().splitlines()
        )
    }
    codes = []
    for number in range(100):
        tree = mutated_tree(random.Random(number), plain)
        if not small(tree):
            continue
        Path("train.yaml").write_text(json.dumps(tree))
        with within(60):
            codes.append(main(["train", "train.yaml", f"run={{name: r{number}, directory: {place}/runs}}"]))
        said = capsys.readouterr()
        assert codes[-1] in (0, 1, 2), number
        assert "Traceback" not in said.err, (number, said.err)
    assert {0, 2} <= set(codes)
