"""Callbacks and metrics: a user's classes in the working directory, the built-in ones, and resuming with them."""

import json
import re
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from forked import Forked
from running import QUIET, assert_same_weights, finish, losses, metrics, train
from safetensors.torch import load_file

import weft
from weft.config.run import CallbackSection, MetricSection, RunConfig
from weft.errors import UserError
from weft.parallel.objective import Loss, Totals
from weft.train.custom_metrics import Metrics, ObservedObjective
from weft.train.hooks import Callbacks

PARTS = '''
import os
import signal

import torch

from weft.train.callbacks.early_stopping import EarlyStopping


class Notes:
    """Writes down every hook, in a file of each rank."""

    def __init__(self, *, name: str = "notes", stop_at: int | None = None, stop_rank: int = 0):
        self.name, self.stop_at, self.stop_rank, self.count = name, stop_at, stop_rank, 0

    def note(self, what, state):
        self.count += 1
        with (state.path / f"{self.name}-{state.rank}.txt").open("a") as file:
            print(what, state.step, sorted(name for name in state.metrics if "valid" in name), state.status, file=file)

    def begin(self, state):
        self.note("begin", state)

    def step(self, state):
        self.note("step", state)
        state.log({f"{self.name}/count": self.count})
        if state.step == self.stop_at and state.rank == self.stop_rank:
            state.request_stop("enough is enough")

    def saved(self, state):
        assert (state.path / "checkpoints" / f"step-{state.step:08}").is_dir()
        self.note("saved", state)

    def validated(self, state):
        self.note("validated", state)

    def ended(self, state):
        self.note("ended", state)


class Listens(Notes):
    """Its state depends on validations, so a resumed run must not leave one out."""

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Patient(EarlyStopping):
    pass


class Dies:
    """Is killed, once."""

    def step(self, state):
        if state.step == 8 and "dies" in state.path.name and not (state.path / "died").exists():
            (state.path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Broken:
    def validated(self, state):
        raise KeyError("nothing here")


class Takes:
    def __init__(self, *, name: str = "loss"):
        self.name = name

    def step(self, state):
        state.log({self.name: 1.0})


class Remembers:
    """Has a state with tensors in a dict, or in something else."""

    def __init__(self, *, where: str = "dict"):
        one = torch.arange(3.0)
        self.state = {
            "dict": {"a": {"b": one}, "best": {"lr/matrix": 1.0}, "list": [1, {"x": 2}]},
            "list": {"a": [{"b": one}, {"b": one + 1}]},
            "slash": {"a/b": {"c": one}},
        }[where]

    def begin(self, state):
        pass

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        assert torch.equal(state["a"]["b"], self.state["a"]["b"])
        assert state | {"a": 0} == self.state | {"a": 0}


class Accuracy:
    """How likely the labels are, and how many rows there are, from outputs and from the batch."""

    scalars = ("likely", "rows", "norm")

    def outputs(self, outputs, batch):
        return {"likely": ((outputs.exp() * batch.weight).sum(), batch.weight.sum())}

    def step(self, state):
        rows = len(state.batch.tokens)
        return {"rows": (rows * rows, rows), "norm": 2.5}


class Again(Accuracy):
    pass


class Undeclared(Accuracy):
    scalars = ("rows", "norm")


class Alone:
    scalars = ("share", "further")

    def outputs(self, outputs, batch):
        return {"further": (0.0, 0.0), "share": 3.0}


class Steps:
    scalars = ("rows", "further")

    def step(self, state):
        return {"rows": 1}
'''


@pytest.fixture
def short(run_yaml, tmp_path, monkeypatch):
    """Writes a short run with callbacks; its directory."""
    (tmp_path / "my_callbacks.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_callbacks", raising=False)

    def write(name, callbacks=(), metrics=(), **changes):
        file = run_yaml(
            f"{name}.yaml",
            run={"name": name},
            training={"steps": 4, "batch_tokens": 512, "threads": 1} | changes.pop("training", {}),
            schedule={"type": "constant", "warmup_steps": 0},
            validation={"every": 2, "tokens": 512} | changes.pop("validation", {}),
            checkpoint={"every": 3, "keep_last": 9} | changes.pop("checkpoint", {}),
            log=QUIET | {"metrics": list(metrics)},
            callbacks=list(callbacks),
            **changes,
        )
        return file, tmp_path / "runs" / name

    return write


