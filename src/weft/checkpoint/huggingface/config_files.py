"""Reads, checks and copies the files next to the weights: config.json, generation_config.json, tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint import checkpoint_files as files
from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.data.conversations.endings import stop_token
from weft.data.conversations.template import ChatTemplate, find_template, has_template, template_problems
from weft.data.tokenizers.copy import copy_tokenizer
from weft.errors import UserError
from weft.families.config_json import is_huggingface, read_config
from weft.files import read_json
from weft.formatting import first_few
from weft.headers import TOKENIZER_CONFIG_FILES, read_tokenizer

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_CONFIG = "tokenizer_config.json"
_SOURCES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def read_origin(path: Path) -> dict[str, Any]:
    """Returns a Hugging Face model's original config.json and generation_config.json, on which an export is based.

    Args:
        path: a Hugging Face folder, or a checkpoint that was imported from a Hugging Face folder.

    Returns:
        A dict: `config` -> content of config.json; `generation_config` -> content of generation_config.json, or None if
        there is no such file. For a checkpoint that was not imported, the dict is empty.
    """
    if (path / files.ORIGIN).is_file():
        return read_json(path / files.ORIGIN)
    if not is_huggingface(path):
        return {}
    generation = path / "generation_config.json"
    return {"config": read_config(path), "generation_config": read_json(generation) if generation.is_file() else None}


def special_ids(tokenizer: Path | None, section: ModelSection) -> dict[str, int | None]:
    """Returns the ids of a tokenizer's special tokens, by their keys in config.json, such as `eos_token_id`.

    The id of a token that is undefined, or outside the model's vocabulary, is None.
    """
    found: dict[str, int | None] = dict.fromkeys(SPECIAL)
    if tokenizer is None:
        return found
    header, content = read_tokenizer(tokenizer)
    found["eos_token_id"] = header.eod_id
    ids = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    settings = _settings(tokenizer)
    for key in ("bos", "pad"):
        token = settings.get(f"{key}_token")
        found[f"{key}_token_id"] = ids.get(token.get("content") if isinstance(token, dict) else token)
    return {key: id if id is not None and id < (section.vocab_size or 0) else None for key, id in found.items()}


def with_stop_token(generation: Mapping[str, Any], tokenizer: Path | None) -> dict[str, Any]:
    """Adds the token that ends an answer in a run's chat template to the content of a generation_config.json.

    Transformers and inference servers generate until a token in `eos_token_id`, which otherwise has the
    end-of-document token only.

    Args:
        tokenizer: the tokenizer's folder. If it is not the folder of a run, or has no chat template, nothing is added.
    """
    is_run = tokenizer is not None and (tokenizer.parent / files.FOLDER).is_dir()
    if tokenizer is None or not is_run or template_problems(tokenizer) or not has_template(tokenizer):
        return dict(generation)
    added = {token["content"]: token["id"] for token in read_tokenizer(tokenizer)[1].get("added_tokens") or []}
    stop = added.get(stop_token(ChatTemplate.for_tokenizer(find_template(tokenizer), tokenizer), added))
    ids = generation.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return dict(generation) if stop is None or stop in ids else {**generation, "eos_token_id": [stop, *ids]}


def copy_tokenizer_files(tokenizer: Path, folder: Path) -> None:
    """Copies a tokenizer's files into a folder with weights, where AutoTokenizer expects them."""
    copy_tokenizer(tokenizer, folder / "tokenizer")
    for path in (folder / "tokenizer").iterdir():
        path.rename(folder / path.name)
    (folder / "tokenizer").rmdir()
    settings = _settings(folder)
    if "tokenizer_class" not in settings:  # AutoTokenizer would use the default class of the model's family
        files.write_json(folder / _CONFIG, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _settings(tokenizer: Path) -> dict[str, Any]:
    return read_json(tokenizer / _CONFIG) if (tokenizer / _CONFIG).exists() else {}


def tokenizer_warnings(
    folder: Path | None, section: ModelSection | TransformersModelSection, config: Mapping[str, Any]
) -> list[str]:
    """Checks whether a tokenizer fits a model, and returns warnings.

    Args:
        folder: the tokenizer's folder; None: unknown.
        config: content of config.json; the special token ids in it are checked.

    Raises:
        UserError: the tokenizer is damaged, or has more tokens than the model's embedding has rows.
    """
    rows = section.vocab_size or 0
    if folder is not None:
        _check_files(folder)
    warnings = []
    for key in SPECIAL:
        given = config.get(key)
        ids = given if isinstance(given, list) else [given]
        beyond = [one for one in ids if isinstance(one, int) and one >= rows]
        if beyond:
            warnings.append(f"{key} is {beyond[0]}, but the model has only {rows:,} tokens; this token is never used")
    if folder is None or not (folder / "tokenizer.json").is_file():
        others = [name for name in _SOURCES if folder is not None and (folder / name).exists()]
        hint = f"; try to convert {others[0]} with `weft data import-tokenizer`" if others else ""
        return [*warnings, f"tokenizer.json is missing, so the model has no tokenizer{hint}"]
    header, content = read_tokenizer(folder)
    vocabulary = content["model"]["vocab"]
    size = max(vocabulary.values(), default=-1) + 1 if isinstance(vocabulary, dict) else len(vocabulary)
    if size > rows:
        raise UserError(
            f"this tokenizer has {size:,} tokens, but the model's embedding has only {rows:,} rows; use the tokenizer "
            "that the model was trained with, or remove tokenizer.json",
            folder / "tokenizer.json",
        )
    if header.vocab_size > rows:
        beyond = [token["content"] for token in content.get("added_tokens") or [] if token["id"] >= rows]
        names = first_few(beyond, 3)
        warnings.append(
            f"special tokens of the tokenizer have ids beyond the model's {rows:,} rows; do not use them: {names}"
        )
    if header.eod_id is None:
        warnings.append(
            "the tokenizer defines no end-of-document token (eos_token); set it with `weft data import-tokenizer --eod`"
        )
    return [*warnings, *template_problems(folder)]


def _check_files(folder: Path) -> None:
    """Checks the JSON files next to a tokenizer, which are copied with it. Raises UserError if a file is damaged."""
    for name in (*TOKENIZER_CONFIG_FILES, "chat_template.json", "generation_config.json"):
        file = folder / name
        if not file.exists():
            continue
        if file.is_file() and not file.stat().st_size:
            raise UserError("the file is empty; download the file again", file)
        if not isinstance(read_json(file), dict):
            raise UserError("not a JSON object; download the file again", file)
