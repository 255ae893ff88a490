"""Converts text to ids with the fast gigatoken library and back. The ids equal those of the `tokenizers` library."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.data.tokenizers.exactness import make_recipe
from weft.data.tokenizers.fast_encoder import FastEncoder, concatenate_ids
from weft.data.tokenizers.token_bytes import token_bytes
from weft.errors import UserError
from weft.headers import read_tokenizer, tokenizer_file

if TYPE_CHECKING:
    import tokenizers

# gigatoken is compared with `tokenizers` on this text and on samples of the first batch.
PROBE = (
    "The quick brown fox's 12345 jumps; don't WE'LL   3.14159e-10\r\n\r\n\tdef f(x): return {'a': [x]}  # ok\n\n\n"
    "Größe naïve ﬁn ’tis ſ İı Ελληνικά русский עברית العربية हिन्दी ไทย 日本語、한국어 á ế "  # noqa: RUF001
    "½ ² ٣ Ⅷ 一二 \0\7\x85\xa0\u2028\u3000\u200d \ufeff\ufffd --- ==== //// ..... 'S'T \n x\n y  z"
)
CHECKED_CHARACTERS = 60_000
REFERENCE_CHARACTERS = 1_000_000  # characters per call of `tokenizers`, which needs 100 bytes of memory per token
BLANKS = ("\u0120", "\u2581")  # spelling of a leading blank: in byte-level tokens, in SentencePiece tokens
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Prompt:
    """A text for a model to continue.

    Attributes:
        text: the text; if `first` is not None, without the blank at its end, with which the first new token begins.
        ids: ids of the text.
        first: ids that are allowed as the first new token; None: all ids.
    """

    text: str
    ids: list[int]
    first: frozenset[int] | None


class Tokenizer:
    """A tokenizer, loaded from a folder with `tokenizer.json` and `tokenizer_config.json`.

    The end-of-document token is the `eos_token` of `tokenizer_config.json`.

    >>> tokenizer = weft.Tokenizer.load("tok")
    >>> tokenizer.decode(tokenizer.encode("Kalo mi"))
    'Kalo mi'

    Truncation and padding of a tokenizer.json are ignored.

    Attributes:
        path: path of the folder or of the tokenizer.json.
        vocab_size: number of tokens, including special tokens.
        eod_id: id of the end-of-document token.
        digest: sha256 of tokenizer.json.
        exact: whether `tokenizers` encodes all texts. Set by the first batch if gigatoken returns different ids.
        checked: whether gigatoken has been compared with `tokenizers`, or another process compares them.
        reason: why `exact` was set, if the user did not request this.
    """

    def __init__(self, path: Path, *, exact: bool = False, checked: bool = False):
        self._header, self._content = header, _ = read_tokenizer(path)
        if header.eod_id is None:
            remedy = f"set it with `weft data import-tokenizer {path} --eod TOKEN --out NEW`"
            raise UserError(f"has no end-of-document token; {remedy}", path)
        self.path, self.vocab_size, self.eod_id, self.digest = path, header.vocab_size, header.eod_id, header.digest
        self.exact, self.reason = exact, None
        self.checked = checked

    @classmethod
    def load(cls, path: str | Path, *, exact: bool = False, checked: bool = False) -> Tokenizer:
        """Loads a tokenizer from its folder or its tokenizer.json.

        Args:
            exact: whether to encode every text with the `tokenizers` library, not with gigatoken.
            checked: skip the comparison of gigatoken with `tokenizers`, because another process compares them.

        Raises:
            UserError: the tokenizer does not exist, is broken, or has no end-of-document token.
        """
        return cls(Path(path), exact=exact, checked=checked)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of a text. `add_special_tokens`: include special tokens such as `<s>`."""
        return self._reference.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text that `ids` represent; invalid UTF-8 becomes U+FFFD."""
        return self._reference.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token; None if the token is not in the vocabulary."""
        return self._reference.token_to_id(token)

    def encode_batch(self, texts: Sequence[str], *, close: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Encodes many texts. The ids of each text are the ids that `encode` returns.

        Args:
            close: append the end-of-document token to each text.

        Returns:
            The concatenated ids (uint32), and the number of ids of each text (int64).

        Raises:
            UserError: an id is outside the vocabulary.
        """
        texts = list(texts)
        fast = self._checked_encoder(texts)
        eod = self.eod_id if close else None
        if fast is None:
            ids, lengths = concatenate_ids([[row] for row in self._encode_exact(texts)], eod)
        elif mixed := self._find_mixed(texts, fast):
            ids, lengths = self._encode_mixed(texts, mixed, fast, eod)
        else:
            ids, lengths = fast.encode(texts, eod)
        if len(ids) and int(ids.max()) >= self.vocab_size:
            what = f"the tokenizer returned id {int(ids.max())}, but its vocabulary has {self.vocab_size:,} tokens"
            raise UserError(f"{what}; the tokenizer is inconsistent: create it again", self.path)
        return ids, lengths

    def prompt(self, text: str, *, special: bool = True, whole: bool = False) -> Prompt:
        """Encodes a text for a model to continue.

        If the text ends with a single blank, the blank is removed, and the first new token must begin with a blank. In
        training, a blank is part of the token of the next word, so the model has rarely seen the token of a single
        blank.

        Args:
            special: whether the tokens that the tokenizer adds before a text, such as `<s>`, are put before the prompt,
                unless the text begins with them.
            whole: whether a blank at the end is never removed, because all of the text is to be scored.
        """
        first = None
        if not whole and text.endswith(" ") and not text[:-1].endswith((" ", "\n")) and text[:-1]:
            first = frozenset(id for token, id in self._reference.get_vocab().items() if token.startswith(BLANKS))
        text, ids = (text[:-1], self.encode(text[:-1])) if first else (text, self.encode(text))
        return Prompt(text, (self.with_beginning(ids) if special else ids) or [self.eod_id], first or None)

    def with_beginning(self, ids: list[int]) -> list[int]:
        """Returns ids after the tokens that the tokenizer adds before a text, unless the ids begin with them."""
        before = self.added_around[0]
        return ids if ids[: len(before)] == before else [*before, *ids]

    @functools.cached_property
    def added_around(self) -> tuple[list[int], list[int]]:
        """The ids that `encode` with `add_special_tokens` adds before and after a text (`post_processor`)."""
        plain, full = self.encode("a"), self.encode("a", add_special_tokens=True)
        start = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), 0)
        return full[:start], full[start + len(plain) :]

    def stream_decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = False) -> StreamDecoder:
        """Returns a decoder of ids that arrive one at a time, after the ids of a prompt.

        Args:
            skip_special_tokens: whether special tokens have no text.
        """
        return StreamDecoder(self, prompt, skip_special_tokens)

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids of the tokens `<0x00>` to `<0xFF>`; empty if the decoder does not combine them to characters."""
        if b"ByteFallback" not in tokenizer_file(self.path).read_bytes():
            return frozenset()
        return frozenset(id for token, id in self._reference.get_vocab().items() if BYTE.fullmatch(token))

    @functools.cached_property
    def token_bytes(self) -> list[bytes] | None:
        """The bytes of each token in a text, by id; None if they depend on other tokens, as in WordPiece.

        The bytes of all tokens of a text, joined, are the text, except for a blank that the decoder removes from the
        beginning. For an id without a token, the bytes are empty.
        """
        return token_bytes(read_tokenizer(self.path)[1], self._reference)

    @functools.cached_property
    def added_tokens(self) -> dict[str, int]:
        """The ids of the added tokens, by text. The text of an added token is always encoded to this token."""
        return {token.content: id for id, token in self._reference.get_added_tokens_decoder().items()}

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which are not part of a text."""
        added = self._reference.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special) | {self.eod_id}

    @functools.cached_property
    def _reference(self) -> tokenizers.Tokenizer:
        import tokenizers

        file = tokenizer_file(self.path)
        try:
            reference = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(
                f"the tokenizers library cannot read this tokenizer ({error}); create it again", file
            ) from None
        reference.no_truncation()
        reference.no_padding()
        eod = reference.token_to_id(self._header.eod_token or "")
        if eod != self.eod_id:
            raise UserError(
                f"{self._header.eod_token!r} has id {self.eod_id} here, but {eod} in the tokenizers library; "
                "the tokenizer is inconsistent: create it again",
                file,
            )
        return reference

    def _checked_encoder(self, texts: list[str]) -> FastEncoder | None:
        """Returns the gigatoken encoder; None if `tokenizers` must encode all texts.

        The first call compares the ids of both libraries on PROBE and on samples of `texts`. If ids differ, it sets
        `exact`.
        """
        if self.exact:
            return None
        fast = self._fast_encoder
        if isinstance(fast, str):
            self.exact, self.reason = True, fast
            return None
        if not self.checked and any(texts):
            step = max(1, len(texts) // 32)
            size = CHECKED_CHARACTERS // min(32, len(texts))
            sample = [PROBE, *(text[:size] for text in texts[::step])]
            exact, _ = concatenate_ids([[row] for row in self._encode_exact(sample)])
            if fast.load_error is not None:
                self.reason = f"gigatoken cannot load the tokenizer: {fast.load_error}"
            elif not np.array_equal(exact, self._encode_mixed(sample, self._find_mixed(sample, fast), fast)[0]):
                self.reason = "gigatoken returned other ids than tokenizers for some of the first texts"
            self.exact = self.reason is not None
            self.checked = True
        return None if self.exact else fast

    @functools.cached_property
    def _fast_encoder(self) -> FastEncoder | str:
        content, self._content = self._content, None
        recipe = make_recipe(content)
        return recipe if isinstance(recipe, str) else FastEncoder(recipe)

    def _find_mixed(self, texts: list[str], fast: FastEncoder) -> list[int]:
        """Returns the indices of texts with added tokens or with doubtful characters (`CharacterCheck`)."""
        is_doubtful = fast.characters.is_doubtful
        # Most batches have no doubtful character, and one call for all texts is faster.
        any_doubtful = is_doubtful("".join(text for text in texts if not text.isascii()))
        return [i for i, text in enumerate(texts) if fast.has_added_token(text) or (any_doubtful and is_doubtful(text))]

    def _encode_mixed(
        self, texts: list[str], mixed: list[int], fast: FastEncoder, eod: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encodes texts with gigatoken. Texts at the indices `mixed` are encoded in part or in full by `tokenizers`."""
        rows: list[list[str | np.ndarray]] = [[text] for text in texts]
        for i in mixed:
            rows[i] = list(self._split_mixed(texts[i], fast))
        ids, lengths = fast.encode([piece for row in rows for piece in row if isinstance(piece, str)])
        encoded = iter(np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else [])
        return concatenate_ids(
            [[next(encoded) if isinstance(piece, str) else piece for piece in row] for row in rows], eod
        )

    def _split_mixed(self, text: str, fast: FastEncoder) -> Iterator[str | np.ndarray]:
        """Splits a text. Yields each piece as str if gigatoken can encode the piece; otherwise yields its ids."""
        is_doubtful = fast.characters.is_doubtful
        if fast.needs_reference(text):
            yield from self._encode_exact([text])
            return
        for piece in fast.split_document(text) if is_doubtful(text) else [text]:
            if is_doubtful(piece):
                yield from self._encode_exact([piece])
            else:
                for part, added in fast.split_added_tokens(piece):
                    yield np.array([self._reference.token_to_id(part)], np.uint32) if added else part

    def _encode_exact(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """Yields the ids of each text from `tokenizers`. Large texts are split if this does not change the ids."""
        batch: list[str] = []
        characters = 0
        for text in texts:
            if batch and characters + len(text) > REFERENCE_CHARACTERS:
                yield from self._encode_by_reference(batch)
                batch, characters = [], 0
            if len(text) > REFERENCE_CHARACTERS and isinstance(self._fast_encoder, FastEncoder):
                pieces = self._fast_encoder.split_document(text)
                yield np.concatenate([ids for piece in pieces for ids in self._encode_by_reference([piece])])
            else:
                batch.append(text)
                characters += len(text)
        yield from self._encode_by_reference(batch)

    def _encode_by_reference(self, texts: list[str]) -> Iterator[np.ndarray]:
        for encoding in self._reference.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array(encoding.ids, np.uint32)


class StreamDecoder:
    """Decodes ids that arrive one at a time, and returns only complete characters.

    The returned pieces, joined, are the text that follows the prompt's text in `decode(prompt + ids)`. (SentencePiece's
    decoder removes a blank from the beginning of a text, but not after a prompt.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special_tokens: bool = False):
        self._tokenizer, self._skipped = tokenizer, tokenizer.special_ids if skip_special_tokens else frozenset()
        if prompt and prompt[-1] in tokenizer.special_ids:  # a text begins
            prompt = ()
        begin = max(0, len(prompt) - 1)
        while begin > 0 and prompt[begin] in tokenizer.byte_ids:  # bytes of one character are decoded together
            begin -= 1
        # The last decoded ids, as context for the decoder, and the ids after them.
        self._ids = list(prompt[begin:])
        self._decoded = len(self._ids)  # number of the last decoded ids in `_ids`

    def step(self, id: int) -> str:
        """Adds an id and returns the new text; empty while a character is incomplete."""
        if id in self._skipped:
            text, self._ids, self._decoded = self.flush(), [], 0
            return text
        self._ids.append(id)
        # A run of byte tokens is decoded only if the complete run is valid UTF-8, so it is decoded at its end.
        return "" if id in self._tokenizer.byte_ids else self._new_text(last=False)

    def flush(self) -> str:
        """Returns the remaining text, with U+FFFD for an incomplete character."""
        return self._new_text(last=True)

    def _new_text(self, *, last: bool) -> str:
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") and not last:  # an incomplete character
            return ""
        new = text[len(self._tokenizer.decode(self._ids[: self._decoded])) :]
        self._ids = self._ids[self._decoded :]
        self._decoded = len(self._ids)
        return new
