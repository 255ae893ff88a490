"""The equivalence matrix as data: models, ways of training, meshes.

A case is three steps in float64 (two in `make test`). What is compared with one process: each step's loss and norm of
the gradient (metrics.jsonl), every gradient and every weight (checkpoints: `PlainSGD` keeps gradients in its state).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from weft.config.mesh import SPLIT_BACKWARD, ParallelSection

STEPS = 3
FEWER_STEPS = 2  # the second begins with momentum, and with weights that the first has changed
WITHIN = 1e-9
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # ep divides dp_shard x cp: it has no ranks of its own

# ---- models: 4 layers, so that there are 4 pipeline stages; 8 query heads; weights large enough to matter

LAYERS = 4
_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
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
    "tied": _SHAPE | {"tie_word_embeddings": True, "pad_token_id": 3},
    "gqa": _SHAPE | {"family": "qwen3", "pad_token_id": 90, "num_key_value_heads": 4, "head_dim": 8, "qk_norm": True},
    "moe": _SHAPE | {"num_key_value_heads": 4, "moe": _MOE},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": _SHAPE | {"preset": "gpt2"},
    "two_groups": _SHAPE | {"num_key_value_heads": 2, "attention_bias": True, "qk_norm": True},
    "gemma2": _SHAPE | {"preset": "gemma2-2b", "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 8},
    "mpt": _SHAPE | {"preset": "mpt-7b"},
    "dynamic": _SHAPE
    | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}},
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
    "few_experts": _SHAPE | {"num_key_value_heads": 4, "moe": _MOE | {"num_experts": 4}},
    "capacity": _SHAPE | {"num_key_value_heads": 4, "moe": _MOE | {"capacity_factor": 0.75}},
    "olmo2": _SHAPE | {"preset": "olmo2-1b"},
    "gpt_neox": _SHAPE | {"preset": "pythia-70m", "partial_rotary_factor": 0.5},
}

TEACHERS = {"dense": "few_experts"}  # of a student; of all others: gqa

# ---- ways of training; a section of the run's file each


def _way(sequences: int, micro: int, *, masked: bool = False, model: dict | None = None, **training: Any) -> dict:
    return {
        "training": {"batch_tokens": sequences * 32, "micro_batch_size": micro, **training},
        "model": model or {},
        "data": {"train": _data(masked=masked)},
    }


def _data(**arguments: Any) -> dict:
    return {"type": "matrix_parts:Sequences", **arguments}


def _grpo(sequences: int, **objective: Any) -> dict:
    fields = {"updates_per_rollout": 2, "mask_truncated": True}
    return _way(sequences, 2) | {
        "data": {"train": {"type": "matrix_parts:Answers"}},
        "objective": {"type": "grpo", "temperature": 0.7, **fields, **objective},
    }


def _items(objective: str, field: str | None = None, **arguments: Any) -> dict:
    data = {"type": "matrix_parts:Items", **({} if field is None else {"field": field})}
    return {
        "objective": {"type": objective, **arguments},
        "data": {
            "train": {**data, "count": 7},
            "validation": {**data, "count": 7},
        },  # learned again, so kto's KL is > 0
        "validation": {"every": 2, "micro_batch_size": 3},
    }


_KEPT = {"type": "objective_parts:Kept"}
_DISTILL = {"type": "distill", "alpha": 0.3, "temperature": 2.0}
_MTP = {"num_nextn_predict_layers": 2}
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
    # 7 sequences, 3 at a time; measured after the second step and at the end.
    "validating": _way(8, 2)
    | {
        "data": {"train": _data(), "validation": _data(count=7, masked=True)},
        "validation": {"every": 2, "micro_batch_size": 3},
    },
    # Noise is drawn for a sample, so micro-batches may be of any size.
    "sft_tokens": _way(8, 2, masked=True) | {"objective": {"type": "sft", "neftune": 5.0}},
    "sft_sequences": _way(7, 2, masked=True) | {"objective": {"type": "sft", "loss": "sequences", "neftune": 5.0}},
    "z_loss": _way(7, 2, masked=True) | {"objective": {"type": "pretrain", "z_loss": 0.05}},
    "mtp": _way(7, 2, masked=True, model=_MTP) | {"objective": {"type": "pretrain", "z_loss": 0.05}},
    "mtp_everything": _way(8, 1, masked=True, grad_clip=0.05, activation_checkpointing="full", model=_MTP | _DROPOUT)
    | {"objective": {"type": "sft", "loss": "sequences", "neftune": 5.0, "mtp_loss_factor": 0.4}},
    "grpo_lora": _grpo(7, clip_high=0.28) | {"adapter": {"r": 3, "alpha": 6.0}},
    "grpo_kl_lora": _grpo(8, beta=0.2) | {"adapter": {"r": 3, "alpha": 6.0}},
    "dapo_kl": _grpo(7, loss="dapo", beta=0.2, kl="k2"),
    "gspo_lora": _grpo(8, loss="gspo", clip=0.3, beta=0.1) | {"adapter": {"r": 3, "alpha": 6.0}},
    "dr_grpo": _grpo(7, loss="dr_grpo"),
    "rloo": _grpo(8, loss="rloo", clip=0.9),
    # Of a pipeline, a stage without anything to train.
    "frozen": _way(8, 2, freeze=["embed_tokens", "layers.[01]", "*.q_proj.weight"], grad_clip=0.05),
    # Adapters; their base model is a run of the plain way. Their dropout is drawn for a micro-batch, too.
    "lora": _way(4, 1, masked=True) | {"adapter": {"r": 3, "alpha": 6.0, "dropout": 0.1}},
    "lora_experts": _way(8, 2) | {"adapter": {"r": 3, "alpha": 6.0, "targets": "all-linear"}},
    "dora": _way(4, 1, activation_checkpointing="full") | {"adapter": {"r": 3, "dropout": 0.1, "dora": True}},
    "pissa": _way(8, 2) | {"adapter": {"r": 3, "alpha": 6.0, "init": "pissa", "rslora": True}},
    "qlora": _way(8, 2, masked=True) | {"adapter": {"r": 3, "targets": "all-linear", "quantize": "nf4"}},
    "qlora_int8": _way(8, 2, activation_checkpointing="full") | {"adapter": {"r": 3, "quantize": "int8", "dora": True}},
    # Beside the trained model, the one with which the run started; its base model is shared where there is an adapter.
    "kept": _way(8, 2, masked=True) | {"objective": _KEPT},
    "kept_lora": _way(4, 1, masked=True) | {"objective": _KEPT, "adapter": {"r": 3, "alpha": 6.0, "dropout": 0.1}},
    "kept_dora": _way(8, 2) | {"objective": _KEPT, "adapter": {"r": 3, "dora": True}},
    "kept_pissa": _way(8, 2) | {"objective": _KEPT, "adapter": {"r": 3, "init": "pissa"}},
    # The teacher has another architecture (TEACHERS); `Runner.run` names it.
    "distill": _way(7, 2, masked=True) | {"objective": _DISTILL | {"top_k": 20}},
    "distill_full": _way(8, 2, masked=True) | {"objective": _DISTILL | {"loss": "jsd", "beta": 0.3}},
    "distill_lora": _way(4, 1)
    | {"objective": _DISTILL | {"loss": "reverse", "top_k": 300}, "adapter": {"r": 3, "alpha": 6.0, "dropout": 0.1}},
    # Hidden states of another size; a pipeline has them in other stages.
    "distill_hidden": _way(7, 2, masked=True, model={"hidden_size": 48}, activation_checkpointing="full")
    | {"objective": _DISTILL | {"top_k": 20, "hidden_weight": 0.5, "hidden_layers": [[-1, 4], [2, 1], [0, 0]]}},
    # Pairs of answers, of which a padding row has none; the KL of kto is that of the whole batch.
    "dpo": _way(7, 2) | _items("dpo", beta=0.5, sft_weight=0.1),
    "dpo_lora": _way(4, 1) | _items("dpo", loss="ipo") | {"adapter": {"r": 3, "alpha": 6.0, "dropout": 0.1}},
    "orpo": _way(8, 2) | _items("orpo", beta=0.5),
    "kto": _way(7, 2) | _items("kto", "label", beta=0.5, desirable_weight=3.0, undesirable_weight=0.1),
    "kto_lora": _way(8, 2) | _items("kto", "label", beta=0.5) | {"adapter": {"r": 3, "alpha": 6.0}},
    "reward": _way(7, 2, model={"num_labels": 1}) | _items("reward", "margin", margin=True, center=0.1),
    "reward_lora": _way(8, 2, model={"num_labels": 1}) | _items("reward") | {"adapter": {"r": 3, "alpha": 6.0}},
    "compiled": _way(8, 2, compile=True),
    "compiled_z_loss": _way(8, 2, compile=True) | {"objective": {"type": "pretrain", "z_loss": 0.05}},
    "compiled_mtp": _way(8, 2, compile=True, model=_MTP),
    "compiled_lora": _way(8, 2, compile=True) | {"adapter": {"r": 3, "alpha": 6.0}},
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
    {"pp": 2, "pp_schedule": "gpipe"},
    {"pp": 2, "pp_schedule": "1f1b"},
    {"pp": 2, "pp_schedule": "looped_bfs"},
    {"pp": 2, "pp_schedule": "interleaved_1f1b"},
    {"pp": 2, "pp_schedule": "interleaved_zero_bubble"},
    {"pp": 2, "pp_schedule": "zbv_zero_bubble"},
    {"pp": 2, "pp_schedule": "dualpipev"},
    {"pp": 2, "dp_shard": 2, "tp": 2, "pp_schedule": "interleaved_1f1b"},
]
SETTINGS = [
    {"dp_shard": 4, "reshard_after_forward": False},
    {"dp_shard": 4, "reshard_after_forward": 2},
    {"dp_shard": 4, "zero_stage": 1},
    {"dp_shard": 4, "zero_stage": 2},
    {"dp_shard": 2, "tp": 2, "zero_stage": 3},
    {"dp_shard": 2, "layers_per_fsdp_unit": 2, "prefetch": 1},
    {"dp_shard": 2, "offload": "parameters"},
    {"dp_shard": 2, "offload": "optimizer"},
    {"pp": 2, "dp_shard": 2, "reshard_after_forward": True},
    {"pp": 2, "stage_layers": [1, 3]},
    {"pp": 2, "pp_schedule": "interleaved_1f1b", "stages_per_rank": 2, "stage_layers": [1, 1, 1, 1]},
    *({"cp": size, "cp_method": way} for size in (2, 4) for way in ("all_gather", "ring")),
    {"cp": 2, "tp": 2, "cp_method": "ring"},
    {"pp": 2, "cp": 2, "cp_method": "ring"},
]
MESHES = [*ALONE, *PAIRS, *MORE, *SCHEDULES, *SETTINGS]
# Where every family goes once, and every way of training.
CHOSEN = [
    {"dp_replicate": 2, "dp_shard": 2},
    {"tp": 2},
    {"cp": 2},
    {"cp": 2, "cp_method": "all_gather"},
    {"cp": 2, "cp_method": "ring"},
    {"pp": 2},
    {"dp_shard": 2, "ep": 2},
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"cp": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 2},
]
MORE_THAN_GROUPS = [{"tp": 4}, {"tp": 8}, {"cp": 2, "tp": 4}, {"pp": 2, "tp": 4}, {"dp_shard": 2, "tp": 4}]
# Compiling takes half a minute.
COMPILED = [
    ("dense", {"dp_shard": 2}),
    ("dense", {"tp": 2}),
    ("two_groups", {"tp": 4}),
    ("dense", {"cp": 2}),
    ("dense", {"pp": 2}),
    ("moe", {"dp_shard": 2, "ep": 2}),
    ("gqa", {"pp": 2, "dp_shard": 2, "tp": 2}),
]


@dataclass(frozen=True)
class Case:
    """A model, a way of training it, a mesh; and the number of the model's layers, and of those of its teacher.

    Attributes:
        sequences: of a step; None: as many as the way has.
    """

    model: str
    way: str
    mesh: dict[str, Any] = field(default_factory=dict)
    layers: int = LAYERS
    sequences: int | None = None

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


def plain(mesh: dict[str, Any]) -> str:
    """The plain way; with more micro-batches where a pipeline would have fewer than 1F1B can order."""
    data_ranks = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    return "accumulation" if mesh.get("pp", 1) * data_ranks > 4 else "plain"


# Ways of training on meshes of two axes that `CHOSEN` does not have.
CROSSED = [
    Case("moe", "sft_sequences", {"dp_shard": 2, "cp": 2}),
    Case("gqa", "z_loss", {"pp": 2, "tp": 2}),
    Case("moe", "mtp_everything", {"dp_shard": 2, "cp": 2}),
    Case("tied", "frozen", {"pp": 2, "tp": 2}),
    Case("gqa", "frozen", {"dp_shard": 2, "cp": 2}),
    Case("tied", "distill", {"pp": 2, "dp_shard": 2, "tp": 2}),
    Case("moe", "distill_full", {"cp": 2, "tp": 2, "ep": 2}),
    Case("dense", "distill_lora", {"pp": 2, "cp": 2}),
    Case("dense", "distill_hidden", {"cp": 2, "tp": 2}),
    Case("gqa", "kept_lora", {"pp": 2, "cp": 2}),
    Case("gqa", "dpo_lora", {"dp_shard": 2, "tp": 2}),
    Case("gqa", "reward_lora", {"pp": 2, "dp_shard": 2}),
]


def matrix() -> list[Case]:
    """All cases: every model on every mesh; every family and every way of training on a few."""
    cases = [Case(model, plain(mesh), mesh) for mesh in MESHES for model in MODELS]
    ways = [way for way in WAYS if not way.startswith("compiled")]
    cases += [
        Case(model, way, mesh)
        for mesh in CHOSEN
        for way in ways
        for model in ("gqa", "moe")
        if "pp" not in mesh or "hidden" not in way
    ]
    cases += [Case(model, "everything", mesh) for mesh in CHOSEN for model in ("dense", "tied")]
    cases += [Case(model, "plain", mesh) for mesh in CHOSEN for model in FAMILIES]
    cases += [Case("tied", "frozen", mesh) for mesh in SCHEDULES]
    cases.append(Case("capacity", "masked", {"cp": 2, "cp_method": "all_gather"}))
    cases += [Case("two_groups", "everything", mesh) for mesh in MORE_THAN_GROUPS]
    cases += [Case("few_experts", "everything", {"dp_shard": 8} | mesh) for mesh in ({}, {"ep": 2})]
    cases += [Case("two_groups", way, mesh) for mesh in MORE_THAN_GROUPS for way in ("lora", "dora", "qlora")]
    cases += [Case("deepseek_v3", "lora_experts", mesh) for mesh in CHOSEN]
    cases += [Case("moe", "qlora", mesh) for mesh in SETTINGS]
    cases += [Case(model, "compiled", mesh) for model, mesh in COMPILED]
    cases += [Case("dense", "compiled_z_loss", mesh) for mesh in ({"tp": 2}, {"pp": 2})]
    cases += [Case("moe", "compiled_lora", mesh) for mesh in ({"dp_shard": 2}, {"tp": 2})]
    cases += [Case("dense", "compiled_mtp", mesh) for mesh in ({"tp": 2}, {"pp": 2})]
    cases += [Case(model, "mtp_everything", mesh) for mesh in ({"cp": 2, "tp": 2}, {"pp": 2}) for model in FAMILIES]
    cases += [Case("tied", "mtp", mesh) for mesh in SCHEDULES if mesh["pp_schedule"] not in SPLIT_BACKWARD]
    cases += CROSSED
    unique = {str(case): case for case in cases if fits(case.model, case.mesh)}
    return list(unique.values())


# What `make test` runs of it: every axis, model of `MODELS` and family of objectives, and the schedules that no other
# test has. As few ranks as these take: each costs a second of a core; and half of the layers, where this is enough. Two
# micro-batches on each data rank add up as four do, and of 3 sequences the last one is half empty, as of 7.
# Other tests compare runs on two axes: `test_callbacks_on_ranks.py` on `pp` and `cp`, `test_experts.py` on
# `dp_replicate` and `dp_shard`, and `test_between_meshes.py` on `pp` and `tp`.
_SMALL = partial(Case, layers=2)
SAMPLE = [
    _SMALL("dense", "dropout", {"dp_shard": 2}, sequences=4),
    Case("dense", "clipping", {"dp_shard": 2, "tp": 2}, layers=1),
    Case("two_groups", "plain", {"tp": 4}, layers=1, sequences=4),
    _SMALL("tied", "masked", {"cp": 2}, sequences=4),
    _SMALL("tied", "uneven", {"pp": 2}),
    _SMALL("moe", "masked", {"dp_shard": 2, "ep": 2}),
    _SMALL("moe", "plain", {"cp": 2, "tp": 2, "ep": 2}, sequences=4),
    _SMALL("capacity", "masked", {"cp": 2, "ep": 2, "cp_method": "all_gather"}, sequences=4),
    _SMALL("tied", "sft_sequences", {"tp": 2}, sequences=3),
    Case("gqa", "z_loss", {"pp": 2, "pp_schedule": "looped_bfs"}),
    _SMALL("dense", "mtp", {"pp": 2}),
    _SMALL("gqa", "gspo_lora", {"cp": 2}, sequences=4),
    Case("tied", "frozen", {"pp": 2, "pp_schedule": "interleaved_zero_bubble"}),
    _SMALL("gqa", "dora", {"dp_shard": 2}),
    _SMALL("tied", "distill", {"pp": 2}),
    Case("dense", "distill_hidden", {"tp": 2}, sequences=3),
    _SMALL("moe", "qlora", {"tp": 2}, sequences=4),
    _SMALL("moe", "dpo", {"pp": 2}),
    _SMALL("gqa", "kto", {"dp_shard": 2}),
    _SMALL("tied", "reward", {"tp": 2}, sequences=3),
]
# The same on more ranks, and what is a part of these; `make test-long` runs them.
LARGER_SAMPLE = [
    Case("dense", "dropout", {"dp_shard": 4}),
    Case("gqa", "everything", {"pp": 2, "dp_shard": 2, "tp": 2}),
    Case("dense", "mtp", {"pp": 2, "tp": 2}),
    Case("gqa", "gspo_lora", {"pp": 2, "cp": 2}),
    Case("gqa", "lora", {"cp": 2, "tp": 2}),
    Case("gqa", "dora", {"pp": 2, "dp_shard": 2}),
    _SMALL("gqa", "uneven", {"dp_replicate": 2, "dp_shard": 2}),
    _SMALL("tied", "sft_sequences", {"pp": 2, "tp": 2}),
    Case("tied", "distill", {"pp": 2, "tp": 2}),
    Case("moe", "qlora", {"dp_shard": 2, "tp": 2, "ep": 2}),
    Case("gqa", "lora", {"tp": 2}),
    Case("tied", "kept", {"tp": 2}),
    Case("tied", "kept", {"pp": 2, "tp": 2}),
    Case("moe", "dpo", {"pp": 2, "cp": 2}),
    Case("gqa", "kto", {"dp_shard": 2, "cp": 2}),
    Case("tied", "reward", {"pp": 2, "tp": 2}),
]

# ---- a run's file


def _model(case: Case) -> dict[str, Any]:
    return (MODELS | FAMILIES)[case.model] | {"num_hidden_layers": case.layers}


def write_run(folder: Path, case: Case, *, steps: int = STEPS, name: str = "run", **sections: Any) -> Path:
    """The YAML file of a case's run, whose directory is `folder/name`; `sections` are merged into its own."""
    way = WAYS[case.way]
    fewer = {} if case.sequences is None else {"batch_tokens": case.sequences * 32}
    content: dict[str, Any] = {
        "run": {"name": name, "directory": str(folder), "seed": 7},
        # Of an adapter's run, the base model has the shape: `Runner.run` names it.
        "model": {} if "adapter" in way else _model(case) | way["model"],
        "data": {"sequence_length": 32} | way["data"],
        "optimizer": {"type": "matrix_parts:PlainSGD", "lr": 0.3},
        "schedule": {"type": "constant"},
        "training": {"steps": steps, "dtype": "float64", "grad_clip": None, "threads": 1, **way["training"], **fewer},
        "parallel": {"dp_shard": 1, **case.mesh},
        "checkpoint": {"every": 1, "keep_last": 10},
        "log": {"every": 1, "trackers": []},
        **{section: way[section] for section in ("objective", "validation", "adapter") if section in way},
    }
    for section, change in sections.items():
        content[section] = content.get(section, {}) | change
    file = folder / f"{name}.yaml"
    file.write_text("".join(f"{section}: {json.dumps(value)}\n" for section, value in content.items()))
    return file
