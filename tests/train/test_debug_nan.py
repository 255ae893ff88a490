"""`weft debug nan`: the module, step and sample at which a test made a value that is not finite are those it names."""

import json

import pytest
from running import QUIET, train

from weft.cli.main import main

PARTS = '''
import numpy as np
import torch
from torch import nn

from weft.objectives.pretrain import Pretrain


class Rows:
    """Rows of random tokens, of which `bad` begins with a token that no other row has."""

    def __init__(self, *, bad: int = -1):
        self.rows = np.random.default_rng(3).integers(0, 511, (64, 17))
        if bad >= 0:
            self.rows[bad, 0] = 511

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"tokens": self.rows[i]}


class Layer(nn.Module):
    """A residual layer that meets a row with the bad token in the way that `fails` says."""

    def __init__(self, width, fails):
        super().__init__()
        self.linear, self.fails = nn.Linear(width, width), fails

    def forward(self, x, bad):
        x = x + torch.tanh(self.linear(x))
        zero = (x * 0 if bad is None else x * (~bad)[:, None, None]).pow(2).mean(-1, keepdim=True)
        if bad is None or not bad.any():
            return x
        if self.fails == "log":  # -inf for the bad row
            return x + zero.log() * bad[:, None, None]
        if self.fails == "root":  # finite, with an infinite derivative that is multiplied by 0
            return x + zero.sqrt() * bad[:, None, None]
        return x


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, width) * 0.02)

    def forward(self, x):
        return x @ self.weight.T


class Net(nn.Module):
    """Two layers, of which the second fails; with `fails: between`, the code between the layers does."""

    def __init__(self, width: int = 16, fails: str = "log"):
        super().__init__()
        self.fails = fails
        self.table = nn.Embedding(512, width)
        self.layers = nn.ModuleList([Layer(width, ""), Layer(width, fails)])
        self.head = Head(width)

    def forward(self, tokens):
        bad = tokens[:, 0] == 511
        x = self.layers[0](self.table(tokens), bad)
        if self.fails == "between" and bad.any():
            x = x / (~bad)[:, None, None]
        return self.head(self.layers[1](x, bad))


class Shifted(Pretrain):
    """The loss of a batch with the bad token is 0/0."""

    def loss(self, outputs, batch):
        factor = (batch.tokens[:, 0] != 511).all().double()
        return super().loss(outputs, batch) * (factor / factor)


class Poison:
    """Sets an element of a weight to NaN after a step."""

    def __init__(self, *, after: int = 5):
        self.after = after

    def step(self, state):
        if state.step == self.after:
            with torch.no_grad():
                weight = dict(state.model.named_parameters())["layers.1.linear.weight"]
                getattr(weight, "_local_tensor", weight)[0, 0] = float("nan")
            state.weights_replaced()
'''
BATCH = 4


