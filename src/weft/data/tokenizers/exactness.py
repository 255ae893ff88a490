"""Decides which tokenizers and texts the fast library gigatoken can encode with the same ids as `tokenizers`.

gigatoken is used only for tokenizers whose components are all listed below, and only for texts whose characters both
libraries classify equally. The tests compare the two libraries over all code points in many contexts.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

# Regexes by which byte-level BPE splits text into words before merging, as written in tokenizer.json. Llama 3 uses
# `llama3`, and so do the tokenizers that Weft trains.
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s+\z|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
# The regex for which gigatoken behaves like `cl100k` above (and like tiktoken); `tokenizers` interprets it differently.
_FOR_GIGATOKEN = {PATTERNS["cl100k"]: PATTERNS["cl100k"].replace(r"|\s+\z", "")}
# Matches where a text can be split without changing its ids: in every pattern above, a blank can only begin a word.
# Large documents are split, so that the slow library encodes only the pieces with doubtful characters.
WORD_START = re.compile(r"(?<=\S)(?= \S)")
PIECE = 32_768  # characters
# Separates texts that are encoded in one call; longer than any word that gigatoken looks up in its vocabulary.
SEPARATOR = "\0\1weft: the next document\1\0"
# The characters by which byte-level tokenizers represent the 256 bytes (Radford et al., 2019): visible ones by
# themselves, others from U+0100 on.
_VISIBLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_SPELLING = {byte: chr(byte) for byte in _VISIBLE}
_SPELLING |= {byte: chr(256 + n) for n, byte in enumerate(sorted({*range(256)} - _VISIBLE))}
_SPELLED = {character: byte for byte, character in _SPELLING.items()}
_BYTES = frozenset(_SPELLED)
# Gemma's pre-tokenizer. It never matches, because the normalizer has replaced all blanks.
_NO_BLANKS = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_PREFIX, _BLANKS = {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


@dataclass(frozen=True)
class Recipe:
    """How to use gigatoken so that it returns the same ids as `tokenizers` for a given tokenizer.json.

    Attributes:
        json: content of the tokenizer.json that gigatoken loads: the given one, without the added tokens.
        by_words: True for a byte-level BPE that splits texts into words before merging, so that texts can be joined and
            split between words; False for a BPE with byte fallback that merges across words.
        nfc: whether texts must be in Unicode normalization form C.
        separator: the id of SEPARATOR, the token that ends each text when several texts are encoded in one call.
        first: texts of the added tokens that `tokenizers` finds first.
        then: texts of the added tokens that `tokenizers` finds next, between the tokens found first.
        reference_only: texts of added tokens that only `tokenizers` handles (tokens that strip blanks, ...).
    """

    json: bytes
    by_words: bool
    nfc: bool
    separator: int
    first: tuple[str, ...]
    then: tuple[str, ...]
    reference_only: tuple[str, ...]


def make_recipe(content: Any) -> Recipe | str:
    """Returns how to use gigatoken for a tokenizer, or, as text for messages, why gigatoken cannot be used.

    `content`: the parsed tokenizer.json.
    """
    model = content["model"]
    if model.get("type") != "BPE":
        return f"the model is {model.get('type')}, but gigatoken supports only BPE"
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "the BPE model has dropout, a prefix or a suffix"
    merges, vocabulary = model["merges"], model["vocab"]
    pairs = merges if not merges or isinstance(merges[0], list) else [m.split(" ", 1) for m in merges]
    by_words = not model.get("byte_fallback")
    steps = _word_steps(content) if by_words else _text_steps(content)
    if isinstance(steps, str):
        return steps
    pre_tokenizer, normalizer, nfc = steps
    byte_level = _BYTES.issuperset("".join(vocabulary)) or _BYTES.issuperset("".join(_without_added(content)))
    if by_words and not (vocabulary.keys() >= _BYTES and byte_level):
        return "the vocabulary is not byte-level"
    if not by_words and not vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}:
        return "the vocabulary lacks some of the 256 bytes"
    ranks = np.fromiter((vocabulary[a + b] for a, b in pairs), np.int64, len(pairs))
    if not (np.diff(ranks) > 0).all():
        if len(set(map(tuple, pairs))) != len(pairs):
            return "the model lists a merge twice"
        # gigatoken uses ids as ranks if they are plausible ranks, and then prefers the leftmost of two merges to one
        # token. A repeated merge, otherwise ignored, makes it use the order of the merges.
        pairs = [*pairs, pairs[0]]
    added = content.get("added_tokens") or []
    separator = max([*vocabulary.values(), *(token["id"] for token in added)]) + 1
    matched = _match_order(added, normalizer is not None or nfc, by_words, pre_tokenizer)
    if isinstance(matched, str):
        return matched
    reduced = {
        "version": "1.0",
        "added_tokens": [{"id": separator, "content": SEPARATOR, "special": True}] if by_words else [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": pairs,
            "byte_fallback": not by_words,
            "ignore_merges": bool(model.get("ignore_merges")),
        },
    }
    return Recipe(orjson.dumps(reduced), by_words, nfc, separator, *matched)


def spell_bytes(token: bytes) -> str:
    """Returns the characters by which byte-level tokenizers represent the bytes of a token."""
    return "".join(map(_SPELLING.__getitem__, token))


def spelled_bytes(token: str) -> bytes:
    """Returns the bytes that a token represents; the bytes of its text if the token is not byte-level."""
    return bytes(map(_SPELLED.__getitem__, token)) if _BYTES.issuperset(token) else token.encode()


def _without_added(content: Any) -> list[str]:
    """Returns the tokens in a tokenizer.json's vocabulary, except added tokens, whose texts need not be byte-level."""
    added = {token["content"] for token in content.get("added_tokens") or []}
    vocabulary = content["model"]["vocab"]
    # An added token in the vocabulary with the same bytes as another word would hide that word.
    added -= {text for text in added if not _BYTES.issuperset(text) and spell_bytes(text.encode()) in vocabulary}
    return [token for token in vocabulary if token not in added]


