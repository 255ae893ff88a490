"""What tokenizers and token stores say of themselves, read without torch: checking a config is instant."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from weft.errors import UserError
from weft.files import read_json
from weft.formatting import counted

# Megatron's indexed dataset: magic, version, dtype code, number of sequences, number of document boundaries.
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
DTYPE_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
FLOAT_CODES = (6, 7)
BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class TokenizerHeader:
    """`vocab_size` counts special tokens; `eod_id` is None if the folder states no end-of-document token."""

    vocab_size: int
    eod_id: int | None
    digest: str
    eod_token: str | None = None


@dataclass(frozen=True)
class IndexHeader:
    """Of an `.idx`: dtype code, numbers of sequences and of document boundaries, and whether a mode follows for each
    sequence (multimodal data)."""

    code: int
    sequences: int
    boundaries: int
    modes: bool


@dataclass(frozen=True)
class StoreHeader:
    """What `store.json` says, checked against the sizes of the files; None where a store without it leaves a gap."""

    num_tokens: int
    num_documents: int
    vocab_size: int | None
    tokenizer_digest: str | None
    eod_id: int | None
    bytes: int | None
    kind: str = "text"


def tokenizer_file(path: str | Path) -> Path:
    """The tokenizer.json that a tokenizer's folder holds, or that `path` itself is.

    Raises:
        UserError: there is none; a SentencePiece model or tiktoken ranks are to be imported first.
    """
    path = Path(path)
    if path.is_dir():
        file = path / "tokenizer.json"
        if file.exists():
            return file
        others = sorted(p for p in path.iterdir() if p.suffix in (".model", ".tiktoken"))
        if not others:
            raise UserError("no tokenizer.json in this folder; `weft data train-tokenizer` makes one", path)
        path = others[0]
    elif not path.exists():
        raise UserError("no such tokenizer; `weft data train-tokenizer` makes one, `import-tokenizer` imports", path)
    elif path.suffix == ".json":
        return path
    raise UserError(f"not a tokenizer.json; `weft data import-tokenizer {path} --out DIR` makes one of it", path)


def read_tokenizer_header(path: str | Path) -> TokenizerHeader:
    """Read a tokenizer's folder, or its tokenizer.json; the files that go with it lie beside it.

    The end-of-document token is the `eos_token` of tokenizer_config.json, or of special_tokens_map.json.

    Raises:
        UserError: there is no tokenizer.json, or it is broken.
    """
    return read_tokenizer(path)[0]


def read_tokenizer(path: str | Path) -> tuple[TokenizerHeader, Any]:
    """`read_tokenizer_header`, and tokenizer.json's content."""
    file = tokenizer_file(path)
    try:
        raw = file.read_bytes()
        content = orjson.loads(raw)
    except (OSError, orjson.JSONDecodeError):
        content = read_json(file)  # says where it is broken
    try:
        vocabulary = content["model"]["vocab"]
        ids = {t["content"]: t["id"] for t in content.get("added_tokens") or []}
        if isinstance(vocabulary, dict):
            ids = vocabulary | ids
            size = max(ids.values(), default=-1) + 1
        else:  # a unigram model's list of [piece, score]
            size = max([len(vocabulary) - 1, *ids.values()]) + 1
            ids = {piece: id for id, (piece, _) in enumerate(vocabulary)} | ids
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UserError("not a tokenizer file: it has no vocabulary; make it again", file) from None
    stated = None
    for name in BESIDE_TOKENIZER:
        beside = file.parent / name
        if stated is None and beside.exists() and isinstance(settings := read_json(beside), dict):
            stated = settings.get("eos_token")
            stated = stated.get("content") if isinstance(stated, dict) else stated
    if stated is not None and stated not in ids:
        raise UserError(f"its eos_token {stated!r} is not in the vocabulary; name one that is", file.parent)
    eod = None if stated is None else ids[stated]
    return TokenizerHeader(size, eod, hashlib.sha256(raw).hexdigest(), stated), content


def read_megatron_index(path: Path) -> IndexHeader:
    """The header of any `.idx` file of Megatron's, against which its size is checked.

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
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != 1 or code not in DTYPE_SIZES:
        raise UserError(f"an index of version {version}, dtype code {code}, which is not known; pack again", path)
    expected = HEADER.size + sequences * 12 + boundaries * 8
    modes = sequences > 0 and size == expected + sequences  # one byte a sequence
    if size != expected and not modes:
        raise UserError(
            f"{size:,} bytes where its header means {expected:,}; it is damaged: pack the store again", path
        )
    return IndexHeader(code, sequences, boundaries, modes)


def read_index_header(path: Path) -> tuple[int, int]:
    """The dtype code and number of documents of a token store's `.idx`, whose size is checked.

    Raises:
        UserError: not an index, cut short, or one in which a document is not one sequence.
    """
    header = read_megatron_index(path)
    if header.boundaries != header.sequences + 1 or header.modes or header.code in FLOAT_CODES:
        raise UserError(
            "an index of Megatron's that is not a token store's (a document is not one sequence of ids); "
            "`weft data convert` makes a store of it",
            path,
        )
    return header.code, header.sequences


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
            info.get("kind", "text"),
        )
        dtype = info["dtype"]
    except (KeyError, TypeError):
        raise UserError("broken: it lacks the store's numbers; pack the store again", folder / "store.json") from None
    needed = {"tokens": header.num_tokens, "documents": header.num_documents}
    known = {"vocab_size": header.vocab_size, "eod_id": header.eod_id, "bytes": header.bytes}
    for key, number in (needed | {key: number for key, number in known.items() if number is not None}).items():
        if type(number) is not int or number < 0:
            raise UserError(f"{key}: {number!r} is no such number; pack the store again", folder / "store.json")
    code, sequences = read_index_header(folder / "tokens.idx")
    if dtype != DTYPE_NAMES[code]:
        raise UserError(
            f"dtype: {dtype!r} where tokens.idx says {DTYPE_NAMES[code]}; pack the store again", folder / "store.json"
        )
    if sequences != header.num_documents:
        raise UserError(
            f"{counted(sequences, 'document')} where store.json has {header.num_documents:,}; pack the store again",
            folder / "tokens.idx",
        )
    file = folder / "tokens.bin"
    size, expected = file.stat().st_size if file.exists() else 0, header.num_tokens * DTYPE_SIZES[code]
    if size != expected:
        raise UserError(f"{size:,} bytes where {expected:,} belong; it is damaged: pack the store again", file)
    return header
