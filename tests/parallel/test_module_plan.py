"""Custom models that train by plans of `weft parallelize`: every number is that of one process."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import Run, compare
from matrix import WAYS, WITHIN
from pool import RanksFailed
from safetensors.numpy import load_file
from torch.distributed.tensor import Shard

import weft
from weft.cli.main import main
from weft.config.dump import read_saved
from weft.errors import ConfigError, UserError
from weft.planner.hardware import load_hardware
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.read import read_plan
from weft.train.module_plan import planned_module

PAGE = (Path(__file__).parents[2] / "docs" / "parallel-own-model.md").read_text(encoding="utf-8")
CODE = re.sub(r"    weft_sharding = \{.*?\n    \}\n", "", re.findall(r"```python\n(.*?)```", PAGE, re.S)[0], flags=re.S)
COLUMNS_AND_ROWS = {
    "blocks.*.attention.[qkv].*": Shard(0),
    "blocks.*.attention.o.weight": Shard(1),
    "blocks.*.mlp.0.*": Shard(0),
    "blocks.*.mlp.2.weight": Shard(1),
    "words.weight": Shard(0),
}
BOTH = COLUMNS_AND_ROWS | {  # over the second tensor axis, too
    "blocks.*.mlp.0.weight": (Shard(0), Shard(0)),
    "blocks.*.mlp.2.weight": (Shard(1), Shard(1)),
    "words.weight": (Shard(0), Shard(1)),
    "blocks.*.attention.[qkv].weight": (Shard(0), Shard(1)),
}


RETURNS_DICT = """
from {module} import {kind}


class Net({kind}):
    def forward(self, tokens):
        return {{"logits": super().forward(tokens)}}
