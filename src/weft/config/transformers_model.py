"""Defines the section `model: {type: hf, path: ...}`, for causal language models of Transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from weft.config.section import Folder, Section
from weft.errors import UserError
from weft.families import family_of
from weft.families.config_json import check_weights, read_config

Attention = Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"]

# The mesh axes that such a model supports, for messages.
LIMITS = "data parallel only; tensor, pipeline, context and expert parallelism need a built-in family"

MISSING = "type: hf needs transformers, which is not installed; install it: pip install 'weft-train[hf]'"
# Keys of the maximum sequence length in config.json files.
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class TransformersModelSection(Section):
    """A model that Transformers' `AutoModelForCausalLM` builds from the config.json of a folder.

    Use this section for architectures that are not a built-in family. Of the mesh axes, only `dp_replicate` and
    `dp_shard` are supported. Code in the folder is not run, and pickle files are not read.
    """

    type: Literal["hf"]
    """`hf`: a model of Transformers."""
    path: Folder | None = None
    """Hugging Face folder with a config.json, and with the initial weights as safetensors. Set `path` or `from`."""
    from_: Folder | None = Field(None, alias="from")
    """Run or checkpoint of a `type: hf` model, from which config.json and initial weights are loaded in place of
    `path`.
    """
    load_optimizer: bool = False
    """Whether the optimizer state of the run or checkpoint in `from` is loaded too."""
    weights: bool = True
    """Whether the weights of the folder in `path` are loaded. If false, the model's class initializes the weights."""
    attn_implementation: Attention | None = None
    """Attention implementation of Transformers. Default: `sdpa` where the model supports it."""
    config: dict[str, Any] = Field(default={})
    """Keys and values that replace those of config.json."""

    @property
    def architecture(self) -> str:
        """The class name in config.json, or the `model_type` if config.json has no class name."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else str(self.config.get("model_type"))

    @property
    def vocab_size(self) -> int | None:
        """Number of rows of the embedding; None if config.json has none of the usual keys for it."""
        inner = self.config.get("text_config")
        return _number(self.config, "vocab_size") or (_number(inner, "vocab_size") if isinstance(inner, dict) else None)

    @property
    def max_position_embeddings(self) -> int | None:
        """The maximum sequence length; None if config.json has none of the usual keys for it."""
        return longest_sequence(self.config)


def folder_config(path: str, changes: dict[str, Any], *, weights: bool) -> dict[str, Any]:
    """Returns the config.json of a folder, with changes.

    Args:
        changes: keys and values that replace those of config.json.
        weights: whether the folder must have weights.

    Raises:
        UserError: the folder does not exist, config.json is unreadable or has no model_type, the weights are quantized,
            pickled or missing, or Transformers is not installed.
    """
    config = read_config(path, dequantized=False) | changes
    if not isinstance(config.get("model_type"), str):
        raise UserError("model_type: missing, so the model class is not known; download config.json again", path)
    if weights:
        check_weights(Path(path))
    if importlib.util.find_spec("transformers") is None:
        raise UserError(MISSING)
    return config


def notices(section: TransformersModelSection, architecture: str) -> list[str]:
    """Returns notes about the model that a run prints when it starts, such as the supported mesh axes.

    Args:
        architecture: name of the model class that was built.
    """
    notice = f"model: type hf ({architecture}): {LIMITS}"
    try:
        family_of({"architectures": [architecture]}).from_hf(dict(section.config))
    except (UserError, KeyError, TypeError):
        return [notice]
    where = section.path or "the Hugging Face folder"
    return [f"{notice}; this architecture is a built-in family: model: {{from: {where}}} loads the same weights"]


def longest_sequence(config: dict[str, Any]) -> int | None:
    """Returns the maximum sequence length in a config.json; None if it has none of the usual keys for it."""
    return next((found for key in _LONGEST if (found := _number(config, key)) is not None), None)


def _number(config: dict[str, Any], key: str) -> int | None:
    found = config.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None
