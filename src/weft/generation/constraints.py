"""Restricts continuations to a JSON schema, a regex or a grammar, with llguidance.

llguidance compiles a schema, regex or grammar to a recognizer of bytes. The recognizer walks a trie of the bytes of all
tokens, and so finds the tokens that can come next (Willard and Louf, 2023).
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.generation.json_schema import prepare_schema

# White space between the parts of a JSON text is what formatters write: a model could go on with white space for ever.
# Without \u escapes, equal keys are written equally.
JSON_OPTIONS = {"whitespace_pattern": " |\\n(?: {0,24}|\\t{0,8})", "json_allowed_escapes": 'nrbtf\\"'}
NAMES = ("json_schema", "regex", "grammar")


def load_llguidance() -> Any:
    """Imports llguidance. Raises UserError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UserError(
            "json_schema, regex and grammar need llguidance, which is not installed; install it: "
            "pip install 'weft-train[constraints]'"
        ) from None
    return llguidance


def compile_constraint(json_schema: Any = None, regex: str | None = None, grammar: str | None = None) -> str | None:
    """Checks a JSON schema, regex or grammar, and converts it to llguidance's JSON format.

    Returns None if none of the three is given.

    Raises:
        UserError: more than one of the three is given, llguidance is not installed, or the given one is invalid.
    """
    given = [name for name, value in zip(NAMES, (json_schema, regex, grammar), strict=True) if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are set; set only one of them")
    if json_schema is not None:
        return _compile("json_schema", _json_text(json_schema))
    for name, value in (("regex", regex), ("grammar", grammar)):
        if value is not None:
            if not isinstance(value, str):
                raise UserError(f"{name} is of type {type(value).__name__}; set it to a string")
            if not value:
                raise UserError(f"{name} is empty, so that only the empty text matches; omit it, or give a pattern")
            return _compile(name, value)
    return None


def json_rule(schema: Any) -> str:
    """Returns an expression of a Lark grammar for the JSON texts that follow a schema, checked like `json_schema`.

    Raises:
        UserError: the schema is invalid or cannot be enforced, or llguidance is not installed.
    """
    (grammar,) = json.loads(_compile("json_schema", _json_text(schema)))["grammars"]
    return f"%json {json.dumps(grammar['json_schema'])}"


@functools.lru_cache(maxsize=64)
def _compile(name: str, text: str) -> str:
    llguidance = load_llguidance()
    if name == "json_schema":
        return _json_grammar(prepare_schema(json.loads(text), lambda schema: _error_of(_json_grammar(schema))))
    matcher = llguidance.LLMatcher
    made = matcher.grammar_from_regex(text) if name == "regex" else _lark_grammar(text)
    error = _error_of(made)
    if error is not None:
        raise UserError(f"{name} {text if len(text) <= 60 else text[:60] + '...'!r}: {error}; correct it")
    return made


def _json_text(schema: Any) -> str:
    """Returns a schema as JSON text. Raises UserError if the schema is not JSON."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"json_schema is not JSON: {' '.join(str(error).split())}; correct it") from None


def _json_grammar(schema: Any) -> str:
    options = {"x-guidance": JSON_OPTIONS}
    schema = {**schema, **options} if isinstance(schema, dict) else {"allOf": [schema], **options}
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _lark_grammar(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _all_tokens(grammar: str, after_blank: bool) -> str:
    """Returns a grammar that accepts the same texts as `grammar`, in any split into tokens.

    Where `grammar` fixes the text, llguidance would accept only the tokens into which the tokenizer splits this text.

    Args:
        after_blank: whether a blank precedes each accepted text.
    """
    (body,) = json.loads(grammar)["grammars"]
    start = '%llguidance {"no_forcing": true}\nstart: ' + '" " ' * after_blank + "@body"
    return json.dumps({"grammars": [{"lark_grammar": start}, {**body, "name": "body"}]})


@functools.cache
def _bytes_tokenizer() -> Any:
    return load_llguidance().LLTokenizer("byte")


def _error_of(grammar: str, tokenizer: Any = None) -> str | None:
    """Compiles a grammar, or only validates it if `tokenizer` is None. Returns the error in one line, or None."""
    if tokenizer is None:
        message = load_llguidance().LLMatcher.validate_grammar(grammar)
        return None if not message or message.startswith("WARNING") else _one_line(message)
    matcher = load_llguidance().LLMatcher(tokenizer, grammar, log_level=0)
    return _one_line(matcher.get_error()) if matcher.is_error() else None


def _one_line(message: str) -> str:
    """Extracts the cause of an error from llguidance's message, which can have many lines and quote the grammar."""
    reason = re.search(r"^error: (.*)$", message, re.MULTILINE)
    first = message.removeprefix("ERROR: ").partition("\n")[0]
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", first)
    what = first[place.end() :] if place else first
    what = re.sub(r'^invalid regex ".*" \(in regex\): ', "", what)
    what = reason.group(1) if reason else what.rstrip(":")
    return what if place is None or reason else f"{what} (line {place.group(1)})"


class TokenTrie:
    """A trie of the bytes of a tokenizer's tokens, and a cache of the grammars that were compiled with the trie.

    Args:
        tokenizer: a byte-level or SentencePiece tokenizer.

    Attributes:
        size: number of tokens.

    Raises:
        UserError: the text of a token depends on other tokens, as in WordPiece.
    """

    def __init__(self, tokenizer: Tokenizer):
        llguidance = load_llguidance()
        tokens = tokenizer.token_bytes
        if tokens is None:
            raise UserError(
                "json_schema, regex and grammar need a byte-level or SentencePiece tokenizer; use another model",
                tokenizer.path,
            )
        self.size = len(tokens)
        wrapper = llguidance.TokenizerWrapper(_Encoder(tokenizer, tokens))
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=tokenizer.eod_id)
        self._new_matcher = llguidance.LLMatcher
        self._compiled = functools.lru_cache(maxsize=32)(self._compile)

    def matcher(self, grammar: str) -> Any:
        """Returns a new llguidance matcher of a grammar.

        Raises:
            UserError: no text matches the grammar, or the grammar names a token that the vocabulary does not have.
        """
        return self._compiled(grammar).deep_copy()

    def _compile(self, grammar: str) -> Any:
        matcher = self._new_matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(
                f"the grammar does not fit the tokenizer: {_one_line(matcher.get_error())}; change the grammar"
            )
        matcher.compute_bitmask()  # copies of the matcher begin with the states of the lexer
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise UserError("no text matches the json_schema, regex or grammar; change it")
        return matcher