def test_hooks_are_called_in_the_order_of_the_list_and_their_numbers_are_logged(short):
    two = [{"type": "my_callbacks:Notes", "name": name} for name in ("first", "second")]
    file, run = short("order", ["lr_monitor", *two])
    assert train(file) == 0
    valid = "['validation_bits_per_byte', 'validation_loss']"
    expected = [
        "begin 0 [] None",
        "step 1 [] None",
        "step 2 [] None",
        f"validated 2 {valid} None",
        "step 3 [] None",
        "saved 3 [] None",
        "step 4 [] None",
        "saved 4 [] None",
        f"validated 4 {valid} None",
        f"ended 4 {valid} finished",
    ]
    for name in ("first", "second"):
        assert (run / f"{name}-0.txt").read_text().splitlines() == expected
    assert [line["first/count"] for line in metrics(run)] == [2, 3, 5, 7]
    assert all(line["lr/matrix"] == line["lr"] for line in metrics(run))


def test_a_callback_stops_the_run_and_it_goes_on_later(short, capsys):
    file, run = short("asked", [{"type": "my_callbacks:Notes", "stop_at": 2}, "my_callbacks:Remembers"])
    assert train(file) == 0
    assert "stopped early after step 2, saved: enough is enough" in capsys.readouterr().err
    assert (run / "checkpoints" / "step-00000002").is_dir()
    manifest = json.loads((run / "manifest.json").read_text())
    assert [(s["status"], s["last_step"]) for s in manifest["sessions"]] == [("stopped-early", 2)]
    assert (run / "notes-0.txt").read_text().splitlines()[-1].startswith("ended 2")
    assert train(file) == 0
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]


@pytest.mark.parametrize(("held_out", "later"), [(False, False), (True, False), (False, True)])
def test_a_run_goes_on_with_or_without_validation_data(short, tiny_heldout, held_out, later):
    for validation in (held_out, later):
        data = {"validation": str(tiny_heldout) if validation else None}
        listens = {"type": "my_callbacks:Listens", "stop_at": 2}
        file, run = short("held-out", [listens], checkpoint={"every": 2}, data=data)
        assert train(file) == 0
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    notes = (run / "notes-0.txt").read_text().splitlines()
    validated = [line.split()[1] for line in notes if line.startswith("validated")]
    assert validated == ["2"] * held_out + ["4"] * later


def test_an_exception_is_reported_with_the_users_line_and_the_key(short, capfd):
    file, _ = short("broken", ["lr_monitor", "my_callbacks:Broken"])
    assert train(file) == 2
    said = capfd.readouterr().err
    line = next(line for line in said.splitlines() if "KeyError" in line)
    number = 1 + PARTS.splitlines().index('        raise KeyError("nothing here")')
    assert line == f"my_callbacks.py:{number}: KeyError: 'nothing here' (in my_callbacks:Broken, callbacks[1])"


@pytest.mark.parametrize(
    ("callbacks", "measures", "told"),
    [
        (["my_callbacks:Takes"], [], "callbacks[0] (Takes) logs 'loss', a name that is already used"),
        (
            [{"type": "my_callbacks:Takes", "name": "validation_x"}],
            [],
            "logs 'validation_x', a name that is",
        ),
        (
            [],
            ["my_callbacks:Accuracy", "my_callbacks:Again"],
            "log.metrics[1] (my_callbacks:Again) logs 'likely', a name that is",
        ),
        ([], ["my_callbacks:Undeclared"], "logs 'likely', which is not in its `scalars`; add the name"),
        (
            [{"type": "early_stopping", "metric": "loss"}],
            [],
            "no metric 'loss'; use one of validation_loss, validation_bits_per_byte",
        ),
        (["my_callbacks:Patient"], [], "callbacks: early_stopping needs validations; set data.validation"),
        ([], ["my_callbacks:Dies"], "`scalars` must list the names that"),
        (
            [],
            ["my_callbacks:Alone"],
            "log.metrics[0] (my_callbacks:Alone): 'share' must be a pair (sum, weight), not a float; return",
        ),
    ],
)
def test_mistakes_are_one_line(short, capsys, callbacks, measures, told):
    with_data = {} if "my_callbacks:Patient" not in callbacks else {"data": {"validation": None}}
    file, _ = short("mistake", callbacks, measures, **with_data)
    assert train(file) == 2
    assert told in capsys.readouterr().err


