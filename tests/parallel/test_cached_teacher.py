"""Distillation with cached probabilities of the teacher makes the updates of distillation with the teacher."""

import errno
import fcntl
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from running import metrics, train

from weft.cli.main import main
from weft.files import publish
from weft.objectives.distill import Distill

MODEL = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def stores(tiny_corpus, tiny_tokenizer, tmp_path_factory):
    """Token stores of a few documents: the teacher is asked about each of them."""
    folder = tmp_path_factory.mktemp("stores")
    for part, names in (("train", ("000.txt", "001.txt", "002.txt", "003.txt")), ("heldout", ("000.txt",))):
        (folder / "texts" / part).mkdir(parents=True)
        for name in names:
            shutil.copy(tiny_corpus / part / name, folder / "texts" / part)
        texts = str(folder / "texts" / part)
        assert main(["data", "pack", texts, "--tokenizer", str(tiny_tokenizer), "--out", str(folder / part)]) == 0
    return folder


@pytest.fixture
def write(stores, tiny_tokenizer, tmp_path):
    """Writes a run of few steps on a token store."""
    on_stores = {"train": str(stores / "train"), "validation": str(stores / "heldout"), "sequence_length": 32}
    teacher = {"type": "distill", "teacher": str(tmp_path / "runs" / "teacher"), "top_k": 5, "alpha": 0.2}

    def write(name, *, mesh=None, data=None, **objective):
        sections = {
            "run": {"name": name, "directory": str(tmp_path / "runs")},
            "model": MODEL | {"hidden_size": 48 if name == "teacher" else 32, "intermediate_size": 64},
            "tokenizer": str(tiny_tokenizer),
            "data": on_stores | (data or {}),
            "objective": {"type": "pretrain"} if name == "teacher" else teacher | objective,
            "optimizer": {"lr": 1e-2},
            "schedule": {"type": "constant"},
            "training": {"steps": 3, "batch_tokens": 256, "micro_batch_size": 4 if mesh else 8, "dtype": "float64"}
            | {"threads": 1},
            "validation": {"every": 2, "tokens": 2000},
            "parallel": {"dp_shard": 1, **(mesh or {})},
            "log": {"trackers": []},
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
        return file

    assert train(write("teacher")) == 0
    return write


def cached():
    """The cached files. The folder is that of the test session, which ranks that other tests started use, too."""
    return set(Path(os.environ["WEFT_CACHE"]).glob("prepared/*/*.npy"))


def numbers(run):
    names = ("loss", "grad_norm", "divergence", "validation_loss", "validation_divergence", "validation_bits_per_byte")
    return np.array([[line.get(name, 0.0) for name in names] for line in metrics(run)])


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("mesh", [{"pp": 2}, pytest.param({"pp": 2, "cp": 2}, marks=pytest.mark.long)], ids=str)
def test_the_cache_gives_the_numbers_of_the_teacher(write, runner, tmp_path, monkeypatch, capsys, mesh):
    runs = tmp_path / "runs"
    assert train(write("live", temperature=2.0)) == 0
    before, _ = cached(), capsys.readouterr()
    sharded = write("ranks", temperature=2.0, cache_teacher=True, mesh=mesh)
    runner.pool.run(sharded, 2 * mesh.get("cp", 1), fresh=True)
    np.testing.assert_allclose(numbers(runs / "ranks"), numbers(runs / "live"), rtol=0, atol=1e-9)
    bits = numbers(runs / "live")[-1, -1] / metrics(runs / "live")[-1]["validation_cross_entropy"]
    last = metrics(runs / "teacher")[-1]
    assert bits == pytest.approx(last["validation_bits_per_byte"] / last["validation_loss"])  # of the cross-entropy
    found = [(file.stem, np.load(file, mmap_mode="r").shape[1:]) for file in sorted(cached() - before)]
    assert found == [("teacher", (32, 6)), ("teacher_ids", (32, 5))] * 2  # of the two stores

    monkeypatch.setattr("weft.train.frozen_sources.FrozenCopy", None)  # it is not needed again
    assert train(write("cached", temperature=2.0, cache_teacher=True)) == 0
    np.testing.assert_allclose(numbers(runs / "cached"), numbers(runs / "live"), rtol=0, atol=1e-9)
    assert train(write("warmer", temperature=3.0, cache_teacher=True, loss="reverse"), "data.workers=1") == 0
    assert "computing" not in capsys.readouterr().err


@pytest.mark.long
def test_a_damaged_cache_is_computed_again_and_custom_data_are_refused(write, tmp_path, capsys):
    assert train(write("first", cache_teacher=True)) == 0
    for file in cached():
        file.write_bytes(b"damaged")
    assert train(write("second", cache_teacher=True)) == 0
    for file in cached():
        if file.stem == "teacher_ids":
            file.unlink()  # the other file is complete
    capsys.readouterr()
    assert train(write("again", cache_teacher=True)) == 0
    assert capsys.readouterr().err.count("once for all runs") == 2
    for other in ("second", "again"):
        assert (numbers(tmp_path / "runs" / "first") == numbers(tmp_path / "runs" / other)).all()
    data = {"train": {"type": "matrix_parts:Sequences"}}
    assert train(write("third", cache_teacher=True, data=data)) == 2
    assert "only samples of token stores can be cached, but the data have a Sequences" in capsys.readouterr().err
    with pytest.raises(Exception, match=r"objective\.cache_teacher: .*set top_k"):
        Distill(teacher="t", cache_teacher=True)


def folders():
    """The cached folders of the stores, ordered by name."""
    return sorted({file.parent for file in cached()})


def test_a_run_waits_for_another_that_computes_the_same_and_keeps_what_it_publishes(
    write, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    assert train(write("first", cache_teacher=True)) == 0
    kept = {folder: folder.stat().st_ino for folder in folders()}
    assert len(kept) == 2
    away = {folder: shutil.move(folder, tmp_path / folder.name) for folder in kept}
    capsys.readouterr()

    locks = [folder.with_suffix(".lock").open("w") for folder in kept]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    waited = threading.Event()

    def other():  # publishes once this run waits
        waited.wait(60)
        for folder, moved in away.items():
            shutil.move(moved, folder)
        for lock in locks:
            lock.close()

    thread = threading.Thread(target=other)
    thread.start()
    clock = SimpleNamespace(sleep=lambda _: (waited.set(), time.sleep(0.05)))
    monkeypatch.setattr("weft.train.cache_entries.time", clock)
    assert train(write("second", cache_teacher=True)) == 0
    assert waited.is_set()
    thread.join()
    assert "computing" not in capsys.readouterr().err
    assert (numbers(tmp_path / "runs" / "first") == numbers(tmp_path / "runs" / "second")).all()

    for folder, moved in away.items():
        shutil.move(folder, moved)
    refused = []

    def publish_second(part, path, *, replace):  # on a file system without locks, another run can be first
        shutil.move(away[path], path)
        try:
            publish(part, path, replace=replace)
        except OSError as error:
            refused.append(error.errno)
            raise

    monkeypatch.setattr("weft.train.cached_prepare.publish", publish_second)
    assert train(write("third", cache_teacher=True)) == 0
    assert len(refused) == 2
    assert set(refused) <= {errno.ENOTEMPTY, errno.EEXIST}
    assert {folder: folder.stat().st_ino for folder in folders()} == kept
    assert not list((tmp_path / "cache" / "prepared").glob(".*"))
    assert (numbers(tmp_path / "runs" / "first") == numbers(tmp_path / "runs" / "third")).all()
