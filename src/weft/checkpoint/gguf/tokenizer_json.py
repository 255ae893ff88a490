"""Builds a tokenizer's folder from the vocabulary of a GGUF file."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.gguf.vocabulary import BYTE, CONTROL, PRE, UNKNOWN, UNUSED, USER_DEFINED
from weft.data.tokenizers.exactness import PATTERNS
from weft.data.tokenizers.import_tokenizer import added_token, bpe_model, replace_step, tokenizer_content
from weft.errors import UserError

# Further names of patterns in llama.cpp -> the steps that split text (`PRE`), and whether merges are ignored.
PATTERN_NAMES = {
    **{name: (steps, ignore) for steps, names in PRE.items() for ignore, name in enumerate(names) if name},
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), ((PATTERNS["llama3"],), 1)),
    "dbrx": ((PATTERNS["llama3"],), 0),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), ((PATTERNS["qwen2"],), 0)),
    **dict.fromkeys(("olmo", "phi-2", "mpt", "jais", "exaone4"), ((PATTERNS["gpt2"],), 0)),
    **dict.fromkeys(("refact", "command-r", "smollm", "codeshell", "exaone"), (("digits", PATTERNS["gpt2"]), 0)),
    **dict.fromkeys(("gpt-4o", "llama4"), ((PATTERNS["o200k"],), 0)),
}  # fmt: skip
# Keys of the vocabulary -> the type of the items of their lists.
_LISTS = {"tokens": str, "merges": str, "token_type": int, "scores": int | float, "precompiled_charsmap": int}
# Tokens that end documents, if the end-of-sequence token of the file ends an answer.
_DOCUMENT_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template of a GGUF file.

    Args:
        metadata: all metadata of the file.
        folder: an existing folder.

    Raises:
        UserError: the vocabulary is incomplete, or its type or pattern is unknown.
    """
    ggml = {
        key.removeprefix("tokenizer.ggml."): one for key, one in metadata.items() if key.startswith("tokenizer.ggml.")
    }
    tokens, kind = ggml.get("tokens"), str(ggml["model"])
    if not isinstance(tokens, list):
        raise UserError("the metadata key tokenizer.ggml.tokens is missing; convert the model again")
    for key, item in _LISTS.items():
        given = ggml.get(key) or []
        wrong = not isinstance(given, list) or not all(isinstance(one, item) for one in given)
        if wrong or (given and key in ("token_type", "scores") and len(given) != len(tokens)):
            raise UserError(f"the metadata key tokenizer.ggml.{key} does not fit the tokens; download the file again")
    types = ggml.get("token_type") or [1] * len(tokens)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
    if kind not in builders:
        raise UserError(f"tokenizer.ggml.model is {kind!r}, which is not supported; use one of {', '.join(builders)}")
    content = builders[kind](ggml, tokens, types)
    special = (CONTROL, UNKNOWN)
    content["added_tokens"] = [
        added_token(id, token, special=types[id] in special)
        for id, token in enumerate(tokens)
        if types[id] in (*special, USER_DEFINED)
    ]
    named = {
        key: tokens[ggml[f"{name}_token_id"]]
        for key, name in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if ggml.get(f"{name}_token_id", len(tokens)) < len(tokens)
    }
    last = ggml.get("eom_token_id")
    if last is not None and last < len(tokens) and tokens[last] in _DOCUMENT_ENDS:
        named["eos_token"] = tokens[last]
    if ggml.get("add_bos_token", kind == "llama") and "bos_token" in named:
        content["post_processor"] = _prefixed(named["bos_token"], tokens)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    for name, value in (("tokenizer.json", content), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")


def _prefixed(token: str, tokens: list[str]) -> dict[str, Any]:
    """Returns the post-processor that adds a token before a text."""
    first, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    ids = {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text, second], "special_tokens": ids}


def _byte_level(ggml: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    pre = str(ggml.get("pre", "default"))
    if pre not in PATTERN_NAMES:
        raise UserError(f"tokenizer.ggml.pre is {pre!r}, which is not supported; use one of {', '.join(PATTERN_NAMES)}")
    steps, ignore = PATTERN_NAMES[pre]
    model = bpe_model(
        {token: id for id, token in enumerate(tokens) if types[id] != UNUSED}, {}, ignore_merges=bool(ignore)
    )
    model["merges"] = [merge.split(" ") for merge in ggml.get("merges") or []]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits: list[dict[str, Any]] = [
        {"type": "Digits", "individual_digits": True}
        if step == "digits"
        else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
        for step in steps
    ]
    return tokenizer_content(model, (), None, {"type": "Sequence", "pretokenizers": [*splits, level]}, level)


def _sentencepiece(ggml: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = ggml.get("scores") or [0.0] * len(tokens)
    merged = {
        token: (-scores[id], id) for id, token in enumerate(tokens) if types[id] not in (BYTE, CONTROL, UNKNOWN, UNUSED)
    }
    unknown = ggml.get("unknown_token_id", 0)
    vocabulary = {token: id for id, token in enumerate(tokens) if types[id] != UNUSED}
    model = bpe_model(vocabulary, merged, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    return tokenizer_content(model, (), *_normalized(ggml.get("add_space_prefix", True)))


def _unigram(ggml: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    if ggml.get("precompiled_charsmap") or ggml.get("remove_extra_whitespaces"):
        steps = []
        if ggml.get("precompiled_charsmap"):
            charsmap = base64.b64encode(bytes(value % 256 for value in ggml["precompiled_charsmap"])).decode()
            steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
        if ggml.get("remove_extra_whitespaces"):
            steps += [replace_step({"Regex": r"\A +"}, ""), replace_step({"Regex": " {2,}"}, " ")]
    else:
        steps = []
    scores = ggml.get("scores") or [0.0] * len(tokens)
    model = {"type": "Unigram", "unk_id": ggml.get("unknown_token_id", 2), "byte_fallback": False}
    model["vocab"] = [[token, score] for token, score in zip(tokens, scores, strict=True)]
    normalizer, pre, decoder = _normalized(ggml.get("add_space_prefix", True))
    normalizer["normalizers"] = [*steps, *normalizer["normalizers"]]
    if ggml.get("remove_extra_whitespaces"):
        normalizer["normalizers"].append(replace_step({"Regex": r"▁+\z"}, ""))
    return tokenizer_content(model, (), normalizer, pre, decoder)


def _normalized(prefix: bool) -> tuple[dict[str, Any], None, dict[str, Any]]:
    """Returns normalizer, pre-tokenizer and decoder of a SentencePiece tokenizer.

    Args:
        prefix: whether a blank is added before a text.
    """
    steps = [{"type": "Prepend", "prepend": "▁"}] * prefix + [replace_step({"String": " "}, "▁")]
    decoders = [replace_step({"String": "▁"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    return {"type": "Sequence", "normalizers": steps}, None, {"type": "Sequence", "decoders": decoders}
