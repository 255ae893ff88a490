"""`model.preset` and `model.from`: the keys that a name or a checkpoint stands for."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from weft.config.draft import node_of
from weft.config.errors import Problem, UserError
from weft.config.experts import BALANCE
from weft.config.foreign import folder_config
from weft.config.huggingface import is_huggingface, section_keys
from weft.config.model import ModelSection
from weft.config.paths import beside
from weft.config.presets import presets
from weft.config.suggest import did_you_mean
from weft.config.tree import Node, merge

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
    preset, source = model.get("preset"), model.get("from")
    known = True
    if source is not None and source.value is not None:
        merged = _from_checkpoint(model, source, problems)
    elif (chosen := model.get("type")) is not None and chosen.value == "hf" and preset is None:
        merged = _from_folder(model, problems)
    else:
        optional = model.get("load_optimizer")
        if optional is not None and optional.value is True:
            what = "there is no model.from to load one of; remove the key"
            problems.append(optional.problem("model.load_optimizer", what))
        merged = model
        if preset is not None and preset.value is not None:
            merged = _from_preset(model, preset, problems)
    if merged is None:
        known, merged = False, model
    return Node({**tree.value, "model": merged}, tree.file, tree.line), known


def _from_preset(model: Node, preset: Node, problems: list[Problem]) -> Node | None:
    known = presets()
    if not isinstance(preset.value, str):
        return None  # the section's check says that it must be text
    if preset.value not in known:
        hint = did_you_mean(preset.value, known)
        problems.append(
            preset.problem(
                "model.preset",
                f"unknown preset {preset.value!r}{hint or '; choose one'} (there are {', '.join(known)})",
            )
        )
        return None
    base = node_of(known[preset.value], preset, f"preset {preset.value}")
    chosen = model.get("type")
    if chosen is not None and chosen.value != "decoder":
        problems.append(
            preset.problem("model.preset", f"a preset is the decoder's, not {chosen.value}'s; remove one of them")
        )
        return None
    multipliers = _multipliers(known[preset.value], merge(base, model, types=_TYPES).plain())
    base = merge(base, node_of(multipliers, preset, f"preset {preset.value}"))
    return merge(base, model, types=_TYPES)


def _multipliers(preset: dict[str, Any], model: dict[str, Any]) -> dict[str, float]:
    """Those that a preset has because of its width or its heads' size, for a model of another."""
    found = {}
    width, wanted = preset["hidden_size"], model.get("hidden_size")
    if (
        isinstance(wanted, int)
        and wanted > 0
        and math.isclose(preset.get("embedding_multiplier", 1.0), math.sqrt(width))
    ):
        found["embedding_multiplier"] = math.sqrt(wanted)
    scale, own, other = preset.get("attention_multiplier"), _head_size(preset), _head_size(model)
    if scale is not None and own is not None and other is not None and own != other:
        found["attention_multiplier"] = scale * math.sqrt(own / other)
    return found


def _head_size(model: dict[str, Any]) -> int | None:
    """Numbers of a query's head; None if its keys are not yet known to be right."""
    latent = model.get("mla")
    keys = [latent.get("qk_nope_head_dim"), latent.get("qk_rope_head_dim")] if isinstance(latent, dict) else []
    keys = keys or [model.get("head_dim")]
    if keys == [None]:
        width, heads = model.get("hidden_size"), model.get("num_attention_heads")
        return width // heads if isinstance(width, int) and isinstance(heads, int) and 0 < heads <= width else None
    sizes = [key for key in keys if isinstance(key, int) and key > 0]
    return sum(sizes) if len(sizes) == len(keys) else None


def _from_folder(model: Node, problems: list[Problem]) -> Node | None:
    """A `type: hf` model, with the folder's config.json as its `config`."""
    path, given, weights = model.get("path"), model.get("config"), model.get("weights")
    if path is None or path.value is None:
        what = "required: the Hugging Face folder whose model to train (or model.from, a run of one); add it"
        problems.append(model.problem("model.path", what))
        return None
    if not isinstance(path.value, str) or not path.value.strip() or (given is not None and not given.is_mapping):
        return None  # the section's check says so
    try:
        changes = {} if given is None else given.plain()
        config = folder_config(path.value, changes, weights=weights is None or weights.value is not False)
    except UserError as error:
        problems.append(path.problem("model.path", beside(path, path.value) or str(error)))
        return None
    whole = node_of(config, path, f"{path.value}/config.json")
    return Node({**model.value, "config": whole}, model.file, model.line)


def _from_checkpoint(model: Node, source: Node, problems: list[Problem]) -> Node | None:
    if not isinstance(source.value, str) or not source.value.strip():
        return None  # the section's check says so
    found = newest_checkpoint(Path(source.value))
    if isinstance(found, str):
        problems.append(source.problem("model.from", f"{source.value}: {beside(source, source.value) or found}"))
        return None
    content = _content(found, model, source, problems)
    if content is None:
        return None
    chosen = model.get("type")
    if is_huggingface(found) and chosen is not None and chosen.value == "hf":
        what = "with type: hf the folder is named by model.path; rename the key"
        problems.append(source.problem("model.from", what))
        return None
    shape: dict[str, Any] = {k: v for k, v in content.items() if k not in ("from", "from_", "load_optimizer")}
    fixed: set[str] = set(SHAPE) if shape.get("type", "decoder") == "decoder" else {"type"}
    if shape.get("position") == "learned":
        fixed.add("max_position_embeddings")
    before = len(problems)
    for name, node in model.value.items():
        default = ModelSection.model_fields[name].default if name in ModelSection.model_fields else None
        has = shape.get(name, default)
        if name == "preset" and node.plain() not in (None, has):
            problems.append(node.problem("model.preset", "model.from already says the shape; remove one of them"))
        elif name in fixed and not _same(name, node, has):
            what = f"{found} has {has}, and model.from takes its shape from there; remove the key"
            problems.append(node.problem(f"model.{name}", what))
    if len(problems) > before:
        return None
    return merge(node_of(shape, source, f"checkpoint {found}"), model, types=_TYPES)


def _same(name: str, node: Node, has: Any) -> bool:
    """Whether a key says what the checkpoint has. How experts are balanced may be said anew."""
    if name == "moe" and node.is_mapping and isinstance(has, dict):
        given = node.plain()
        return all(key in BALANCE or value == has.get(key) for key, value in given.items())
    return node.plain() == has


def _content(found: Path, model: Node, source: Node, problems: list[Problem]) -> dict[str, Any] | None:
    """The model section that a checkpoint, or a Hugging Face folder, was made with."""
    if not is_huggingface(found):
        try:
            content = json.loads((found / "model.json").read_bytes())
            assert isinstance(content, dict)
        except (OSError, ValueError, AssertionError):
            what = f"{found / 'model.json'} cannot be read; name another checkpoint"
            problems.append(source.problem("model.from", what))
            return None
        return content
    optional = model.get("load_optimizer")
    if optional is not None and optional.value is True:
        what = "a Hugging Face folder has no optimizer's state; remove the key"
        problems.append(optional.problem("model.load_optimizer", what))
        return None
    try:
        return section_keys(found)
    except UserError as error:
        problems.append(source.problem("model.from", str(error)))
        return None


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
