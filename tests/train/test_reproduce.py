"""`weft reproduce`: equal runs are equal to the bit, and a difference is found at its step, with its cause."""

import json
import os
import sys

import pytest
import torch
from running import QUIET, losses, metrics, train

from weft.cli.main import main

STEPS = 8
COMMON = {
    "training": {"steps": STEPS, "batch_tokens": 256, "threads": 1},
    "schedule": {"warmup_steps": 1},
    "model": {"hidden_dropout": 0.1},
    "validation": {"every": 3, "tokens": 256},
    "checkpoint": {"every": 3},
    "log": QUIET,
}
SHIFTED = """
from weft.objectives.pretrain import Pretrain

class Shifted(Pretrain):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * {factor}
"""


def reproduce(*arguments) -> int:
    return main(["reproduce", *map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_tokenizer, tiny_store, tiny_heldout):
    """A finished run of 8 steps with checkpoints of steps 6 and 8."""
    from pool import no_measuring

    no_measuring()  # of git, as in the tests that compare with this run
    folder = tmp_path_factory.mktemp("trained")
    file = folder / "run.yaml"
    config = {
        "run": {"name": "demo", "directory": str(folder / "runs"), "seed": 7},
        "tokenizer": str(tiny_tokenizer),
        "data": {"train": str(tiny_store), "validation": str(tiny_heldout), "sequence_length": 64},
        **COMMON,
        "model": {"preset": "llama-tiny", "vocab_size": 512, **COMMON["model"]},
        "training": COMMON["training"] | {"dtype": "float32", "micro_batch_size": 4},
        "log": QUIET | {"every": 1},
    }
    file.write_text(json.dumps(config))
    assert train(file) == 0
    return folder / "runs" / "demo"


def result(out) -> dict:
    return json.loads((out / "reproduce.json").read_text())


def test_a_run_is_equal_to_itself_from_the_start_and_from_a_checkpoint(trained, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in trained.iterdir()}
    assert reproduce(trained) == 0
    said = capsys.readouterr()
    assert f"equal, bit by bit: loss and gradient norm of {STEPS} logged steps" in said.out
    assert losses(trained / "reproduce-1") == losses(trained)
    assert result(trained / "reproduce-1")["equal"] is True
    assert not list((trained / "reproduce-1").glob("checkpoints/step-*"))
    assert before.items() <= {path: path.stat().st_mtime_ns for path in trained.iterdir()}.items()

    assert reproduce(trained, "--from", "6", "--out", tmp_path / "again") == 0
    assert result(tmp_path / "again") | {"run": ""} == {
        "run": "",
        "after_step": 6,
        "equal_steps": 2,
        "equal": True,
        "first_difference": None,
        "likely_causes": [],
    }
    assert reproduce(trained, "--steps", "2") == 0
    assert len(metrics(trained / "reproduce-2")) == 2


def test_the_first_differing_step_is_named_with_its_cause(trained, tmp_path, capsys):
    changed = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("manifest.json", "config.yaml"):
        (copy / name).write_bytes((trained / name).read_bytes())
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["sessions"][0]["versions"]["torch"] = "1.0"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    # The neighbouring float: the smallest difference that there is.
    value = torch.tensor(changed[4]["grad_norm"], dtype=torch.float64)
    changed[4]["grad_norm"] = torch.nextafter(value, value + 1).item()
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert reproduce(copy) == 1
    said = capsys.readouterr().out
    assert "differs first at step 5, after 4 equal steps: grad_norm" in said
    assert f"likely cause: versions (torch: 1.0 -> {torch.__version__})" in said
    found = result(copy / "reproduce-1")
    assert found["first_difference"]["step"] == 5
    assert len(metrics(copy / "reproduce-1")) <= 6  # it does not train to the end

    assert reproduce(trained, "data.shuffle=false", "--out", tmp_path / "unshuffled", "--steps", "2") == 1
    assert result(tmp_path / "unshuffled")["first_difference"]["step"] == 1
    assert result(tmp_path / "unshuffled")["likely_causes"] == ["config (data.shuffle: True -> False)"]


def test_changed_custom_code_is_the_likely_cause(run_yaml, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = tmp_path / "shifted_for_reproduce.py"
    code.write_text(SHIFTED.format(factor=1.0))
    short = {
        "training": {"steps": 2, "batch_tokens": 256},
        "schedule": {"warmup_steps": 1},
        "data": {"validation": None},
    }
    assert train(run_yaml(**short, objective={"type": "shifted_for_reproduce:Shifted"}, log=QUIET)) == 0
    code.write_text(SHIFTED.format(factor=1.25))
    monkeypatch.delitem(sys.modules, "shifted_for_reproduce")
    assert reproduce("runs/demo") == 1
    assert "likely cause: custom code (shifted_for_reproduce:Shifted:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "5"], "--from 5: this run has no checkpoint of this step (checkpoints: 6, 8)"),
        (["--steps", "9"], "--steps 9: the run logged 8 steps after step 0"),
        (["--from", "8"], "no step after step 8 is logged"),
        (["--steps", "0"], "--steps 0: use a number of at least 1"),
        (["--out", "RUN"], "already exists"),
    ],
)
def test_what_cannot_be_repeated_is_refused(trained, capsys, arguments, words):
    assert reproduce(trained, *[str(trained) if word == "RUN" else word for word in arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert reproduce(tmp_path) == 2
    assert f"{tmp_path}: not a run directory" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("verb", [["reproduce"], ["debug", "nan"]])
def test_a_missing_run_is_refused_before_anything_heavy_is_imported(tmp_path, capsys, monkeypatch, verb):
    for module in ("weft.train.reproduce", "weft.train.debug_nan"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of the module fails
    assert main([*verb, str(tmp_path / "missing")]) == 2
    assert f"{tmp_path}/missing: not a run directory" in capsys.readouterr().err
