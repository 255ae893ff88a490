"""`weft generate`: what it says of prompts that are no text."""

import io
import sys

import pytest

from weft.cli.main import main


@pytest.mark.parametrize(("prompt", "named"), [("-", "the prompt on standard input"), ("ab\udcff", "the prompt 'ab")])
def test_a_prompt_that_is_not_utf8_is_one_line(run_yaml, tmp_path, monkeypatch, capsys, prompt, named):
    short = {"training": {"steps": 1}, "schedule": {"warmup_steps": 0}, "data": {"validation": None}}
    assert main(["train", str(run_yaml(**short, log={"trackers": []}))]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff\xfe"), errors="surrogateescape"))
    assert main(["generate", str(tmp_path / "runs" / "demo"), prompt, "--max-new-tokens", "4"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(named)
    assert "is not UTF-8 text, from byte 2 on" in line
