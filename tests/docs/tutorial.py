"""Reads the tutorials: the files, commands and outputs of their code blocks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass
class Command:
    """One line after "$ " in a console block, and the lines after it."""

    text: str
    output: list[str] = field(default_factory=list)


def files(text: str) -> dict[str, str]:
    """The files of a page: blocks like "```yaml run.yaml"; a later block replaces an earlier one."""
    titled = ((info.split(), body) for info, body in FENCE.findall(text))
    return {words[1]: body for words, body in titled if len(words) == 2 and "." in words[1]}


def commands(text: str) -> list[Command]:
    """The commands of the page's console blocks, in order. "```console profile" and the like are not run."""
    found: list[Command] = []
    for info, body in FENCE.findall(text):
        if info != "console":
            continue
        for line in body.splitlines():
            if line.startswith("$ "):
                found.append(Command(line.removeprefix("$ ")))
            else:
                found[-1].output.append(line)
    return found


def losses(run: Path) -> list[float]:
    """The losses of a run's steps."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_style() -> None:
    """Checks that the files of the working directory are in the house's style, by ruff."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    if ruff is None:
        pytest.skip("ruff is not installed")
    for command in (["check"], ["format", "--check"]):
        command = [ruff, *command, "--no-cache", "--config", str(ROOT / "pyproject.toml"), "."]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
