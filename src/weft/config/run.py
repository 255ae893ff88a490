"""`RunConfig`: the whole of one run's YAML file, checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.config.load import load_run
from weft.config.sections import RunSections


class RunConfig(RunSections):
    """A run, whole and checked: what `weft train` does is a function of this and the data."""

    @classmethod
    def load(
        cls, path: str | Path, overrides: Sequence[str] = (), *, check_data: bool = True, ranks: int | None = None
    ) -> RunConfig:
        """Read, merge, check and complete a YAML file.

        >>> weft.RunConfig.load("run.yaml", ["optimizer.lr=1e-3"]).optimizer.arguments["lr"]
        0.001

        Args:
            path: the file; `extends`, presets and defaults are filled in.
            overrides: `key.path=value`, the value as YAML; they win over the file.
            check_data: open the headers of the tokenizer and the token stores as well.
            ranks: check the mesh on so many; default: as many as torchrun has started, else the least that fits it.

        Raises:
            ConfigError: with every problem found, each with file, line, key and what to do.
        """
        return load_run(cls, Path(path), overrides, check_data=check_data, ranks=ranks)