class _Encoder:
    """Adapts a tokenizer to the interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]):
        self.eos_token_id, self.tokens, self._tokenizer = tokenizer.eod_id, tokens, tokenizer
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


_TRIES: dict[tuple[str, int], TokenTrie] = {}  # by tokenizer; the last four


def trie_of(tokenizer: Tokenizer) -> TokenTrie:
    """Returns the trie of a tokenizer. The tries of the last four tokenizers are kept."""
    key = tokenizer.digest, tokenizer.eod_id
    if key not in _TRIES:
        while len(_TRIES) >= 4:
            del _TRIES[next(iter(_TRIES))]
        _TRIES[key] = TokenTrie(tokenizer)
    return _TRIES[key]


class Constraint:
    """Determines which tokens can come next in one continuation.

    The methods take `new`, all tokens of the continuation so far. Results do not depend on earlier calls.

    Args:
        tokenizer: the tokenizer.
        grammar: result of `compile_constraint`.
        stop_ids: tokens that end a continuation. They are allowed where the text is complete.
        after_blank: whether the continuation begins with a blank that is not part of the text (see `Prompt.first`).

    Raises:
        UserError: the tokenizer is not supported, or no text matches.
    """

    def __init__(self, tokenizer: Tokenizer, grammar: str, stop_ids: Collection[int], after_blank: bool = False):
        trie = trie_of(tokenizer)
        self._new_matcher = functools.partial(trie.matcher, _all_tokens(grammar, after_blank))
        self._matcher = self._new_matcher()
        self._size, self._eod, self._stop_ids = trie.size, tokenizer.eod_id, frozenset(stop_ids)
        self._tokens: list[int] = []  # the tokens that the matcher has consumed
        self._mask: torch.Tensor | None = None  # for these tokens
        self.mask(())

    def mask(self, new: Sequence[int]) -> torch.Tensor:
        """Returns whether each token of the vocabulary is allowed after `new`, bool `[vocab]`, on the CPU.

        Raises:
            UserError: `new` is not allowed, no token is allowed after `new`, or the grammar is too complex.
        """
        self._go_to(new)
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            mask = np.unpackbits(bits, count=self._size, bitorder="little").astype(bool)
            ends = self._matcher.is_accepting()
            for id in (self._eod, *self._stop_ids):
                if id < self._size:
                    mask[id] = ends and id in self._stop_ids
            self._check()
            if not mask.any():
                raise UserError("the json_schema, regex or grammar failed: no token continues the text; change it")
            self._mask = torch.from_numpy(mask)
        return self._mask

    def advance(self, new: Sequence[int]) -> bool:
        """Returns whether `new` is a complete text that cannot become longer.

        If not, also computes `mask(new)`, so that an error is raised now, and a later call of `mask` is fast.

        Raises:
            UserError: in the same cases as `mask`.
        """
        self._go_to(new)
        complete = self._matcher.is_stopped() and self._matcher.is_accepting()
        if not complete:
            self.mask(new)
        return complete

    def count_allowed(self, new: Sequence[int], draft: Sequence[int]) -> int:
        """Returns the length of the longest prefix of `draft` that is allowed after `new`.

        The prefix ends before the first stop token, and at the end of a text that cannot become longer.
        """
        self._go_to(new)
        end = next((i for i, token in enumerate(draft) if token in self._stop_ids), len(draft))
        allowed = self._matcher.validate_tokens(list(draft[:end]))
        self._check()
        return allowed

    def _go_to(self, new: Sequence[int]) -> None:
        """Moves the matcher to the end of `new`: rolls back tokens that differ, and consumes the other tokens."""
        tokens, known = list(new), self._tokens
        if tokens[: len(known)] != known:
            same = next(i for i, token in enumerate(known) if i == len(tokens) or token != tokens[i])
            self._matcher.rollback(len(known) - same)
            self._tokens, self._mask = known[:same], None
        added = list(itertools.takewhile(lambda id: id not in self._stop_ids, tokens[len(self._tokens) :]))
        if added:
            self._matcher.consume_tokens(added)
            self._tokens, self._mask = self._tokens + added, None
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            error = _one_line(self._matcher.get_error()).replace("NoExtensionBias", "no token continues the text")
            self._matcher, self._tokens, self._mask = self._new_matcher(), [], None
            raise UserError(f"the json_schema, regex or grammar failed: {error}; change it")


def new_constraint(
    grammar: str | None, tokenizer: Tokenizer | None, stop_ids: Collection[int], after_blank: bool = False
) -> Constraint | None:
    """Returns the constraint of a continuation (see `Constraint`), or None if `grammar` is None.

    Raises:
        UserError: `grammar` is given without a tokenizer, or `Constraint` raises the error.
    """
    if grammar is None:
        return None
    if tokenizer is None:
        raise UserError("json_schema, regex and grammar need a tokenizer; pass one to weft.Engine")
    return Constraint(tokenizer, grammar, stop_ids, after_blank)
