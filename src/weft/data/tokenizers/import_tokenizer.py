"""Converts SentencePiece models and tiktoken rank files to tokenizer.json, and checks that texts keep their ids."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.tokenizers.exactness import PATTERNS, spell_bytes
from weft.errors import UserError
from weft.files import read_json
from weft.headers import read_tokenizer_header

EXTRA = "pip install 'weft-train[tokenizers]'"
# Texts for comparing ids: blanks, line ends, digits, scripts, marks, emoji, control characters, runs.
TEST_TEXTS = [
    "",
    " ",
    "   ",
    "a",
    " a",
    "a ",
    "  two  blanks  ",
    "Hello world! It's 2024, isn't it? I'LL",
    "line\nline\r\nline\n\n\n  indented\n\ttab\t\tend \n",
    "1 12 123 1234 12345 3.14159 1e-10 0xFF",
    "def f(x):\n    return {'a': [x, x**2]}  # comment\n" * 3,
    "https://example.org/a/b?c=d&e=f#g",
    "né 🎉 日本語 русский עברית العربية हिन्दी ไทย 한국어 ½ ² ٣ Ⅷ",
    "\u212b ﬁ ﷺ ① ㎏",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "\x00\x07\x1b\x7f\x85\xa0\u200b\u2028\u3000\ufeff\ufffd",
    "aaaaaaaa bbbbbb ======== -------- ........ ________",
    "6300000",
    "9.000",
    "....",
    "1000 10000 100000 1000000 10,000,000.00 0x0000 1.1111 222 3333333",
    "wait... well.... what..... aaa hmmm !!! ??? *** ### --- === ___",
    "▁a ▁ ▁▁b",
    "\U0001d518\U0001d4eb\U00020000\U0010ffff",
]
# Texts whose ids may differ though the import is correct: long runs, which a unigram model can split in several equally
# probable ways, and characters of several code points, for which the converted normalizer is incomplete.
EDGE_CASES = [
    "x" * 300,
    "e\u0301 a\u0323\u0301 o\u0338\u0301",
    "\u1100\u1161\u11a8 \uac00\u11a8",
    "\u0338² \u0345\u0301ω\u0345",
]


@dataclass(frozen=True)
class Imported:
    """A tokenizer that was converted to tokenizer.json.

    Attributes:
        content: content of tokenizer.json.
        kind: what the tokenizer was converted from, for messages.
        eod: end-of-document token of the original tokenizer; None: the original tokenizer has no such token.
        library: name of the original library.
        encode: function that encodes a text with the original library; None if there is no original to compare with.
    """

    content: dict[str, Any]
    kind: str
    eod: str | None
    library: str
    encode: Callable[[str], list[int]] | None


def from_folder(file: Path, special: dict[str, int | None]) -> Imported:
    """Returns the tokenizer in a tokenizer.json, with additional special tokens. Does not change the file.

    Args:
        file: path of the tokenizer.json.
        special: special token -> id; an id of None becomes the next free id.

    Raises:
        UserError: an id is taken, or leaves a gap that the model does not allow.
    """
    header, content = read_tokenizer_header(file), read_json(file)
    vocabulary = content["model"]["vocab"]
    ids = vocabulary if isinstance(vocabulary, dict) else {piece: id for id, (piece, _) in enumerate(vocabulary)}
    added = content["added_tokens"] = list(content.get("added_tokens") or [])
    new = {token: id for token, id in special.items() if token not in {entry["content"] for entry in added}}
    free = assign_ids({token: id for token, id in new.items() if token not in ids}, set(range(header.vocab_size)))
    added += [added_token(ids.get(token, free.get(token)), token, special=True) for token in new]
    if isinstance(vocabulary, dict):
        vocabulary |= free  # so that the tokens keep their ids even if these leave gaps
    elif free and sorted(free.values()) != list(range(header.vocab_size, header.vocab_size + len(free))):
        raise UserError(f"--special: new ids must be consecutive and begin at {header.vocab_size}", file)
    return Imported(content, "a tokenizer.json", header.eod_token, "tokenizers", None)


def from_sentencepiece(file: Path) -> Imported:
    """Converts a SentencePiece model (Kudo and Richardson, 2018; BPE or unigram).

    Raises:
        UserError: sentencepiece or protobuf is not installed, `file` is not a SentencePiece model, or tokenizer.json
            cannot express the model.
    """
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise UserError(f"SentencePiece models need {error.name}; install it: {EXTRA}", file) from None
    protocol: Any = sentencepiece_model_pb2  # its classes are created on import
    model = protocol.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
        processor = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
    except Exception as error:  # DecodeError of either protobuf implementation, RuntimeError of sentencepiece
        raise UserError(f"not a SentencePiece model ({type(error).__name__}); check the path", file) from None
    spec, rules = model.trainer_spec, model.normalizer_spec
    if spec.model_type not in (spec.UNIGRAM, spec.BPE):
        raise UserError("a word or character model; only BPE and unigram models can be imported", file)
    if spec.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise UserError(
            "tokenizer.json cannot express its settings treat_whitespace_as_suffix or escape_whitespaces; use another "
            "tokenizer",
            file,
        )
    unknown = next((i for i, piece in enumerate(model.pieces) if piece.type == piece.UNKNOWN), None)
    if unknown is None:  # an empty file parses as a model without pieces
        raise UserError("not a SentencePiece model (the unknown piece is missing); check the path", file)
    added = [
        added_token(id, piece.piece, special=piece.type != piece.USER_DEFINED)
        for id, piece in enumerate(model.pieces)
        if piece.type in (piece.CONTROL, piece.USER_DEFINED, piece.UNKNOWN)
    ]
    decoders: list[dict[str, Any]] = [replace_step({"String": "▁"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if rules.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizer = {"type": "Sequence", "normalizers": _normalizers(rules)}
    decoder = {"type": "Sequence", "decoders": decoders}
    content = tokenizer_content(_sentencepiece_model(model, unknown), added, normalizer, None, decoder)
    kind = f"a SentencePiece {'BPE' if spec.model_type == spec.BPE else 'unigram'} model"
    eod = processor.id_to_piece(processor.eos_id()) if processor.eos_id() >= 0 else None
    return Imported(content, kind, eod, "sentencepiece", lambda text: processor.encode(text))


def _normalizers(rules: Any) -> list[dict[str, Any]]:
    """Returns the normalizers of a tokenizer.json for a SentencePiece NormalizerSpec."""
    steps: list[dict[str, Any]] = []
    if rules.precompiled_charsmap:
        charsmap = base64.b64encode(rules.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if rules.remove_extra_whitespaces:
        steps += [replace_step({"Regex": r"\A +"}, ""), replace_step({"Regex": " {2,}"}, " ")]
    if rules.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    steps.append(replace_step({"String": " "}, "▁"))
    if rules.remove_extra_whitespaces:
        steps.append(replace_step({"Regex": r"▁+\z"}, ""))
    return steps


def _sentencepiece_model(model: Any, unknown: int) -> dict[str, Any]:
    """Returns the `model` of a tokenizer.json for a SentencePiece ModelProto.

    Args:
        unknown: id of the unknown piece.
    """
    spec = model.trainer_spec
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    if spec.model_type != spec.BPE:
        return {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": spec.byte_fallback}
    ranks = {
        piece.piece: (-piece.score, id)
        for id, piece in enumerate(model.pieces)
        if piece.type in (piece.NORMAL, piece.USER_DEFINED)
    }
    vocabulary = {piece: id for id, (piece, _) in enumerate(pieces)}
    return bpe_model(vocabulary, ranks, unk_token=pieces[unknown][0], fuse_unk=True, byte_fallback=spec.byte_fallback)


def from_tiktoken(file: Path, pattern: str, special: dict[str, int | None]) -> Imported:
    """Converts a tiktoken rank file.

    Args:
        pattern: the regex that splits text into words, or its name in PATTERNS.
        special: special token -> id; an id of None becomes the next free id.

    Raises:
        UserError: tiktoken is not installed, `file` is not a rank file, `pattern` is not a regex, or an id is taken.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise UserError(
            "not a tiktoken rank file: each line must be a base64 token and its rank", file, len(ranks) + 1
        ) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(
            f"lacks {len(missing)} of the 256 bytes, such as 0x{missing[0]:02X}; use a tiktoken rank file",
            file,
        )
    specials = assign_ids(special, set(ranks.values()))
    regex = PATTERNS.get(pattern, pattern)
    try:
        import tiktoken

        encoding = tiktoken.Encoding("imported", pat_str=regex, mergeable_ranks=ranks, special_tokens=specials)
    except ImportError as error:
        raise UserError(f"tiktoken ranks need {error.name}; install it: {EXTRA}", file) from None
    except ValueError as error:
        raise UserError(f"--pattern: {error}; give a regex, or one of {', '.join(PATTERNS)}") from None
    words = {spell_bytes(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])}
    model = bpe_model(
        words | specials,  # so that special tokens keep their ids even if these leave gaps
        {token: (rank, 0) for token, rank in words.items()},
        ignore_merges=True,  # tiktoken first looks up the complete word
    )
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [added_token(id, token, special=True) for token, id in specials.items()]
    content = tokenizer_content(model, added, None, {"type": "Sequence", "pretokenizers": [split, level]}, level)
    return Imported(
        content, "tiktoken ranks", None, "tiktoken", lambda text: encoding.encode(text, allowed_special="all")
    )


