"""The equivalence matrix as data: models, ways of training, meshes; and one case of it, run and compared.

A case is three steps in float64. What is compared with one process: each step's loss and norm of the gradient
(metrics.jsonl), every gradient and every weight (the checkpoints: `PlainSGD` keeps gradients in its state).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
from pool import Pool
from safetensors import safe_open

from weft.config.mesh import ParallelSection

STEPS = 3
WITHIN = 1e-9
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # ep divides dp_shard x cp: it has no ranks of its own

# ---- models: 4 layers, so that there are 4 pipeline stages; 8 query heads; weights large enough to matter

_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "router_aux_loss_coef": 0.01,
    "router_z_loss_coef": 0.001,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _SHAPE,
    "tied": _SHAPE | {"tie_word_embeddings": True},
    "gqa": _SHAPE | {"family": "qwen3", "num_key_value_heads": 4, "head_dim": 8, "qk_norm": True},
    "moe": _SHAPE | {"num_key_value_heads": 4, "moe": _MOE},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": _SHAPE | {"preset": "gpt2"},
    "gemma2": _SHAPE | {"preset": "gemma2-2b", "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 8},
    "mpt": _SHAPE | {"preset": "mpt-7b"},
    "gpt_oss": _SHAPE
    | {
        "preset": "gpt-oss-20b",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "sliding_window": 8,
        "moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.01},
    },
    "deepseek_v3": _SHAPE
    | {
        "preset": "deepseek-v3",
        "num_key_value_heads": None,
        "mla": {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        "moe": _MOE | {"n_group": 4, "topk_group": 2},
    },
    "olmo2": _SHAPE | {"preset": "olmo2-1b"},
    "gpt_neox": _SHAPE | {"preset": "pythia-70m", "partial_rotary_factor": 0.5},
}

# ---- ways of training; a section of the run's file each


def _way(sequences: int, micro: int, *, model: dict | None = None, masked: bool = False, **training: Any) -> dict:
    return {
        "training": {"batch_tokens": sequences * 32, "micro_batch_size": micro, **training},
        "model": model or {},
        "masked": masked,
    }


_DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "embedding_dropout": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "plain": _way(8, 2),
    "accumulation": _way(8, 1),
    "uneven": _way(5, 2),  # on 4 data ranks: 2, 2, 1 and none
    "masked": _way(8, 2, masked=True),
    "clipping": _way(8, 2, grad_clip=0.05),
    "recomputing": _way(8, 2, activation_checkpointing="full"),
    # Dropout is drawn for a micro-batch: equal micro-batches on all meshes are those of one sequence.
    "dropout": _way(8, 1, model=_DROPOUT),
    "everything": _way(7, 1, masked=True, grad_clip=0.05, activation_checkpointing="full"),
}

# ---- meshes: a line each, as keys of `parallel:`. Those with a key or a word that config/mesh.py does not know are
# skipped.

ALONE = [{axis: size} for axis in AXES for size in (2, 4)] + [
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 4, "ep": 4},
    {"cp": 2, "ep": 2},
]
PAIRS = [{one: 2, other: 2} for number, one in enumerate(AXES) for other in AXES[number + 1 :]] + [
    {"dp_shard": 4, "ep": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"dp_shard": 2, "cp": 2, "ep": 2},
    {"dp_shard": 2, "cp": 2, "ep": 4},
    {"dp_shard": 2, "tp": 2, "ep": 2},
    {"pp": 2, "dp_shard": 2, "ep": 2},
]
MORE = [
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"pp": 4, "dp_shard": 2, "tp": 2},
    {"pp": 2, "dp_shard": 4, "tp": 2},
    {"pp": 2, "dp_shard": 2, "tp": 4},
    {"pp": 2, "dp_replicate": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "cp": 2},
    {"pp": 2, "cp": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2},
    {"dp_shard": 4, "tp": 2, "ep": 2},
    {"dp_shard": 4, "tp": 2, "ep": 4},
    {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4},
    {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2},
    {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 4},
]
SCHEDULES = [
    {"pp": 2, "schedule": "gpipe"},
    {"pp": 2, "schedule": "1f1b"},
    {"pp": 2, "schedule": "interleaved_1f1b"},
    {"pp": 2, "schedule": "zbv"},
    {"pp": 2, "schedule": "dualpipev"},
    {"pp": 2, "dp_shard": 2, "tp": 2, "schedule": "interleaved_1f1b"},
]
SETTINGS = [
    {"dp_shard": 4, "reshard_after_forward": False},
    {"pp": 2, "dp_shard": 2, "reshard_after_forward": False},
]
MESHES = [*ALONE, *PAIRS, *MORE, *SCHEDULES, *SETTINGS]
# Where every family goes once, and every way of training.
CHOSEN = [
    {"dp_replicate": 2, "dp_shard": 2},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2},
    {"dp_shard": 2, "ep": 2},
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"cp": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 2},
]


@dataclass(frozen=True)
class Case:
    """A model, a way of training it, a mesh."""

    model: str
    way: str
    mesh: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}-{self.way}-{mesh_name(self.mesh)}"


def mesh_name(mesh: dict[str, Any]) -> str:
    """`pp2 x dp_shard2`, and its settings."""
    axes = [f"{key}{mesh[key]}" for key in (*AXES, "ep") if key in mesh]
    settings = [f"{key}={value}" for key, value in mesh.items() if key not in (*AXES, "ep")]
    return "_".join(axes + settings) or "alone"


def ranks_of(mesh: dict[str, Any]) -> int:
    """Processes that a mesh takes."""
    return math.prod(mesh.get(axis, 1) for axis in AXES)


def unknown(mesh: dict[str, Any]) -> str | None:
    """What of a mesh this version cannot say; None if it can say all."""
    for key, value in mesh.items():
        chosen = ParallelSection.model_fields.get(key)
        if chosen is None:
            return f"parallel.{key}"
        words = get_args(chosen.annotation)
        if isinstance(value, str) and words and value not in words:
            return f"parallel.{key}: {value}"
    return None


def has_experts(model: str) -> bool:
    return "moe" in (MODELS | FAMILIES)[model]


def fits(model: str, mesh: dict[str, Any]) -> bool:
    """Experts can be shared out only where there are some."""
    return "ep" not in mesh or has_experts(model)


def matrix() -> list[Case]:
    """All cases: every model on every mesh; every family and every way of training on a few."""
    cases = [Case(model, "plain", mesh) for mesh in MESHES for model in MODELS]
    cases += [Case(model, way, mesh) for mesh in CHOSEN for way in WAYS for model in ("gqa", "moe")]
    cases += [Case(model, "everything", mesh) for mesh in CHOSEN for model in ("dense", "tied")]
    cases += [Case(model, "plain", mesh) for mesh in CHOSEN for model in FAMILIES]
    unique = {str(case): case for case in cases if fits(case.model, case.mesh)}
    return list(unique.values())


# What `make test` runs of it: every axis and every model.
SAMPLE = [
    Case("dense", "dropout", {"dp_shard": 4}),
    Case("gqa", "uneven", {"dp_replicate": 2, "dp_shard": 2}),
    Case("dense", "clipping", {"tp": 2}),
    Case("tied", "masked", {"cp": 2}),
    Case("tied", "uneven", {"pp": 2}),
    Case("moe", "masked", {"dp_shard": 2, "ep": 2}),
    Case("gqa", "everything", {"pp": 2, "dp_shard": 2, "tp": 2}),
    Case("moe", "plain", {"cp": 2, "tp": 2, "ep": 2}),
]


# ---- running


def write_run(folder: Path, case: Case, *, steps: int = STEPS, name: str = "run", **sections: Any) -> Path:
    """The YAML file of a case's run, whose directory is `folder/name`; `sections` are merged into its own."""
    way = WAYS[case.way]
    content: dict[str, Any] = {
        "run": {"name": name, "directory": str(folder), "seed": 7},
        "model": (MODELS | FAMILIES)[case.model] | way["model"],
        "data": {
            "train": {"type": "matrix_parts:Sequences", "masked": way["masked"]},
            "sequence_length": 32,
        },
        "optimizer": {"type": "matrix_parts:PlainSGD", "lr": 0.5},
        "schedule": {"type": "constant"},
        "training": {"steps": steps, "dtype": "float64", "grad_clip": None, "threads": 1, **way["training"]},
        "parallel": {"dp_shard": 1, **case.mesh},
        "checkpoint": {"every": 1, "keep_last": 10},
        "log": {"every": 1, "trackers": []},
    }
    for section, change in sections.items():
        content[section] = content.get(section, {}) | change
    file = folder / f"{name}.yaml"
    file.write_text("".join(f"{section}: {json.dumps(value)}\n" for section, value in content.items()))
    return file


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
            self.references[key] = self.run(
                Case(case.model, case.way), steps=steps, name=f"{'-'.join(key[:2])}-{steps}"
            )
        return self.references[key]

    def compare(self, case: Case) -> Difference:
        """How far a case is from one process."""
        return compare(self.reference(case), self.run(case))
