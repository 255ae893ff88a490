"""`checkpoint.remote`: copies in an object store, and runs that continue from them on a host that has nothing."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from weft.checkpoint import remote as module
from weft.checkpoint.checkpoint_files import Keep, find_damage
from weft.checkpoint.load import checkpoints
from weft.checkpoint.uploader import Uploader
from weft.cli.main import main
from weft.errors import UserError

SHORT = {"training": {"steps": 6, "batch_tokens": 128, "micro_batch_size": 2}, "data": {"validation": None}}
PROFILE = ["--warmup", "1", "--steps", "1", "--out"]
CONSTANT = {"type": "constant", "warmup_steps": 0}


class Flaky(MemoryFileSystem):
    """A store that fails: `failures` has the numbers of the uploads that do, or is "half": parts arrive."""

    protocol = "flaky"
    store, pseudo_dirs = {}, [""]
    failures: ClassVar = set()
    count = 0

    def put_file(self, lpath, rpath, **options):
        type(self).count += 1
        if self.failures == "half" and rpath.endswith(".safetensors"):
            self.pipe_file(rpath, Path(lpath).read_bytes()[:100])
            raise OSError(500, "Internal Error")
        if self.failures != "half" and self.count in self.failures:
            raise OSError(503, "Slow Down")
        super().put_file(lpath, rpath, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT", 0.001)
    for kind in (MemoryFileSystem, Flaky):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    Flaky.failures, Flaky.count = set(), 0


@pytest.fixture
def train(tmp_path, run_yaml):
    def fit(name: str, *overrides: str, url: str = "memory://bucket/runs", code: int = 0, **checkpoint) -> Path:
        section = {"every": 2, "keep_last": 2, "remote": url, **checkpoint}
        path = run_yaml(**SHORT, schedule=CONSTANT, checkpoint=section, run={"name": name})
        assert main(["train", str(path), *overrides]) == code
        return tmp_path / "runs" / name

    return fit


def lost(run: Path) -> dict[int, float]:
    """Deletes a run directory, as when its host is gone. Returns the losses that it had."""
    found = losses(run)
    shutil.rmtree(run)
    return found


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints(run)]


def stored(kind=MemoryFileSystem) -> list[str]:
    return sorted(name for name in kind.store if name.endswith("complete.json"))


def test_a_lost_run_continues_from_the_store_with_the_same_losses(train, capsys):
    undisturbed = losses(train("whole", url="memory://bucket/other"))
    run = train("run", "training.steps=4", mode="async")  # the default name of `run.yaml`
    lost(run)
    capsys.readouterr()
    run = train("run", mode="async")
    assert "downloaded step-00000004" in capsys.readouterr().err
    assert losses(run) == undisturbed  # metrics of the first steps come from the store too
    assert steps(run) == [4, 6]
    assert all(find_damage(path) is None for path in checkpoints(run))
    assert len(stored()) == 2 + 2


def test_a_store_that_could_not_be_read_leaves_no_lock(train, capsys, monkeypatch):
    def fails(*_, **__):
        raise OSError(503, "Slow Down")

    with monkeypatch.context() as patched:
        patched.setattr(Flaky, "info", fails)
        train("again", url="flaky://bucket/runs", code=2)
    assert "checkpoint.remote: flaky://bucket/runs/again: OSError: [Errno 503] Slow Down" in capsys.readouterr().err
    assert steps(train("again", url="flaky://bucket/runs")) == [4, 6]


def test_as_many_checkpoints_stay_in_the_store_as_in_the_run_directory(train):
    train("few", keep_last=1, keep_every=4)
    assert [name.split("/")[-2] for name in stored()] == ["step-00000004", "step-00000006"]


def test_the_best_checkpoint_stays_in_the_store_after_the_run_directory_is_lost(tmp_path):
    run = tmp_path / "run"
    copies = module.RemoteRun("memory://bucket/best", "a1")
    for step in (10, 20, 30):
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "some").write_text("content")
        copies.upload(folder, run)
    values = {"10": 1.0, "20": 3.0, "30": 2.0}
    record = {"metric": "validation_loss", "mode": "min", "values": values}
    (run / "checkpoints" / "best.json").write_text(json.dumps(record))
    shutil.rmtree(run / "checkpoints" / "step-00000010")  # only the newest is downloaded
    uploader = Uploader(copies, run, Keep(1, None, 1))
    uploader.start(run / "checkpoints" / "step-00000030")
    uploader.finish()
    assert copies.steps() == [10, 30]


def test_a_later_checkpoint_from_which_the_run_did_not_continue_does_not_displace_newer_copies(tmp_path):
    run = tmp_path / "run"
    copies = module.RemoteRun("memory://bucket/later", "a1")
    for step in (15, 20):
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "some").write_text("content")
    copies.upload(run / "checkpoints" / "step-00000020", run)
    uploader = Uploader(copies, run, Keep(1))
    uploader.start(run / "checkpoints" / "step-00000015")
    uploader.finish()
    assert copies.steps() == [15]


def test_a_checkpoint_that_is_deleted_before_it_is_copied_is_reported(tmp_path):
    uploader = Uploader(module.RemoteRun("memory://bucket/late", "a1"), tmp_path, Keep(1))
    uploader.start(tmp_path / "checkpoints" / "step-00000010")
    with pytest.raises(UserError, match=r"step-00000010 was deleted.*checkpoint\.keep_last"):
        uploader.finish()


def test_fresh_starts_over_and_never_continues_the_earlier_run(train, capsys):
    train("over")
    run = train("over", "--fresh", "training.steps=2")
    assert len(stored()) == 2 + 1  # those of the earlier run stay
    lost(run)
    capsys.readouterr()
    run = train("over", "training.steps=4")
    assert "downloaded step-00000002" in capsys.readouterr().err
    assert steps(run) == [2, 4]


def test_operations_that_fail_are_tried_again(train):
    Flaky.failures = {1, 2, 5}
    run = train("again", url="flaky://bucket")
    assert len(stored(Flaky)) == 2
    lost(run)
    assert steps(train("again", url="flaky://bucket")) == [6]


def test_half_an_upload_is_never_used(train, capsys):
    run = train("half", "training.steps=2", url="flaky://bucket")
    Flaky.failures = "half"
    train("half", "training.steps=4", url="flaky://bucket", code=2)
    assert [name.split("/")[-2] for name in stored(Flaky)] == ["step-00000002"]
    message = capsys.readouterr().err
    assert "checkpoint.remote" in message
    assert "Internal Error" in message
    assert steps(run) == [2, 4]  # the training itself ended
    Flaky.failures = set()
    train("half", "training.steps=4", url="flaky://bucket")
    assert "copying step-00000004 to flaky://bucket/half" in capsys.readouterr().err
    assert [name.split("/")[-2] for name in stored(Flaky)] == ["step-00000002", "step-00000004"]
    Flaky.store.pop(stored(Flaky)[-1])  # half an upload again
    lost(run)
    assert steps(train("half", "--accept-changes", url="flaky://bucket")) == [4, 6]  # continued from step 2
    assert [name.split("/")[-2] for name in stored(Flaky)] == ["step-00000004", "step-00000006"]


def test_a_damaged_copy_is_skipped_and_named(train, capsys):
    run = train("damaged", "training.steps=4")
    lost(run)
    name = next(name for name in MemoryFileSystem.store if "step-00000004" in name and name.endswith(".safetensors"))
    content = bytearray(MemoryFileSystem.store[name].getvalue())
    content[-5] ^= 1
    MemoryFileSystem.store[name].seek(0)
    MemoryFileSystem.store[name].write(bytes(content))
    capsys.readouterr()
    run = train("damaged", "--accept-changes")
    output = capsys.readouterr().err
    assert "downloaded step-00000002" in output
    assert "damaged checkpoint" in output
    assert steps(run) == [4, 6]


def copied(kind: str, tmp_path, steps=(10, 20)) -> module.RemoteRun:
    """Copies a folder as checkpoints of some steps to a store, and returns the run there."""
    copies = module.RemoteRun(f"{kind}://bucket/some", "a1")
    copies.begin()
    for step in steps:
        folder = tmp_path / "lost" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "some").write_text("content")
        copies.upload(folder, tmp_path / "lost")
    return copies


def test_an_outage_is_not_taken_for_damage_of_the_newest_copy(tmp_path, monkeypatch):
    copies = copied("flaky", tmp_path)

    def fails(self, path, target, **options):
        raise OSError(503, "Slow Down")

    monkeypatch.setattr(Flaky, "get_file", fails)
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=r"^checkpoint\.remote: flaky://bucket/some: OSError: .*Slow Down; check"):
        module.open_remote(tmp_path / "run", copies.url, fresh=False)


def test_a_folder_in_a_checkpoint_is_not_copied(tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step-00000010"
    (folder / "export").mkdir(parents=True)
    (folder / "some").write_text("content")
    copies = module.RemoteRun("memory://bucket/some", "a1")
    copies.upload(folder, tmp_path / "run")
    assert copies.steps() == [10]
    assert sorted(name.rpartition("/")[2] for name in MemoryFileSystem.store) == ["complete.json", "some"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_local_disk_is_named_at_once_and_not_the_store(tmp_path, monkeypatch, code):
    copies, tries = copied("flaky", tmp_path), []

    def fails(self, path, target, **options):
        tries.append(target)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Flaky, "get_file", fails)
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(UserError) as caught:
        module.open_remote(run, copies.url, fresh=False)
    said = str(caught.value)
    assert said.startswith(f"{run / 'checkpoints' / 'step-00000020'}: cannot be written: {os.strerror(code)}; ")
    assert "checkpoint.remote" not in said
    assert len(tries) == 1
    assert not list((run / "checkpoints").glob("*"))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"files": ["some"]}', b'{"files": {"some": "many"}}', None])
def test_a_copy_whose_list_of_files_is_damaged_is_skipped(tmp_path, monkeypatch, content):
    copies, run = copied("memory", tmp_path), tmp_path / "run"
    if content is None:
        copies.store.rm_file("/bucket/some/a1/step-00000020/some")
    else:
        copies.store.pipe_file("/bucket/some/a1/step-00000020/complete.json", content)
    run.mkdir()
    monkeypatch.setattr(module.files, "find_damage", lambda path: None)  # this folder is no checkpoint
    message = module.open_remote(run, copies.url, fresh=False)[1]
    assert message.startswith("downloaded step-00000010 from memory://bucket/some; ")
    assert steps(run) == [10]


def test_runs_that_share_a_url_do_not_find_each_other(train, capsys):
    one = train("one", "training.steps=2")
    two = train("two", "training.steps=4")
    expected = lost(one)
    lost(two)
    capsys.readouterr()
    one = train("one", "training.steps=4")
    assert "downloaded step-00000002" in capsys.readouterr().err
    assert losses(one).items() >= expected.items()


@pytest.mark.long
def test_a_repetition_and_a_profile_leave_the_store_alone(train, tmp_path, capsys):
    run = train("calm")
    before = {name: file.getvalue() for name, file in MemoryFileSystem.store.items()}
    assert main(["reproduce", str(run)]) == 0
    assert main(["profile", str(tmp_path / "run.yaml"), *PROFILE, str(tmp_path / "profile")]) == 0
    assert {name: file.getvalue() for name, file in MemoryFileSystem.store.items()} == before


def test_a_store_that_fails_is_not_taken_for_an_empty_one(train, capsys, monkeypatch):
    run = train("fails", "training.steps=2", url="flaky://bucket")
    lost(run)

    def fails(self, path, **options):
        raise OSError(503, "Slow Down")

    monkeypatch.setattr(Flaky, "info", fails)
    train("fails", url="flaky://bucket", code=2)
    assert "Slow Down" in capsys.readouterr().err
    assert not checkpoints(run)


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/some", "s3://bucket/some?secret=1"])
def test_credentials_in_the_url_are_refused(train, capsys, url):
    train("secret", url=url, code=2)
    told = capsys.readouterr().err
    assert "checkpoint.remote: credentials do not belong" in told
    assert "AWS_ACCESS_KEY_ID" in told


@pytest.mark.parametrize(
    ("url", "word"), [("nosuch://bucket", "nosuch"), ("s3://", "checkpoint.remote"), ("flaky://bucket", "Slow Down")]
)
def test_a_store_that_cannot_be_used_is_one_line(train, capsys, url, word, monkeypatch):
    def fails(self, path, value, **options):
        raise OSError(503, "Slow Down")

    monkeypatch.setattr(Flaky, "pipe_file", fails)
    train("unusable", url=url, code=2)
    message = capsys.readouterr().err.strip()
    assert word in message
    assert "Traceback" not in message
