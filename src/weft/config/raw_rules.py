"""Checks raw data, its configuration keys and its tokenizer without reading the data."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from weft.config.data_rules import check_document_attention, data_section
from weft.config.draft import Draft
from weft.config.model_source import newest_checkpoint
from weft.errors import UserError
from weft.headers import StoreHeader, read_tokenizer_header

# Keys of `data` that say how raw data is packed.
RAW_KEYS = ("layout", "fields", "chat_template", "train_on", "overlong")
# Kinds of token stores whose documents are separate by default: `packing: best_fit`.
SEPARATE = ("conversations", "preferences")
# Suffixes of token files of other tools, which would be read as text.
TOKEN_FILES = (".bin", ".idx", ".pbin", ".npy", ".mds")


def check_raw(draft: Draft) -> None:
    """Reports raw data that cannot be read or needs a tokenizer, and keys of raw data without raw data."""
    section, tokenizer = data_section(draft), draft.get("tokenizer")
    raw = section.raw
    if not raw:
        # A missing file, which is reported elsewhere, is probably raw data.
        known = "data.train" in draft.values and all(map(os.path.exists, section.paths[0].values()))
        for name in RAW_KEYS if known else ():
            if draft.get(f"data.{name}") is not None:
                what = "no effect, because a token store is packed already, and a custom dataset has its own samples"
                draft.report(f"data.{name}", f"{what}; remove the key, or set data.train to raw data")
        return
    for key, path in raw.items():
        what = _mistake(path)
        if what is not None:
            draft.report(key, what)
        elif tokenizer is None and "tokenizer" in draft.values and draft.model_known:
            what = f"{path} is raw data, which needs a tokenizer, but the run has none"
            draft.report(key, f"{what}; set tokenizer to a folder with a tokenizer.json")
            tokenizer = ""  # reported once


def _mistake(path: str) -> str | None:
    """Returns why a path is not raw data; None if it is."""
    if path == "-":
        return "the standard input can be read only once, but a run reads its data in every session; use a file"
    if not os.path.exists(path) and not glob.glob(path, recursive=True):
        return f"{path}: no file matches this pattern; check the pattern"
    if path.lower().endswith(TOKEN_FILES):
        return f"{path}: not a token store and not raw data; convert the tokens with `weft data convert`"
    if os.path.isdir(path) and all(name.startswith(".") for name in os.listdir(path)):
        return f"{path}: not a token store, and a folder without files; create a store with `weft data pack`"
    return None


def fill_tokenizer(draft: Draft, stores: list[StoreHeader]) -> bool:
    """Sets `tokenizer` to the tokenizer of `model.from` or `model.path`, if the run file does not set the key.

    Without raw data, does so only if the stores were packed with that tokenizer.

    Args:
        stores: headers of the run's token stores.

    Returns:
        Whether the tokenizer was set.
    """
    if draft.origins.get("tokenizer") != "default":
        return False
    key = "model.from" if draft.get("model.from") is not None else "model.path"
    folder = find_tokenizer(str(draft.get(key) or ""))
    if folder is None:
        return False
    if not data_section(draft).raw:
        try:
            digest = read_tokenizer_header(folder).digest
        except UserError:  # the run does not need a tokenizer
            return False
        if any(header.tokenizer_digest not in (None, digest) for header in stores):
            return False
    draft.fill("tokenizer", folder, f"from {key}")
    return True


def find_tokenizer(model: str) -> str | None:
    """Returns the folder of the tokenizer of a run, a checkpoint or a Hugging Face folder; None if it has none."""
    found = newest_checkpoint(Path(model)) if model else ""
    if isinstance(found, str):
        return None
    run = found.absolute().parent.parent if found.absolute().parent.name == "checkpoints" else None
    folders = [found, found / "tokenizer"] if run is None else [run / "tokenizer"]
    return next((str(folder) for folder in folders if (folder / "tokenizer.json").is_file()), None)


def fill_packing(draft: Draft, stores: list[StoreHeader]) -> None:
    """Sets the default of `data.packing`, unless it depends on raw data, which is read when the run starts.

    Args:
        stores: headers of the token stores for training; without any, of those for validation.
    """
    section = data_section(draft)
    if "data.packing" not in draft.values or section.packing is not None or section.raw:
        return
    kind = next((header.kind for header in stores if header.kind in SEPARATE), None)
    for name, value in default_packing(kind is not None, separate=_stated(draft)).items():
        draft.fill(f"data.{name}", value, f"for {kind}" if kind is not None else "default")
    check_document_attention(draft)


def _stated(draft: Draft) -> bool | None:
    """Returns `data.document_attention` if the run file sets the key, otherwise None."""
    key = "data.document_attention"
    return None if draft.origins.get(key, "default") == "default" else draft.get(key)


def default_packing(conversations: bool, separate: bool | None) -> dict[str, object]:
    """Returns the values of `packing` and `document_attention` for a run file that does not set `packing`.

    Args:
        conversations: whether training data have a kind in `SEPARATE`; without token stores for training, validation
            data.
        separate: `data.document_attention`, if the run file sets the key.
    """
    if conversations and separate is not False:
        return {"packing": "best_fit", "document_attention": True}
    return {"packing": "concatenate", "document_attention": bool(separate)}
