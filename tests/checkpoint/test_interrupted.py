"""Verbs that make folders, stopped half way or started twice at once."""

import os
import re
import signal
import sys
import time

import pytest
from forked import Forked
from test_huggingface import folder, theirs, weft_command

from weft.checkpoint.delta import apply  # noqa: F401 (an import while `byte_view` is replaced would keep that)
from weft.checkpoint.shard_files import new_folder
from weft.errors import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A Hugging Face folder, and what import and delta make of it."""
    path = tmp_path_factory.mktemp("made")
    folder(path / "hf", theirs())
    assert weft_command("import", path / "hf", path / "ours") == 0
    assert weft_command("delta", "make", path / "hf", path / "hf", path / "delta") == 0
    return path


@pytest.fixture(autouse=True)
def as_a_shell_starts_it():
    """Python's own handling of Ctrl-C; the elastic launcher, run in this process by another test, left its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


VERBS = {
    "import": ("weft.checkpoint.tensor_file", ["import", "hf"]),
    "export": ("weft.checkpoint.tensor_file", ["export", "ours"]),
    "resize": ("weft.checkpoint.tensor_file", ["resize", "ours", "--vocab-size", "600"]),
    "delta make": ("weft.checkpoint.delta.make", ["delta", "make", "hf", "hf"]),
    "delta apply": ("weft.checkpoint.tensor_file", ["delta", "apply", "hf", "delta"]),
}


@pytest.mark.parametrize(
    ("verb", "number", "code", "word"),
    [
        *((verb, "SIGINT", 130, "interrupted") for verb in VERBS),
        ("import", "SIGTERM", 143, "terminated"),
        *(pytest.param(verb, "SIGTERM", 143, "terminated", marks=pytest.mark.long) for verb in list(VERBS)[1:]),
    ],
)
def test_stopped_half_way(made, tmp_path, monkeypatch, capsys, verb, number, code, word):
    module, words = VERBS[verb]
    real = sys.modules[module].byte_view
    calls = []

    def slow(tensor):
        calls.append(tensor)
        if len(calls) == 5:
            os.kill(os.getpid(), getattr(signal, number))
        time.sleep(0.02 if len(calls) < 5 else 1.0)  # on a busy machine the signal is noticed late
        return real(tensor)

    monkeypatch.setattr(f"{module}.byte_view", slow)
    monkeypatch.chdir(made)
    before = signal.getsignal(signal.SIGTERM)
    assert weft_command(*words, tmp_path / "out") == code
    assert signal.getsignal(signal.SIGTERM) == before
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == word
    done, total = map(float, re.search(r"([\d.]+)/([\d.]+) MB  .*took", said[-2]).groups())
    assert done <= total / 2, said
    assert len(calls) < 10
    assert not list(tmp_path.iterdir())


MAKING = """
import sys, time
from pathlib import Path
from weft.checkpoint.shard_files import new_folder
with new_folder(Path(sys.argv[1]), 0) as made:
    (made / "file").touch()
    print("begun", flush=True)
    time.sleep(60)
"""


def test_two_at_once(tmp_path):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    other = Forked(out, program=MAKING)
    try:
        assert other.first_line() == "begun", other.stderr
        told = "out: another process is writing this folder; wait"
        with pytest.raises(UserError, match=told), new_folder(out, 0):
            pass
        assert (partial / "file").exists()
    finally:
        other.kill()
        other.communicate()
    (partial / "folder").mkdir()
    with new_folder(out, 0) as made:  # what a killed one left is in nobody's way
        assert not list(made.iterdir())
        (made / "mine").touch()
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert not partial.exists()
