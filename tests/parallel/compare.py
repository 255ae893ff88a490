"""One case of the matrix, run and compared with one process, number by number."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matrix import LAYERS, STEPS, TEACHERS, WAYS, WITHIN, Case, ranks_of, write_run
from pool import Pool
from safetensors import safe_open


def read_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, put together from the pieces that the ranks wrote."""
    index = json.loads((folder / "index.json").read_bytes())
    files = [safe_open(folder / name, framework="np") for name in index["files"]]
    tensors = {}
    for name, entry in index["tensors"].items():
        unread = np.nan if np.issubdtype(entry["dtype"], np.floating) else 0
        whole = np.full(entry["shape"], unread, entry["dtype"])
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
    def metrics(self) -> dict[str, np.ndarray]:
        """What was written down of the steps and does not depend on time; 0 where a step has none."""
        lines = list(map(json.loads, (self.path / "metrics.jsonl").read_text().splitlines()))
        names = ("step", "loss", "validation_loss", "expert_load", "dropped", "learned_tokens", "grad_norm", "kept")
        names += (
            "mtp_loss",
            "hidden_loss",
            "margin",
            "accuracy",
            "kl",
            "validation_margin",
            "validation_accuracy",
            "validation_kl",
        )
        return {name: np.array([line.get(name, 0.0) for line in lines]) for name in names}

    @cached_property
    def steps(self) -> list[dict[str, np.ndarray]]:
        """Of each step: name of a tensor -> its value."""
        return [read_checkpoint(folder) for folder in sorted((self.path / "checkpoints").glob("step-*"))]


@dataclass
class Difference:
    """The largest differences of two runs, and those of each tensor: (step, name) -> difference.

    A tensor that only one of them has, or has in another shape, differs by infinity; so does a number that is none.

    Attributes:
        loss: of the losses, on held-out data too, and of what is counted in a step.
        not_shared: why the ranks cannot have been this mesh, equal or not.
    """

    loss: float
    norm: float
    gradient: float
    weight: float
    tensors: dict[tuple[int, str], float]
    not_shared: str | None = None

    @property
    def good(self) -> bool:
        return self.largest <= WITHIN and self.not_shared is None

    @property
    def largest(self) -> float:
        return max(self.loss, self.norm, self.gradient, self.weight)

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, norm {self.norm:.1e}, gradient {self.gradient:.1e}, weight {self.weight:.1e}"

    def wrong(self, most: int = 12) -> str:
        """What is not equal, for a message: of the first step with such a tensor, so many of them."""
        found = {key: value for key, value in self.tensors.items() if value > WITHIN}
        first = min((step for step, _ in found), default=0)
        lines = [f"  step {step} {name}: {value:.3g}" for (step, name), value in found.items() if step == first]
        more = [f"  and {len(lines) - most} more"] if len(lines) > most else []
        return "\n".join([str(self), *([self.not_shared] if self.not_shared else []), *lines[:most], *more])


def not_shared(run: Run, mesh: dict[str, Any], layers: int) -> str | None:
    """What of a mesh a run made no use of, as far as its checkpoint's pieces tell; None if all is well."""
    index = json.loads((run.path / "checkpoints" / "step-00000001" / "index.json").read_bytes())
    blocks = {name: entry for name, entry in index["tensors"].items() if name.startswith("model.layers.")}
    pieces = max(len(entry["pieces"]) for entry in blocks.values())
    wanted = math.prod(mesh.get(axis, 1) for axis in ("dp_shard", "cp", "tp"))
    if pieces != wanted:
        return f"matrices are in {pieces} pieces and not in {wanted}"
    found: dict[int, set[str]] = {}
    for name, entry in blocks.items():
        for number, *_ in entry["pieces"]:
            if int(name.split(".")[2]) < layers:  # not a multi-token prediction layer
                found.setdefault(number, set()).add(name.split(".")[2])
    if "pp" in mesh and (most := max(map(len, found.values()))) > layers + 1 - mesh["pp"]:
        return f"a rank has {most} of {layers} layers"
    return None


