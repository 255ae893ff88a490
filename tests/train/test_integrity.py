"""Numbers that a fault changed: replicas whose parameters differ, and gradients that differ when they are repeated."""

import json

import pytest
from running import QUIET, assert_same_weights, losses, train

from weft.checkpoint.load import checkpoints
from weft.observe.events import read_events

PARTS = '''
import os

import torch
from weft.objectives.pretrain import Pretrain


class Flip:
    """Flips one bit of one element of a parameter on one rank, once in the life of a run directory.

    Not the lowest bit: the rounding of the next update may undo it.
    """

    def __init__(self, *, rank: int = 1, after: int = 5, name: str = "norm.weight"):
        self.rank, self.after, self.name = rank, after, name

    def step(self, state):
        mark = state.path / "flipped"
        if state.step == self.after and state.rank == self.rank and not mark.exists():
            mark.touch()
            tensor = dict(state.model.named_parameters())[self.name].detach()
            tensor = getattr(tensor, "_local_tensor", tensor)
            tensor.flatten().view(torch.int64)[:1] ^= 1 << 20


class Unsteady(Pretrain):
    """Its 11th call, in this process, is wrong in the last bits: the repetition of the sixth step."""

    def __init__(self, *, call: int = 11):
        self.calls, self.call = 0, call

    def loss(self, outputs, batch):
        self.calls += 1
        return super().loss(outputs, batch) * (1 + 1e-6 * (self.calls == self.call and torch.is_grad_enabled()))
'''


@pytest.fixture
def checked(run_yaml, tmp_path, monkeypatch):
    """Writes a run of 8 short steps with a section `watch`, and returns its file and its directory."""
    (tmp_path / "integrity_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)

    def write(name, watch, **sections):
        training = {"steps": 8, "batch_tokens": 256, "micro_batch_size": 4, "threads": 1, "dtype": "float64"}
        file = run_yaml(
            f"{name}.yaml",
            run={"name": name},
            data={"validation": None},
            model={"num_hidden_layers": 1, **sections.pop("model", {})},
            training=training | sections.pop("training", {}),
            schedule={"type": "constant", "warmup_steps": 0},
            checkpoint={"every": 4, "keep_last": 3},
            log=QUIET,
            **sections,
        )
        with file.open("a") as out:
            out.write(f"watch: {json.dumps(watch)}\n")
        return file, tmp_path / "runs" / name

    return write


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("parallel", "name", "wrong"),
    [
        ({"dp_replicate": 2, "dp_shard": 2}, "layers.0.mlp.up_proj.weight", [1, 3]),  # two replicas have no majority
        # ranks 0 and 1 have the same rows
        pytest.param({"dp_shard": 2, "tp": 2}, "norm.weight", [0, 1], marks=pytest.mark.long),
    ],
)
def test_a_flipped_bit_is_found_on_its_ranks(checked, tmp_path, ranks, parallel, name, wrong):
    from pool import weft_command

    flip = {"type": "integrity_parts:Flip", "name": name, "after": 5}
    file, run = checked("flip", {"parameter_check_every": 3}, parallel=parallel, callbacks=[flip])
    (code, errors), *_ = ranks.call(weft_command, 4, tmp_path, ["train", str(file)])
    assert code == 1, errors
    [event] = read_events(run)
    assert (event["step"], event["event"], event["action"]) == (6, "corruption", "stop")
    assert event["tensors"] == {name: wrong}
    assert event["equal_step"] == 4
    assert f"{name} on rank {wrong[0]}, {wrong[1]}" in errors
    assert checkpoints(run)[-1].name == "step-00000004"  # none after the flip


@pytest.mark.xdist_group("ranks")
def test_a_rollback_repeats_the_steps_after_the_last_equal_checkpoint(checked, ranks):
    flip = {"type": "integrity_parts:Flip", "after": 5}
    watch = {"parameter_check_every": 100, "corruption": "rollback"}
    parallel = {"dp_replicate": 2}
    file, run = checked("flipped", watch, parallel=parallel, callbacks=[flip])
    ranks.run(file, 2)
    file, straight = checked("straight", {}, parallel=parallel)
    ranks.run(file, 2)
    # Found before the checkpoint of step 8, which is then made again.
    assert [(e["step"], e["action"], e["tensors"]) for e in read_events(run)] == [
        (8, "rollback", {"norm.weight": [0, 1]})
    ]
    assert losses(run) == losses(straight)
    assert_same_weights(run, straight)


def test_repeated_steps_leave_no_trace(checked):
    """Counts of routers, dropout, and the order of the data are those of a run without repetitions."""
    experts = {"moe": {"num_experts": 4, "num_experts_per_tok": 2}, "hidden_dropout": 0.1}
    file, run = checked("repeated", {"replay_every": 2}, model=experts)
    assert train(file) == 0
    file, straight = checked("straight", {}, model=experts)
    assert train(file) == 0
    assert losses(run) == losses(straight)
    assert_same_weights(run, straight)
    lines = [[json.loads(line)["expert_load"] for line in (path / "metrics.jsonl").open()] for path in (run, straight)]
    assert lines[0] == lines[1]
    assert not read_events(run)


@pytest.mark.parametrize("action", ["stop", "warn", "rollback"])
def test_a_step_that_is_not_repeatable_is_named(checked, capsys, action):
    unsteady = {"type": "integrity_parts:Unsteady", "call": 11}  # 1, 2+3 (step 2), 4, 5+6, 7, 8+9, 10, 11+12
    watch = {"replay_every": 2, "corruption": action}
    file, run = checked("unsteady", watch, objective=unsteady)
    assert train(file) == (1 if action == "stop" else 0)
    [event] = read_events(run)
    assert (event["step"], event["event"], event["action"], event["ranks"]) == (8, "corruption", action, [0])
    assert "lm_head.weight" in event["gradients"] or "embed_tokens.weight" in event["gradients"]
    assert "the same step, computed twice, differs in the loss of rank 0" in capsys.readouterr().err
    assert len(losses(run)) == (7 if action == "stop" else 8)
    if action == "stop":
        assert checkpoints(run)[-1].name == "step-00000004"


def test_repetitions_need_exact_kernels(checked, capsys):
    file, _ = checked("order", {"replay_every": 2}, training={"determinism": "order"})
    assert train(file) == 2
    assert "watch.replay_every: repeated gradients are equal only with" in capsys.readouterr().err


def test_a_run_without_replicas_says_that_nothing_is_compared(checked, capsys):
    file, _ = checked("alone", {"parameter_check_every": 2}, training={"steps": 1})
    assert train(file) == 0
    assert "no two ranks have a parameter in common" in capsys.readouterr().err
