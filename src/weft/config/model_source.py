"""Replaces `model.preset`, `model.from` and `model.path` by the keys of the preset, checkpoint or folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from weft.config.error_messages import spell
from weft.config.huggingface_config import folder_model_keys
from weft.config.model import ModelSection
from weft.config.model_sections import BALANCE
from weft.config.suggest import did_you_mean
from weft.config.transformers_model import folder_config
from weft.config.tree import Node, merge, wrong_folder_hint
from weft.errors import ConfigError, Problem, UserError
from weft.families import presets, rescaled_multipliers
from weft.families.config_json import is_huggingface

# Keys that determine which tensors a model has, or their shapes.
SHAPE = (
    "type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "position", "norm", "qk_norm", "mlp", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "norm_placement", "qk_norm_over", "attention_output_bias", "norm_bias", "attention_sinks", "mla", "moe",
)  # fmt: skip
_TYPES = {"": "decoder"}  # the default `type` of a model, for `merge`
_STEP = re.compile(r"step-(\d{8,})")


def resolve_model(tree: Node, problems: list[Problem]) -> tuple[Node, bool]:
    """Adds the keys of the preset, checkpoint or folder to the section `model` of a tree.

    Returns:
        The tree, and whether the keys of the preset, checkpoint or folder were found. If not, this function or the
        later validation of the section reports why, and missing keys of `model` need not be reported.
    """
    model = tree.get("model")
    if model is None or not model.is_mapping:
        return tree, True
    model = Node(model.value, model.file, model.line)  # without `replaces`: the files are already merged
    known = True
    try:
        merged = _resolved(model, problems)
    except ConfigError as error:
        problems += error.problems
        known, merged = False, model
    return Node({**tree.value, "model": merged}, tree.file, tree.line), known


def _resolved(model: Node, problems: list[Problem]) -> Node:
    """Returns the section `model` with the keys of its preset, checkpoint or folder.

    Args:
        model: the section `model`.
        problems: problems that do not stop this function are added to this list.

    Raises:
        ConfigError: the preset, checkpoint or folder cannot be read. The error lists no problem if a key has a value of
            the wrong type, because the later validation of the section reports this.
    """
    preset, source, chosen = model.get("preset"), model.get("from"), model.get("type")
    if source is not None and source.value is not None:
        return _from_checkpoint(model, source)
    if chosen is not None and chosen.value == "hf" and preset is None:
        return _from_folder(model)
    optional = model.get("load_optimizer")
    if optional is not None and optional.value is True:
        what = "needs model.from, which names the checkpoint; set model.from, or remove the key"
        problems.append(optional.problem("model.load_optimizer", what))
    return model if preset is None or preset.value is None else _from_preset(model, preset)


def _error(node: Node, key: str, what: str) -> ConfigError:
    return ConfigError([node.problem(key, what)])


def to_tree(value: Any, place: Node, origin: str) -> Node:
    """Converts plain data to a tree of Nodes with the given origin. All nodes have the file and line of `place`."""
    if isinstance(value, dict):
        value = {name: to_tree(item, place, origin) for name, item in value.items()}
    elif isinstance(value, list):
        value = [to_tree(item, place, origin) for item in value]
    else:
        return Node(value, place.file, place.line, spell(value), origin)
    return Node(value, place.file, place.line, None, origin)


def _from_preset(model: Node, preset: Node) -> Node:
    known, chosen = presets(), model.get("type")
    if not isinstance(preset.value, str):
        raise ConfigError([])
    if preset.value not in known:
        near = did_you_mean(preset.value, known)
        hint = f"{near} (`weft models` lists them all)" if near else f"; choose one of {', '.join(known)}"
        raise _error(preset, "model.preset", f"unknown preset {preset.value!r}{hint}")
    if chosen is not None and chosen.value != "decoder":
        what = f"presets are for type decoder, not for {chosen.value}; remove preset or type"
        raise _error(preset, "model.preset", what)
    origin = f"preset {preset.value}"
    base = to_tree(known[preset.value], preset, origin)
    multipliers = rescaled_multipliers(known[preset.value], merge(base, model, types=_TYPES).plain())
    return merge(merge(base, to_tree(multipliers, preset, origin)), model, types=_TYPES)


def _from_folder(model: Node) -> Node:
    """Returns the section of a `type: hf` model with the content of its folder's config.json as the key `config`."""
    path, given, weights = model.get("path"), model.get("config"), model.get("weights")
    if path is None or path.value is None:
        what = "required: the Hugging Face folder of the model; add the key, or set model.from to a run of such a model"
        raise _error(model, "model.path", what)
    if not isinstance(path.value, str) or not path.value.strip() or (given is not None and not given.is_mapping):
        raise ConfigError([])
    try:
        changes = {} if given is None else given.plain()
        config = folder_config(path.value, changes, weights=weights is None or weights.value is not False)
    except UserError as error:
        raise _error(path, "model.path", wrong_folder_hint(path, path.value) or str(error)) from None
    content = to_tree(config, path, f"{path.value}/config.json")
    content = Node(
        {**content.value, **(given.value if given is not None else {})}, path.file, path.line, None, content.origin
    )
    return Node({**model.value, "config": content}, model.file, model.line)


