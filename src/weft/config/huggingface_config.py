"""Converts the config.json of a Hugging Face folder to keys of the section `model`, without torch.

The model families (`weft.families`) convert the keys; `ModelSection` checks the result.
"""

from __future__ import annotations

import reprlib
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.config.model import ModelSection
from weft.config.model_rules import model_mistakes
from weft.config.model_sections import ExpertsSection, LatentAttentionSection
from weft.config.suggest import did_you_mean
from weft.errors import UserError
from weft.families import Family, classifier_of, family_of
from weft.families.config_json import CONFIG, read_config
from weft.families.mapping import SAME, activation

_KINDS = {
    "int_type": "not an integer", "int_from_float": "not an integer", "float_type": "not a number",
    "bool_type": "neither true nor false", "list_type": "not a list", "string_type": "not a name",
}  # fmt: skip
_MOST_PARAMETERS = 10**15  # a larger number is an error, and the tensor sizes overflow


def model_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of `ModelSection` for a config.json, each with a valid type and range.

    Raises:
        UserError: the architecture is unknown, or a value is not supported. The message names the key of config.json.
    """
    return _read(config)[0]


def checked_model(config: dict[str, Any]) -> ModelSection:
    """Returns the model section for a config.json, with the same checks as for a run file.

    Raises:
        UserError: the architecture is unknown, a value is not supported, or values contradict each other.
    """
    (keys, section), remedy = _read(config), "if this is not intended, download config.json again"
    for key, what, _ in model_mistakes(section):
        raise UserError(f"{family_of(config).KEYS.get(key, key)}: {what}; {remedy}")
    if (size := section.size().parameters) > _MOST_PARAMETERS:
        raise UserError(f"the sizes imply {float(size):.1e} parameters; {remedy}")
    _refuse_unread_keys(config, keys, section)
    return section


def check_table(family: Family) -> None:
    """Raises UserError if the table `KEYS` of a family names a key that the section `model` does not have."""
    sections = {"": ModelSection, "moe": ExpertsSection, "mla": LatentAttentionSection}
    for key in family.KEYS:
        inside, _, name = key.rpartition(".")
        if inside not in sections or name not in sections[inside].model_fields:
            near = did_you_mean(name, sections.get(inside, ModelSection).model_fields)
            what = f"KEYS has {key!r}, which is not a key of `model:`{near or '; correct the name'}"
            raise UserError(what, getattr(family, "__file__", None))


def _refuse_unread_keys(config: dict[str, Any], keys: dict[str, Any], section: ModelSection) -> None:
    """Raises UserError if config.json has a common key that its family does not read, and the decoder's value differs.

    Biases and `head_dim` are not compared: the names and shapes of the tensors must agree with them.

    Args:
        keys: the keys that the family's `from_hf` returned.
        section: the section made of `keys`.
    """
    table = family_of(config).KEYS
    for key in (*SAME, "hidden_act"):
        value, ours = config.get(key), getattr(section, key)
        if value is None or ours is None or key in (*keys, *table, *table.values()):
            continue
        if (activation(value, key) if key == "hidden_act" else value) != ours:
            raise UserError(
                f"{key}: {reprlib.repr(value)}, but the family {section.family} does not read this key, and Weft's "
                f"model would have {ours!r}; add the key to KEYS of the family, or remove it if Transformers ignores it"
            )


def _read(config: dict[str, Any]) -> tuple[dict[str, Any], ModelSection]:
    family = family_of(config)
    check_table(family)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        ids = value if key == "eos_token_id" and isinstance(value, list) else [value]
        if value is not None and not all(type(one) is int for one in ids):
            raise UserError(f"{key}: {reprlib.repr(value)} is not a token id; it must be an integer")
    keys = family.from_hf(dict(config)) | _labels(config, family)
    try:
        return keys, ModelSection(**keys)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
    path = [part for part in mistake["loc"] if isinstance(part, str)]
    inner = bool(path) and len(path) < len(mistake["loc"])  # of a list
    value = reduce(lambda found, part: found[part], path, keys)
    kind = "a list with an invalid item" if inner else _KINDS.get(mistake["type"])
    what = f"is {kind}" if kind else f"is not valid: {mistake['msg'].replace('Input should', 'it must')}"
    ours = ".".join(path)
    raise UserError(f"{family.KEYS.get(ours, ours)}: {reprlib.repr(value)} {what}")


def _labels(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns the key `num_labels` for the config.json of a reward model, a classifier with one label; {} for others.

    Raises:
        UserError: the classifier has several labels.
    """
    if classifier_of(family) not in (config.get("architectures") or []):
        return {}
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)  # Transformers' default is 2
    if count != 1:
        raise UserError(
            f"id2label: a classifier with {count} labels is not supported; use a reward model, with one label"
        )
    return {"num_labels": 1}


def folder_model_keys(path: str | Path) -> dict[str, Any]:
    """Returns the keys of `ModelSection` for the config.json of a folder, without multi-token prediction layers.

    Raises:
        UserError: the file cannot be read, the architecture is unknown, or a value is not supported. The message names
            the file and the key.
    """
    config = read_config(path)
    try:
        return {key: value for key, value in model_keys(config).items() if key != "num_nextn_predict_layers"}
    except UserError as error:
        raise UserError(error.what, error.where or Path(path) / CONFIG) from None
