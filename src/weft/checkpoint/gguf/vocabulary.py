"""Converts a tokenizer.json to GGUF's vocabulary, if llama.cpp splits and merges text in the same way.

llama.cpp has byte-level BPE with a list of named patterns (`tokenizer.ggml.pre`), the BPE of SentencePiece (`llama`),
and SentencePiece's unigram model (`t5`).
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.data.tokenizers.exactness import PATTERNS, spell_bytes
from weft.errors import UserError
from weft.headers import read_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types of GGUF
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# The pattern of Qwen 3.5, whose words contain combining marks.
_QWEN35 = PATTERNS["qwen2"].replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# The steps by which a byte-level tokenizer splits text (`_steps`) -> names of the same pattern in llama.cpp: for
# tokenizers that merge all words, and for those with `ignore_merges`, where a word that is a token is not merged.
PRE: dict[tuple[str, ...], tuple[str | None, str | None]] = {
    (PATTERNS["gpt2"],): ("gpt-2", None),
    ("digits", PATTERNS["gpt2"]): ("starcoder", None),
    (PATTERNS["llama3"],): ("smaug-bpe", "llama-bpe"),
    (PATTERNS["qwen2"],): ("qwen2", None),
    (_QWEN35,): ("qwen35", None),
}
# Patterns that llama.cpp has only approximately.
_APPROXIMATE: dict[tuple[str, ...], str] = {
    (PATTERNS["o200k"],): "llama.cpp's form of this pattern, gpt-4o, treats letters outside of A-Z as both upper and "
    "lower case",
}
# Tokens that llama.cpp takes for special ones by their text.
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "[EOT]", "<|eom_id|>", "</s>", "<|return|>", "<|call|>", "<eos>", "<end_of_utterance>",
}  # fmt: skip
_HINT = "use --pre NAME to write llama.cpp's pattern NAME nevertheless (texts may then get other ids)"


@dataclass
class Vocabulary:
    """The metadata `tokenizer.ggml.*` of a tokenizer, without the prefix, and warnings."""

    metadata: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def vocabulary(folder: Path, rows: int, pre: str | None) -> Vocabulary:
    """Returns tokens, merges or scores, and the rules of llama.cpp for a tokenizer.

    Args:
        folder: the tokenizer's folder.
        rows: number of rows of the model's embedding; rows without a token become unused tokens.
        pre: name of llama.cpp's pattern. Default: the pattern that equals the tokenizer's.

    Raises:
        UserError: llama.cpp would give other ids to some texts, and `pre` is None.
    """
    file = folder / "tokenizer.json"
    content = read_tokenizer(folder)[1]
    made = Vocabulary()
    try:
        kind = content["model"].get("type", "BPE")
        if kind == "Unigram":
            made.metadata |= _unigram(content)
        elif kind == "BPE" and content["model"].get("byte_fallback"):
            made.metadata |= _sentencepiece(content, pre is not None)
        elif kind == "BPE":
            made.metadata |= _byte_level(file, content, pre)
        else:
            raise UserError(f"llama.cpp has no tokenizer of type {kind}; use --to hf")
    except UserError as error:
        raise UserError(error.what, error.where or file) from None
    _add_tokens(made, content, rows)
    if any(step.get("type") == "NFC" for step in _flat(content.get("normalizer"), "normalizers")):
        made.warnings.append(
            "llama.cpp does not normalize text, but this tokenizer does (NFC); a text that is not NFC gets other ids"
        )
    return made


def _flat(step: Any, key: str) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer; the steps of a Sequence are in its list `key`."""
    if step is None:
        return []
    return [one for inner in step[key] for one in _flat(inner, key)] if step["type"] == "Sequence" else [step]


# ---- byte-level BPE


