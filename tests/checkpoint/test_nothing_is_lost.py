"""A kill at any instant, a full disk, a damaged file: never a half checkpoint taken for a whole one."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import forked
import pytest
import torch
from checkpoint_cases import adamw, built, updates, write
from torch import nn

from weft.checkpoint.load import checkpoints, load, resolve
from weft.errors import UserError


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoints(run)]


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with checkpoints of steps 1, 2 and 3."""
    model = built(1)
    optimizer = adamw(model)
    for step in (1, 2, 3):
        updates(model, optimizer, step - 1, step)
        write(tmp_path / "run", model, optimizer, step=step)
    return tmp_path / "run"


def tensors_of(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.safetensors"))


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)


# ---- damage

SUMS = "checksums.json"
DAMAGES = {
    "a flipped bit in the tensors": (
        lambda c: flip(tensors_of(c), -10),
        "safetensors: damaged checkpoint: the contents",
    ),
    "truncated": (lambda c: os.truncate(tensors_of(c), 100), "the file has 100 bytes instead of "),
    "tensors missing": (lambda c: tensors_of(c).unlink(), "the file is missing"),
    "checksums missing": (lambda c: (c / SUMS).unlink(), f"{SUMS}: damaged checkpoint: the file is"),
    "checksums no JSON": (lambda c: (c / SUMS).write_text("{"), f"{SUMS}: damaged checkpoint: the file is not"),
    "checksums empty": (lambda c: (c / SUMS).write_text("[]"), f"{SUMS}: damaged checkpoint: the file is not"),
    "a checksum changed": (
        lambda c: (c / SUMS).write_text((c / SUMS).read_text().replace('"bytes": ', '"bytes": 1')),
        f"{SUMS}: damaged checkpoint: the contents",
    ),
    "state changed": (lambda c: flip(c / "state.json", 5), "state.json: damaged checkpoint: the contents"),
    "index missing": (lambda c: (c / "index.json").unlink(), "index.json: damaged checkpoint: the file is missing"),
    "all missing": (
        lambda c: [file.unlink() for file in c.iterdir()],
        "checksums.json: damaged checkpoint: the file is",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_previous_whole_checkpoint_named(run, damage):
    newest = checkpoints(run)[-1]
    resolve(newest)  # what was whole once is looked at again
    flip(tensors_of(checkpoints(run)[1]), -1)  # the one before is damaged too
    break_it, expected = DAMAGES[damage]
    break_it(newest)
    for look in (resolve, lambda path: load(path, model=built(2))):
        for path in (run, newest) if look is resolve else (newest,):
            with pytest.raises(UserError) as caught:
                look(path)
            text = str(caught.value)
            assert expected in text
            assert f"previous complete checkpoint, {run}/checkpoints/step-00000001;" in text
            assert "\n" not in text
    shutil.rmtree(newest)
    shutil.rmtree(checkpoints(run)[-1])
    assert resolve(run).name == "step-00000001"


def test_the_only_checkpoint_damaged(tmp_path):
    flip(tensors_of(write(tmp_path, built(1), None)), -1)
    with pytest.raises(UserError, match=r"no older checkpoint is complete.*--fresh"):
        resolve(tmp_path)


def test_a_list_of_files_that_points_elsewhere_is_refused(run):
    """A checkpoint may come from anybody: it reads no file but its own."""
    path = checkpoints(run)[-1] / "checksums.json"
    from weft.checkpoint.checkpoint_files import Digest, write_checksums

    write_checksums(path.parent, {"../../../etc/passwd": Digest("0" * 64, 1)})
    with pytest.raises(UserError, match="outside the checkpoint"):
        resolve(path.parent)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: None, "does not exist; give a run directory"),
        (lambda p: p.write_text("x"), "this is a file; give a run directory"),
        (lambda p: p.mkdir(), "neither a run directory"),
        (lambda p: (p / "checkpoints").mkdir(parents=True), "no checkpoint yet"),
        (lambda p: (p / "checkpoints" / ".step-00000004.partial").mkdir(parents=True), "no checkpoint yet"),
    ],
)
def test_paths_that_are_no_run(tmp_path, make, expected):
    path = tmp_path / "it"
    make(path)
    with pytest.raises(UserError, match=expected) as caught:
        resolve(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_half_written_checkpoint_is_refused_by_name(run):
    half = run / "checkpoints" / ".step-00000009.partial"
    shutil.copytree(checkpoints(run)[-1], half)
    with pytest.raises(UserError, match=f"give the run directory instead: {run}"):
        resolve(half)
    assert resolve(run).name == "step-00000003"


def test_resolve_takes_a_run_its_folder_a_checkpoint_and_a_copy(run, tmp_path):
    newest = checkpoints(run)[-1]
    assert resolve(run) == resolve(run / "checkpoints") == resolve(newest) == newest
    copy = shutil.copytree(newest, tmp_path / "copy")
    assert resolve(str(copy)) == copy


# ---- mismatches


def test_another_shape_names_the_tensors(run):
    with pytest.raises(UserError) as caught:
        load(checkpoints(run)[-1], model=built(2, width=8))
    text = str(caught.value)
    assert "embed.weight has shape [11, 8] in this model, but [11, 6] in the checkpoint" in text
    assert "\n" not in text


def test_more_and_fewer_tensors_are_named(run):
    model = built(2)
    del model.up
    model.extra = nn.Linear(2, 2)
    with pytest.raises(UserError) as caught:
        load(checkpoints(run)[-1], model=model)
    assert "extra.weight is in this model, but not in the checkpoint" in str(caught.value)
    assert "up.bias is in the checkpoint, but not in this model" in str(caught.value)


def test_a_mismatch_leaves_the_model_as_it_was(run):
    model = built(2, width=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError):
        load(checkpoints(run)[-1], model=model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_another_optimizer_is_refused(run):
    model = built(2)
    with pytest.raises(UserError, match="state of AdamW, but the run uses SGD; use the same optimizer"):
        load(checkpoints(run)[-1], model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_checkpoint_without_optimizer_state_is_refused_with_one(tmp_path):
    checkpoint = write(tmp_path, built(1), None)
    model = built(2)
    with pytest.raises(UserError, match="no optimizer state; load the model without"):
        load(checkpoint, model=model, optimizer=adamw(model))
    load(checkpoint, model=model)


def test_state_of_a_parameter_that_is_not_trained_is_not_dropped_silently(run):
    model = built(2)
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("up")], fused=True)
    with pytest.raises(UserError, match=r"up\.bias has optimizer state in the checkpoint"):
        load(checkpoints(run)[-1], model=model, optimizer=optimizer)


def test_optimizer_state_that_json_cannot_hold_is_refused(tmp_path):
    model = built(1)
    optimizer = adamw(model)
    updates(model, optimizer, 0, 1)
    optimizer.state[model.up.bias]["odd"] = object()
    with pytest.raises(UserError, match=r"optimizer\.up\.bias\.odd: .*type object .*; use tensors"):
        write(tmp_path, model, optimizer)
    assert not list(tmp_path.glob("checkpoints/*"))  # also no hidden one


# ---- what a state may be


def test_wrapped_models_have_the_plain_names(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = built(1)
    model.up = checkpoint_wrapper(model.up)
    model.down.compile()
    model.tiny = torch.compile(model.tiny)
    plain = built(2)
    load(write(tmp_path, model, None), model=plain)
    assert torch.equal(plain.up.weight, model.up.weight)
    assert torch.equal(plain.tiny.weight, model.tiny.weight)
    load(write(tmp_path, plain, None), model=model)


def test_a_weight_tied_when_saved_fills_both_when_they_are_two(tmp_path):
    saved = built(1)
    checkpoint = write(tmp_path, saved, None)
    model = built(2)
    model.head.weight = nn.Parameter(torch.zeros(11, 6))
    load(checkpoint, model=model)
    assert torch.equal(model.head.weight, saved.embed.weight)
    assert torch.equal(model.embed.weight, saved.embed.weight)


def test_two_weights_do_not_silently_become_one(tmp_path):
    model = built(1)
    model.head.weight = nn.Parameter(torch.zeros(11, 6))
    with pytest.raises(UserError, match=r"head\.weight is in the checkpoint, but not in this model"):
        load(write(tmp_path, model, None), model=built(2))


def test_many_dtypes_and_shapes_bit_for_bit(tmp_path):
    def model(fill: bool) -> nn.Module:
        module = nn.Module()
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64,
                      torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):  # fmt: skip
            for shape in ((), (1,), (3, 5), (0, 4), (2, 3, 2)):
                size = torch.Size(shape).numel() * dtype.itemsize
                bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
                value = (bits if fill else torch.zeros_like(bits)).view(dtype).reshape(shape)
                module.register_buffer(f"{dtype}-{'x'.join(map(str, shape))}".removeprefix("torch."), value)
        module.register_buffer("turned", torch.randn(4, 6).t() if fill else torch.zeros(6, 4))
        return module

    before, after = model(True), model(False)
    load(write(tmp_path, before, None), model=after)
    for name, value in before.named_buffers():
        other = dict(after.named_buffers())[name]
        assert other.dtype == value.dtype
        assert other.contiguous().reshape(-1).view(torch.uint8).equal(value.contiguous().reshape(-1).view(torch.uint8))


def test_no_file_is_pickled(run):
    for checkpoint in checkpoints(run):
        assert {file.suffix for file in checkpoint.iterdir()} == {".json", ".safetensors"}
        for file in checkpoint.glob("*.json"):
            json.loads(file.read_text())


def test_large_states_go_into_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.checkpoint.storage.FILE_BYTES", 200)
    saved, model = built(1), built(2)
    checkpoint = write(tmp_path, saved, None)
    assert len(list(checkpoint.glob("*.safetensors"))) > 2
    load(checkpoint, model=model)
    assert all(torch.equal(a, b) for a, b in zip(saved.state_dict().values(), model.state_dict().values(), strict=True))


# ---- what stays and what goes


def test_keep_last_and_keep_every(tmp_path):
    model = built(1)
    for step in range(1, 11):
        checkpoint = write(tmp_path, model, None, step=step, keep_last=2, keep_every=4)
        (checkpoint / "of-somebody-else").mkdir()  # a directory that holds more than ours can go too
    assert names(tmp_path) == [f"step-{step:08d}" for step in (4, 8, 9, 10)]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4


def test_a_lower_keep_last_makes_room_before_the_save(run, monkeypatch):
    """Whoever lowers it may have a full disk; but an undamaged checkpoint stays until the new one is there."""
    os.truncate(tensors_of(run / "checkpoints" / "step-00000003"), 100)
    present, usage = [], shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (present.extend(names(run)), usage(path))[1])
    write(run, built(1), None, step=4, keep_last=1)
    assert present == ["step-00000002", "step-00000003"]
    assert names(run) == ["step-00000004"]


