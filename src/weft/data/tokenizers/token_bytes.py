"""Finds the bytes of tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from weft.data.tokenizers.exactness import spelled_bytes

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}


def token_bytes(content: Any, reference: tokenizers.Tokenizer) -> list[bytes] | None:
    """Returns the bytes of each token, by id, as the decoder of a tokenizer.json writes them.

    Args:
        content: the parsed tokenizer.json.
        reference: the tokenizer.

    Returns:
        The bytes, empty for ids without a token; None if the decoder is neither byte-level nor SentencePiece's.
    """
    decoder: dict[str, Any] = content.get("decoder") or {"type": "none"}
    parts: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    vocabulary = reference.get_vocab(with_added_tokens=True)
    found = [b""] * (max(vocabulary.values(), default=-1) + 1)
    if "ByteLevel" in kinds:
        for token, id in vocabulary.items():
            found[id] = spelled_bytes(token)
        return found
    if not kinds <= _SENTENCEPIECE:
        return None
    replaced = [(p["pattern"].get("String"), p["content"]) for p in parts if p["type"] == "Replace"]
    replaced += [(p.get("replacement", "▁"), " ") for p in parts if p["type"] == "Metaspace"]
    if any(old is None for old, _ in replaced):  # a regex
        return None
    for token, id in vocabulary.items():
        byte = _BYTE.fullmatch(token) if "ByteFallback" in kinds else None
        for old, new in replaced:
            token = token.replace(old, new)
        found[id] = bytes.fromhex(byte.group(1)) if byte else token.encode()
    return found
