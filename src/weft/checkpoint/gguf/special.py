"""Special tokens and chat template of a tokenizer, as GGUF metadata."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.conversations.endings import stop_token
from weft.data.conversations.template import (
    ChatTemplate,
    find_template,
    has_template,
    special_tokens,
    template_problems,
)
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.headers import read_tokenizer

# `{% generation %}` marks the assistant's text for training; llama.cpp does not know this statement.
_MARKS = (
    (re.compile(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})"), r"\1if true\2"),
    (re.compile(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})"), r"\1endif\2"),
)


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a tokenizer.

    Attributes:
        metadata: metadata, without the prefix `tokenizer.`.
        template: the compiled chat template, or None.
        stops: the tokens that end an answer.
        warnings: texts about what llama.cpp does differently.
    """

    metadata: dict[str, Any]
    template: ChatTemplate | None
    stops: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def read_special_tokens(folder: Path, rows: int) -> SpecialTokens:
    """Returns the special tokens of the tokenizer in a folder.

    The end-of-sequence token of the metadata is the token that ends an answer in the chat template, because programs
    generate until this token. llama.cpp also stops at the end-of-document token.

    Args:
        rows: number of rows of the model's embedding; tokens beyond are left out.
    """
    header, content = read_tokenizer(folder)
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or [] if token["id"] < rows}
    vocab = content["model"]["vocab"]
    ids = {**(vocab if isinstance(vocab, dict) else {}), **added}
    named = {name: ids[token] for name, token in special_tokens(folder).items() if ids.get(token, rows) < rows}
    made: dict[str, Any] = {}
    template = source = None
    problems = template_problems(folder)
    if has_template(folder) and not problems:
        source = find_template(folder)
        template = ChatTemplate.for_tokenizer(source, folder)
    turn = added.get(stop_token(template, added)) if template is not None else None
    document = header.eod_id if header.eod_id is not None and header.eod_id < rows else None
    first, last, warnings = _around(folder)
    end = document if turn is None else turn
    begin = first if first is not None else named.get("bos_token")
    if end is not None:
        made |= {"ggml.eos_token_id": end, "ggml.eot_token_id": end}
        if document not in (None, end):
            made["ggml.eom_token_id"] = document  # the third key of a token at which llama.cpp stops
    if (begin := end if begin is None else begin) is not None:
        made["ggml.bos_token_id"] = begin  # without the key, llama.cpp uses the id of another model
    if "pad_token" in named:
        made["ggml.padding_token_id"] = named["pad_token"]
    made |= {"ggml.add_bos_token": first is not None, "ggml.add_eos_token": last is not None and last == end}
    if source is not None:
        made["chat_template"] = _plain(source.source)
        if source.with_tools:
            made |= {"chat_templates": ["tool_use"], "chat_template.tool_use": _plain(source.with_tools)}
    texts = {id: token for token, id in added.items()}
    stops = dict.fromkeys(texts[id] for id in (turn, document) if id in texts)
    left_out = tuple(f"the chat template is left out: {problem}" for problem in problems)
    return SpecialTokens(made, template, tuple(stops), (*warnings, *left_out))


def _plain(source: str) -> str:
    for mark, statement in _MARKS:
        source = mark.sub(statement, source)
    return source


def _around(folder: Path) -> tuple[int | None, int | None, tuple[str, ...]]:
    """Returns the ids that the tokenizer adds before and after a text, and warnings about further ids."""
    before, after = Tokenizer.load(folder).added_around
    warnings = ()
    if len(before) > 1 or len(after) > 1:
        warnings = ("llama.cpp adds at most one token before and after a text; this tokenizer adds more",)
    return before[0] if before else None, after[-1] if after else None, warnings