def test_a_checkpoint_that_was_just_saved_stays_though_others_are_of_later_steps(run):
    write(run, built(1), None, step=1, keep_last=1)
    assert names(run) == ["step-00000001", "step-00000003"]


def test_what_kills_left_goes_with_the_next_save(run):
    folder = run / "checkpoints"
    for name in (".step-00000007.partial", ".step-00000001.old"):
        shutil.copytree(checkpoints(run)[-1], folder / name)
    (folder / "notes").mkdir()
    write(run, built(1), None, step=4)
    assert sorted(path.name for path in folder.iterdir()) == ["notes", *names(run)]


def test_the_same_step_again_replaces_it(run):
    model = built(5)
    write(run, model, None, state={"seen": 99})
    assert names(run) == ["step-00000001", "step-00000002", "step-00000003"]
    other = built(2)
    assert load(resolve(run), model=other)["seen"] == 99
    assert torch.equal(other.up.weight, model.up.weight)
    assert len(list((run / "checkpoints").iterdir())) == 3


def test_steps_beyond_eight_digits_are_in_order(tmp_path):
    for step in (99_999_999, 100_000_000):
        write(tmp_path, built(1), None, step=step)
    assert names(tmp_path) == ["step-99999999", "step-100000000"]


def test_what_cannot_be_deleted_is_a_warning_and_no_checkpoint(run, monkeypatch):
    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="could not be deleted .Operation not permitted"):
        write(run, built(1), None, step=4, keep_last=1)
    monkeypatch.undo()
    assert names(run) == ["step-00000004"]
    write(run, built(1), None, step=5, keep_last=1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000005"]


# ---- storage that fails


def refused(run: Path, expected: str) -> None:
    """A save fails with one line, and all is as it was."""
    folder = run / "checkpoints"
    old = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        write(run, built(1), None, step=4)
    text = str(caught.value)
    assert text.startswith(f"{folder}/step-00000004: ")
    assert expected in text
    assert "\n" not in text
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == old
    assert sorted(path.name for path in folder.iterdir()) == names(run)


def test_a_file_that_may_not_grow(run):
    """The kernel itself refuses the write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        refused(run, "File too large; the last complete checkpoint is step-00000003; fix the cause and run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    write(run, built(1), None, step=4)
    assert names(run)[-1] == "step-00000004"


@pytest.mark.parametrize("looks_empty", [False, True])
def test_a_full_disk(tmp_path, monkeypatch, looks_empty):
    """A file system of 256 kB, when its free space is known and when it is not (a quota)."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        for step in (1, 2):
            write(disk, built(1), None, step=step)
        (disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(disk).free - 8192))
        monkeypatch.setattr("weft.checkpoint.storage.split_by_size", lambda entries, limit: [entries])
        large = built(1, width=200)
        if looks_empty:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 0, 2**50))
        with pytest.raises(UserError, match="No space left on device") as caught:
            write(disk, large, None, step=3)
        assert "last complete checkpoint is step-00000002; free space and run" in str(caught.value)
        assert ("bytes needed" in str(caught.value)) == (not looks_empty)
        assert sorted(path.name for path in (disk / "checkpoints").iterdir()) == names(disk)
        for checkpoint in checkpoints(disk):
            resolve(checkpoint)
        (disk / "ballast").unlink()
        write(disk, large, None, step=3)
        resolve(checkpoints(disk)[-1])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_storage_that_fails_late(run, monkeypatch, step):
    real = getattr(os, step)
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        if step == "rename" or len(calls) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        refused(run, "Input/output error; the last complete checkpoint is step-00000003")
    assert calls


