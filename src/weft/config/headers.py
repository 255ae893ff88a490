"""What tokenizers and token stores say of themselves, read without torch: checking a config is instant."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.errors import UserError

# Megatron's indexed dataset: magic, version, dtype code, number of sequences, number of document boundaries.
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


@dataclass(frozen=True)
class TokenizerHeader:
    """`vocab_size` counts special tokens; `eod_id` is None if the folder states no end-of-document token."""

    vocab_size: int
    eod_id: int | None
    digest: str


@dataclass(frozen=True)
class StoreHeader:
    """What `store.json` says, checked against the sizes of the files; None where a store without it leaves a gap."""

    num_tokens: int
    num_documents: int
    vocab_size: int | None
    tokenizer_digest: str | None
    eod_id: int | None
    bytes: int | None


def read_json(path: Path) -> Any:
    """A JSON file's value; a UserError says where it is broken."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError("no such file", path) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path) from None
    except json.JSONDecodeError as error:
        raise UserError(f"broken JSON: {error.msg}; the file is damaged, make it again", path, error.lineno) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8; the file is damaged, make it again", path) from None


def read_tokenizer_header(path: str | Path) -> TokenizerHeader:
    """Read a tokenizer folder.

    Raises:
        UserError: there is no such folder, no tokenizer.json in it, or it is broken.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not folder.exists():
        raise UserError("no such tokenizer folder; `weft data train-tokenizer` makes one", folder)
    if not file.exists():
        raise UserError("no tokenizer.json in this folder; `weft data train-tokenizer` makes one", folder)
    content = read_json(file)
    try:
        vocabulary = content["model"]["vocab"]
        ids = {t["content"]: t["id"] for t in content.get("added_tokens") or []}
        if isinstance(vocabulary, dict):
            ids = vocabulary | ids
            size = max(ids.values(), default=-1) + 1
        else:  # a unigram model's list of [piece, score]
            size = max([len(vocabulary) - 1, *ids.values()]) + 1
    except (KeyError, TypeError, AttributeError):
        raise UserError("not a tokenizer file: it has no vocabulary; make it again", file) from None
    eod = None
    if (folder / "tokenizer_config.json").exists():
        stated = read_json(folder / "tokenizer_config.json").get("eos_token")
        eod = ids.get(stated["content"] if isinstance(stated, dict) else stated)
    return TokenizerHeader(size, eod, hashlib.sha256(file.read_bytes()).hexdigest())


def read_index_header(path: Path) -> tuple[int, int]:
    """The dtype code and number of sequences of a `.idx` file, whose size is checked.

    Raises:
        UserError: not an index, or cut short.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
        size = path.stat().st_size
    except FileNotFoundError:
        raise UserError("no such file; pack the store again", path) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path) from None
    if len(head) < HEADER.size or head[:9] != MAGIC:
        raise UserError("not the index of a token store (its first bytes are not MMIDIDX); pack the store again", path)
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != 1 or code not in DTYPE_SIZES:
        raise UserError(f"an index of version {version}, dtype code {code}, which is not known; pack again", path)
    expected = HEADER.size + sequences * 12 + documents * 8
    if size != expected:
        raise UserError(
            f"{size:,} bytes where its header means {expected:,}; it is damaged: pack the store again", path
        )
    return code, sequences


def read_store_header(path: str | Path) -> StoreHeader:
    """Read a token store's `store.json` and the sizes of its files.

    Raises:
        UserError: no store, or its files do not fit one another.
    """
    folder = Path(path)
    if not folder.exists():
        raise UserError("no such token store; `weft data pack` makes one", folder)
    if not (folder / "store.json").exists():
        raise UserError("not a token store: it has no store.json; `weft data pack` makes one", folder)
    info = read_json(folder / "store.json")
    try:
        header = StoreHeader(
            info["tokens"],
            info["documents"],
            info["vocab_size"],
            info["tokenizer_digest"],
            info["eod_id"],
            info["bytes"],
        )
    except (KeyError, TypeError):
        raise UserError("broken: it lacks the store's numbers; pack the store again", folder / "store.json") from None
    code, sequences = read_index_header(folder / "tokens.idx")
    if sequences != header.num_documents:
        raise UserError(
            f"{sequences:,} documents where store.json has {header.num_documents:,}; pack the store again",
            folder / "tokens.idx",
        )
    file = folder / "tokens.bin"
    size, expected = file.stat().st_size if file.exists() else 0, header.num_tokens * DTYPE_SIZES[code]
    if size != expected:
        raise UserError(f"{size:,} bytes where {expected:,} belong; it is damaged: pack the store again", file)
    return header
