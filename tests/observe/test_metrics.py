"""metrics.jsonl and samples.jsonl: exact numbers, no step twice, and nothing lost but a torn last line."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from weft.errors import UserError
from weft.observe.metrics import JsonLines, MetricsFile, SamplesFile, read_metrics, read_samples


def test_floats_come_back_to_the_last_bit(tmp_path):
    values = [0.1, 1 / 3, 2.5e-320, 1.7976931348623157e308, -0.0]
    with_file = MetricsFile(tmp_path)
    for step, value in enumerate(values, start=1):
        with_file.write({"step": step, "loss": value})
    read = [line["loss"] for line in read_metrics(tmp_path)]
    assert [v.hex() for v in read] == [v.hex() for v in values]


def test_numbers_of_torch_and_numpy_are_plain_numbers_in_the_file(tmp_path):
    MetricsFile(tmp_path).write({"step": np.int64(1), "loss": torch.tensor(0.5, dtype=torch.float64), "n": np.int32(3)})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5, "n": 3}


def test_what_is_not_finite_is_null_for_json_and_itself_for_us(tmp_path):
    MetricsFile(tmp_path).write({"step": 1, "loss": math.nan, "grad_norm": -math.inf})

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    strict = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert strict["loss"] is None
    assert strict["grad_norm"] is None
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["loss"])
    assert line["grad_norm"] == -math.inf
    assert set(line) == {"step", "loss", "grad_norm"}


def test_a_step_cannot_stand_twice(tmp_path):
    metrics = MetricsFile(tmp_path)
    metrics.write({"step": 3})
    with pytest.raises(ValueError, match="keep_until"):
        metrics.write({"step": 3})
    with pytest.raises(ValueError, match="keep_until"):
        MetricsFile(tmp_path).write({"step": 2})


def test_keep_until_takes_back_later_steps_and_goes_on(tmp_path, caplog):
    caplog.set_level("INFO", "weft")
    metrics = MetricsFile(tmp_path)
    for step in range(1, 8):
        metrics.write({"step": step, "loss": step / 3})
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    metrics = MetricsFile(tmp_path)
    metrics.keep_until(4)
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines() == before[:4]
    removed = [f'removed from metrics.jsonl: {{"step": {step}, "loss": {step / 3}}}' for step in (5, 6, 7)]
    assert caplog.messages == removed  # the only record of what a rollback takes back
    metrics.write({"step": 5, "loss": 9.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]  # no temporary file stays


def test_keep_until_zero_begins_again(tmp_path):
    metrics = MetricsFile(tmp_path)
    metrics.write({"step": 5})
    metrics.keep_until(0)
    metrics.write({"step": 1})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize("torn", [b"{", b'{"step": 3, "lo', b'{"step": 3, "loss": "\xc3', b'{"step": 3, "loss": 1.2'])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n' + torn)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    MetricsFile(tmp_path).write({"step": 3, "loss": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    MetricsFile(tmp_path).write({"step": 2})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("broken", [b'{"step": 2, "loss"', b"", b"[1, 2]", b'{"loss": 1.0}', b"\xff\xfe"])
def test_a_broken_line_in_the_middle_is_named(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 3}\n')
    with pytest.raises(UserError) as error:
        read_metrics(tmp_path)
    assert str(error.value).startswith(f"{path}:2: ")
    with pytest.raises(UserError):
        MetricsFile(tmp_path)
    assert path.read_bytes().count(b"\n") == 3  # nothing was lost


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    code = (
        "import sys, os, signal; from weft.observe.metrics import MetricsFile\n"
        "m = MetricsFile(sys.argv[1])\n"
        "for step in range(1, 51): m.write({'step': step, 'loss': 1 / step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == -9
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 51))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error(tmp_path):
    metrics = MetricsFile(tmp_path)
    metrics._file.close()
    metrics._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(UserError, match=r"No space left.*run the same command"):
        metrics.write({"step": 1})


def test_no_file_is_no_metrics(tmp_path):
    assert read_metrics(tmp_path) == []
    assert read_samples(tmp_path) == []


def test_samples_may_share_a_step(tmp_path):
    samples = SamplesFile(tmp_path)
    texts = ["a\nb", "\u2028 \x1b[31m é", "\ud800 half a pair"]
    for text in texts:
        samples.add(2, "def ", text)
    samples.add(4, "def ", "later")
    samples.keep_until(2)
    assert read_samples(tmp_path) == [{"step": 2, "prompt": "def ", "text": text} for text in texts]


def test_an_unwritable_place_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        JsonLines(tmp_path / "file" / "metrics.jsonl")
