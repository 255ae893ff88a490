"""Detects the format of a token store and opens it."""

from __future__ import annotations

from pathlib import Path

from weft.data.stores.external.external_store import ExternalStore
from weft.errors import UserError
from weft.files import read_json
from weft.headers import MAGIC


def detect_format(path: Path) -> str:
    """Returns the format of a token store, from the names and first bytes of its files.

    Raises:
        UserError: no such store, or an unknown format.
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
        raise UserError("no such store", path)
    raise UserError(
        "unknown format of a token store (known are weft, megatron, nanogpt, pbin, litdata, mds); state it: "
        "--from FORMAT",
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
    """Opens a token store. Never executes anything from its files.

    Args:
        format: `weft`, `megatron`, `nanogpt`, `pbin`, `litdata` or `mds`; default: detected.
        dtype: of the ids, for formats that do not record it (nanoGPT, default uint16; byte columns of MDS).
        field: the column of the ids (MDS).

    Raises:
        UserError: not a store of this format, or a damaged one.
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
