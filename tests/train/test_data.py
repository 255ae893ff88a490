"""Whole runs over mixtures, packed documents and short rows: the same losses across kills, ranks and micro-batches."""

import json
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from forked import Forked
from running import QUIET, SLOW, finish, losses, metrics, train, until_step

from weft.cli.main import main
from weft.config.mesh import MeshShape
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.objectives.dpo import DPO
from weft.objectives.grpo import GRPO
from weft.objectives.kto import KTO
from weft.parallel.objective import Objective
from weft.train.data import layout_of, open_data


@pytest.fixture(scope="module")
def small_store(tiny_tokenizer, tmp_path_factory):
    """A store of few tokens, which a run goes through more than once."""
    folder = tmp_path_factory.mktemp("small")
    texts = [f"book {number} tells of a king and {number * 7} ships. " * 6 for number in range(12)]
    (folder / "books.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["data", "pack", folder / "books.jsonl", "--tokenizer", tiny_tokenizer, "--out", folder / "books"]
    assert main([str(part) for part in command]) == 0
    return folder / "books"


@pytest.fixture
def mixed(run_yaml, tiny_store, small_store):
    """A mixture of the two stores with a limit that is reached, and a curriculum's place."""

    def write(name, **changes):
        sources = [
            {"store": str(tiny_store), "weight": 0.6, "name": "web"},
            {"store": str(small_store), "weight": 0.4, "max_epochs": 2},
        ]
        data = {"train": sources, "mixture_block": 20, "sequence_length": 32} | changes.pop("data", {})
        training = {"steps": 14, "batch_tokens": 256, "micro_batch_size": 8, "dtype": "float64"}
        return run_yaml(
            f"{name}.yaml",
            run={"name": name},
            data=data,
            training=training | changes.pop("training", {}),
            schedule={"warmup_steps": 2},
            log=QUIET,
            **changes,
        )

    return write


def test_a_mixture_killed_and_resumed_gives_the_same_losses(mixed, tmp_path, monkeypatch):
    (tmp_path / "slow_for_mixture.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    slow = {"schedule": None, "checkpoint": {"every": 5}, "validation": {"every": 100}}
    files = {}
    for name in ("straight", "broken"):
        files[name] = mixed(name, **{k: v for k, v in slow.items() if k != "schedule"})
        lines = [line for line in files[name].open() if not line.startswith("schedule:")]
        lines.append('schedule: {"type": "slow_for_mixture:Slow", "seconds": 0.05, "warmup_steps": 0}\n')
        files[name].write_text("".join(lines))
    assert train(files["straight"], "training.steps=14") == 0
    straight, broken = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"
    process = Forked("train", files["broken"], cwd=tmp_path)
    until_step(process, broken, 7)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert train(files["broken"]) == 0
    assert [step for step, *_ in losses(broken)] == list(range(1, 15))
    np.testing.assert_allclose(losses(broken), losses(straight), rtol=0, atol=1e-12)
    manifest = json.loads((broken / "manifest.json").read_text())
    assert set(manifest["data_digests"]) == {"train/web", "train/books", "validation"}
    assert manifest["mixture"]["block"] == 20
    assert manifest["mixture"]["sources"]["books"]["epochs"] <= 2


def test_the_plan_is_printed_before_the_first_step(mixed, capsys):
    assert train(mixed("told", validation={"every": 100}), "training.steps=2") == 0
    said = capsys.readouterr().err
    lines = said.splitlines()
    first = next(n for n, line in enumerate(lines) if "2 sources in sequences of 32" in line)
    assert "web" in lines[first + 1]
    assert "epochs of" in lines[first + 2]
    assert first < next(n for n, line in enumerate(lines) if "step " in line and "validation" in line)


def test_a_run_longer_than_its_sources_is_reported_at_once(mixed, capsys):
    file = mixed("long")
    file.write_text(file.read_text().replace('"weight": 0.6', '"weight": 0.6, "max_epochs": 0.1'))
    assert train(file, "training.steps=9999") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{file}:4: data.train[0].max_epochs: ")
    assert train(file, "training.steps=9999", "data.packing=best_fit") == 2  # known once the store is packed
    assert "data.train: " in capsys.readouterr().err


def test_short_rows_count_the_same_tokens_and_micro_batches_do_not_matter(mixed, tmp_path):
    warmed = {"length_warmup": {"start": 8, "steps": 8}}
    for name, micro in (("whole", 8), ("parts", 3)):
        file = mixed(name, data=warmed, training={"micro_batch_size": micro, "steps": 10}, validation={"every": 100})
        assert train(file) == 0
    whole, parts = (tmp_path / "runs" / name for name in ("whole", "parts"))
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=0, atol=1e-10)
    lines = metrics(whole)
    assert [line["tokens"] for line in lines] == [256 * step for step in range(1, 11)]
    assert all(line["learned_tokens"] == 256 for line in lines)


def test_packed_documents_train_in_a_mixture_with_a_dataset_of_the_users_own(mixed, tmp_path, monkeypatch, small_store):
    (tmp_path / "my_rows.py").write_text(
        "class Rows:\n    def __len__(self):\n        return 9\n"
        "    def __getitem__(self, i):\n        return {'tokens': list(range(i, i + 32))}\n"
    )
    monkeypatch.chdir(tmp_path)
    sources = [str(small_store), {"type": "my_rows:Rows", "name": "mine"}]
    file = mixed("packed", data={"train": sources, "packing": "best_fit", "mixture_block": None})
    assert train(file, "training.steps=4") == 0
    manifest = json.loads((tmp_path / "runs" / "packed" / "manifest.json").read_text())
    assert manifest["mixture"]["block"] is None
    assert set(manifest["mixture"]["sources"]) == {"books", "mine"}


def test_a_dead_worker_ends_the_run_with_one_line_and_its_checkpoint_whole(mixed, tmp_path, monkeypatch, capsys):
    (tmp_path / "deadly_rows.py").write_text(
        "import os, pathlib\n"
        "class Rows:\n    def __len__(self):\n        return 1000\n"
        "    def __getitem__(self, i):\n"
        "        if i == 70 and not pathlib.Path('healed').exists():\n            os.kill(os.getpid(), 9)\n"
        "        return {'tokens': [(i + k) % 512 for k in range(32)]}\n"
    )
    monkeypatch.chdir(tmp_path)
    data = {"train": {"type": "deadly_rows:Rows"}, "mixture_block": None, "workers": 1, "shuffle": False}
    file = mixed("dead", data=data, checkpoint={"every": 2}, validation={"every": 100})
    assert train(file) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "killed by SIGKILL; it last read step 9, samples 64 to 71: the first is sample 64 of Rows" in said
    assert 6 <= losses(tmp_path / "runs" / "dead")[-1][0] <= 8
    (tmp_path / "healed").touch()
    assert train(file) == 0
    assert [step for step, *_ in losses(tmp_path / "runs" / "dead")] == list(range(1, 15))


def test_own_samples_have_the_length_that_rows_are_cut_by(run_yaml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = "class Own:\n    def __len__(self): return 9\n    def __getitem__(self, i): return {'tokens': range(48)}\n"
    (tmp_path / "own_lengths.py").write_text(code)
    data = {"train": {"type": "own_lengths:Own"}, "validation": None, "sequence_length": 32}
    config = RunConfig.load(run_yaml("own.yaml", data=data, training={"steps": 9, "batch_tokens": 128}))
    assert open_data(config, SimpleNamespace(shape=MeshShape(), data_rank=0, data_ranks=1)).length.steps == 9
    with pytest.raises(UserError, match=r"data\.train: Own's samples have 48 tokens.*; set data\.sequence_length: 48$"):
        open_data(config, SimpleNamespace(shape=MeshShape(tp=2), data_rank=0, data_ranks=1))


class LastTokens(Objective):
    last_tokens = True


@pytest.mark.parametrize("objective", [GRPO(), DPO(), KTO(), LastTokens()], ids=lambda one: type(one).__name__)
def test_a_length_warm_up_is_refused_where_documents_must_stay_whole(run_yaml, tmp_path, monkeypatch, objective):
    """Also where the check of the run file cannot see it: fields that a property returns, own datasets."""
    monkeypatch.chdir(tmp_path)
    data = {"train": {"type": "rows_never_read:Rows"}, "validation": None, "sequence_length": 32}
    warmed = data | {"length_warmup": {"start": 8, "steps": 4}}
    code = "class Rows:\n    def __len__(self): return 99\n    def __getitem__(self, i): return {'tokens': range(32)}\n"
    (tmp_path / "rows_never_read.py").write_text(code)
    config = RunConfig.load(run_yaml("whole.yaml", data=warmed, training={"steps": 9, "batch_tokens": 128}))
    world = SimpleNamespace(shape=MeshShape(), data_rank=0, data_ranks=1)
    with pytest.raises(UserError, match=r"^data\.length_warmup: a warm-up splits documents, .*; remove the key$"):
        open_data(config, world, layout=layout_of(objective, config))


@pytest.mark.parametrize("length", ["-1", "2.5", "None"])
def test_a_dataset_without_a_number_of_samples(length, run_yaml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = "lengths_" + "".join(filter(str.isalnum, length))
    (tmp_path / f"{name}.py").write_text(
        f"class Own:\n    def __len__(self): return {length}\n    def __getitem__(self, i): return {{}}\n"
    )
    data = {"train": {"type": f"{name}:Own"}, "validation": None}
    config = RunConfig.load(run_yaml("own.yaml", data=data, training={"steps": 9}))
    with pytest.raises(UserError, match=rf"{name}:Own: its __len__ does not return a number of samples: "):
        open_data(config, SimpleNamespace(shape=MeshShape(), data_rank=0, data_ranks=1))
