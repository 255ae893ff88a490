"""`model.preset` and `model.from`: the keys that a name or a checkpoint stands for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from weft.config.draft import node_of
from weft.config.huggingface_config import section_keys
from weft.config.model import ModelSection
from weft.config.moe import BALANCE
from weft.config.relative_paths import beside
from weft.config.suggest import did_you_mean
from weft.config.transformers_model import folder_config
from weft.config.tree import Node, merge
from weft.errors import ConfigError, Problem, UserError
from weft.families import presets, rescaled_multipliers
from weft.families.config_json import is_huggingface

# Keys that change which tensors there are, or how they are cut.
SHAPE = (
    "type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "position", "norm", "qk_norm", "mlp", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "norm_placement", "qk_norm_over", "attention_output_bias", "norm_bias", "attention_sinks", "mla", "moe",
)  # fmt: skip
_TYPES = {"": "decoder"}  # of a model whose `type` is not written, for `merge`
_STEP = re.compile(r"step-(\d{8,})")


def resolve_model(tree: Node, problems: list[Problem]) -> tuple[Node, bool]:
    """The tree with its `model` whole.

    Returns:
        The tree, and whether the model is known: if not, a problem has been noted, and missing keys are no news.
    """
    model = tree.get("model")
    if model is None or not model.is_mapping:
        return tree, True
    # From here on, nothing is left of which file said it.
    model = Node(model.value, model.file, model.line)
    known = True
    try:
        merged = _whole(model, problems)
    except ConfigError as error:
        problems += error.problems
        known, merged = False, model
    return Node({**tree.value, "model": merged}, tree.file, tree.line), known


def _whole(model: Node, problems: list[Problem]) -> Node:
    """The model with the keys that its preset, checkpoint or folder has.

    Raises:
        ConfigError: they are not known; without a problem where the section's check tells it.
    """
    preset, source, chosen = model.get("preset"), model.get("from"), model.get("type")
    if source is not None and source.value is not None:
        return _from_checkpoint(model, source)
    if chosen is not None and chosen.value == "hf" and preset is None:
        return _from_folder(model)
    optional = model.get("load_optimizer")
    if optional is not None and optional.value is True:
        problems.append(
            optional.problem("model.load_optimizer", "there is no model.from to load one of; remove the key")
        )
    return model if preset is None or preset.value is None else _from_preset(model, preset)


def _wrong(node: Node, key: str, what: str) -> ConfigError:
    return ConfigError([node.problem(key, what)])


def _from_preset(model: Node, preset: Node) -> Node:
    known, chosen = presets(), model.get("type")
    if not isinstance(preset.value, str):
        raise ConfigError([])
    if preset.value not in known:
        near = did_you_mean(preset.value, known)
        hint = f"{near} (`weft models` lists them all)" if near else f"; choose one (there are {', '.join(known)})"
        raise _wrong(preset, "model.preset", f"unknown preset {preset.value!r}{hint}")
    if chosen is not None and chosen.value != "decoder":
        what = f"a preset is the decoder's, not {chosen.value}'s; remove one of them"
        raise _wrong(preset, "model.preset", what)
    origin = f"preset {preset.value}"
    base = node_of(known[preset.value], preset, origin)
    multipliers = rescaled_multipliers(known[preset.value], merge(base, model, types=_TYPES).plain())
    return merge(merge(base, node_of(multipliers, preset, origin)), model, types=_TYPES)


def _from_folder(model: Node) -> Node:
    """A `type: hf` model, with the folder's config.json as its `config`."""
    path, given, weights = model.get("path"), model.get("config"), model.get("weights")
    if path is None or path.value is None:
        what = "required: the Hugging Face folder whose model to train (or model.from, a run of one); add it"
        raise _wrong(model, "model.path", what)
    if not isinstance(path.value, str) or not path.value.strip() or (given is not None and not given.is_mapping):
        raise ConfigError([])
    try:
        changes = {} if given is None else given.plain()
        config = folder_config(path.value, changes, weights=weights is None or weights.value is not False)
    except UserError as error:
        raise _wrong(path, "model.path", beside(path, path.value) or str(error)) from None
    whole = node_of(config, path, f"{path.value}/config.json")
    return Node({**model.value, "config": whole}, model.file, model.line)


def _from_checkpoint(model: Node, source: Node) -> Node:
    if not isinstance(source.value, str) or not source.value.strip():
        raise ConfigError([])
    found = newest_checkpoint(Path(source.value))
    if isinstance(found, str):
        raise _wrong(source, "model.from", f"{source.value}: {beside(source, source.value) or found}")
    shape = {k: v for k, v in _content(found, model, source).items() if k not in ("from", "from_", "load_optimizer")}
    fixed: set[str] = set(SHAPE) if shape.get("type", "decoder") == "decoder" else {"type"}
    if shape.get("position") == "learned":
        fixed.add("max_position_embeddings")
    problems = []
    for name, node in model.value.items():
        default = ModelSection.model_fields[name].default if name in ModelSection.model_fields else None
        has = shape.get(name, default)
        if name == "preset" and node.plain() not in (None, has):
            problems.append(node.problem("model.preset", "model.from already says the shape; remove one of them"))
        elif name in fixed and not _same(name, node, has):
            what = f"{found} has {has}, and model.from takes its shape from there; remove the key"
            problems.append(node.problem(f"model.{name}", what))
    if problems:
        raise ConfigError(problems)
    return merge(node_of(shape, source, f"checkpoint {found}"), model, types=_TYPES)


def _same(name: str, node: Node, has: Any) -> bool:
    """Whether a key says what the checkpoint has. How experts are balanced may be said anew."""
    if name == "moe" and node.is_mapping and isinstance(has, dict):
        given = node.plain()
        return all(key in BALANCE or value == has.get(key) for key, value in given.items())
    return node.plain() == has


def _content(found: Path, model: Node, source: Node) -> dict[str, Any]:
    """The model section that a checkpoint, or a Hugging Face folder, was made with."""
    if not is_huggingface(found):
        try:
            content = json.loads((found / "model.json").read_bytes())
            assert isinstance(content, dict)
        except (OSError, ValueError, AssertionError):
            what = f"{found / 'model.json'} cannot be read; name another checkpoint"
            raise _wrong(source, "model.from", what) from None
        return content
    optional, chosen = model.get("load_optimizer"), model.get("type")
    if optional is not None and optional.value is True:
        what = "a Hugging Face folder has no optimizer's state; remove the key"
        raise _wrong(optional, "model.load_optimizer", what)
    try:
        content = section_keys(found)
    except UserError as error:
        raise _wrong(source, "model.from", str(error)) from None
    if chosen is not None and chosen.value == "hf":
        raise _wrong(source, "model.from", "with type: hf the folder is named by model.path; rename the key")
    return content


def newest_checkpoint(path: Path) -> Path | str:
    """The checkpoint that a path means: itself (or a Hugging Face folder), or the newest of a run directory.

    Returns:
        The checkpoint; or what is wrong, in words.
    """
    if not path.exists():
        near = ""
        if path.parent.is_dir():
            near = did_you_mean(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()])
        return f"there is no such run or checkpoint{near or '; check the path'}"
    if (path / "model.json").is_file() or is_huggingface(path):
        return path
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    if not folder.is_dir():
        return "this is neither a run directory nor a checkpoint, nor a Hugging Face folder; name one"
    steps = [(int(match[1]), p) for p in folder.iterdir() if (match := _STEP.fullmatch(p.name))]
    return max(steps)[1] if steps else "this run has no checkpoint yet; train it until it has saved one"
