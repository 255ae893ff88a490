"""What importing and exporting share: a folder that appears whole or not at all, and the tokenizer in it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.config.errors import UserError
from weft.config.headers import read_tokenizer
from weft.config.model import ModelSection
from weft.data.folders import sync_entry

_SOURCES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


@contextlib.contextmanager
def new_folder(out: Path, needed: int) -> Iterator[Path]:
    """A hidden folder beside `out` that takes its name when the block ends well, and is deleted if it does not.

    Args:
        needed: bytes that will be written.

    Raises:
        UserError: `out` is there already or cannot be made, or the disk has no room.
    """
    if out.name in ("", ".."):
        raise UserError(f"{out}: a name is needed for what is made; such as {out / 'new'}")
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError("exists already; name another folder, or move it away", out)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed one left
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"no room on the disk: {needed:,} bytes needed, {free:,} free")
        yield partial
        for path in partial.rglob("*"):
            sync_entry(path)
        sync_entry(partial)
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
        sync_entry(out.absolute().parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"cannot be written: {error.strerror or error}; nothing was made", out) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def tokenizer_doubts(folder: Path | None, section: ModelSection, config: Mapping[str, Any]) -> list[str]:
    """What is to be said of a model's tokenizer.

    Args:
        folder: where its files are; None if nothing is known of one.
        config: the config.json, for the special ids that it names.

    Raises:
        UserError: it is broken, or another model's: its vocabulary is larger than the embedding.
    """
    rows = section.vocab_size or 0
    doubts = []
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = config.get(key) if isinstance(config.get(key), list) else [config.get(key)]
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
        named = ", ".join(far[:3]) + (f" and {len(far) - 3} more" if len(far) > 3 else "")
        doubts.append(f"the tokenizer has special tokens beyond the model's {rows:,} rows ({named}); do not use them")
    if header.eod_id is None:
        doubts.append(
            "the tokenizer states no end-of-document token (eos_token); `weft data import-tokenizer --eod` sets one"
        )
    return doubts
