"""Packs raw data into the user's cache, once for each content, tokenizer and set of options."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from weft.data.packing.pack import pack
from weft.data.raw.detect import RawData
from weft.data.raw.digests import file_digests
from weft.data.sources.source_format import detect_format
from weft.errors import UserError
from weft.files import cache_folder, file_stamps, locked, read_json, remove, replace_file
from weft.headers import read_store_header, tokenizer_file
from weft.observe.console import Console

VERSION = 1  # increased if the same options and content give another store


def cached_store(raw: RawData, console: Console) -> Path:
    """Returns the token store of raw data in the cache; packs the data first if the store does not exist.

    Several processes that need the same store wait for the first one. An interrupted pack is resumed.

    Args:
        console: shows the progress of reading and packing.

    Raises:
        UserError: a document is invalid, a file changed while it was packed, a file cannot be read, or the cache cannot
            be written.
    """
    folder, stamps = cache_folder() / "data", file_stamps(raw.files)
    out = folder / _key(raw, file_digests(raw.files, stamps, folder / "digests", console))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{out.name}.lock") as alone:
            if _usable(out):
                return out
            if not alone:  # two processes must not write the same folder
                raise UserError("this file system has no file locks; set WEFT_CACHE to a folder on another one", folder)
            pack(raw.files, out, raw.encoder, reading=raw.reading, overwrite=True, console=console)
            if file_stamps(raw.files) != stamps:
                remove(out)
                raise UserError("changed while it was packed; run the same command again", raw.path)
            about = {"tokenizer": str(tokenizer_file(raw.tokenizer).parent.absolute()), "data": raw.path}
            replace_file(_about(out), json.dumps(about), durable=False)
            return out
    except OSError as error:
        what = f"cannot be written: {error.strerror}; free space, or set WEFT_CACHE to another folder"
        raise UserError(what, folder) from None


def packed_with(store: Path) -> str | None:
    """Returns the folder of the tokenizer that packed raw data into a store; None if it is not known."""
    try:
        folder = json.loads(_about(store).read_bytes())["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if Path(folder).is_dir() else None


def template_date(store: Path) -> str | None:
    """Returns the date that the chat template wrote as the current date when a store was packed; None without one."""
    return read_json(store / "store.json")["made_from"]["encoder"].get("date")


def _about(store: Path) -> Path:
    """Returns the file beside a store that has the paths of the tokenizer and of the raw data, for people."""
    return store.with_name(f".{store.name}.json")


def _key(raw: RawData, digests: list[str]) -> str:
    """Returns the name of a store: a digest of everything on which its bytes depend.

    A template can write the current date. The date is not part of the key, so that a run resumes with the same store
    on another day.
    """
    try:
        identity = raw.encoder.identity() | {"date": None}
    except OSError as error:
        what = f"cannot be read: {error.strerror}; check the file and its permissions"
        raise UserError(what, error.filename or raw.tokenizer) from None
    formats = [detect_format(path) for path in raw.files]
    content = [VERSION, identity, asdict(raw.reading), formats, digests]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _usable(store: Path) -> bool:
    try:
        read_store_header(store)
    except UserError:  # missing, or damaged: it is packed again
        return False
    return True
