"""Writes the files of PEFT's LoRA adapters: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface.peft_files import ADAPTER_WEIGHTS, MAGNITUDE, PREFIX, A, B, digest_key, stacked_keys
from weft.checkpoint.huggingface.peft_layers import PeftLayer, PeftModel, peft_model
from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.families.peft_config import ADAPTER_CONFIG
from weft.models.low_rank import LowRank


def write_peft(
    folder: Path,
    section: ModelSection | TransformersModelSection,
    layers: Mapping[str, LowRank],
    heads: Mapping[str, torch.Tensor] | None = None,
    *,
    rslora: bool = False,
    dropout: float = 0.0,
    base: str | None = None,
    digest: str | None = None,
) -> int:
    """Writes adapter_config.json and adapter_model.safetensors, which `peft.PeftModel.from_pretrained` loads.

    Args:
        folder: an existing folder.
        section: the base model.
        layers: name of a weight of Weft's model, without `.weight` -> its change.
        heads: name of the head of a reward model -> its weight (`modules_to_save`).
        rslora: whether the config states scales as alpha / sqrt(rank) instead of alpha / rank.
        dropout: dropout of the adapter in training.
        base: path or name of the base model.
        digest: digest of the base model's weights, which Weft checks when it reads the adapter.

    Returns:
        The number of layers of the Transformers model that the adapter changes.

    Raises:
        UserError: PEFT cannot express the adapter.
    """
    names = peft_model(section)
    joined: dict[str, LowRank] = {}
    left = set(layers)
    for name, layer in names.layers.items():
        if layer.expert is None and left.intersection(layer.weights):
            joined[name] = _join(layer, [layers.get(one) for one in layer.weights])
            left -= set(layer.weights)
    if left:
        raise UserError(
            f"{min(left)}: the Transformers model has no layer of its own for this weight; merge the adapter"
        )
    tensors = _tensors(names, joined)
    if len({change.magnitude is None for change in joined.values()}) > 1:
        raise UserError("PEFT uses DoRA for all layers of an adapter or for none; merge the adapter instead")
    heads = heads or {}
    saved = {name: heads[targets[0][0]] for name, targets in names.weights.items() if targets[0][0] in heads}
    tensors |= {PREFIX + name: weight for name, weight in saved.items()}
    config = _config(names, joined, rslora, dropout)
    if saved:
        config |= {"task_type": "SEQ_CLS", "modules_to_save": [name.removesuffix(".weight") for name in saved]}
    metadata = {"format": "pt"} | ({} if digest is None else {digest_key(isinstance(section, ModelSection)): digest})
    written = {key: one.detach().contiguous().clone() for key, one in tensors.items()}
    save_file(written, folder / ADAPTER_WEIGHTS, metadata)
    files.write_json(folder / ADAPTER_CONFIG, {"base_model_name_or_path": base, **config})
    return len(joined)


def _tensors(names: PeftModel, joined: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    """Returns the tensors of the changes of layers of the Transformers model, by their keys in PEFT's files."""
    stems = {name: name for name in joined if not names.layers[name].experts}
    stems |= {layer.name: stem for stem, layer in stacked_keys(names.layers[name] for name in joined).items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, change in joined.items():
        stem, a, b = PREFIX + stems[name], change.a, change.b
        if names.layers[name].experts:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        tensors |= {f"{stem}.{A}": a, f"{stem}.{B}": b}
        if change.magnitude is not None:
            tensors[f"{stem}.{MAGNITUDE}"] = change.magnitude
    return tensors


def _join(layer: PeftLayer, changes: Sequence[LowRank | None]) -> LowRank:
    """Returns the change of a layer from the changes of the weights that it contains (None: unchanged).

    If the weights have different matrices A, these are concatenated, and B is block diagonal.
    """
    given = [one for one in changes if one is not None]
    first, dora = given[0], given[0].magnitude is not None
    if dora and len(given) < len(changes):
        missing = next(name for name, one in zip(layer.weights, changes, strict=True) if one is None)
        raise UserError(f"{missing}: PEFT's DoRA must change all weights of {layer.name}; merge the adapter instead")
    if dora and layer.experts:
        raise UserError(f"{layer.name}: PEFT has no DoRA for experts; merge the adapter instead")
    shared = all(torch.equal(one.a, first.a) for one in given)
    a = first.a if shared else torch.cat([one.a for one in given], dim=-2)
    parts, column = [], 0
    for change, rows in zip(changes, layer.rows, strict=True):
        part = first.b.new_zeros(*first.b.shape[:-2], rows, a.shape[-2])
        if change is not None:
            rank = change.a.shape[-2]
            part[..., 0 if shared else column : rank if shared else column + rank] = change.b * (
                change.scale / first.scale
            )
            column += rank
        parts.append(part)
    b = torch.stack([layer.join(one) for one in zip(*parts, strict=True)]) if layer.experts else layer.join(parts)
    magnitudes = [one.magnitude for one in given if one.magnitude is not None]
    return LowRank(a, b, first.scale, layer.join(magnitudes) if dora else None)


def _config(names: PeftModel, joined: Mapping[str, LowRank], rslora: bool, dropout: float) -> dict[str, Any]:
    """Returns the content of adapter_config.json. Ranks and alphas that are not the most common ones are patterns."""
    linear = [name for name in joined if not names.layers[name].experts]
    stacked = [name for name in joined if names.layers[name].experts]
    ranks = {name: change.a.shape[-2] for name, change in joined.items()}
    alphas = {
        name: round(change.scale * (math.sqrt(ranks[name]) if rslora else ranks[name]), 9)
        for name, change in joined.items()
    }
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    every = [name for name, layer in names.layers.items() if layer.expert is None]
    short = _short_names(linear, every) | _short_names(stacked, every)
    _refuse_moved_targets(names, linear)

    def patterns(values: Mapping[str, Any], common: Any) -> dict[str, Any]:
        by_short: dict[str, set[Any]] = {}
        for name, value in values.items():
            by_short.setdefault(short[name], set()).add(value)
        found = {short[n] if len(by_short[short[n]]) == 1 else n: v for n, v in values.items()}
        return {name.replace(".", "\\."): _plain(value) for name, value in found.items() if value != common}

    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "revision": None,
        "r": rank, "lora_alpha": _plain(alpha), "use_rslora": rslora,
        "use_dora": any(change.magnitude is not None for change in joined.values()),
        "target_modules": sorted({short[name] for name in linear}),
        "target_parameters": sorted({short[name] for name in stacked}) or None,
        "rank_pattern": patterns(ranks, rank), "alpha_pattern": patterns(alphas, alpha),
        "lora_dropout": 0.0 if stacked else dropout,  # PEFT has no dropout for experts
        "fan_in_fan_out": any(names.layers[name].transposed for name in linear),
        "bias": "none", "modules_to_save": None, "init_lora_weights": True,
    }  # fmt: skip


def _plain(value: float) -> float:
    """Returns `value` as an int if it is an integer, otherwise unchanged."""
    return int(value) if value == int(value) else value


def _short_names(chosen: Sequence[str], every: Sequence[str]) -> dict[str, str]:
    """Returns for each chosen layer the shortest ending of its name that no other layer of the model has.

    An ending that several chosen layers have is used for all of them.
    """
    found = {}
    for name in chosen:
        parts = name.split(".")
        endings = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [one for one in every if one not in set(chosen)]
        found[name] = next(one for one in endings if not any(f".{other}".endswith(f".{one}") for other in others))
    return found


def _refuse_moved_targets(names: PeftModel, linear: Sequence[str]) -> None:
    """Raises UserError for adapters of dense MLPs in a model with experts, which PEFT moves to the experts."""
    has_experts = any(layer.expert is not None for layer in names.layers.values())
    moved = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
    for name in linear:
        if has_experts and name.rpartition(".")[2] in moved:
            raise UserError(
                f"{name}: PEFT applies an adapter of this layer to the experts; merge the adapter instead, or train "
                "without this layer in adapter.targets"
            )
