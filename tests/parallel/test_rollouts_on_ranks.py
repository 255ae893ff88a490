"""Runs whose model generates its training data, on several ranks: completions and updates are those of one process."""

import json
import shutil

import pytest
import torch
from compare import Run, compare
from matrix import MODELS, WITHIN, ranks_of
from pool import weft_command

STEPS = 5
SHOWN = (
    "reward",
    "reward/letters",
    "reward/judge",
    "completion_length",
    "truncated",
    "entropy",
    "ratio",
    "clip_fraction",
)


def train(runner, tokenizer, name, mesh, *, fresh=True, **changes):
    file = write(runner, tokenizer, name, mesh, **changes)
    runner.pool.run(file, ranks_of(mesh), fresh=fresh, seconds=90)
    return Run(runner.folder / name)


def write(runner, tokenizer, name, mesh, *, steps=STEPS, model=MODELS["gqa"], objective=None, **sections):
    """A run in float64 with two mini-batches and two passes per rollout, so the last step is in the middle of one."""
    prompts = runner.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} ka", "number": n}) + "\n" for n in range(9)))
    content = {
        "run": {"name": name, "directory": str(runner.folder), "seed": 7},
        "model": {**model, "vocab_size": 512, "initializer_range": 0.05},
        "tokenizer": str(tokenizer),
        "data": {"train": str(prompts), "sequence_length": 32},
        "objective": {
            "type": "grpo",
            "reward": {"rollout_parts:letters": 1.0, "rollout_parts:short": 0.5},
            **(objective or {}),
            **{"prompts": 4, "group": 3, "max_new_tokens": 7, "updates_per_rollout": 4, "minibatches": 2},
        },
        "optimizer": {"type": "matrix_parts:PlainSGD", "lr": 0.3},
        "schedule": {"type": "constant"},
        "training": {"steps": steps, "dtype": "float64", "grad_clip": None, "threads": 1, "micro_batch_size": 1},
        "parallel": {"dp_shard": 1, **mesh},
        "checkpoint": {"every": 1, "keep_last": 10},
        "log": {"every": 1, "trackers": []},
        **sections,
    }
    file = runner.folder / f"{name}.yaml"
    file.write_text("".join(f"{section}: {json.dumps(value)}\n" for section, value in content.items()))
    return file


def found(run):
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return [[line.get(name, 0.0) for name in SHOWN] for line in lines]


def check(one, run):
    difference = compare(one, run)
    assert difference.largest <= WITHIN, difference.wrong()
    for line, other in zip(found(one), found(run), strict=True):
        assert other == pytest.approx(line, rel=0, abs=WITHIN)


def test_two_data_ranks_and_another_mesh_after_a_stop_in_the_middle_of_a_rollout(runner, tiny_tokenizer):
    one = train(runner, tiny_tokenizer, "rollouts-alone", {})
    assert len({tuple(line) for line in found(one)}) > 2
    train(runner, tiny_tokenizer, "rollouts-moved", {"dp_shard": 2}, steps=3)
    check(one, train(runner, tiny_tokenizer, "rollouts-moved", {"pp": 2, "pp_schedule": "gpipe"}, fresh=False))


def test_a_reward_that_fails_is_one_line_of_one_rank(runner, tiny_tokenizer):
    objective = {"reward": "rollout_parts:fails"}
    file = write(runner, tiny_tokenizer, "rollouts-failing", {"dp_shard": 2}, objective=objective)
    codes, said = zip(*runner.pool.call(weft_command, 2, runner.folder, ["train", str(file), "--fresh"]), strict=True)
    assert codes == (2, 2)
    assert sum(text.count("reward rollout_parts:fails raised ValueError: no ") for text in said) == 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mesh", [{"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"pp": 2, "dp_shard": 2}, {"dp_shard": 3}], ids=str
)
@pytest.mark.parametrize("model", ["tied", "moe"])
def test_all_meshes_make_the_same_rollouts(mesh, model, runner, tiny_tokenizer):
    one = train(runner, tiny_tokenizer, f"rollouts-{model}", {}, model=MODELS[model])
    name = "rollouts-" + model + "-".join(f"{axis}{size}" for axis, size in mesh.items())
    check(one, train(runner, tiny_tokenizer, name, mesh, model=MODELS[model]))


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [{"dp_replicate": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
@pytest.mark.parametrize(
    ("model", "adapter"),
    [("gqa", {"r": 3, "init": "pissa"}), ("gqa", {"r": 3, "dora": True}), ("moe", {"r": 3, "targets": "all-linear"})],
)
def test_all_meshes_make_the_same_rollouts_with_a_merged_adapter(mesh, model, adapter, runner, tiny_tokenizer):
    base = train(runner, tiny_tokenizer, f"rollouts-base-{model}", {}, model=MODELS[model], steps=1)
    sections = {"model": {"from": str(base.path)}, "adapter": adapter}
    one = train(runner, tiny_tokenizer, "rollouts-adapter", {}, **sections)
    check(one, train(runner, tiny_tokenizer, "rollouts-adapter-mesh", mesh, **sections))


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [{"dp_shard": 3}, {"pp": 2, "tp": 2}], ids=str)
def test_ranks_score_their_completions_with_a_reward_model(mesh, runner, tiny_tokenizer, hf_folder, tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    judge = tmp_path / "judge"
    torch.manual_seed(3)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, num_labels=1, initializer_range=0.3, pad_token_id=0, **sizes)
    shutil.copytree(hf_folder, judge, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    LlamaForSequenceClassification(config).save_pretrained(judge)
    objective = {"reward": {str(judge): 1.0, "rollout_parts:letters": 1.0}}
    one = train(runner, tiny_tokenizer, "rollouts-judge", {}, objective=objective)
    assert len({line["reward/judge"] for line in map(json.loads, (one.path / "metrics.jsonl").open())}) > 1
    check(one, train(runner, tiny_tokenizer, "rollouts-judge-mesh", mesh, objective=objective))