def test_the_first_checkpoint_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(UserError, match="no checkpoint is complete yet; free space and run"):
        write(tmp_path, built(1), None)


def test_a_run_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match="Not a directory"):
        write(tmp_path / "run", built(1), None)


# ---- kill -9


def big(step: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(step)
    return model


def save_for_ever(run: Path) -> None:
    found = names(run)
    step = int(found[-1].removeprefix("step-")) if found else 0
    while True:
        step += 1
        model = big(step)
        # Each step is saved twice, so that replacing and pruning are killed too.
        for _ in range(2):
            write(run, model, adamw(model), step=step, keep_last=2)


def kill_often(run: Path) -> None:
    """In a process of its own: fork savers, kill each at some instant, look at what is there. Prints what it saw.

    Twelve kills do; a busy machine gets more, and each saver more time, until enough came in the middle of a save.
    """
    random.seed(7)
    model = big(0)
    load(write(run.with_name("warm"), model, adamw(model)), model=model)  # imports what is imported late
    leftovers = newest = 0
    for kills in range(60):
        if kills >= 12 and leftovers >= 3 and newest >= 3:
            break
        child = os.fork()
        if child == 0:
            save_for_ever(run)
        time.sleep(random.uniform(0.03, 0.3 * (1 + kills // 12)))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        folder = run / "checkpoints"
        leftovers += any(path.name.startswith(".") for path in folder.iterdir()) if folder.exists() else 0
        for checkpoint in checkpoints(run):
            resolve(checkpoint)
        if checkpoints(run):
            model = big(0)
            step = load(resolve(run), model=model, optimizer=adamw(model))["step"]
            assert step >= newest
            assert all(bool((p == step).all()) for p in model.parameters())
            newest = step
    print(json.dumps({"leftovers": leftovers, "newest": newest}))


def test_kill_at_any_instant(tmp_path):
    here = Path(__file__)
    program = f"import runpy, sys; sys.path[:0] = {[str(here.parent), str(here.parents[1])]}; "
    program += f"runpy.run_path({__file__!r}, run_name='__main__')"
    ran = forked.run(tmp_path / "run", program=program, timeout=120)
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout)
    assert seen["leftovers"] >= 3  # the kills did come in the middle
    assert seen["newest"] >= 3


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kill_often(Path(sys.argv[1]))
