"""Text to ids and back: the ids of the `tokenizers` library, at gigatoken's speed."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.data.tokenizers.exactness import recipe_of
from weft.data.tokenizers.fast_encoder import FastEncoder, joined
from weft.errors import UserError
from weft.headers import read_tokenizer, tokenizer_file

if TYPE_CHECKING:
    import tokenizers

# Compared with `tokenizers` before gigatoken is trusted: this text, and some of the first batch.
PROBE = (
    "The quick brown fox's 12345 jumps; don't WE'LL   3.14159e-10\r\n\r\n\tdef f(x): return {'a': [x]}  # ok\n\n\n"
    "Größe naïve ﬁn ’tis ſ İı Ελληνικά русский עברית العربية हिन्दी ไทย 日本語、한국어 á ế "  # noqa: RUF001
    "½ ² ٣ Ⅷ 一二 \0\7\x85\xa0\u2028\u3000\u200d \ufeff\ufffd --- ==== //// ..... 'S'T \n x\n y  z"
)
CHECKED_CHARACTERS = 60_000
SLOW_CHARACTERS = 1_000_000  # encoded by `tokenizers` in one call: its encodings take a hundred bytes a token
BLANKS = ("\u0120", "\u2581")  # how a token spells the blank that it begins with: byte-level, SentencePiece
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Prompt:
    """What to continue: `text`, its `ids`, and which ids may come `first` (None: any)."""

    text: str
    ids: list[int]
    first: frozenset[int] | None


class Tokenizer:
    """A folder with a `tokenizer.json`, and `tokenizer_config.json` whose `eos_token` is the end-of-document token.

    >>> tokenizer = weft.Tokenizer.load("tok")
    >>> tokenizer.decode(tokenizer.encode("Kalo mi"))
    'Kalo mi'

    Truncation and padding that a tokenizer.json asks for are left out: no text is cut short.

    Attributes:
        path: of the folder or the tokenizer.json.
        vocab_size: counts special tokens.
        eod_id: of the end-of-document token.
        digest: sha256 of tokenizer.json.
        exact: every text goes through `tokenizers`. The first batch may set it.
        checked: gigatoken's ids were compared, or need not be: another process does it.
        reason: why, if that was not asked for: what gigatoken was not verified for.
    """

    def __init__(self, path: Path, *, exact: bool = False, checked: bool = False):
        self._header, self._content = header, _ = read_tokenizer(path)
        if header.eod_id is None:
            raise UserError(
                f"states no end-of-document token; `weft data import-tokenizer {path} --eod TOKEN --out NEW` does so",
                path,
            )
        self.path, self.vocab_size, self.eod_id, self.digest = path, header.vocab_size, header.eod_id, header.digest
        self.exact, self.reason = exact, None
        self.checked = checked

    @classmethod
    def load(cls, path: str | Path, *, exact: bool = False, checked: bool = False) -> Tokenizer:
        """Open a tokenizer: its folder, or the tokenizer.json itself.

        Args:
            exact: send every text through `tokenizers`.
            checked: another process compared gigatoken with `tokenizers` on this tokenizer; do not do so again.

        Raises:
            UserError: there is none, it is broken, or it states no end-of-document token.
        """
        return cls(Path(path), exact=exact, checked=checked)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text; with `add_special_tokens` also those that the tokenizer puts around one, if it does."""
        return self._reference.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids, special tokens among it unless they are to be skipped; broken UTF-8 becomes U+FFFD."""
        return self._reference.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name; None if there is none."""
        return self._reference.token_to_id(token)

    def encode_batch(self, texts: Sequence[str], *, close: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The ids of many texts.

        Args:
            close: put the end-of-document token behind each text, and count it.

        Returns:
            All ids end to end (uint32), and how many are each text's (int64); exactly those of `encode`.

        Raises:
            UserError: an id that the vocabulary has no place for.
        """
        texts = list(texts)
        fast = self._checked_encoder(texts)
        eod = self.eod_id if close else None
        if fast is None:
            ids, lengths = joined([[part] for part in self._exactly(texts)], eod)
        elif dirty := self._dirty(texts, fast):
            ids, lengths = self._mixed(texts, dirty, fast, eod)
        else:
            ids, lengths = fast.encode(texts, eod)
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise UserError(
                f"gave the id {int(ids.max())}, but has {self.vocab_size:,} entries; it is inconsistent, make it again",
                self.path,
            )
        return ids, lengths

    def prompt(self, text: str) -> Prompt:
        """A text to continue, ready for `generate`.

        A blank at its end is left to the model: in training blanks were part of the words that they begin, and a lone
        one is a token that the model has hardly seen. The first new token then is one that begins with a blank.
        """
        if text.endswith(" ") and not text[:-1].endswith((" ", "\n")) and text[:-1]:
            first = frozenset(id for token, id in self._reference.get_vocab().items() if token.startswith(BLANKS))
            if first:
                return Prompt(text[:-1], self.encode(text[:-1]), first)
        return Prompt(text, self.encode(text) or [self.eod_id], None)

    def stream_decoder(self) -> StreamDecoder:
        """Decodes ids one at a time."""
        return StreamDecoder(self)

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids of `<0x00>` to `<0xFF>` where the decoder makes characters of runs of them (SentencePiece's)."""
        if b"ByteFallback" not in tokenizer_file(self.path).read_bytes():
            return frozenset()
        return frozenset(id for token, id in self._reference.get_vocab().items() if BYTE.fullmatch(token))

    @functools.cached_property
    def _reference(self) -> tokenizers.Tokenizer:
        import tokenizers

        file = tokenizer_file(self.path)
        try:
            reference = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(f"the tokenizers library cannot read it ({error}); make it again", file) from None
        reference.no_truncation()
        reference.no_padding()
        eod = reference.token_to_id(self._header.eod_token or "")
        if eod != self.eod_id:
            raise UserError(
                f"says that {self._header.eod_token!r} is {self.eod_id}, but the tokenizers library numbers it {eod}; "
                "it is inconsistent, make it again",
                file,
            )
        return reference

    def _checked_encoder(self, texts: list[str]) -> FastEncoder | None:
        """gigatoken, once its ids were those of `tokenizers` on PROBE and some of the first batch; or None."""
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
            exact, _ = joined([[part] for part in self._exactly(sample)])
            if fast.refusal is not None:
                self.reason = f"gigatoken does not take it: {fast.refusal}"
            elif not np.array_equal(exact, self._mixed(sample, self._dirty(sample, fast), fast)[0]):
                self.reason = "gigatoken gave other ids than tokenizers for some of the first texts"
            self.exact = self.reason is not None
            self.checked = True
        return None if self.exact else fast

    @functools.cached_property
    def _fast_encoder(self) -> FastEncoder | str:
        content, self._content = self._content, None
        recipe = recipe_of(content)
        return recipe if isinstance(recipe, str) else FastEncoder(recipe)

    def _dirty(self, texts: list[str], fast: FastEncoder) -> list[int]:
        """Which texts hold added tokens or doubtful characters."""
        # Most batches hold no doubtful character, and to ask once is faster.
        doubtful = fast.doubts.about("".join(text for text in texts if not text.isascii()))
        return [i for i, text in enumerate(texts) if fast.special_in(text) or (doubtful and fast.doubts.about(text))]

    def _mixed(
        self, texts: list[str], dirty: list[int], fast: FastEncoder, eod: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Texts of which some need `tokenizers` for all or a part."""
        rows: list[list[str | np.ndarray]] = [[text] for text in texts]
        for i in dirty:
            rows[i] = list(self._parts(texts[i], fast))
        ids, lengths = fast.encode([part for row in rows for part in row if isinstance(part, str)])
        pieces = iter(np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else [])
        return joined([[next(pieces) if isinstance(part, str) else part for part in row] for row in rows], eod)

    def _parts(self, text: str, fast: FastEncoder) -> Iterator[str | np.ndarray]:
        """What gigatoken may encode of a text, and the ids of the rest."""
        if fast.fenced_in(text):
            yield from self._exactly([text])
            return
        for piece in fast.slices(text) if fast.doubts.about(text) else [text]:
            if fast.doubts.about(piece):
                yield from self._exactly([piece])
            else:
                for part, special in fast.split(piece):
                    yield np.array([self._reference.token_to_id(part)], np.uint32) if special else part

    def _exactly(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """The ids of texts by `tokenizers`, some at once; large ones in pieces where that gives the same ids."""
        batch: list[str] = []
        characters = 0
        for text in texts:
            if batch and characters + len(text) > SLOW_CHARACTERS:
                yield from self._by_reference(batch)
                batch, characters = [], 0
            if len(text) > SLOW_CHARACTERS and isinstance(self._fast_encoder, FastEncoder):
                pieces = self._fast_encoder.slices(text)
                yield np.concatenate([ids for piece in pieces for ids in self._by_reference([piece])])
            else:
                batch.append(text)
                characters += len(text)
        yield from self._by_reference(batch)

    def _by_reference(self, texts: list[str]) -> Iterator[np.ndarray]:
        for encoding in self._reference.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array(encoding.ids, np.uint32)


class StreamDecoder:
    """Text as ids come in: `step` gives what is certain, `flush` the rest. Never half a character.

    All pieces together are what `decode` gives for all ids at once.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last ones shown, for a decoder that looks back, then those not shown
        self._shown = 0

    def step(self, id: int) -> str:
        """The new text after one more id; may be empty while a character is incomplete."""
        self._ids.append(id)
        # A run of byte tokens is characters only if the whole run is valid UTF-8, so it is not known before its end.
        return "" if id in self._tokenizer.byte_ids else self._new(last=False)

    def flush(self) -> str:
        """What is left, with U+FFFD for a character that never became whole."""
        return self._new(last=True)

    def _new(self, *, last: bool) -> str:
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") and not last:  # the first bytes of a longer character
            return ""
        new = text[len(self._tokenizer.decode(self._ids[: self._shown])) :]
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return new
