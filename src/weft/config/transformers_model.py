"""`model: {type: hf, path: ...}`: any causal language model of transformers, as the checks of a run file see it."""

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

# What is said of a model that is trained this way: which axes of the mesh there are for it.
LIMITS = "data parallel only; tensor, pipeline, context and expert parallelism need a built-in family"

MISSING = "type: hf needs transformers, which is not installed; install it: pip install 'weft-train[hf]'"
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # of several families' config.json


class TransformersModelSection(Section):
    """What transformers' `AutoModelForCausalLM` builds from a folder's config.json, trained by the same loop.

    For models that are none of the built-in families. No code of the folder is run and no pickle is read. Of the mesh
    it has the data axes only.
    """

    type: Literal["hf"] = Field(description="a model of transformers")
    path: Folder | None = Field(None, description="a Hugging Face folder: config.json, and safetensors to start from")
    from_: Folder | None = Field(
        None, alias="from", description="a run or checkpoint of such a model to start from, in place of `path`"
    )
    load_optimizer: bool = Field(False, description="with `from`: take over the optimizer's state as well")
    weights: bool = Field(
        True, description="start from the folder's weights; false: from random ones, drawn by its class with run.seed"
    )
    attn_implementation: Attention | None = Field(
        None, description="transformers' name of how attention is computed; default: sdpa where the model has it"
    )
    config: dict[str, Any] = Field(
        default={}, description="the folder's config.json; keys given here take the place of those there"
    )

    @property
    def architecture(self) -> str:
        """The class that config.json names, or its model_type."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else str(self.config.get("model_type"))

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding, if config.json says them where most do."""
        inner = self.config.get("text_config")
        return _number(self.config, "vocab_size") or (_number(inner, "vocab_size") if isinstance(inner, dict) else None)

    @property
    def max_position_embeddings(self) -> int | None:
        """The longest sequence, if config.json says it where most do."""
        return longest_sequence(self.config)


def folder_config(path: str, changes: dict[str, Any], *, weights: bool) -> dict[str, Any]:
    """A folder's config.json, with some keys changed.

    Args:
        weights: whether the folder must hold weights as well.

    Raises:
        UserError: no such folder, a config.json that cannot be read or lacks its model_type, quantized or pickled
            weights, none at all; or transformers is not installed.
    """
    config = read_config(path, dequantized=False) | changes
    if not isinstance(config.get("model_type"), str):
        raise UserError("model_type: missing, and it says what model this is; download the file again", path)
    if weights:
        check_weights(Path(path))
    if importlib.util.find_spec("transformers") is None:
        raise UserError(MISSING)
    return config


def notices(section: TransformersModelSection, architecture: str) -> list[str]:
    """What a run says once, when it starts.

    Args:
        architecture: the class that was built.
    """
    said = f"model: type hf ({architecture}): {LIMITS}"
    try:
        family_of({"architectures": [architecture]}).from_hf(dict(section.config))
    except (UserError, KeyError, TypeError):
        return [said]
    where = section.path or "the Hugging Face folder"
    return [f"{said}; this architecture is one: model: {{from: {where}}} takes the same weights and gives those"]


def longest_sequence(config: dict[str, Any]) -> int | None:
    """The longest sequence that a config.json says."""
    return next((found for key in _LONGEST if (found := _number(config, key)) is not None), None)


def _number(config: dict[str, Any], key: str) -> int | None:
    found = config.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None
