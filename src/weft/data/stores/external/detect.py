"""Token stores of other tools: which one it is, and its documents in order."""

from __future__ import annotations

from pathlib import Path

from weft.data.stores.external.external_store import Foreign
from weft.errors import UserError
from weft.files import read_json
from weft.headers import MAGIC


def detect(path: Path) -> str:
    """The format of a store, by what its files begin with and how they are called.

    Raises:
        UserError: none that is known.
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
        "not a token store that is known (weft, megatron, nanogpt, pbin, litdata, mds); --from FORMAT says which", path
    )


def _is_index(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_foreign(
    path: Path, format: str | None = None, *, dtype: str | None = None, field: str | None = None
) -> Foreign:
    """Open a store; nothing in it is ever executed.

    Args:
        format: `weft`, `megatron`, `nanogpt`, `pbin`, `litdata` or `mds`; None: found out.
        dtype: of the ids where the files do not say it (nanoGPT: default uint16; columns of bytes in MDS).
        field: the column with the ids (MDS).

    Raises:
        UserError: not such a store, or a damaged one.
    """
    chosen = format or detect(path)
    if chosen in ("weft", "megatron"):
        from weft.data.stores.external.megatron import open_megatron

        return open_megatron(path / "tokens" if chosen == "weft" else path, chosen)
    if chosen == "nanogpt":
        from weft.data.stores.external.nanogpt import open_nanogpt

        return open_nanogpt(path, dtype or "uint16")
    if chosen == "pbin":
        from weft.data.stores.external.pbin import open_pbin

        return open_pbin(path)
    from weft.data.stores.external.shards import open_litdata, open_mds

    return open_litdata(path) if chosen == "litdata" else open_mds(path, field, dtype)
