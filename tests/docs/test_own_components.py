"""docs/own-components.md is true: its examples are one run, the same on two ranks; its samples are told as it says."""

import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tutorial import check_style, losses

from weft.cli.main import main
from weft.config.components import COMPONENT_KINDS
from weft.data.batches.layout import PLAIN, Field, Layout
from weft.data.batches.samples import read_samples
from weft.errors import UserError
from weft.observe.metrics import NAMES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "own-components.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```$", TEXT, re.S | re.M))
EXACT = ("training.dtype=float64", "training.threads=1", "checkpoint.every=2")


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's files, in the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_each_component_has_a_short_example_in_the_houses_style(page):
    rooms = {"optimizer", "schedule", "objective", "callback", "metric", "tracker"}
    modules = {f"my_{room}.py" for room in ("data", *rooms)}
    more = {"my_pairs.py", "my_preference.py", "my_stream.py", "my_z_loss.py"}
    assert set(FILES) == {"run.yaml", "preference.yaml"} | more | modules
    assert {room for room in COMPONENT_KINDS if f"my_{room}.py" in modules} == rooms
    for name in modules | more:
        assert len(FILES[name].splitlines()) <= (20 if name in modules else 24), name
    check_style()


@pytest.mark.xdist_group("ranks")
def test_the_examples_are_one_run_also_on_two_ranks_and_resumed(page, ranks):
    from pool import weft_command

    (command,) = re.findall(r"^\$ weft (train run.yaml)$", TEXT, re.M)
    assert main([*command.split(), "run.name=one", *EXACT]) == 0
    one, two = page / "runs" / "one", page / "runs" / "two"
    assert losses(one)[-1] < losses(one)[0]
    rows = [line.split(",") for line in (one / "table.csv").read_text().splitlines()]
    assert [[float(cell) for cell in row] for row in rows] == [
        [step, loss, lr] for step, loss, lr in zip((1, 2, 3, 4), losses(one), (0.02, 0.02, 0.01, 0.005), strict=True)
    ]
    numbers = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert [(line["steps_without_progress"], line["longest"]) for line in numbers] == [(0, 16)] * 4
    assert all(line["lr/matrix"] == line["lr"] and 0 <= line["sure"] < 1 for line in numbers)
    for code, errors in ranks.call(weft_command, 2, page, [*command.split(), "run.name=two", *EXACT]):
        assert code == 0, errors
    assert losses(two) == pytest.approx(losses(one), rel=0, abs=1e-12)
    shutil.rmtree(two / "checkpoints" / "step-00000004")  # one rank goes on from what two have saved
    assert main([*command.split(), "run.name=two", *EXACT]) == 0
    assert losses(two) == pytest.approx(losses(one), rel=0, abs=1e-12)
    assert len((two / "table.csv").read_text().splitlines()) == 4


def test_the_objective_is_pretraining_where_gamma_is_0(page):
    import torch

    from weft.data.batches.loader import BatchSource
    from weft.objectives.pretrain import Pretrain

    data, focal = (importlib.import_module(f"my_{name}") for name in ("data", "objective"))
    batch = BatchSource(data.Sums(), batch_size=4).batch(0)
    outputs = torch.log_softmax(torch.randn(4, 16, 8), -1)[..., 0]
    plain, ours = Pretrain(), focal.Focal(gamma=0)
    assert ours.inputs(batch).keys() == plain.inputs(batch).keys()
    assert ours.weight(batch) == plain.weight(batch)
    assert ours.loss(outputs, batch) == pytest.approx(plain.loss(outputs, batch))
    assert focal.Focal(gamma=2).loss(outputs, batch) < plain.loss(outputs, batch)


def test_the_objective_of_logits_is_cross_entropy_and_a_penalty(page):
    import torch

    from weft.data.batches.loader import BatchSource

    data, z_loss = (importlib.import_module(f"my_{name}") for name in ("data", "z_loss"))
    batch = BatchSource(data.Sums(), batch_size=4).batch(0)
    objective, logits = z_loss.ZLoss(coefficient=0.5), torch.randn(4, 16, 256, dtype=torch.float64)
    assert "labels" not in objective.inputs(batch)
    found = objective.loss(logits, batch)
    chosen, z = logits.gather(-1, batch.labels[..., None])[..., 0], logits.exp().sum(-1).log()
    assert found.sum == pytest.approx(((z - chosen + 0.5 * z**2) * batch.weight).sum())
    assert found.scalars["log_z_sq"] == (pytest.approx((z**2 * batch.weight).sum()), batch.weight.sum())


