"""One case of the matrix, run and compared with one process, number by number."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from matrix import STEPS, WITHIN, Case, ranks_of, write_run
from pool import Pool
from safetensors import safe_open


def losses(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, norm of the gradient) of every line of a run's metrics."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def read_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, put together from the pieces that the ranks wrote."""
    index = json.loads((folder / "index.json").read_bytes())
    files = [safe_open(folder / name, framework="np") for name in index["files"]]
    tensors = {}
    for name, entry in index["tensors"].items():
        whole = np.full(entry["shape"], np.nan, entry["dtype"])
        for number, offset, shape in entry["pieces"]:
            place = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
            whole[place] = files[number].get_tensor(name)
        tensors[name] = whole
    return tensors


@dataclass
class Run:
    """What a finished run left."""

    path: Path

    @cached_property
    def losses(self) -> list[tuple[int, float, float]]:
        return losses(self.path)

    @cached_property
    def steps(self) -> list[dict[str, np.ndarray]]:
        """Of each step: name of a tensor -> its value."""
        return [read_checkpoint(folder) for folder in sorted((self.path / "checkpoints").glob("step-*"))]


@dataclass
class Difference:
    """The largest differences of two runs, and where there are any: (step, name) -> difference.

    A tensor that only one of them has, or has in another shape, differs by infinity; so does a number that is none.
    """

    loss: float
    norm: float
    gradient: float
    weight: float
    tensors: dict[tuple[int, str], float]

    @property
    def largest(self) -> float:
        return max(self.loss, self.norm, self.gradient, self.weight)

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, norm {self.norm:.1e}, gradient {self.gradient:.1e}, weight {self.weight:.1e}"

    def wrong(self, within: float = WITHIN) -> str:
        """The first step's tensors that are not equal, for a message."""
        found = {key: value for key, value in self.tensors.items() if value > within}
        first = min((step for step, _ in found), default=0)
        lines = [f"  step {step} {name}: {value:.3g}" for (step, name), value in found.items() if step == first]
        return "\n".join([str(self), *lines])


def compare(one: Run, other: Run) -> Difference:
    """All numbers of two runs, side by side."""
    tensors: dict[tuple[int, str], float] = {}
    steps = max(len(one.steps), len(other.steps))
    for step in range(steps):
        left, right = (run.steps[step] if step < len(run.steps) else {} for run in (one, other))
        for name in sorted(left.keys() | right.keys()):
            tensors[step + 1, name] = _apart(left.get(name), right.get(name))
    largest = {"optimizer.": 0.0, "model.": 0.0}
    for prefix in largest:
        largest[prefix] = max((value for (_, name), value in tensors.items() if name.startswith(prefix)), default=0.0)
    return Difference(
        loss=_apart(_column(one, 1), _column(other, 1)),
        norm=_apart(_column(one, 2), _column(other, 2)),
        gradient=largest["optimizer."],
        weight=largest["model."],
        tensors=tensors,
    )


def _column(run: Run, number: int) -> np.ndarray:
    return np.array([line[number] for line in run.losses])


def _apart(left: np.ndarray | None, right: np.ndarray | None) -> float:
    if left is None or right is None or left.shape != right.shape or left.size == 0:
        return math.inf
    apart = float(np.abs(left - right).max())
    return apart if math.isfinite(apart) else math.inf


class Runner:
    """Runs cases in one pool; a reference, a run of one process, is made once a model and way of training."""

    def __init__(self, folder: Path, *, seconds: float = 60):
        self.folder, self.seconds, self.pool = folder, seconds, Pool()
        self.references: dict[tuple[str, str, int], Run] = {}

    def run(self, case: Case, *, steps: int = STEPS, name: str | None = None, fresh: bool = True, **sections) -> Run:
        """Train a case; the run is in `folder/name`."""
        name = name or str(case)
        file = write_run(self.folder, case, steps=steps, name=name, **sections)
        self.pool.run(file, ranks_of(case.mesh), fresh=fresh, seconds=self.seconds)
        return Run(self.folder / name)

    def reference(self, case: Case, *, steps: int = STEPS) -> Run:
        """The run of one process that a case must be equal to."""
        key = (case.model, case.way, steps)
        if key not in self.references:
            name = f"{case.model}-{case.way}-{steps}-steps"
            self.references[key] = self.run(Case(case.model, case.way), steps=steps, name=name)
        return self.references[key]

    def compare(self, case: Case) -> Difference:
        """How far a case is from one process."""
        return compare(self.reference(case), self.run(case))
