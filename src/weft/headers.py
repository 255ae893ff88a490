"""Reads headers of tokenizers and token stores. Does not import torch, so that `weft config check` is fast."""

from __future__ import annotations

import glob
import hashlib
import os
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
DTYPE_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
DTYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
FLOAT_CODES = (6, 7)
TOKENIZER_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class TokenizerHeader:
    """Vocabulary size, end-of-document token and digest of the tokenizer in a folder.

    Attributes:
        vocab_size: highest token id + 1, including special tokens.
        eod_id, eod_token: end-of-document token; None if the folder names no such token.
        digest: sha256 of tokenizer.json.
    """

    vocab_size: int
    eod_id: int | None
    digest: str
    eod_token: str | None = None


@dataclass(frozen=True)
class IndexHeader:
    """Header of a Megatron `.idx` file.

    Attributes:
        code: dtype code, a key of `DTYPE_NAMES`.
        sequences: number of sequences.
        boundaries: number of document boundaries.
        modes: whether the file ends with one mode byte per sequence (multimodal data).
    """

    code: int
    sequences: int
    boundaries: int
    modes: bool


@dataclass(frozen=True)
class StoreHeader:
    """Contents of `store.json`, checked against the file sizes. A field is None if `store.json` has null for it."""

    num_tokens: int
    num_documents: int
    vocab_size: int | None
    tokenizer_digest: str | None
    eod_id: int | None
    bytes: int | None
    kind: str = "text"
    chat_template: str | None = None
    fields: tuple[str, ...] = ()


def is_raw(path: str) -> bool:
    """Whether a path names raw data: a file, a pattern, or a folder without any file of a token store."""
    if not os.path.exists(path):
        return path == "-" or glob.has_magic(path)
    return not any(os.path.isfile(os.path.join(path, name)) for name in ("store.json", "tokens.idx", "tokens.bin"))


def tokenizer_file(path: str | Path) -> Path:
    """Returns the tokenizer.json in the folder `path`, or `path` itself if it is a `.json` file.

    Raises:
        UserError: there is no tokenizer.json. For a SentencePiece model or a tiktoken rank file, the message says how
            to convert it.
    """
    path = Path(path)
    if path.is_dir():
        file = path / "tokenizer.json"
        if file.exists():
            return file
        others = sorted(p for p in path.iterdir() if p.suffix in (".model", ".tiktoken"))
        if not others:
            raise UserError("no tokenizer.json in this folder; create one with `weft data train-tokenizer`", path)
        path = others[0]
    elif not path.exists():
        raise UserError(
            "no such tokenizer; check the path, or create one: `weft data train-tokenizer`, `import-tokenizer`", path
        )
    elif path.suffix == ".json":
        return path
    raise UserError(f"not a tokenizer.json; convert it with `weft data import-tokenizer {path} --out DIR`", path)