def _from_checkpoint(model: Node, source: Node) -> Node:
    if not isinstance(source.value, str) or not source.value.strip():
        raise ConfigError([])
    found = newest_checkpoint(Path(source.value))
    if isinstance(found, str):
        raise _error(source, "model.from", f"{source.value}: {wrong_folder_hint(source, source.value) or found}")
    shape = {k: v for k, v in _content(found, model, source).items() if k not in ("from", "from_", "load_optimizer")}
    fixed: set[str] = set(SHAPE) if shape.get("type", "decoder") == "decoder" else {"type"}
    if shape.get("position") == "learned":
        fixed.add("max_position_embeddings")
    problems = []
    for name, node in model.value.items():
        default = ModelSection.model_fields[name].default if name in ModelSection.model_fields else None
        has = shape.get(name, default)
        if name == "preset" and node.plain() not in (None, has):
            problems.append(node.problem("model.preset", "model.from already sets the shape; remove preset or from"))
        elif name in fixed and not _same(name, node, has):
            there = "null" if has is None else has
            what = f"the checkpoint {found} has {there}, and model.from sets the shape; remove the key"
            problems.append(node.problem(f"model.{name}", what))
    if problems:
        raise ConfigError(problems)
    return merge(to_tree(shape, source, f"checkpoint {found}"), model, types=_TYPES)


def _same(name: str, node: Node, has: Any) -> bool:
    """Whether the run file and the checkpoint have the same value for the key `name`; load balancing keys may differ.

    Args:
        name: a key of the section `model`.
        node: the value in the run file.
        has: the value in the checkpoint.
    """
    if name == "moe" and node.is_mapping and isinstance(has, dict):
        given = node.plain()
        return all(key in BALANCE or value == has.get(key) for key, value in given.items())
    return node.plain() == has


def _content(found: Path, model: Node, source: Node) -> dict[str, Any]:
    """Returns the model section that `found`, a checkpoint or Hugging Face folder, contains.

    Args:
        found: the path of the checkpoint or folder.
        model: the section `model` of the run file.
        source: the value of `model.from`; errors are reported at its line.
    """
    if not is_huggingface(found):
        try:
            content = json.loads((found / "model.json").read_bytes())
            assert isinstance(content, dict)
        except (OSError, ValueError, AssertionError):
            what = f"{found / 'model.json'} cannot be read; use another checkpoint"
            raise _error(source, "model.from", what) from None
        return content
    optional, chosen = model.get("load_optimizer"), model.get("type")
    if optional is not None and optional.value is True:
        what = "a Hugging Face folder has no optimizer state; remove the key"
        raise _error(optional, "model.load_optimizer", what)
    try:
        content = folder_model_keys(found)
    except UserError as error:
        raise _error(source, "model.from", str(error)) from None
    if chosen is not None and chosen.value == "hf":
        raise _error(
            source,
            "model.from",
            "with type: hf, model.from must be a run or checkpoint; set model.path to the folder instead",
        )
    return content


def newest_checkpoint(path: Path) -> Path | str:
    """Returns `path` itself if it is a checkpoint or Hugging Face folder, or the newest checkpoint of a run directory.

    For any other path, returns an error message.
    """
    if not path.exists():
        near = ""
        if path.parent.is_dir():
            near = did_you_mean(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()])
        remedy = near or "; check the path"
        if not path.is_absolute() and len(path.parts) == 2 and not path.parent.exists():  # maybe a name on the Hub
            remedy += f", or download a model of the Hub first (hf download {path} --local-dir FOLDER)"
        return f"there is no such run, checkpoint or folder{remedy}"
    if (path / "model.json").is_file() or is_huggingface(path):
        return path
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    if not folder.is_dir():
        return "neither a run directory nor a checkpoint nor a Hugging Face folder; use the path of one of these"
    steps = [(int(match[1]), p) for p in folder.iterdir() if (match := _STEP.fullmatch(p.name))]
    return max(steps)[1] if steps else "this run has no checkpoint yet; train it until it has saved one"
