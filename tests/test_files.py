"""Files and folders appear whole or not at all, also where a process is killed or the disk is full."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from weft.errors import UserError
from weft.files import hidden_folder, new_file, publish, remove, replace_file, report_write_errors, sync_tree


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(folder, content):
    (folder / "inner").mkdir()
    (folder / "inner" / "a").write_text(content)
    sync_tree(folder)


def test_a_file_is_the_old_one_until_it_is_whole(tmp_path):
    path = tmp_path / "a.json"
    replace_file(path, "old")
    with pytest.raises(ZeroDivisionError), new_file(path) as file:  # noqa: PT012
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
        raise ZeroDivisionError
    assert (path.read_text(), names(tmp_path)) == ("old", ["a.json"])
    with new_file(path) as file:
        file.write(b"new")
    assert (path.read_text(), names(tmp_path)) == ("new", ["a.json"])


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    replace_file(pipe, "content")
    assert reader.communicate(timeout=60)[0] == b"content"
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_what_killed_writers_of_a_file_left_is_deleted_by_a_later_one(tmp_path):
    path, hour = tmp_path / "a.json", 3600
    ages = {".a.json.71.partial": 2 * hour, ".a.json.72.partial": 9, ".b.json.71.partial": 2 * hour}
    for name, age in ages.items():
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    replace_file(path, "new")
    assert names(tmp_path) == [".a.json.72.partial", ".b.json.71.partial", "a.json"]  # 72 may be writing elsewhere


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as caught, report_write_errors(path, "make room"):
        replace_file(path, "new")
    assert str(caught.value) == f"{path}: cannot be written: No space left on device; make room"
    out = tmp_path / "out"
    with (
        pytest.raises(UserError, match="on device; nothing was written"),
        report_write_errors(out),
        hidden_folder(out) as made,
    ):
        fill(made, "new")
    assert (path.read_text(), names(tmp_path)) == ("old", ["a"])


def test_a_folder_takes_its_name_whole(tmp_path):
    out = tmp_path / "out"
    for content in ("first", "second"):
        with hidden_folder(out) as made:
            fill(made, content)
            publish(made, out, replace=True)
        assert (out / "inner" / "a").read_text() == content
        assert names(tmp_path) == ["out"]
    with pytest.raises(OSError, match="not empty"), hidden_folder(out) as made:  # noqa: PT012
        fill(made, "third")
        publish(made, out)
    assert (out / "inner" / "a").read_text() == "second"
    remove(out)
    assert names(tmp_path) == []


def test_a_link_is_replaced_and_what_it_names_stays(tmp_path):
    (tmp_path / "there").mkdir()
    fill(tmp_path / "there", "precious")
    out = tmp_path / "out"
    out.symlink_to("there")
    with hidden_folder(out) as made:
        fill(made, "new")
        publish(made, out, replace=True)
    assert (out / "inner" / "a").read_text() == "new"
    assert (tmp_path / "there" / "inner" / "a").read_text() == "precious"
    assert names(tmp_path) == ["out", "there"]


def test_one_process_makes_a_folder_and_a_killed_one_is_in_nobody_s_way(tmp_path):
    out = tmp_path / "out"
    script = (
        "import sys, time; from pathlib import Path; from weft.files import hidden_folder\n"
        "with hidden_folder(Path(sys.argv[1])) as made:\n"
        "    (made / 'half').mkdir(); print('begun', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "begun\n"
        with pytest.raises(UserError, match="out: another process is writing this folder; wait"), hidden_folder(out):
            pass
        assert names(tmp_path / ".out.partial") == ["half"]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    with hidden_folder(out) as made:
        assert names(made) == []
        publish(made, out)
    assert names(tmp_path) == ["out"]
