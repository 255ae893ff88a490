"""`weft checkpoint`: the tables are those of the files, damage is named, and what is converted loads as it was."""

import errno
import fcntl
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from weft.cli.main import main
from weft.config.run import RunConfig
from weft.train.trainer import Trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_store, tiny_tokenizer):
    """A run with checkpoints of steps 1 to 6."""
    folder = tmp_path_factory.mktemp("run")
    lines = {
        "run": {"name": "demo", "directory": str(folder), "seed": 7},
        "model": {"preset": "llama-tiny", "vocab_size": 512, "tie_word_embeddings": True},
        "tokenizer": str(tiny_tokenizer),
        "data": {"train": str(tiny_store), "sequence_length": 32},
        "optimizer": {"type": "adamw", "lr": 3e-3},
        "training": {"steps": 6, "batch_tokens": 64, "micro_batch_size": 2, "dtype": "float32", "threads": 1},
        "checkpoint": {"every": 1, "keep_last": 9},
    }
    path = folder / "run.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in lines.items()))
    Trainer(RunConfig.load(path)).fit()
    return folder / "demo"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, which a test can change."""
    import shutil

    return shutil.copytree(trained, tmp_path / "demo")


def steps(run):
    return [int(path.name[5:]) for path in sorted((run / "checkpoints").iterdir())]


def weft(*words):
    return main(["checkpoint", *map(str, words)])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def test_files_that_no_save_wrote_are_reported_and_are_no_damage(run, capsys):
    extra = run / "checkpoints" / "step-00000003"
    (extra / "notes.txt").write_text("mine")
    (extra / "export").mkdir()
    assert weft("verify", run) == 0
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if "checksums.json" in line]
    assert f"{extra}: 2 entries are not in checksums.json: export, notes.txt; " in line
    assert "move or delete them" in line
    assert len(printed.out.splitlines()) == 6
    (extra / "checksums.json").unlink()  # then nothing is listed, which is damage, and reported once
    assert weft("verify", extra) == 2
    assert "not in checksums.json" not in capsys.readouterr().err


def test_list(run, capsys):
    os.truncate(run / "checkpoints" / "step-00000004" / "state.json", 5)
    (run / "checkpoints" / ".step-00000007.partial").mkdir()
    assert weft("list", run, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if not row["complete"]] == [4]
    assert "state.json: the file has 5 bytes" in rows[3]["state"]
    for row in rows:
        folder = run / "checkpoints" / f"step-{row['step']:08d}"
        assert row["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert weft("list", run) == 0
    assert "step-00000006" in capsys.readouterr().out


def test_verify_names_the_file_that_a_flipped_bit_damaged(run, capsys):
    assert weft("verify", run) == 0
    assert capsys.readouterr().out.count("undamaged") == 6
    for file in sorted((run / "checkpoints" / "step-00000005").iterdir()):
        before = file.read_bytes()
        flip(file)
        assert weft("verify", run) == 2, file
        assert f"{file}: damaged checkpoint: " in capsys.readouterr().out
        assert weft("verify", file.parent) == 2
        assert weft("verify", run / "checkpoints" / "step-00000006") == 0
        capsys.readouterr()
        file.write_bytes(before)


def test_diff_names_the_tensors_that_differ(run, capsys):
    one, two = (run / "checkpoints" / f"step-{step:08d}" for step in (5, 6))
    assert weft("diff", one, one) == 0
    capsys.readouterr()
    assert weft("diff", one, run, "--json") == 1
    found = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    tensors = [{k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()} for path in (one, two)]
    changed = {name for name in tensors[0] if not torch.equal(tensors[0][name], tensors[1][name])}
    assert {name for name, row in found.items() if row["largest"] is not None} == changed
    for name in changed:
        largest = (tensors[0][name].double() - tensors[1][name].double()).abs().max()
        assert found[name]["largest"] == pytest.approx(float(largest))
    assert found["state.json: step"]["what"] == "5 -> 6"
    losses = [json.loads((path / "state.json").read_text())["watch"]["loss"] for path in (one, two)]
    added = f"5 -> 6 items; first at index 5: (no item) -> {losses[1][5]}"
    assert found["state.json: watch.loss"]["what"] == added  # not the whole lists


def test_prune(run, capsys):
    os.truncate(run / "checkpoints" / "step-00000006" / "state.json", 5)
    assert weft("prune", run, "--keep-last", 1, "--keep-every", 2, "--dry-run") == 0
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert weft("prune", run, "--keep-last", 1, "--keep-every", 2) == 0
    assert steps(run) == [2, 4, 5, 6]  # 5 is the last complete one
    assert weft("prune", run, "--keep-last", 0) == 2
    assert "--keep-last 0: use a positive number" in capsys.readouterr().err


def test_prune_keeps_the_last_checkpoint_whose_contents_are_undamaged(run, capsys):
    """The newest checkpoint has all its files in their sizes, but a bit of its tensors is flipped."""
    shard = next((run / "checkpoints" / "step-00000006").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert weft("prune", run, "--keep-last", 1) == 0
    assert steps(run) == [5, 6]
    assert weft("verify", run) == 2
    assert "step-00000005: undamaged" in capsys.readouterr().out


def test_prune_refuses_a_run_that_is_training(run, capsys):
    from weft.train.run_directory import claim

    lock = claim(run, fresh=False)
    try:
        assert weft("prune", run, "--keep-last", 1) == 2
    finally:
        os.close(lock)
    assert f"another process (process {os.getpid()} on " in capsys.readouterr().err
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_prune_locks_no_file_behind_a_link(run, tmp_path, capsys):
    (tmp_path / "other").write_text("kept")
    (run / ".lock").unlink(missing_ok=True)
    (run / ".lock").symlink_to(tmp_path / "other")
    assert weft("prune", run, "--keep-last", 1) == 2
    said = capsys.readouterr().err
    assert "cannot be locked (.lock: " in said
    assert "Traceback" not in said
    assert (tmp_path / "other").read_text() == "kept"
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_prune_without_locks_respects_the_recorded_owner(run, monkeypatch, capsys):
    """As on a network file system without locks: the file names a process of another host, which writes to the run."""

    def unsupported(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    owner = {"host": "elsewhere", "pid": 1, "boot": "", "since": "now"}
    (run / ".lock").write_text(json.dumps(owner))
    (run / "metrics.jsonl").touch()
    assert weft("prune", run, "--keep-last", 1) == 2
    assert "another process (process 1 on elsewhere, since now) is training" in capsys.readouterr().err
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_convert(run, tmp_path, capsys):
    newest = run / "checkpoints" / "step-00000006"
    assert weft("convert", run, tmp_path / "one") == 0
    assert weft("diff", newest, tmp_path / "one") == 0
    assert (tmp_path / "one" / "tokenizer").is_dir()
    capsys.readouterr()
    assert weft("verify", tmp_path / "one") == 0
    assert "checksums.json" not in capsys.readouterr().err  # the tokenizer is part of a converted checkpoint
    assert weft("convert", run, tmp_path / "hf", "--to", "hf") == 0
    assert weft("convert", tmp_path / "hf", tmp_path / "back") == 0
    capsys.readouterr()
    assert weft("diff", tmp_path / "one", tmp_path / "back", "--json") == 1
    names = [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()]
    assert names
    assert not [name for name in names if name.startswith("model.") and "json" not in name]
    assert weft("convert", run, tmp_path / "half", "--dtype", "bfloat16") == 0
    whole, half = (load_file(next(path.glob("*.safetensors"))) for path in (newest, tmp_path / "half"))
    weights = [name for name in whole if name.startswith("model.") and whole[name].is_floating_point()]
    assert weights
    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in weights)
    assert all(torch.equal(half[name], whole[name]) for name in whole if name.startswith("optimizer."))
    assert weft("convert", run, tmp_path / "half") == 2


@pytest.mark.parametrize("verb", ["list", "verify", "diff", "prune", "convert"])
def test_a_path_without_checkpoints(tmp_path, capsys, verb):
    more = {"diff": [tmp_path], "prune": ["--keep-last", 1], "convert": [tmp_path / "out"]}
    assert weft(verb, tmp_path / "nothing", *more.get(verb, [])) == 2
    error = capsys.readouterr().err
    assert "nothing" in error
    assert error.count("\n") == 1