def test_what_metrics_and_objectives_return_is_checked(short):
    def returns(values):
        metric = SimpleNamespace(scalars=("share", "further"), outputs=lambda outputs, batch: values)
        objective = SimpleNamespace(loss=lambda outputs, batch: torch.tensor(1.0))
        return ObservedObjective(objective, {"log.metrics[0] (m:M)": metric}).loss(torch.zeros(2), None)

    pair = (torch.tensor(2.0), 4)
    assert returns({"share": pair, "further": [1, 2]}).scalars == {"share": pair, "further": [1, 2]}
    for values, told in (
        (None, "`outputs` must return a dict of names and values, not a NoneType"),
        ({"share": pair}, "`outputs` did not return 'further', which is in its `scalars`"),
        ({"share": pair, "further": (1, 2, 3)}, "'further' must be a pair (sum, weight), not a tuple"),
        ({"share": pair, "further": (1, torch.ones(2))}, "'further' must be a pair (sum, weight), not a tuple"),
    ):
        with pytest.raises(UserError, match=rf"log\.metrics\[0\] \(m:M\):? {re.escape(told)}"):
            returns(values)
    with pytest.raises(UserError, match=r"^objective: 'log_z_sq' must be a pair \(sum, weight\), not a float"):
        Totals(("log_z_sq",), torch.device("cpu")).add(Loss(torch.tensor(1.0), {"log_z_sq": 3.0}))
    metrics = Metrics([MetricSection(type="my_callbacks:Steps")], SimpleNamespace(), None)
    with pytest.raises(UserError, match=r"\(my_callbacks:Steps\): `step` did not return 'further'"):
        metrics.step(SimpleNamespace(logged=True))


def test_a_class_without_hooks_is_refused_when_the_file_is_checked(short, tmp_path):
    (tmp_path / "no_hooks.py").write_text("class Nothing:\n    def beginn(self, state):\n        pass\n")
    file, _ = short("refused", ["no_hooks:Nothing"])
    with pytest.raises(UserError, match=r"callbacks\[0\].type: .*Nothing.* begin\(state\).* step\(state\)"):
        RunConfig.load(file)


@pytest.mark.parametrize(
    ("where", "told"), [("list", "/a: a tensor in a list"), ("slash", "the key 'a/b' of a tensor contains '/'")]
)
def test_a_state_that_would_be_loaded_in_another_form_is_refused(short, where, told):
    callbacks = Callbacks([CallbackSection(type="my_callbacks:Remembers", where=where)])
    with pytest.raises(UserError, match=f"callback/my_callbacks:Remembers.*{told}"):
        callbacks.state_dict()


def test_metrics_look_at_outputs_and_at_the_state_in_training_and_validation(short):
    file, run = short("measured", [], ["my_callbacks:Accuracy"])
    assert train(file) == 0
    lines = metrics(run)
    assert [(line["rows"], line["norm"]) for line in lines] == [(8, 2.5)] * 4
    assert 0 < lines[0]["likely"] < lines[3]["likely"] < 1
    assert lines[3]["validation_likely"] == pytest.approx(lines[3]["likely"], rel=0.2)
    assert "likely" in (run / "report.html").read_text()


def test_early_stopping_ends_a_run_that_gets_no_better(short, capsys):
    never = {"type": "early_stopping", "patience": 2, "min_delta": 100.0}
    file, run = short("early", [never], training={"steps": 20}, validation={"every": 1})
    assert train(file) == 0
    assert "stopped early after step 3, saved: validation_loss has not improved on" in capsys.readouterr().err
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]  # the first is an improvement on nothing
    assert weft.load_model(run) is not None
    assert train(file) == 0  # it stays stopped
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]


def test_a_killed_run_with_state_goes_on_to_the_same_bits(short, tmp_path):
    common = {
        "training": {"steps": 20},
        "validation": {"every": 1},
        "checkpoint": {"every": 6},
        "optimizer": {"lr": 0.03},
    }
    stop = {"type": "early_stopping", "patience": 8, "min_delta": 0.5}
    callbacks = [{"type": "ema", "decay": 0.8, "validate": True}, stop, "my_callbacks:Dies"]
    straight_file, straight = short("straight", callbacks, **common)
    file, run = short("dies", callbacks, **common)
    process = Forked("train", file, cwd=tmp_path)
    assert train(straight_file) == 0
    assert 8 < metrics(straight)[-1]["step"] < 20  # stopped early
    assert finish(process)[0] == -signal.SIGKILL
    assert [c.name for c in (run / "checkpoints").glob("step-*")] == ["step-00000006"]
    assert train(file) == 0
    assert losses(run) == losses(straight)
    assert [m["validation_loss"] for m in metrics(run)] == [m["validation_loss"] for m in metrics(straight)]
    assert_same_weights(straight, run)
    names = [str(path.relative_to(run)) for path in sorted(run.glob("checkpoints/*/*.safetensors"))[-1:]]
    one, other = (load_file(folder / names[0]) for folder in (run, straight))
    averages = {name for name in one if name.startswith("callback/ema/weights/")}
    assert averages
    assert all(torch.equal(one[name], other[name]) for name in averages)