def _word_steps(content: Any) -> tuple[Any, None, bool] | str:
    """Returns settings of gigatoken for a BPE on words, or, as text, the reason why gigatoken cannot be used.

    The settings are the pre-tokenizer, the normalizer (always None), and whether texts must be in NFC.
    """
    normalizer = content.get("normalizer")
    parts = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    kinds = {part["type"] for part in parts if part}
    if kinds - {"NFC"}:
        return f"the normalizer {', '.join(sorted(kinds))} was not verified with gigatoken"
    given: dict[str, Any] = content.get("pre_tokenizer") or {"type": "none"}
    parts: list[dict[str, Any]] = given["pretokenizers"] if given["type"] == "Sequence" else [given]
    last = parts[-1] if parts else {"type": "none"}
    unknown = "the pre-tokenizer was not verified with gigatoken"
    if last["type"] != "ByteLevel" or last.get("add_prefix_space", True):
        return unknown
    if len(parts) == 1 and last.get("use_regex", True):
        return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, None, bool(kinds)
    if len(parts) != 2 or last.get("use_regex", True) or parts[0]["type"] != "Split":
        return unknown
    split = parts[0]
    # These patterns match every character, so isolating the matches and removing the rest are the same.
    how = split.get("behavior"), bool(split.get("invert"))
    regex = split["pattern"].get("Regex")
    if regex not in PATTERNS.values() or how not in {("Isolated", False), ("Removed", True)}:
        return unknown
    split = {"type": "Split", "pattern": {"Regex": _FOR_GIGATOKEN.get(regex, regex)}, "behavior": "Isolated"}
    return split, None, bool(kinds)


def _text_steps(content: Any) -> tuple[Any, Any, bool] | str:
    """Returns settings of gigatoken for a BPE on complete texts, or, as text, the reason why gigatoken cannot be used.

    The settings are the pre-tokenizer, the normalizer, and whether texts must be in NFC (always False).
    """
    normalizer, given = content.get("normalizer"), content.get("pre_tokenizer")
    parts = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    if given in (None, _NO_BLANKS) and parts in ([_PREFIX, _BLANKS], [_BLANKS]):
        return None, normalizer, False
    if (
        normalizer is None
        and given is not None
        and given["type"] == "Metaspace"
        and given.get("replacement") == "▁"
        and given.get("split") is False
        and given.get("prepend_scheme") in {"always", "first", "never"}
    ):
        return given, None, False
    return "the normalizer and the pre-tokenizer were not verified with gigatoken"


