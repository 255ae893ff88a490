"""The files beside the weights: config.json, generation_config.json and the tokenizer's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint import checkpoint_files as files
from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.data.conversations.template import template_doubts
from weft.data.tokenizers.copy import copy_tokenizer
from weft.errors import UserError
from weft.families.config_json import is_huggingface, read_config
from weft.files import read_json
from weft.formatting import first_few
from weft.headers import TOKENIZER_CONFIG_FILES, read_tokenizer

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_CONFIG = "tokenizer_config.json"
_SOURCES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def origin_of(path: Path) -> dict[str, Any]:
    """`config` and `generation_config` (None: there was none) of a Hugging Face folder, or of the one that a checkpoint
    was imported from; {} for a model that began here."""
    if (path / files.ORIGIN).is_file():
        return read_json(path / files.ORIGIN)
    if not is_huggingface(path):
        return {}
    generation = path / "generation_config.json"
    return {"config": read_config(path), "generation_config": read_json(generation) if generation.is_file() else None}


def special_ids(tokenizer: Path | None, section: ModelSection) -> dict[str, int | None]:
    """The ids of the special tokens that the tokenizer names; without one null, not the family's defaults."""
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


def copy_tokenizer_beside(tokenizer: Path, made: Path) -> None:
    """The tokenizer's files, beside the weights as AutoTokenizer expects them."""
    copy_tokenizer(tokenizer, made / "tokenizer")
    for path in (made / "tokenizer").iterdir():
        path.rename(made / path.name)
    (made / "tokenizer").rmdir()
    settings = _settings(made)
    if "tokenizer_class" not in settings:  # else one is taken that the model's family is known to have
        files.write_json(made / _CONFIG, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _settings(tokenizer: Path) -> dict[str, Any]:
    return read_json(tokenizer / _CONFIG) if (tokenizer / _CONFIG).exists() else {}


def tokenizer_doubts(
    folder: Path | None, section: ModelSection | TransformersModelSection, config: Mapping[str, Any]
) -> list[str]:
    """What is to be said of a model's tokenizer.

    Args:
        folder: where its files are; None if nothing is known of one.
        config: the config.json, for the special ids that it names.

    Raises:
        UserError: it is broken, or another model's: its vocabulary is larger than the embedding.
    """
    rows = section.vocab_size or 0
    if folder is not None:
        _check_beside(folder)
    doubts = []
    for key in SPECIAL:
        given = config.get(key)
        ids = given if isinstance(given, list) else [given]
        far = [one for one in ids if isinstance(one, int) and one >= rows]
        if far:
            doubts.append(f"{key} is {far[0]}, beyond the model's {rows:,} tokens; no text has that token")
    if folder is None or not (folder / "tokenizer.json").is_file():
        others = [name for name in _SOURCES if folder is not None and (folder / name).exists()]
        how = f"; `weft data import-tokenizer` may make one of {others[0]}" if others else ""
        return [*doubts, f"there is no tokenizer.json, so the model has no tokenizer{how}"]
    header, content = read_tokenizer(folder)
    vocabulary = content["model"]["vocab"]
    plain = max(vocabulary.values(), default=-1) + 1 if isinstance(vocabulary, dict) else len(vocabulary)
    if plain > rows:
        raise UserError(
            f"this tokenizer does not fit: it has {plain:,} tokens and the model's embedding {rows:,} rows; bring the "
            "tokenizer that the model was trained with, or take tokenizer.json away",
            folder / "tokenizer.json",
        )
    if header.vocab_size > rows:
        far = [token["content"] for token in content.get("added_tokens") or [] if token["id"] >= rows]
        named = first_few(far, 3)
        doubts.append(f"the tokenizer has special tokens beyond the model's {rows:,} rows ({named}); do not use them")
    if header.eod_id is None:
        doubts.append(
            "the tokenizer states no end-of-document token (eos_token); `weft data import-tokenizer --eod` sets one"
        )
    return [*doubts, *template_doubts(folder)]


def _check_beside(folder: Path) -> None:
    """Raise UserError if one of the files beside a tokenizer and a model is damaged: it would go along."""
    for name in (*TOKENIZER_CONFIG_FILES, "chat_template.json", "generation_config.json"):
        file = folder / name
        if not file.exists():
            continue
        if file.is_file() and not file.stat().st_size:
            raise UserError("the file is empty; download it again", file)
        if not isinstance(read_json(file), dict):
            raise UserError("a mapping belongs here; the file is damaged: download it again", file)