def padded_rows(tokens: int, multiple: int | None) -> int:
    """Returns the rows of an embedding of `tokens` tokens: up to a multiple of `model.pad_vocab_to_multiple`."""
    return -(-tokens // (multiple or 1)) * (multiple or 1)


def read_tokenizer_header(path: str | Path) -> TokenizerHeader:
    """Reads a tokenizer folder, or a tokenizer.json and the configuration files in its folder.

    The end-of-document token is the `eos_token` of tokenizer_config.json, or of special_tokens_map.json.

    Raises:
        UserError: there is no tokenizer.json, or its content is invalid.
    """
    return read_tokenizer(path)[0]


def read_token_ids(path: str | Path) -> dict[str, int]:
    """Returns the vocabulary of a tokenizer, including special tokens: token -> id. `path` as in
    `read_tokenizer_header`.
    """
    return _token_ids(read_tokenizer(path)[1])


def _token_ids(content: Any) -> dict[str, int]:
    vocabulary = content["model"]["vocab"]
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    if isinstance(vocabulary, dict):
        return vocabulary | added
    return {piece: id for id, (piece, _) in enumerate(vocabulary)} | added  # a unigram model's list of [piece, score]


def read_tokenizer(path: str | Path) -> tuple[TokenizerHeader, Any]:
    """Returns the header of a tokenizer (see `read_tokenizer_header`) and the parsed content of its tokenizer.json."""
    file = tokenizer_file(path)
    try:
        raw = file.read_bytes()
        content = orjson.loads(raw)
    except (OSError, orjson.JSONDecodeError):
        content = read_json(file)  # reports the line
    try:
        ids = _token_ids(content)
        size = max(ids.values(), default=-1) + 1
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UserError(
            "not a tokenizer file: it has no vocabulary; check the path, or create the tokenizer again", file
        ) from None
    eos_token = None
    for config_file in (file.parent / name for name in TOKENIZER_CONFIG_FILES):
        if eos_token is None and config_file.exists() and isinstance(settings := read_json(config_file), dict):
            eos_token = settings.get("eos_token")
            eos_token = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    if eos_token is not None and eos_token not in ids:
        raise UserError(
            f"eos_token {eos_token!r} is not in the vocabulary; set it to a token of tokenizer.json", file.parent
        )
    eod_id = None if eos_token is None else ids[eos_token]
    return TokenizerHeader(size, eod_id, hashlib.sha256(raw).hexdigest(), eos_token), content


def read_megatron_index(path: Path) -> IndexHeader:
    """Reads the header of a Megatron `.idx` file and checks the file's size.

    Raises:
        UserError: the file is missing, is not an index, or is truncated.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
        size = path.stat().st_size
    except FileNotFoundError:
        raise UserError("no such file; pack the store again", path) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; check the file and its permissions", path) from None
    if len(head) < HEADER.size or head[:9] != MAGIC:
        raise UserError("not the index of a token store (its first bytes are not MMIDIDX); pack the store again", path)
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != 1 or code not in DTYPE_NAMES:
        raise UserError(f"index version {version} with dtype code {code} is not supported; pack the store again", path)
    expected = HEADER.size + sequences * 12 + boundaries * 8
    modes = sequences > 0 and size == expected + sequences  # one byte a sequence
    if size != expected and not modes:
        raise UserError(
            f"damaged: it has {size:,} bytes, but its header implies {expected:,}; pack the store again", path
        )
    return IndexHeader(code, sequences, boundaries, modes)


def read_index_header(path: Path) -> tuple[int, int]:
    """Returns the dtype code and the number of documents of a token store's `.idx`.

    Raises:
        UserError: the file is not an index or is truncated, or a document does not consist of exactly one sequence of
            ids.
    """
    header = read_megatron_index(path)
    if header.boundaries != header.sequences + 1 or header.modes or header.code in FLOAT_CODES:
        raise UserError(
            "not a token store: documents of this Megatron dataset have several sequences, or ids that are not "
            "integers; convert it with `weft data convert`",
            path,
        )
    return header.code, header.sequences


def read_store_header(path: str | Path) -> StoreHeader:
    """Reads a token store's `store.json` and checks it against the sizes of the store's files.

    Raises:
        UserError: the folder is not a token store, or its files contradict each other.
    """
    folder = Path(path)
    file, index, data = folder / "store.json", folder / "tokens.idx", folder / "tokens.bin"
    if not folder.exists():
        raise UserError("no such token store or file; check the path, or create a store with `weft data pack`", folder)
    if not file.exists():
        raise UserError("not a token store: it has no store.json; create a store with `weft data pack`", folder)
    info = read_json(file)
    try:
        header = StoreHeader(
            num_tokens=info["tokens"],
            num_documents=info["documents"],
            vocab_size=info["vocab_size"],
            tokenizer_digest=info["tokenizer_digest"],
            eod_id=info["eod_id"],
            bytes=info["bytes"],
            kind=info.get("kind", "text"),
            chat_template=info.get("chat_template"),
            fields=tuple(info.get("fields", ())),
        )
        dtype = info["dtype"]
    except (KeyError, TypeError):
        raise UserError("damaged: required keys are missing; pack the store again", file) from None
    for key in ("tokens", "documents", "vocab_size", "eod_id", "bytes"):
        number = info[key]
        if number is None and key not in ("tokens", "documents"):
            continue
        if type(number) is not int or number < 0:
            raise UserError(f"{key}: {number!r} is not a non-negative integer; pack the store again", file)
    code, sequences = read_index_header(index)
    if dtype != DTYPE_NAMES[code]:
        raise UserError(f"dtype: {dtype!r}, but tokens.idx has {DTYPE_NAMES[code]}; pack the store again", file)
    if sequences != header.num_documents:
        raise UserError(
            f"{counted(sequences, 'document')}, but store.json counts {header.num_documents:,}; pack the store again",
            index,
        )
    size, expected = data.stat().st_size if data.exists() else 0, header.num_tokens * DTYPE_SIZES[code]
    if size != expected:
        raise UserError(f"damaged: it has {size:,} bytes instead of {expected:,}; pack the store again", data)
    return header
