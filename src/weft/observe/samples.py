"""`samples.jsonl` of a run directory: what the model wrote while it learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.observe.jsonlines import JsonLines, read_lines

SAMPLES = "samples.jsonl"


class SamplesFile:
    """Appends to `<run>/samples.jsonl`: `{"step": 200, "prompt": "def ", "text": "main():"}`, one line a prompt.

    Raises:
        UserError: as `JsonLines`.
    """

    def __init__(self, run_directory: str | Path):
        self._lines = JsonLines(Path(run_directory) / SAMPLES, once=False)

    def write(self, step: int, prompt: str, text: str) -> None:
        """Append what the model made of one prompt after `step` updates; `text` is without the prompt."""
        self._lines.write({"step": step, "prompt": prompt, "text": text})

    def keep_until(self, step: int) -> None:
        """Drop the samples of later steps: a resumed run writes them again."""
        self._lines.keep_until(step)

    def close(self) -> None:
        """Write no more."""
        self._lines.close()


def read_samples(run_directory: str | Path) -> list[dict[str, Any]]:
    """The samples of a run in the order written; a torn last line is left out.

    Raises:
        UserError: a broken line that is not the last, as `path:line`.
    """
    return read_lines(Path(run_directory) / SAMPLES)
