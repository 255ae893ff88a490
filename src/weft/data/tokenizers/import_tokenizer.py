"""SentencePiece models and tiktoken ranks as tokenizer.json, compared with the library that each comes from."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.tokenizers.exactness import PATTERNS, spelled
from weft.errors import UserError
from weft.files import read_json
from weft.headers import read_tokenizer_header

EXTRA = "pip install 'weft-train[tokenizers]'"
# What both libraries are compared on: blanks, line ends, digits, scripts, marks, emoji, control characters, runs.
NASTY = [
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
# Where ids may differ without the import being wrong: long runs, which a unigram model can cut in several equally good
# ways, and characters in several code points, of which tokenizer.json's form of SentencePiece's normalizer misses some.
ODD = [
    "x" * 300,
    "e\u0301 a\u0323\u0301 o\u0338\u0301",
    "\u1100\u1161\u11a8 \uac00\u11a8",
    "\u0338² \u0345\u0301ω\u0345",
]


@dataclass(frozen=True)
class Imported:
    """A tokenizer.json's `content`, what it was made from (`kind`), the end-of-document token that the original states
    (`eod`), and how the original `library` encodes (`own`)."""

    content: dict[str, Any]
    kind: str
    eod: str | None
    library: str
    own: Callable[[str], list[int]] | None


def from_folder(file: Path, special: dict[str, int | None]) -> Imported:
    """A tokenizer.json with further special tokens.

    Raises:
        UserError: it is broken, or an id is taken or leaves a gap where there cannot be one.
    """
    header, content = read_tokenizer_header(file), read_json(file)
    vocabulary = content["model"]["vocab"]
    there = vocabulary if isinstance(vocabulary, dict) else {piece: id for id, (piece, _) in enumerate(vocabulary)}
    added = content["added_tokens"] = list(content.get("added_tokens") or [])
    new = {token: id for token, id in special.items() if token not in {known["content"] for known in added}}
    free = number({token: id for token, id in new.items() if token not in there}, set(range(header.vocab_size)))
    added += [_added(there.get(token, free.get(token)), token, special=True) for token in new]
    if isinstance(vocabulary, dict):
        vocabulary |= free  # so that they keep their ids where others are left free
    elif free and sorted(free.values()) != list(range(header.vocab_size, header.vocab_size + len(free))):
        raise UserError(f"--special: new ids must follow on, from {header.vocab_size}", file)
    return Imported(content, "a tokenizer.json", header.eod_token, "tokenizers", None)


def from_sentencepiece(file: Path) -> Imported:
    """A SentencePiece model (Kudo and Richardson, 2018; BPE or unigram).

    Raises:
        UserError: sentencepiece or protobuf is missing; no such model; a kind that tokenizer.json has no words for.
    """
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise UserError(f"SentencePiece models need {error.name}: {EXTRA}", file) from None
    protocol: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    model = protocol.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
        own = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
    except Exception as error:  # protobuf's DecodeError and sentencepiece's RuntimeError, by whichever is installed
        raise UserError(f"not a SentencePiece model ({type(error).__name__})", file) from None
    spec, rules = model.trainer_spec, model.normalizer_spec
    if spec.model_type not in (spec.UNIGRAM, spec.BPE):
        raise UserError("a word or character model; only BPE and unigram models can be imported", file)
    if spec.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise UserError("it keeps blanks behind words or as they are, for which tokenizer.json has no words", file)
    unknown = next((i for i, piece in enumerate(model.pieces) if piece.type == piece.UNKNOWN), None)
    if unknown is None:  # an empty file is a model without pieces
        raise UserError("not a SentencePiece model (it has no piece for what is unknown)", file)
    inner = _pieces(model, unknown)
    added = [
        _added(id, piece.piece, special=piece.type != piece.USER_DEFINED)
        for id, piece in enumerate(model.pieces)
        if piece.type in (piece.CONTROL, piece.USER_DEFINED, piece.UNKNOWN)
    ]
    steps: list[dict[str, Any]] = []
    if rules.precompiled_charsmap:
        charsmap = base64.b64encode(rules.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if rules.remove_extra_whitespaces:
        steps += [_replace({"Regex": r"\A +"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if rules.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    steps.append(_replace({"String": " "}, "▁"))
    if rules.remove_extra_whitespaces:
        steps.append(_replace({"Regex": r"▁+\z"}, ""))
    decoders: list[dict[str, Any]] = [_replace({"String": "▁"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if rules.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    content = _content(
        inner, added, {"type": "Sequence", "normalizers": steps}, None, {"type": "Sequence", "decoders": decoders}
    )
    kind = f"a SentencePiece {'BPE' if spec.model_type == spec.BPE else 'unigram'} model"
    eod = own.id_to_piece(own.eos_id()) if own.eos_id() >= 0 else None
    return Imported(content, kind, eod, "sentencepiece", lambda text: own.encode(text))


def _pieces(model: Any, unknown: int) -> dict[str, Any]:
    """The `model` of a tokenizer.json, of a SentencePiece ModelProto."""
    spec = model.trainer_spec
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    if spec.model_type != spec.BPE:
        return {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": spec.byte_fallback}
    ranks = {
        piece.piece: (-piece.score, id)
        for id, piece in enumerate(model.pieces)
        if piece.type in (piece.NORMAL, piece.USER_DEFINED)
    }
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[unknown][0],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": spec.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece: id for id, (piece, _) in enumerate(pieces)},
        "merges": _merges(ranks),
    }


def from_tiktoken(file: Path, pattern: str, special: dict[str, int | None]) -> Imported:
    """A tiktoken rank file.

    Args:
        pattern: how text is cut into words: a name of PATTERNS, or a regex.
        special: special tokens and their ids; None: the next that is free.

    Raises:
        UserError: tiktoken is missing; no rank file; a broken regex; an id that is taken.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise UserError("not a rank file: each line is a token in base64 and its rank", file, len(ranks) + 1) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"lacks {len(missing)} of the 256 bytes, such as 0x{missing[0]:02X}; not a rank file", file)
    specials = number(special, set(ranks.values()))
    regex = PATTERNS.get(pattern, pattern)
    try:
        import tiktoken

        own = tiktoken.Encoding("imported", pat_str=regex, mergeable_ranks=ranks, special_tokens=specials)
    except ImportError as error:
        raise UserError(f"tiktoken ranks need {error.name}: {EXTRA}", file) from None
    except ValueError as error:
        raise UserError(f"--pattern: {error}; {', '.join(PATTERNS)} are known by name") from None
    vocabulary = {spelled(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])}
    inner = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,  # tiktoken looks a whole word up first
        "vocab": vocabulary | specials,  # so that they keep their ids where others are left free
        "merges": _merges({token: (rank, 0) for token, rank in vocabulary.items()}),
    }
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [_added(id, token, special=True) for token, id in specials.items()]
    content = _content(inner, added, None, {"type": "Sequence", "pretokenizers": [split, level]}, level)
    return Imported(content, "tiktoken ranks", None, "tiktoken", lambda text: own.encode(text, allowed_special="all"))