def assign_ids(special: dict[str, int | None], taken: set[int]) -> dict[str, int]:
    """Returns `special` with the next free id in place of each None. Raises UserError if an id is in `taken`."""
    assigned: dict[str, int] = {}
    for token, id in special.items():
        if id is None:
            id = max([*taken, *assigned.values()], default=-1) + 1
        elif id in taken or id in assigned.values():
            raise UserError(f"--special {token}={id}: this id is taken; use a free id, or only --special {token}")
        assigned[token] = id
    return assigned


def compare_ids(imported: Imported, texts: Iterable[str]) -> tuple[list[str], int]:
    """Compares the ids of the converted tokenizer with the ids of the original library.

    Texts that contain a special token are not compared, because `tokenizers` encodes special tokens and SentencePiece
    never does. Other added tokens are tested in additional texts.

    Returns:
        The texts whose ids differ, and the number of texts that were compared.
    """
    import tokenizers

    if imported.encode is None:
        return [], 0
    converted = tokenizers.Tokenizer.from_str(json.dumps(imported.content))
    added = imported.content["added_tokens"]
    special = [token["content"] for token in added if token["special"]]
    symbols = [token["content"] for token in added if not token["special"]][:20]
    texts = [*texts, *(f"{symbol} a" for symbol in symbols), *(f"a {symbol}b c{symbol}" for symbol in symbols)]
    compared = [text for text in texts if not any(token in text for token in special)]
    differing = [
        text for text in compared if converted.encode(text, add_special_tokens=False).ids != imported.encode(text)
    ]
    return differing, len(compared)


def bpe_model(vocabulary: dict[str, int], ranks: dict[str, tuple[float, int]], **options: Any) -> dict[str, Any]:
    """Returns the BPE `model` of a tokenizer.json.

    The merges are all pairs of tokens that form a token, sorted by the rank of the formed token. Pairs that form the
    same token are sorted by the length of the left token, longest first.

    Args:
        vocabulary: token -> id.
        ranks: rank of each token that takes part in merges, as a part or as the result.
        options: further keys of `model`.
    """
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:i], token[i:]) for i in range(len(token) - 1, 0, -1))
        merges += [(left, right) for left, right in pairs if left in ranks and right in ranks]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary,
        "merges": merges,
    }


def replace_step(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def added_token(id: int | None, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, **flags, "special": special}


def tokenizer_content(
    model: dict[str, Any], added: Sequence[dict[str, Any]], normalizer: Any, pre_tokenizer: Any, decoder: Any
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