def _steps(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the regexes by which a byte-level tokenizer splits text, with "digits" for a split of single digits.

    Raises:
        UserError: the tokenizer is not byte-level, or has steps that llama.cpp does not have.
    """
    found: list[str] = []
    level = None
    for step in _flat(content.get("pre_tokenizer"), "pretokenizers"):
        kind = step["type"]
        if kind == "Digits" and step.get("individual_digits") and level is None:
            found.append("digits")
        elif kind == "Split" and level is None and "Regex" in step["pattern"]:
            behavior = (step["behavior"].lower(), bool(step.get("invert")))
            if behavior not in (("isolated", False), ("removed", True)):
                raise UserError(f"its Split with behavior {step['behavior']} does not exist in llama.cpp; {_HINT}")
            found.append(step["pattern"]["Regex"])
        elif kind == "ByteLevel" and level is None:
            level = step
        else:
            raise UserError(f"its pre-tokenizer {kind} does not exist in llama.cpp; {_HINT}")
    if level is None:
        raise UserError(f"it is neither byte-level nor a SentencePiece model with bytes; {_HINT}")
    if level.get("add_prefix_space"):
        raise UserError(f"its ByteLevel with add_prefix_space does not exist in llama.cpp; {_HINT}")
    return (*found, PATTERNS["gpt2"]) if level.get("use_regex", True) else tuple(found)


def _byte_level(file: Path, content: Mapping[str, Any], pre: str | None) -> dict[str, Any]:
    model = content["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UserError(f"its model's {key} does not exist in llama.cpp; use --to hf")
    lacking = [byte for byte in range(256) if spell_bytes(bytes([byte])) not in model["vocab"]]
    if lacking:
        raise UserError(f"lacks {len(lacking)} of the 256 bytes, such as 0x{lacking[0]:02X}; use --to hf")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"model": "gpt2", "pre": pre or _find_pre(file, content), "merges": merges}


def _find_pre(file: Path, content: Mapping[str, Any]) -> str:
    """Returns the name of the pattern that llama.cpp and the tokenizer share."""
    normalizers = {step["type"] for step in _flat(content.get("normalizer"), "normalizers")} - {"NFC"}
    if normalizers:
        raise UserError(f"its normalizer {sorted(normalizers)[0]} does not exist in llama.cpp; {_HINT}")
    steps = _steps(content)
    if steps in _APPROXIMATE:
        raise UserError(f"{_APPROXIMATE[steps]}; {_HINT}")
    if steps not in PRE:
        known = ", ".join(name or other or "" for name, other in PRE.values())
        raise UserError(f"its pattern {' and '.join(map(repr, steps))} equals none of {known}; {_HINT}")
    ignore = bool(content["model"].get("ignore_merges"))
    same, other = PRE[steps][ignore], PRE[steps][not ignore]
    if same is not None:
        return same
    if other is None or not _merges_to_tokens(file, content):
        raise UserError(f"its model's ignore_merges: {ignore} does not exist in llama.cpp for its pattern; {_HINT}")
    return other


def _merges_to_tokens(file: Path, content: Mapping[str, Any]) -> bool:
    """Whether the merges of each token's bytes result in this token, so that `ignore_merges` changes nothing."""
    import tokenizers

    words = [word for word in content["model"]["vocab"] if all(character in _SPELLED for character in word)]
    plain = {**content["model"], "ignore_merges": False}
    model = tokenizers.Tokenizer.from_str(json.dumps({**content, "model": plain, "added_tokens": []})).model
    return all(len(model.tokenize(word)) == 1 for word in words)


_SPELLED = {spell_bytes(bytes([byte])) for byte in range(256)}


# ---- SentencePiece

_ESCAPE = ("Replace", {"String": " "}, "▁")


def _spaces(content: Mapping[str, Any], ignoring: bool) -> bool:
    """Whether a SentencePiece tokenizer adds a blank before a text.

    Args:
        ignoring: whether steps that llama.cpp does not have are ignored.

    Raises:
        UserError: the tokenizer has other steps than llama.cpp.
    """
    prefix = False
    for step in _flat(content.get("normalizer"), "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == "▁":
            prefix = True
        elif (step["type"], step.get("pattern"), step.get("content")) != _ESCAPE and not ignoring:
            raise UserError(f"its normalizer {step['type']} does not exist in llama.cpp; {_HINT}")
    for step in _flat(content.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") == "never":
            continue
        if step["type"] == "Metaspace" and ignoring:
            prefix = True
        elif not ignoring and (step["type"] != "Split" or step["pattern"] != {"String": " "}):
            what = "" if step["type"] != "Metaspace" else ", which adds no blank before a text that begins with one,"
            raise UserError(f"its pre-tokenizer {step['type']}{what} does not exist in llama.cpp; {_HINT}")
    return prefix


def _sentencepiece(content: Mapping[str, Any], ignoring: bool) -> dict[str, Any]:
    """Returns the metadata of a BPE model of SentencePiece. llama.cpp merges the pair whose result has the best score.

    Raises:
        UserError: the merges do not follow from scores of their results.
    """
    model = content["model"]
    lacking = [byte for byte in BYTES if byte not in model["vocab"]]
    if lacking:
        raise UserError(f"lacks the token {lacking[0]} of a byte; use --to hf")
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    order = [left + right for left, right in merges]
    grouped = sum(one != other for one, other in itertools.pairwise(order)) + bool(order) == len(ranks)
    if not ignoring and not (grouped and _complete(model["vocab"], set(merges), ranks)):
        raise UserError(f"its merges are not those of SentencePiece, which llama.cpp computes from scores; {_HINT}")
    scores = {token: -float(place) for place, token in enumerate(sorted(ranks, key=ranks.__getitem__))}
    prefix = _spaces(content, ignoring)
    return {"model": "llama", "pre": "default", "add_space_prefix": prefix, "scores": scores}


def _complete(vocab: Mapping[str, int], merges: set[tuple[str, ...]], ranks: Mapping[str, int]) -> bool:
    """Whether there is a merge for each pair of tokens that forms a token."""
    parts = {one for one in vocab if len(one) == 1 or one in ranks}
    pairs = (
        (token[:end], token[end:])
        for token in ranks
        for end in range(1, len(token))
        if token[:end] in parts and token[end:] in parts
    )
    return all(pair in merges for pair in pairs)


def _unigram(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a unigram model of SentencePiece.

    Raises:
        UserError: llama.cpp's unigram model lacks bytes, or another step of the tokenizer.
    """
    model = content["model"]
    if model.get("byte_fallback"):
        raise UserError("llama.cpp's unigram model has no bytes for unknown characters (byte_fallback); use --to hf")
    found: dict[str, Any] = {"model": "t5", "pre": "default", "add_space_prefix": False}
    found["remove_extra_whitespaces"] = False
    for step in _flat(content.get("normalizer"), "normalizers"):
        pattern = step.get("pattern", {})
        if step["type"] == "Precompiled":
            found["precompiled_charsmap"] = list(base64.b64decode(step["precompiled_charsmap"]))
        elif step["type"] == "Prepend":
            found["add_space_prefix"] = True
        elif step["type"] == "Replace" and "Regex" in pattern:
            found["remove_extra_whitespaces"] = True
        elif step["type"] != "Replace" or pattern != {"String": " "}:
            raise UserError(f"its normalizer {step['type']} does not exist in llama.cpp; use --to hf")
    if content.get("pre_tokenizer") is not None:
        raise UserError(
            f"its pre-tokenizer {content['pre_tokenizer']['type']} does not exist in llama.cpp; use --to hf"
        )
    found["scores"] = dict(model["vocab"])
    return found


# ---- tokens


def _add_tokens(made: Vocabulary, content: Mapping[str, Any], rows: int) -> None:
    """Adds the list of tokens with their types and scores to the metadata."""
    model, metadata = content["model"], made.metadata
    vocab = model["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((token, id) for id, (token, _) in enumerate(vocab))
    tokens, types = [f"[PAD{id}]" for id in range(rows)], [UNUSED] * rows
    for token, id in pairs:
        if id < rows:
            tokens[id], types[id] = token, NORMAL
    if metadata["model"] == "llama":
        for byte in BYTES:
            types[vocab[byte]] = BYTE
    unknown = model.get("unk_token")
    if model.get("unk_id") is not None:
        unknown = tokens[model["unk_id"]]
    strips = []
    for added in content.get("added_tokens") or []:
        if added["id"] >= rows:
            continue
        blank = metadata["model"] != "gpt2" and added.get("normalized")
        tokens[added["id"]] = added["content"].replace("▁", " ") if blank else added["content"]
        types[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
        strips += [added["content"] for key in ("lstrip", "rstrip", "single_word") if added.get(key)]
    if unknown is not None and unknown in tokens and metadata["model"] != "gpt2":
        types[tokens.index(unknown)] = UNKNOWN
        metadata["unknown_token_id"] = tokens.index(unknown)
    if strips:
        made.warnings.append(
            f"llama.cpp ignores lstrip, rstrip and single_word of special tokens, such as {strips[0]}; white space "
            "beside them gets other ids"
        )
    if ordinary := sorted(_ENDS & {token for token, one in zip(tokens, types, strict=True) if one == NORMAL}):
        made.warnings.append(f"llama.cpp takes the ordinary token {ordinary[0]} for the end of a text")
    if metadata["model"] == "t5" and metadata["add_space_prefix"]:
        made.warnings.append("llama.cpp adds no blank before a text of blanks only, which gets other ids")
    scores = metadata.pop("scores", None)
    if scores is not None:
        lowest = min(scores.values(), default=0.0) - 1.0
        metadata["scores"] = [float(scores.get(token, lowest)) for token in tokens]
    metadata["tokens"], metadata["token_type"] = _distinct(tokens, types), types


def _distinct(tokens: list[str], types: Sequence[int]) -> list[str]:
    """Returns the tokens with different names for unused ones; llama.cpp requires that all differ."""
    taken = {token for token, kind in zip(tokens, types, strict=True) if kind != UNUSED}
    return [token + "_" * (kind == UNUSED and token in taken) for token, kind in zip(tokens, types, strict=True)]