@pytest.fixture
def broken(run_yaml, tmp_path, monkeypatch):
    """Writes a run of 8 steps with 4 rows each, checkpoints of steps 3 and 6, and a bad row in step 5."""
    (tmp_path / "nan_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)

    def write(fails="log", *, bad=4 * BATCH + 2, watch=None, **sections):
        sections.setdefault("objective", {"type": "pretrain"})
        model = sections.pop("model", None) or {"type": "nan_parts:Net", "fails": fails}
        file = run_yaml(
            data=None,
            tokenizer=None,
            model=None,
            schedule={"type": "constant", "warmup_steps": 0},
            training={"steps": 8, "batch_tokens": BATCH * 16, "micro_batch_size": 2, "threads": 1, "dtype": "float32"},
            checkpoint={"every": 3, "keep_last": 3},
            log=QUIET,
            **sections,
        )
        rows = {"type": "nan_parts:Rows", "bad": bad}
        data = {"train": rows, "sequence_length": 16, "shuffle": False}
        with file.open("a") as out:
            out.writelines(f"{k}: {json.dumps(v)}\n" for k, v in (("data", data), ("model", model)))
            out.write(f"watch: {json.dumps(watch or {})}\n")
        return file, tmp_path / "runs" / "demo"

    return write


def debug(run, *options) -> dict:
    assert main(["debug", "nan", str(run), *map(str, options)]) == 0
    newest = max(run.glob("debug-nan-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return json.loads((newest / "debug-nan.json").read_text())


@pytest.mark.parametrize(
    ("action", "fails", "what", "module", "kind", "cause"),
    [
        *((action, "log", "output", "layers.1", "Layer", "logarithm of 0") for action in ("stop", "rollback", "skip")),
        ("stop", "root", "output gradient", "layers.1", "Layer", "the derivative at 0"),  # of the output of its linear
        ("stop", "between", "input", "", "Net", "division by 0"),
    ],
)
def test_the_module_is_named(broken, capsys, action, fails, what, module, kind, cause):
    """From the checkpoint of step 3, or from 4 if the run stopped there."""
    file, run = broken(fails, watch={"non_finite": action})
    assert train(file) == (1 if action == "stop" else 0)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    result = debug(run)
    assert (result["step"], result["after_step"]) == (5, 4 if action == "stop" else 3)
    assert (result["data_step"], result["batch_samples"]) == (4, [16, 19])
    found = result["found"]
    assert (found["what"], found["module"], found["type"]) == (what, module, kind)
    assert found["samples"] == [4 * BATCH + 2]
    assert cause in result["likely_cause"]
    said = capsys.readouterr().out
    assert "step 5: first not finite" in said
    assert f"code of {module or 'the model'} ({kind})" in said
    assert f"bad samples: {4 * BATCH + 2}" in said
    assert {path: path.read_bytes() for path in before} == before


def test_the_objective_is_named(broken):
    file, run = broken("", objective={"type": "nan_parts:Shifted"})
    assert train(file) == 1
    found = debug(run)["found"]
    assert (found["what"], found["module"], found["type"], found["values"]) == ("loss", "", "Shifted", ["nan"])


def test_a_weight_is_named_with_the_update_after_which_it_was_bad(broken, capsys):
    file, run = broken("", bad=-1, callbacks=[{"type": "nan_parts:Poison", "after": 5}])
    assert train(file) == 1
    result = debug(run)
    assert (result["step"], result["found"]["what"]) == (6, "weight")
    assert result["found"]["tensor"] == "the weight layers.1.linear.weight"
    assert "the checkpoint of step 5 already has it" in result["likely_cause"]
    result = debug(run, "--from", 0)
    assert result["found"]["tensor"] == "the weight layers.1.linear.weight"
    assert "the update of step 5, or a callback after it" in result["likely_cause"]


def test_a_finite_step_and_a_step_that_is_not_there(broken, capsys):
    file, run = broken("", bad=-1)
    assert train(file) == 0
    assert debug(run, "--step", 5)["found"] is None
    assert "the loss and all gradients are finite in this repetition" in capsys.readouterr().out
    for options, words in (
        ([], "no event `non-finite` is recorded"),
        (["--step", "9"], "--step 9: the run has made 8 steps"),
        (["--step", "5", "--from", "6"], "--from 6: not a step from which step 5 can be repeated; use one of 0, 3"),
        (["--step", "0"], "--step 0: use a number of at least 1"),
    ):
        assert main(["debug", "nan", str(run), *options]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("parallel", [pytest.param({"dp_shard": 2}, marks=pytest.mark.long), {"pp": 2, "dp_shard": 1}])
def test_two_ranks_find_the_same_module(broken, tmp_path, ranks, parallel):
    """With data parallelism, only rank 1 has the bad row; with a pipeline, the second stage has the weight."""
    from pool import weft_command

    model = {"preset": "llama-tiny", "vocab_size": 512, "num_hidden_layers": 2} if "pp" in parallel else None
    part = {"objective": {"type": "nan_parts:Shifted"}} if "pp" in parallel else {}
    file, run = broken("log", parallel=parallel, model=model, bad=4 * BATCH + 3, **part)
    assert ranks.call(weft_command, 2, tmp_path, ["train", str(file)])[0][0] == 1
    (code, errors), _ = ranks.call(weft_command, 2, tmp_path, ["debug", "nan", str(run), "--out", "found"])
    assert code == 0, errors
    result = json.loads((tmp_path / "found" / "debug-nan.json").read_text())
    found = result["found"]
    if "pp" in parallel:
        assert (found["what"], found["type"], found["rank"]) == ("loss", "Shifted", 1)
    else:
        assert (found["module"], found["type"], found["rank"]) == ("layers.1", "Layer", 1)
        assert found["samples"] == [4 * BATCH + 3]