"""


LLAMA = """
import torch
import transformers


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    def __init__(self, width, head_dim, longest, vocab_size, layers):
        heads = width // head_dim
        sizes = {"hidden_size": width, "intermediate_size": 64, "num_attention_heads": heads, "num_key_value_heads": 2}
        sizes |= {"max_position_embeddings": longest, "vocab_size": vocab_size, "num_hidden_layers": layers}
        super().__init__(transformers.LlamaConfig(**sizes, attn_implementation="eager"))

    def forward(self, tokens):
        return super().forward(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
"""


CALLS_THE_MODEL = """
class Objective:
    def inputs(self, batch):
        return {"tokens": batch.tokens, "labels": batch.labels}

    def weight(self, batch):
        return batch.weight.sum()

    def loss(self, outputs, batch):
        return -(outputs * batch.weight).sum()

    def compute(self, forward, batch):
        return self.loss(forward(self.inputs(batch)), batch)
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    """A model without a sharding table; its `module:Class`."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    module = f"planned_gpt_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(CODE)
    assert "weft_sharding" not in CODE
    return f"{module}:GPT"


TWO_STAGES = (("", ("words", "places", "blocks.0..1")), ("blocks.2", ("blocks.2..3", "norm", "head")))
FOUR_STAGES = (
    ("", ("words", "places", "blocks.0")),
    ("blocks.1", ("blocks.1",)),
    ("blocks.2", ("blocks.2",)),
    ("blocks.3", ("blocks.3", "norm", "head")),
)


def write_run(folder, name, net, parallel, **changes):
    sections = {
        "run": {"name": name, "directory": str(folder), "seed": 7},
        "model": {"type": net, "width": 32, "head_dim": 8, "longest": 32, "vocab_size": 256, "layers": 4},
        "data": {"sequence_length": 32, "train": {"type": "matrix_parts:Sequences"}},
        "optimizer": {"type": "adamw", "lr": 0.01, "eps": 1e-3},
        "schedule": {"type": "constant"},
        "training": {"steps": 2, "dtype": "float64", "threads": 1, "batch_tokens": 8 * 32, "micro_batch_size": 2},
        "parallel": parallel,
        "checkpoint": {"every": 1, "keep_last": 10},
        "log": {"every": 1, "trackers": []},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values} if isinstance(values, dict) else values
    file = folder / f"{name}.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
    return file


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"plan": "tp.py"}, {}),
        pytest.param({"plan": "dp.json"}, {"plan": "tp.py"}, marks=pytest.mark.matrix),
        pytest.param("auto", {"plan": "dp.json"}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_a_planned_run_is_one_process_and_goes_on_without_its_plan(runner, net, tmp_path, first, second):
    shorter = {"training": {"steps": 1}, "model": {"layers": 2}}
    Plan(tp=2, parameters=COLUMNS_AND_ROWS, inputs={"blocks.*": Shard(1)}, recompute=("blocks.0",)).write("tp.py")
    Plan(dp=2).write("dp.json")
    runner.pool.run(write_run(tmp_path, "alone", net, {}, model={"layers": 2}), 1, seconds=120)
    runner.pool.run(write_run(tmp_path, "planned", net, first, **shorter), 2, seconds=120)
    runner.pool.run(write_run(tmp_path, "planned", net, second, model={"layers": 2}), 2 if second else 1, seconds=120)
    difference = compare(Run(tmp_path / "alone"), Run(tmp_path / "planned"))
    assert difference.largest <= WITHIN, difference.wrong()


@pytest.mark.parametrize(
    ("plan", "second"),
    [
        (Plan(pp=2, stages=TWO_STAGES), {}),
        pytest.param(
            Plan(pp=2, stages=FOUR_STAGES, schedule="ZBVZeroBubble"), {"dp_shard": 2}, marks=pytest.mark.matrix
        ),
        pytest.param(Plan(pp=2, dp=2, stages=TWO_STAGES), {"plan": "tp.py"}, marks=pytest.mark.matrix),
        pytest.param(
            Plan(pp=2, tp=2, stages=FOUR_STAGES, schedule="Interleaved1F1B", parameters=COLUMNS_AND_ROWS),
            {"plan": "stages.py"},
            marks=pytest.mark.matrix,
        ),
        pytest.param(Plan(tp=2, tp2=2, parameters=BOTH), {"plan": "tp.py"}, marks=pytest.mark.matrix),
    ],
    ids=lambda one: f"pp{one.pp}-dp{one.dp}-tp{one.tp}-{one.tp2}-{one.schedule}" if isinstance(one, Plan) else str(one),
)
def test_a_run_in_stages_or_on_two_tensor_axes_is_one_process(runner, net, tmp_path, plan, second):
    plan.write("plan.py")
    Plan(tp=2, parameters=COLUMNS_AND_ROWS).write("tp.py")
    Plan(pp=2, stages=FOUR_STAGES, schedule="DualPipeV").write("stages.py")
    held_out = {"data": {"validation": {"type": "matrix_parts:Sequences", "count": 12}}, "validation": {"every": 1}}
    longer = held_out | {"training": {"steps": 2, "grad_clip": 0.5}}
    first = held_out | {"training": {"steps": 1, "grad_clip": 0.5}}
    ranks = {"{}": 1}.get(str(second), 2)
    runner.pool.run(write_run(tmp_path, "alone", net, {}, **longer), 1, seconds=120)
    runner.pool.run(write_run(tmp_path, "staged", net, {"plan": "plan.py"}, **first), plan.devices, seconds=240)
    runner.pool.run(write_run(tmp_path, "staged", net, second, **longer), ranks, seconds=120)
    difference = compare(Run(tmp_path / "alone"), Run(tmp_path / "staged"))
    assert difference.largest <= WITHIN, difference.wrong()


@pytest.mark.matrix
def test_a_reference_runs_in_the_stages_of_the_model(runner, net, tmp_path):
    code = CODE.replace("def forward(self, tokens):", "def forward(self, tokens, segments=None):")
    (tmp_path / f"{net.partition(':')[0]}.py").write_text(code)
    Plan(pp=2, stages=TWO_STAGES).write("plan.py")
    pairs = {"data": WAYS["dpo"]["data"], "objective": WAYS["dpo"]["objective"]}
    for name, parallel, ranks in (("alone", {}, 1), ("staged", {"plan": "plan.py"}, 2)):
        runner.pool.run(write_run(tmp_path, name, net, parallel, **pairs), ranks, seconds=120)
    difference = compare(Run(tmp_path / "alone"), Run(tmp_path / "staged"))
    assert difference.largest <= WITHIN, difference.wrong()


@pytest.mark.long
def test_a_killed_run_in_pipeline_stages_resumes_with_the_same_numbers(runner, net, tmp_path):
    dropout = "return F.dropout(x + self.mlp(self.norm2(x)), 0.1, self.training)"
    (tmp_path / f"{net.partition(':')[0]}.py").write_text(CODE.replace("return x + self.mlp(self.norm2(x))", dropout))
    Plan(pp=2, stages=FOUR_STAGES, schedule="InterleavedZeroBubble").write("plan.py")
    steps = {"training": {"steps": 4, "dtype": "float32"}}
    dies = {"callbacks": [{"type": "callback_parts:Dies", "step": 3, "rank": 1}]}
    for name, changes in (("whole", {}), ("killed", dies), ("killed", dies)):
        file = write_run(tmp_path, name, net, {"plan": "plan.py"}, **steps, **changes)
        if changes and not (tmp_path / "killed").exists():
            with pytest.raises(RanksFailed, match="exit code -9"):
                runner.pool.run(file, 2, seconds=120)
        else:
            runner.pool.run(file, 2, seconds=120)
    difference = compare(Run(tmp_path / "whole"), Run(tmp_path / "killed"))
    assert difference.largest == 0, difference.wrong()


def test_the_saved_config_of_a_run_in_pipeline_stages_is_legal(runner, net, tmp_path, capsys):
    Plan(pp=2, stages=TWO_STAGES).write("plan.py")
    runner.pool.run(write_run(tmp_path, "one", net, {"plan": "plan.py"}, training={"steps": 1}), 2)
    assert main(["config", "check", "one/config.yaml"]) == 0
    assert "stages of the plan, by 1f1b" in capsys.readouterr().out
    assert main(["profile", "one/config.yaml", "--structure"]) == 2
    assert "--structure does not show plans of custom models" in capsys.readouterr().err
    runner.pool.run(Path("one/config.yaml"), 2)


@pytest.mark.matrix
def test_a_model_of_a_known_family_is_exported_after_training_in_stages(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planned_llama.py").write_text(LLAMA)
    ends = ("model.norm", "lm_head")
    stages = (("", ("model.embed_tokens", "model.layers.0")), ("model.layers.1", ("model.layers.1..3", *ends)))
    Plan(pp=2, stages=stages).write("plan.py")
    for name, parallel, ranks in (("alone", {}, 1), ("staged", {"plan": "plan.py"}, 2)):
        runner.pool.run(write_run(tmp_path, name, "planned_llama:LlamaForCausalLM", parallel), ranks, seconds=120)
    assert main(["export", "staged", "exported"]) == 0
    expected, found = Run(tmp_path / "alone").steps[-1], load_file("exported/model.safetensors")
    assert len(found) == 39
    for name, value in found.items():
        assert np.abs(value - expected[f"model.{name}"]).max() <= WITHIN, name


def test_stages_that_a_run_cannot_use_are_one_line(runner, net, tmp_path):
    Plan(pp=2, stages=TWO_STAGES).write("plan.py")
    one = write_run(tmp_path, "one", net, {"plan": "plan.py"}, training={"micro_batch_size": 8})
    with pytest.raises(RanksFailed, match="1f1b over 2 ranks needs at least 2 micro-batches, but a step has 1"):
        runner.pool.run(one, 2)


def links(folder, bandwidth):
    """A hardware file whose devices compute so slowly that only they and the bandwidth, in GB/s, matter."""
    device = {"peak_tflops": {"float64": 1e-4, "float32": 1e-4}, "launch_us": 0, "memory_bandwidth_gb_s": 1e6}
    machine: dict[str, Any] = load_hardware("cpu-generic").model_dump(exclude_none=True)
    machine["device"] |= device
    machine["levels"] = [{"name": "link", "latency_us": 1, "bandwidth_gb_s": bandwidth}]
    file = folder / f"links_{bandwidth:g}.yaml"
    file.write_text(json.dumps(machine))
    return str(file)


def test_auto_finds_stages_where_links_are_slow_and_a_resumed_run_keeps_them(runner, net, tmp_path):
    slow, longer = {"auto": True, "hardware": links(tmp_path, 1e-3)}, {"model": {"layers": 2}}
    runner.pool.run(write_run(tmp_path, "alone", net, {}, **longer), 1, seconds=120)
    shorter = longer | {"training": {"steps": 1}}
    runner.pool.run(write_run(tmp_path, "staged", net, slow, **shorter), 2, seconds=120)
    plan, saved = read_plan("staged/plan.py"), read_saved(tmp_path / "staged" / "config.yaml")["parallel"]
    assert (plan.pp, plan.dp, plan.tp, plan.micro_batches) == (2, 1, 1, 4)
    assert saved["pp"] == 2
    (tmp_path / "staged" / "plan.json").write_text(json.dumps(plan.to_json() | {"notes": {"kept": "yes"}}))
    runner.pool.run(write_run(tmp_path, "staged", net, slow, **longer), 2, seconds=120)
    assert read_plan("staged/plan.py").notes == {"kept": "yes"}
    difference = compare(Run(tmp_path / "alone"), Run(tmp_path / "staged"))
    assert difference.largest <= WITHIN, difference.wrong()


def planned_mesh(net, folder, bandwidth=1e-3, **changes):
    parallel = {"auto": True, "hardware": links(folder, bandwidth)}
    found = planned_module(weft.RunConfig.load(write_run(folder, "run", net, parallel, **changes)), 2, fresh=False)
    return found[0].parallel.pp, found[0].parallel.dp_shard, found[0].parallel.tp


@pytest.mark.long
def test_auto_compares_whole_steps_with_and_without_stages(net, tmp_path):
    assert planned_mesh(net, tmp_path, bandwidth=1e3) == (1, 2, 1)
    assert planned_mesh(net, tmp_path) == (2, 1, 1)


@pytest.mark.long
def test_auto_compares_steps_of_other_sizes_objectives_and_outputs(net, tmp_path):
    assert planned_mesh(net, tmp_path, training={"micro_batch_size": 8})[0] == 1  # stages would wait for each other
    larger = {"batch_tokens": 64 * 32}
    once, often = ({"training": larger | {"micro_batch_size": size}} for size in (32, 1))
    assert planned_mesh(net, tmp_path, **once) == (1, 2, 1)  # gradients are reduced once
    assert planned_mesh(net, tmp_path, **often)[0] == 2  # and here 32 times
    (tmp_path / "calls_the_model.py").write_text(CALLS_THE_MODEL)
    assert planned_mesh(net, tmp_path, objective={"type": "calls_the_model:Objective"})[0] == 1
    module, kind = net.split(":")
    (tmp_path / "returns_dict.py").write_text(RETURNS_DICT.format(module=module, kind=kind))
    assert planned_mesh(net, tmp_path, bandwidth=1e3, model={"type": "returns_dict:Net"}) == (1, 2, 1)


def test_auto_keeps_the_plan_of_the_last_session(net, tmp_path, capsys):
    small = {"model": {"layers": 1}, "training": {"steps": 1, "micro_batch_size": 8}}
    assert main(["train", str(write_run(tmp_path, "auto", net, "auto", **small))]) == 0
    assert "parallel: dp 1, tp 1 (auto; " in capsys.readouterr().err
    saved, plan = read_saved(tmp_path / "auto" / "config.yaml")["parallel"], read_plan("auto/plan.py")
    assert (saved["dp_shard"], saved["tp"], saved["plan"]) == (1, 1, str(tmp_path / "auto" / "plan.py"))
    assert plan.structure
    assert plan.notes["hardware"] == load_hardware("cpu-generic").device.name  # also where a later call finds it
    (tmp_path / "auto" / "plan.json").write_text(json.dumps(plan.to_json() | {"notes": {"kept": "yes"}}))
    small["training"]["steps"] = 2
    assert main(["train", str(write_run(tmp_path, "auto", net, "auto", **small))]) == 0
    assert read_plan("auto/plan.py").notes == {"kept": "yes"}
    assert len(Run(tmp_path / "auto").steps) == 2


@pytest.mark.parametrize(
    ("parallel", "changes", "words"),
    [
        ({"plan": "none.py"}, {}, ["parallel.plan: none.py: no such file", "weft parallelize my:Net"]),
        ({"plan": "dp.json", "cp": 2}, {}, ["parallel.cp", "the plan of a custom model decides it"]),
        ({"auto": True, "offload": "optimizer"}, {}, ["parallel.offload", "remove the key"]),
        ({"plan": "dp.json"}, {"training": {"compile": True}}, ["training.compile", "not supported with a plan"]),
        (
            {"plan": "dp.json"},
            {"training": {"activation_checkpointing": "full"}},
            ["training.activation_checkpointing: the plan of a custom model decides it"],
        ),
    ],
)
def test_keys_that_a_plan_does_not_support_are_reported(net, tmp_path, parallel, changes, words):
    Plan(dp=2).write("dp.json")
    with pytest.raises(ConfigError) as error:
        weft.RunConfig.load(write_run(tmp_path, "bad", net, parallel, **changes))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("plan", "parallel", "words"),
    [
        (Plan(dp=2), {}, "is for 2 devices (dp 2 x tp 1), and the run has 1; start 2 (--nproc 2)"),
        (Plan(pp=2, stages=TWO_STAGES), {}, "is for 2 devices (pp 2 x dp 1 x tp 1), and the run has 1; start 2"),
        (Plan(), {"pp_schedule": "gpipe"}, "parallel.pp_schedule: gpipe, but the plan has 1f1b; remove the key"),
        (Plan(), {"tp": 1, "dp_shard": 1}, "the plan is for a module of the structure 0123"),
        (Plan(parameters={"nothing": Shard(0)}), {}, "plan: parameters: 'nothing' matches no parameter of GPT"),
    ],
)
def test_a_plan_that_does_not_fit_is_one_line(net, tmp_path, capsys, plan, parallel, words):
    replace(plan, structure="0123" if "structure" in words else "").write("plan.py")
    assert main(["train", str(write_run(tmp_path, "bad", net, {"plan": "plan.py", **parallel}))]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "schedule", "usual"),
    [
        (Plan(pp=2, stages=TWO_STAGES), "1f1b", 1),
        (Plan(pp=2, stages=FOUR_STAGES, schedule="Interleaved1F1B"), "interleaved_1f1b", 2),
    ],
    ids=["1f1b", "interleaved"],
)
def test_a_run_may_name_the_usual_number_of_stages_of_its_plan(net, tmp_path, plan, schedule, usual):
    plan.write("plan.py")
    keys = {"plan": "plan.py", "pp": 2, "pp_schedule": schedule, "stages_per_rank": usual}
    config = weft.RunConfig.load(write_run(tmp_path, "one", net, keys))
    assert planned_module(config, 2, fresh=True)[0].parallel.stages_per_rank is None
    keys |= {"pp_schedule": "interleaved_1f1b", "stages_per_rank": 3}
    config = weft.RunConfig.load(write_run(tmp_path, "one", net, keys))
    words = "parallel.stages_per_rank: 3, but the plan has 2; remove" if usual == 2 else "but the plan has 1f1b; remove"
    with pytest.raises(UserError, match=words):
        planned_module(config, 2, fresh=True)
