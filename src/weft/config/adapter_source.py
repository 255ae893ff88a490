"""Replaces `adapter.from` by the keys of the adapter with which the training starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.config.adapter import RECORD, AdapterSection, LayerShape, adapted_layers, decoder_layers, is_stacked
from weft.config.model import ModelSection
from weft.config.model_source import newest_checkpoint, to_tree
from weft.config.tree import Node, merge, wrong_folder_hint
from weft.errors import Problem, UserError
from weft.families import families
from weft.families.peft_config import ADAPTER_CONFIG, ALL_LINEAR, PeftConfig, in_transformers, read_peft_config

# Keys that the adapter of a run sets, and that must not change when the run resumes. PEFT's files do not say whether
# the base model was quantized.
FIXED = ("r", "alpha", "targets", "rslora", "dora", "init", "quantize")


def resolve_adapter(tree: Node, problems: list[Problem]) -> Node:
    """Adds the keys of the adapter that `adapter.from` names to the section `adapter` of a tree.

    Args:
        tree: the run file, in which `model.from` is resolved.
        problems: problems are added to this list.
    """
    adapter, source = tree.get("adapter"), tree.get("adapter", "from")
    if adapter is None or source is None or not isinstance(source.value, str) or not source.value.strip():
        return tree
    try:
        keys = _keys(tree, source, Path(source.value))
    except UserError as error:
        problems.append(source.problem("adapter.from", wrong_folder_hint(source, source.value) or str(error)))
        return tree
    for key, value in keys.items():
        given = adapter.get(key)
        if given is not None and _differ(key, given.plain(), value, tree):
            first, second = ("null" if one is None else one for one in (given.plain(), value))
            what = f"{first} differs from the {second} of the adapter {source.value}; remove the key"
            problems.append(given.problem(f"adapter.{key}", what))
    merged = merge(to_tree(keys, source, f"adapter {source.value}"), adapter)
    return Node({**tree.value, "adapter": merged}, tree.file, tree.line)


def _differ(key: str, given: Any, value: Any, tree: Node) -> bool:
    """Whether two values of a key of `adapter` differ. Targets are equal if they stand for the same layers."""
    try:
        first, second = (AdapterSection.model_validate({key: one}) for one in (given, value))
        if key != "targets":
            return getattr(first, key) != getattr(second, key)
        section = _decoder(tree)
        if section is None:
            return set(first.targets) != set(second.targets)  # the layers are not known, only their names
        layers = decoder_layers(section)
        chosen, expected = (adapted_layers(one, layers, [*filter(is_stacked, layers)]) for one in (first, second))
        return chosen != expected
    except (ValidationError, UserError):  # reported by the validation of the section
        return False


def _decoder(tree: Node) -> ModelSection | None:
    """Returns the section of the built-in decoder; None for other models. Raises ValidationError if it is invalid."""
    model = tree.get("model")
    content = model.plain() if model is not None and model.is_mapping else {}
    return ModelSection.model_validate(content) if content.get("type", "decoder") == "decoder" else None


def _keys(tree: Node, source: Node, path: Path) -> dict[str, Any]:
    """Returns the keys of the adapter in a run, a checkpoint or a PEFT folder. Raises UserError if there is none."""
    if (path / ADAPTER_CONFIG).is_file():
        return _peft_keys(read_peft_config(path), tree)
    found = newest_checkpoint(path)
    if isinstance(found, str):
        raise UserError(found, path)
    try:
        content = json.loads((found / RECORD).read_bytes())["adapter"]
        return {key: content[key] for key in FIXED}
    except FileNotFoundError:
        what = "this is neither a run with an adapter nor a folder of PEFT; use one of these, or remove adapter.from"
        raise UserError(what, path) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError("the record of the adapter cannot be read; use another checkpoint", found / RECORD) from None


def _peft_keys(config: PeftConfig, tree: Node) -> dict[str, Any]:
    try:
        section = _decoder(tree)
    except ValidationError:  # reported by the validation of the section
        return {}
    if section is None:
        targets, rank = _targets_of_hf(config), config.rank
    else:
        names = _names(section, decoder_layers(section))
        chosen = [name for name, hf_name in names.items() if _changes(config, name, hf_name)]
        if not chosen:
            raise UserError("target_modules match no layer of this model that can have an adapter", config.path)
        targets, rank = _shortened(chosen, list(names)), max(config.rank_of(names[name]) for name in chosen)
    return {
        "r": rank, "alpha": float(config.alpha), "targets": targets, "rslora": config.rslora, "dora": config.dora,
        "init": "default",
    }  # fmt: skip


def _targets_of_hf(config: PeftConfig) -> Any:
    """Returns the targets in a model of type hf, whose layers have PEFT's names."""
    chosen = config.keys.get("target_modules")
    others = ("exclude_modules", "layers_to_transform", "rank_pattern", "alpha_pattern", "target_parameters")
    if isinstance(chosen, str) and chosen.lower() == ALL_LINEAR:
        chosen = ALL_LINEAR
    elif not isinstance(chosen, list) or not chosen:
        raise UserError(
            "target_modules: with type: hf, only a list of names is supported; merge the adapter", config.path
        )
    for key in others:
        if config.keys.get(key):
            raise UserError(f"{key}: not supported with type: hf; merge the adapter (weft merge)", config.path)
    return chosen


def _names(section: ModelSection, layers: dict[str, LayerShape]) -> dict[str, str]:
    """Returns the name of each layer in the Transformers model; for stacked experts, that of their stacked weight."""
    table = {weight.name: weight for weight in families()[section.family].WEIGHTS}
    found = {}
    for name in layers:
        number = name.split(".")[1]
        weight = table.get(name.replace(f"layers.{number}.", "layers.{n}.", 1))
        if weight is None:
            continue
        hf_name = in_transformers(weight.hf_name.replace("{n}", number))
        if is_stacked(name) and "{e}" in hf_name:
            module = hf_name.partition(".{e}.")[0]
            hf_name = f"{module}.{'down_proj' if name.endswith('.down_proj') else 'gate_up_proj'}"
        found[name] = hf_name
    return found


def _changes(config: PeftConfig, name: str, hf_name: str) -> bool:
    if not is_stacked(name):
        return config.targets(hf_name, None)
    return config.targets_parameter(hf_name)


def _shortened(chosen: list[str], every: list[str]) -> list[str]:
    """Returns names for the chosen layers: an ending such as `attention.q_proj` if all layers with this ending are."""
    found = []
    for name in chosen:
        ending = name.split(".", 2)[2]
        complete = all(one in chosen for one in every if one.endswith(f".{ending}"))
        found.append(ending if complete else name)
    return list(dict.fromkeys(found))