def _match_order(
    added: list[Any], normalizes: bool, by_words: bool, pre_tokenizer: Any
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] | str:
    """Returns the attributes `first`, `then` and `reference_only` of a `Recipe`.

    If gigatoken cannot be used, returns the reason as text.

    Args:
        added: the added tokens, as in tokenizer.json.
        normalizes: whether the tokenizer has a normalizer.
        by_words: as in `Recipe`.
        pre_tokenizer: the pre-tokenizer in tokenizer.json, or None.
    """
    texts = [token["content"] for token in added]
    if "" in texts:
        return "an added token is empty"
    later = [token.get("normalized", not token.get("special")) for token in added]
    # The text between two added tokens is encoded independently, unless the beginning of a text is special.
    independent = by_words or pre_tokenizer is None or pre_tokenizer.get("prepend_scheme") != "first"
    flags = any(token.get(flag) for token in added for flag in ("single_word", "lstrip", "rstrip"))
    with_blank = by_words and any(" " in text for text in texts)  # could be split by `split_document`
    if independent and not flags and not with_blank and not (normalizes and any(later)):
        first = tuple(text for text, late in zip(texts, later, strict=True) if not late)
        return first, tuple(text for text, late in zip(texts, later, strict=True) if late), ()
    # `tokenizers` matches a normalized added token in the normalized text.
    blanks = any(late and (" " in text or "▁" in text) for late, text in zip(later, texts, strict=True))
    if normalizes and not by_words and blanks:
        return "an added token with blanks is matched in normalized text"
    return (), (), tuple({*texts, *(unicodedata.normalize("NFC", text) for text in texts)})


class CharacterCheck:
    """Finds texts with doubtful characters, which gigatoken and `tokenizers` possibly classify differently.

    Every character is doubtful, except characters that are assigned in Python's Unicode tables, private use characters,
    and blocks for pictographs. Python's tables are older than the tables of both libraries, and the categories of
    assigned characters hardly ever change.
    """

    _UNSEEN, _SETTLED, _DOUBTFUL = range(3)

    def __init__(self, recipe: Recipe):
        self._unused, self._nfc = not recipe.by_words, recipe.nfc  # only splitting into words depends on categories
        self._states = np.zeros(0x110000, np.uint8)  # by code point, filled as characters occur

    def is_doubtful(self, text: str) -> bool:
        """Whether `tokenizers` must encode `text`. Takes one or two nanoseconds per character of a non-ASCII text."""
        if self._unused or not text or text.isascii():
            return False
        for start in range(0, len(text), 1_000_000):  # limits the temporary arrays, 8 bytes per character
            codes = np.frombuffer(text[start : start + 1_000_000].encode("utf-32-le", "surrogatepass"), np.uint32)
            states = self._states[codes]
            if states.min() == self._UNSEEN:
                for code in np.unique(codes[states == self._UNSEEN]).tolist():
                    self._states[code] = self._SETTLED if is_settled(code) else self._DOUBTFUL
                states = self._states[codes]
            if states.max() == self._DOUBTFUL:
                return True
        return self._nfc and not unicodedata.is_normalized("NFC", text)


def is_settled(code: int) -> bool:
    """Whether all versions of gigatoken and `tokenizers` classify a code point equally."""
    if code == 0x295:  # a lower-case letter until Unicode 17, where it has no case
        return False
    return unicodedata.category(chr(code)) != "Cn" or 0x1F000 <= code <= 0x1FAFF or 0x1FC00 <= code <= 0x1FFFD


def split_document(text: str) -> list[str]:
    """Splits a text into pieces of about PIECE characters that can be encoded independently."""
    pieces, start = [], 0
    while len(text) - start > PIECE:
        found = WORD_START.search(text, start + PIECE)
        if found is None:
            break
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]