def number(special: dict[str, int | None], taken: set[int]) -> dict[str, int]:
    """Ids for special tokens, the next free ones where none is given.

    Raises:
        UserError: an id that is taken.
    """
    numbered: dict[str, int] = {}
    for token, id in special.items():
        if id is None:
            id = max([*taken, *numbered.values()], default=-1) + 1
        elif id in taken or id in numbered.values():
            raise UserError(f"--special {token}={id}: this id is taken; name a free one, or none")
        numbered[token] = id
    return numbered


def differences(imported: Imported, texts: Iterable[str]) -> tuple[list[str], int]:
    """The texts whose ids are not those of the original library, and how many texts were compared.

    Texts that spell a special token are left out: `tokenizers` makes that token of them, SentencePiece never. Other
    added tokens are tried in some texts of their own.
    """
    import tokenizers

    if imported.own is None:
        return [], 0
    converted = tokenizers.Tokenizer.from_str(json.dumps(imported.content))
    added = imported.content["added_tokens"]
    special = [token["content"] for token in added if token["special"]]
    symbols = [token["content"] for token in added if not token["special"]][:20]
    texts = [*texts, *(f"{symbol} a" for symbol in symbols), *(f"a {symbol}b c{symbol}" for symbol in symbols)]
    found, compared = [], 0
    for text in texts:
        if any(token in text for token in special):
            continue
        compared += 1
        if converted.encode(text, add_special_tokens=False).ids != imported.own(text):
            found.append(text)
    return found, compared


def _merges(ranks: dict[str, tuple[float, int]]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, by that token's rank; of those the longest left part first."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:i], token[i:]) for i in range(len(token) - 1, 0, -1))
        merges += [(left, right) for left, right in pairs if left in ranks and right in ranks]
    return merges


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _added(id: int | None, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, **flags, "special": special}


def _content(
    model: dict[str, Any], added: Sequence[dict[str, Any]], normalizer: Any, pre_tokenizer: Any, decoder: Any
) -> dict[str, Any]:
    """A tokenizer.json."""
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
