"""Detects the format of a token store, and opens stores in external formats."""

from __future__ import annotations

from pathlib import Path

from weft.data.stores.external.external_store import ExternalStore
from weft.errors import UserError
from weft.files import read_json
from weft.headers import MAGIC


def detect_format(path: Path) -> str:
    """Returns the format of a token store, from the names and first bytes of its files.

    Raises:
        UserError: the path does not exist, or the format is unknown.
    """
    if path.is_dir():
        if (path / "store.json").exists():
            return "weft"
        if (path / "index.json").exists():
            index = read_json(path / "index.json")
            if isinstance(index, dict) and "shards" in index:
                return "mds"
            if isinstance(index, dict) and "chunks" in index:
                return "litdata"
        if list(path.glob("*.idx")):
            return "megatron"
    elif path.suffix == ".pbin" and path.exists():
        return "pbin"
    elif _is_index(path.with_suffix(".idx")) or _is_index(Path(f"{path}.idx")):
        return "megatron"
    elif path.suffix == ".bin" and path.exists():
        return "nanogpt"
    elif not path.exists():
        raise UserError("no such token store; check the path", path)
    raise UserError(
        "unknown token store format; set it with --from, to one of weft, megatron, nanogpt, pbin, litdata and mds",
        path,
    )


def _is_index(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_external_store(
    path: Path, format: str | None = None, *, dtype: str | None = None, field: str | None = None
) -> ExternalStore:
    """Opens a token store of any format. Never executes code from the store's files.

    Args:
        format: `weft`, `megatron`, `nanogpt`, `pbin`, `litdata` or `mds`; detected if None.
        dtype: dtype of the ids, for files that do not record the dtype: nanoGPT (default uint16) and byte columns of
            MDS (required).
        field: name of the column that contains the ids (MDS only).

    Raises:
        UserError: the files are not a store of this format, or the store is damaged.
    """
    format = format or detect_format(path)
    if format in ("weft", "megatron"):
        from weft.data.stores.external.megatron import open_megatron

        return open_megatron(path / "tokens" if format == "weft" else path, format)
    if format == "nanogpt":
        from weft.data.stores.external.nanogpt import open_nanogpt

        return open_nanogpt(path, dtype or "uint16")
    if format == "pbin":
        from weft.data.stores.external.pbin import open_pbin

        return open_pbin(path)
    from weft.data.stores.external.shards import open_litdata, open_mds

    return open_litdata(path) if format == "litdata" else open_mds(path, field, dtype)
