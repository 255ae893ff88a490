"""A Hugging Face folder as the checks of a run file see it: what its config.json says, read without torch.

What a config.json's keys mean is its family's to say (`weft.families`); the sections here check what that gives.
"""

from __future__ import annotations

import reprlib
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.config.model import ModelSection
from weft.config.model_rules import mistakes
from weft.errors import UserError
from weft.families import family_of
from weft.families.config_json import CONFIG, read_config

_KINDS = {
    "int_type": "no whole number", "int_from_float": "no whole number", "float_type": "no number",
    "bool_type": "neither true nor false", "list_type": "no list", "string_type": "no name",
}  # fmt: skip
_MOST_PARAMETERS = 10**15  # beyond a thousand trillion it is a mistake, and sizes of tensors overflow


def keys_of(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json, each of a type and within the bounds that its field has.

    Raises:
        UserError: an unknown architecture, or a key's value that is not supported; it names config.json's key.
    """
    return _read(config)[0]


def model_of(config: dict[str, Any]) -> ModelSection:
    """The model that a config.json means, its sizes checked against one another as a run file's are.

    Raises:
        UserError: as `keys_of`, or for sizes that do not fit together.
    """
    section, said = _read(config)[1], "if it is not meant so, the file is damaged: download it again"
    for key, what, _ in mistakes(section):
        raise UserError(f"{family_of(config).KEYS.get(key, key)}: {what}; {said}")
    if (size := section.size().parameters) > _MOST_PARAMETERS:
        raise UserError(f"its sizes are those of a model of {float(size):.1e} parameters; {said}")
    return section


def _read(config: dict[str, Any]) -> tuple[dict[str, Any], ModelSection]:
    family = family_of(config)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        said = config.get(key)
        ids = said if key == "eos_token_id" and isinstance(said, list) else [said]
        if said is not None and not all(type(one) is int for one in ids):
            raise UserError(f"{key}: {reprlib.repr(said)} is no token's id, which is a whole number")
    keys = family.from_hf(dict(config))
    try:
        return keys, ModelSection(**keys)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
    path = [part for part in mistake["loc"] if isinstance(part, str)]
    inner = bool(path) and len(path) < len(mistake["loc"])  # of a list
    value = reduce(lambda found, part: found[part], path, keys)
    kind = "no list of such" if inner else _KINDS.get(mistake["type"])
    what = f"is {kind}" if kind else f"cannot be: {mistake['msg'].replace('Input should', 'it must')}"
    ours = ".".join(path)
    raise UserError(f"{family.KEYS.get(ours, ours)}: {reprlib.repr(value)} {what}")


def section_keys(path: str | Path) -> dict[str, Any]:
    """The keys of `ModelSection` that a folder's config.json means.

    Raises:
        UserError: with the file, for an unknown architecture or a key that is not supported.
    """
    config = read_config(path)
    try:
        return keys_of(config)
    except UserError as error:
        raise UserError(error.what, Path(path) / CONFIG) from None