def test_the_page_lists_the_names_of_the_built_in_metrics():
    section = TEXT.partition("## A metric")[2]
    assert set(re.findall(r"`(\w+)`", section)) >= NAMES


def test_the_pairs_are_learned(page):
    assert main(["train", "preference.yaml", "training.dtype=float32", "optimizer.lr=1e-2"]) == 0
    lines = [json.loads(line) for line in (page / "runs" / "preference" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < lines[0]["learned_tokens"] <= 512
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["accuracy"] > lines[0]["accuracy"]


def test_a_stream_becomes_a_store(page, tiny_tokenizer, monkeypatch):
    (command,) = re.findall(r"^\$ python my_stream.py \| weft (data pack .*)$", TEXT, re.M)
    lines = subprocess.run([sys.executable, "my_stream.py"], capture_output=True, check=True).stdout
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert main(command.replace("tok ", f"{tiny_tokenizer} ").split()) == 0
    assert json.loads((page / "squares" / "store.json").read_text())["documents"] == 1000


class Sums:
    """Of these the page quotes what is said of samples that are none."""

    def __init__(self, **samples):
        self.samples = samples

    def __getitem__(self, index):
        return self.samples[f"at_{index}"]


FULL = {"tokens": range(16)}
REWARDS = Layout({"reward": Field()})


@pytest.mark.parametrize(
    ("samples", "layout"),
    [
        ({"at_40": [1, 2]}, PLAIN),
        ({"at_40": {"tokens": [0.5]}}, PLAIN),
        ({"at_40": FULL | {"labels": range(15)}}, PLAIN),
        ({"at_40": FULL | {"labels": [0.5] * 16}}, PLAIN),
        ({"at_40": FULL | {"mask": range(16)}}, PLAIN),
        ({"at_40": {"tokens": [3, 256]}}, Layout(vocab_size=256)),
        ({"at_40": FULL}, REWARDS),
        ({"at_40": FULL | {"reward": "x"}}, REWARDS),
        ({"at_40": FULL, "at_53": {"tokens": range(15)}}, PLAIN),
    ],
)
def test_what_is_said_of_a_sample_that_is_none(samples, layout):
    indices = np.array([int(name.removeprefix("at_")) for name in samples])
    with pytest.raises(UserError) as told:
        read_samples(Sums(**samples), indices, layout)
    assert f"\n{told.value}\n" in TEXT


def test_what_is_said_of_an_exception_in_a_dataset(page):
    code = FILES["my_data.py"].splitlines()
    code[13] = '        raise KeyError("no such row")'
    (page / "my_data.py").write_text("\n".join(code))
    with pytest.raises(UserError) as told:
        read_samples(importlib.import_module("my_data").Sums(), np.array([40]))
    assert "\n" + str(told.value).replace(str(page), "/path/to") + "\n" in TEXT


def test_what_a_sample_lacks_is_as_the_table_says():
    tokens = np.arange(5, 9)
    plain = read_samples(Sums(at_0={"tokens": tokens, "weight": [2, 2, 2, 2]}), np.array([0]))
    assert set(plain) == {"tokens", "labels", "weight", "positions"}
    assert plain["labels"][0, :3].tolist() == [6, 7, 8]
    assert plain["weight"].tolist() == [[2, 2, 2, 0]]
    assert plain["positions"].tolist() == [[0, 1, 2, 3]]
    given = read_samples(Sums(at_0={"tokens": tokens, "labels": tokens, "segments": [0, 0, 1, 1]}), np.array([0]))
    assert given["weight"].tolist() == [[1, 1, 1, 1]]
    assert given["positions"].tolist() == [[0, 1, 2, 3]]
    some = read_samples(Sums(at_0={"tokens": tokens, "segments": [3, 3, 4, 4]}, at_1={"tokens": tokens}), np.arange(2))
    assert some["segments"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    for parts in (plain, given, some):
        kinds = {name: part.dtype for name, part in parts.items()}
        assert kinds.pop("weight") == np.float32
        assert set(kinds.values()) == {np.dtype(np.int64)}


def test_many_at_once_are_read_of_complete_samples_only():
    class Many(Sums):
        def read(self, indices):
            return {"tokens": indices}

    assert set(read_samples(Many(at_7=FULL), np.array([7]))) > {"tokens"}
    Many.complete = True
    assert read_samples(Many(), np.array([7])) == {"tokens": np.array([7])}