def compare(one: Run, other: Run) -> Difference:
    """All numbers of two runs, side by side."""
    tensors: dict[tuple[int, str], float] = {}
    steps = max(len(one.steps), len(other.steps))
    for step in range(steps):
        left, right = (run.steps[step] if step < len(run.steps) else {} for run in (one, other))
        for name in sorted(left.keys() | right.keys()):
            tensors[step + 1, name] = _apart(left.get(name), right.get(name))
    of = {
        kind: [value for (_, name), value in tensors.items() if name.startswith(kind)]
        for kind in ("model.", "optimizer.")
    }
    metrics = {name: _apart(values, other.metrics[name]) for name, values in one.metrics.items()}
    return Difference(
        loss=max(value for name, value in metrics.items() if name != "grad_norm"),
        norm=metrics["grad_norm"],
        gradient=max(of["optimizer."], default=math.inf),
        weight=max(of["model."], default=math.inf),
        tensors=tensors,
    )


def _apart(left: np.ndarray | None, right: np.ndarray | None) -> float:
    if left is None or right is None or left.shape != right.shape or left.size == 0:
        return math.inf
    apart = float(np.abs(left - right).max())
    return apart if math.isfinite(apart) else math.inf


class Runner:
    """Runs cases; a reference, a run of one process, is made once a model and way of training."""

    def __init__(self, folder: Path, *, steps: int = STEPS, seconds: float = 60):
        self.folder, self.steps, self.seconds, self.pool = folder, steps, seconds, Pool()
        self.references: dict[tuple[str, str, int, int | None, int], Run] = {}

    def run(
        self, case: Case, *, steps: int | None = None, name: str | None = None, fresh: bool = True, **sections
    ) -> Run:
        """Train a case; the run is in `folder/name`."""
        name = name or str(case)
        steps = steps or self.steps
        if "adapter" in WAYS[case.way]:
            base = self.reference(Case(case.model, "plain", layers=case.layers))
            sections["model"] = {"from": str(base.path)} | WAYS[case.way]["model"] | sections.get("model", {})
        if WAYS[case.way].get("objective", {}).get("type") == "distill":
            teacher = self.reference(Case(TEACHERS.get(case.model, "gqa"), "plain", layers=case.layers))
            sections["objective"] = {"teacher": str(teacher.path)} | sections.get("objective", {})
        file = write_run(self.folder, case, steps=steps, name=name, **sections)
        self.pool.run(file, ranks_of(case.mesh), fresh=fresh, seconds=self.seconds)
        return Run(self.folder / name)

    def reference(self, case: Case, *, steps: int | None = None) -> Run:
        """The run of one process that a case must be equal to."""
        steps = steps or self.steps
        key = (case.model, case.way, case.layers, case.sequences, steps)
        if key not in self.references:
            name = f"{case.model}-{case.way}-{case.layers}-layers-{case.sequences or 'all'}-sequences-{steps}-steps"
            self.references[key] = self.run(replace(case, mesh={}), steps=steps, name=name)
        return self.references[key]

    def compare(self, case: Case) -> Difference:
        """How far a case is from one process."""
        run = self.run(case)
        difference = compare(self.reference(case), run)
        difference.not_shared = not_shared(run, case.mesh, case.layers)
        if difference.good:
            shutil.rmtree(run.path)  # there are hundreds
        return difference

    def travel(self, model: str, meshes: list[dict[str, Any]], layers: int = LAYERS) -> Difference:
        """How far a run that makes each step on another mesh is from one that makes them all in one process."""
        name = f"{model}-from-mesh-to-mesh"
        for step, mesh in enumerate(meshes, start=1):
            run = self.run(Case(model, "plain", mesh, layers), steps=step, name=name, fresh=step == 1)
        return compare(self.reference(Case(model, "plain", layers=layers), steps=len(meshes)), run)
