"""Which tokenizers, and which texts, gigatoken may encode: those where its ids are the `tokenizers` library's.

Everything is exact by default: a tokenizer whose every part is on the lists below is trusted, and of its texts those
without doubtful characters. The tests compare the two libraries over all code points in many contexts.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

# How byte-level BPE cuts text into words before merging, as tokenizer.json spells it. Llama 3 uses `llama3`, and so do
# the tokenizers that Weft trains.
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
# gigatoken does as `cl100k` above (and as tiktoken) when it is given this, which means something else to `tokenizers`.
_GIGATOKENS = {PATTERNS["cl100k"]: PATTERNS["cl100k"].replace(r"|\s+\z", "")}
# A text may be cut here and its parts encoded one by one: in every pattern above a blank can only begin a word. Large
# documents are, so that one doubtful character does not send megabytes the slow way.
CUT = re.compile(r"(?<=\S)(?= \S)")
PIECE = 32_768  # characters
# Stands between texts that are encoded in one call; longer than any word that gigatoken looks up whole.
SEPARATOR = "\0\1weft: the next document\1\0"
# How byte-level tokenizers spell the 256 bytes (Radford et al., 2019): visible ones as they are, others from U+0100.
_VISIBLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_SPELLING = {byte: chr(byte) for byte in _VISIBLE}
_SPELLING |= {byte: chr(256 + n) for n, byte in enumerate(sorted({*range(256)} - _VISIBLE))}
_BYTES = frozenset(_SPELLING.values())
# Gemma's pre-tokenizer, which finds no blank: its normalizer has replaced them all.
_NO_BLANKS = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_PREFIX, _BLANKS = {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


@dataclass(frozen=True)
class Recipe:
    """How gigatoken encodes as one tokenizer.json means.

    Attributes:
        json: a tokenizer.json for gigatoken: of model and pre-tokenizer only what matters, and without added tokens.
        by_words: byte-level BPE on words: texts may be joined and cut. Otherwise BPE on whole texts with byte fallback.
        nfc: texts must be in Unicode's normal form C.
        separator: the id of SEPARATOR.
        first, then: texts of the added tokens in the order that `tokenizers` looks for them: `first` everywhere, then
            `then` in what is left. Both are empty if `fenced`.
        fenced: texts of added tokens that only `tokenizers` handles: those that strip blanks, stand alone, ...
    """

    json: bytes
    by_words: bool
    nfc: bool
    separator: int
    first: tuple[str, ...]
    then: tuple[str, ...]
    fenced: tuple[str, ...]


def recipe_of(content: Any) -> Recipe | str:
    """How to encode a tokenizer.json's texts by gigatoken, or why not ("its normalizer is ..., which ...")."""
    model = content["model"]
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, and gigatoken does BPE only"
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "its BPE has dropout, a prefix or a suffix"
    merges, vocabulary = model["merges"], model["vocab"]
    pairs = merges if not merges or isinstance(merges[0], list) else [m.split(" ", 1) for m in merges]
    by_words = not model.get("byte_fallback")
    shape = _words(content) if by_words else _sentences(content)
    if isinstance(shape, str):
        return shape
    pre_tokenizer, normalizer, nfc = shape
    spelled_in_bytes = _BYTES.issuperset("".join(vocabulary)) or _BYTES.issuperset("".join(_plain(content)))
    if by_words and not (vocabulary.keys() >= _BYTES and spelled_in_bytes):
        return "its vocabulary is not byte-level"
    if not by_words and not vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}:
        return "its vocabulary lacks some bytes"
    ranks = np.fromiter((vocabulary[a + b] for a, b in pairs), np.int64, len(pairs))
    if not (np.diff(ranks) > 0).all():
        if len(set(map(tuple, pairs))) != len(pairs):
            return "it lists a merge twice"
        # gigatoken takes ids for ranks if they look like such, and then the leftmost of two merges to the same token.
        # A repeated merge, which it ignores, makes it go by the merges' own order.
        pairs = [*pairs, pairs[0]]
    added = content.get("added_tokens") or []
    separator = max([*vocabulary.values(), *(token["id"] for token in added)]) + 1
    sorted_out = _added(added, normalizer is not None or nfc, by_words, pre_tokenizer)
    if isinstance(sorted_out, str):
        return sorted_out
    first, then, fenced = sorted_out
    slim = {
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
    return Recipe(orjson.dumps(slim), by_words, nfc, separator, first, then, fenced)


def spelled(token: bytes) -> str:
    """Bytes as byte-level tokenizers spell them."""
    return "".join(map(_SPELLING.__getitem__, token))


def _plain(content: Any) -> list[str]:
    """The vocabulary without the added tokens, whose text need not be spelled in bytes."""
    added = {token["content"] for token in content.get("added_tokens") or []}
    vocabulary = content["model"]["vocab"]
    # An added token in the vocabulary that spells the same bytes as another word would hide that word.
    added -= {text for text in added if not _BYTES.issuperset(text) and spelled(text.encode()) in vocabulary}
    return [token for token in vocabulary if token not in added]


def _words(content: Any) -> tuple[Any, None, bool] | str:
    """The pre-tokenizer for gigatoken, no normalizer, and whether texts must be NFC; or why not."""
    normalizer = content.get("normalizer")
    parts = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    kinds = {part["type"] for part in parts if part}
    if kinds - {"NFC"}:
        return f"its normalizer is {', '.join(sorted(kinds))}, which was not verified with gigatoken"
    given: dict[str, Any] = content.get("pre_tokenizer") or {"type": "none"}
    parts: list[dict[str, Any]] = given["pretokenizers"] if given["type"] == "Sequence" else [given]
    last = parts[-1] if parts else {"type": "none"}
    unknown = "its pre-tokenizer was not verified with gigatoken"
    if last["type"] != "ByteLevel" or last.get("add_prefix_space", True):
        return unknown
    if len(parts) == 1 and last.get("use_regex", True):
        return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, None, bool(kinds)
    if len(parts) != 2 or last.get("use_regex", True) or parts[0]["type"] != "Split":
        return unknown
    split = parts[0]
    # Every character is in some word of these patterns, so keeping the matches and removing the rest are the same.
    how = split.get("behavior"), bool(split.get("invert"))
    regex = split["pattern"].get("Regex")
    if regex not in PATTERNS.values() or how not in {("Isolated", False), ("Removed", True)}:
        return unknown
    split = {"type": "Split", "pattern": {"Regex": _GIGATOKENS.get(regex, regex)}, "behavior": "Isolated"}
    return split, None, bool(kinds)


def _sentences(content: Any) -> tuple[Any, Any, bool] | str:
    """The pre-tokenizer and normalizer of a tokenizer like Llama 2's; or why not."""
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
    return "its normalizer and pre-tokenizer were not verified with gigatoken"


def _added(
    added: list[Any], normalizes: bool, by_words: bool, pre_tokenizer: Any
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] | str:
    """The added tokens' texts: looked for first, then, and left to `tokenizers`; or why gigatoken is no use."""
    texts = [token["content"] for token in added]
    if "" in texts:
        return "an added token is empty"
    later = [token.get("normalized", not token.get("special")) for token in added]
    # What is between two added tokens is encoded by itself, unless the text's beginning is something special.
    alone = by_words or pre_tokenizer is None or pre_tokenizer.get("prepend_scheme") != "first"
    flags = any(token.get(flag) for token in added for flag in ("single_word", "lstrip", "rstrip"))
    cut_in_two = by_words and any(" " in text for text in texts)
    if alone and not flags and not cut_in_two and not (normalizes and any(later)):
        first = tuple(text for text, late in zip(texts, later, strict=True) if not late)
        return first, tuple(text for text, late in zip(texts, later, strict=True) if late), ()
    # `tokenizers` looks for a normalized token's normal form in the normal form of the text.
    blanks = any(late and (" " in text or "▁" in text) for late, text in zip(later, texts, strict=True))
    if normalizes and not by_words and blanks:
        return "an added token with blanks is looked for in normalized text"
    return (), (), tuple({*texts, *(unicodedata.normalize("NFC", text) for text in texts)})


class Doubts:
    """Finds the texts whose characters the libraries may class differently.

    A character is settled if this Python's Unicode tables, older than either library's, have it: classes hardly ever
    change once they are given. Private use and what is reserved for pictographs is settled too.
    """

    _UNSEEN, _SETTLED, _DOUBTFUL = range(3)

    def __init__(self, recipe: Recipe):
        self._none, self._nfc = not recipe.by_words, recipe.nfc  # without words there are no classes of characters
        self._states = np.zeros(0x110000, np.uint8)  # by code point, as they are met

    def about(self, text: str) -> bool:
        """Whether a text must go through `tokenizers`. Linear, a nanosecond or two a character; none for ASCII."""
        if self._none or not text or text.isascii():
            return False
        for start in range(0, len(text), 1_000_000):  # eight bytes a character, for a while
            if self._doubtful(text[start : start + 1_000_000]):
                return True
        return self._nfc and not unicodedata.is_normalized("NFC", text)

    def _doubtful(self, text: str) -> bool:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        states = self._states[codes]
        if states.min() == self._UNSEEN:
            for code in np.unique(codes[states == self._UNSEEN]).tolist():
                self._states[code] = self._SETTLED if settled(code) else self._DOUBTFUL
            states = self._states[codes]
        return bool(states.max() == self._DOUBTFUL)


def settled(code: int) -> bool:
    """Whether all versions of both libraries class this code point alike."""
    if code == 0x295:  # a small letter that Unicode 17 made one without case
        return False
    return unicodedata.category(chr(code)) != "Cn" or 0x1F000 <= code <= 0x1FAFF or 0x1FC00 <= code <= 0x1FFFD


def cut(text: str) -> list[str]:
    """A text in pieces of some 32,768 characters that may be encoded one by one."""
    pieces, start = [], 0
    while len(text) - start > PIECE:
        found = CUT.search(text, start + PIECE)
        if found is None:
            break
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]
