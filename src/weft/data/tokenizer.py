"""Text to ids and back: the ids of the `tokenizers` library, at gigatoken's speed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from weft.config.errors import UserError
from weft.config.headers import read_tokenizer_header

END_OF_DOCUMENT = "<|endoftext|>"
# How byte-level BPE cuts text into words before merging: contractions, letters, up to 3 digits, punctuation, line ends.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Characters whose class (letter, number, neither) differs between the two libraries' Unicode tables, found by comparing
# the two over all code points. Texts that hold one go through `tokenizers`.
DISPUTED = re.compile(
    "[\u088f\u0c5c\u0cdc\ua7ce-\ua7cf\ua7d2\ua7d4\ua7f1\U00010940-\U00010959\U00010ec5-\U00010ec7\U00011db0-\U00011ddb"
    "\U00011de0-\U00011de9\U00016ea0-\U00016eb8\U00016ebb-\U00016ed3\U00016ff2-\U00016ff6\U000187f8-\U000187ff"
    "\U00018d09-\U00018d1e\U00018d80-\U00018df2\U0001e6c0-\U0001e6de\U0001e6e0-\U0001e6e2\U0001e6e4-\U0001e6e5"
    "\U0001e6e7-\U0001e6ed\U0001e6f0-\U0001e6f4\U0001e6fe-\U0001e6ff\U0002b73a-\U0002b73f\U0002cea2-\U0002cead"
    "\U000323b0-\U00033479]"
)
CHECKED_TEXTS = 32  # compared with `tokenizers` before gigatoken is trusted


@dataclass(frozen=True)
class Prompt:
    """What to continue: `text`, its `ids`, and which ids may come `first` (None: any)."""

    text: str
    ids: list[int]
    first: frozenset[int] | None


class Tokenizer:
    """A folder with a `tokenizer.json`, and `tokenizer_config.json` whose `eos_token` is the end-of-document token.

    Attributes:
        vocab_size: counts special tokens.
        eod_id: of the end-of-document token.
        digest: sha256 of tokenizer.json.
        exact: send every text through `tokenizers`.
    """

    def __init__(self, path: Path, *, exact: bool = False):
        header = read_tokenizer_header(path)
        if header.eod_id is None:
            raise UserError(
                'no end-of-document token is stated; name one in tokenizer_config.json: {"eos_token": "..."}', path
            )
        self.path, self.vocab_size, self.eod_id, self.digest = path, header.vocab_size, header.eod_id, header.digest
        self._reference = _read(path / "tokenizer.json")
        specials = [token.content for token in self._reference.get_added_tokens_decoder().values()]
        self._special = re.compile("|".join(map(re.escape, specials))) if specials else None
        self.exact = exact
        self._fast: Any = None
        self._checked = 0

    @classmethod
    def load(cls, path: str | Path, *, exact: bool = False) -> Tokenizer:
        """Open a tokenizer folder.

        Raises:
            UserError: there is none, it is broken, or it states no end-of-document token.
        """
        return cls(Path(path), exact=exact)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; no token is added."""
        return self._reference.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens among it; broken UTF-8 becomes U+FFFD."""
        return self._reference.decode(list(ids), skip_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of many texts.

        Returns:
            All ids end to end, and how many are each text's; exactly those of `encode`.
        """
        fast = self._fast_encoder()
        if fast is None:
            return self._encode_exactly(texts)
        slow = [i for i, text in enumerate(texts) if self._needs_reference(text)]
        ids, lengths = _ragged(fast.encode_batch(list(texts)))
        if self._checked < CHECKED_TEXTS and texts:
            if not self._agrees(texts, ids, lengths):
                self.exact = True
                return self._encode_exactly(texts)
            self._checked += len(texts)
        if not slow:
            return ids, lengths
        replaced = [np.asarray(e.ids, ids.dtype) for e in self._encodings([texts[i] for i in slow])]
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for i, new in zip(slow, replaced, strict=True):
            parts[i], lengths[i] = new, len(new)
        return np.concatenate(parts), lengths

    def prompt(self, text: str) -> Prompt:
        """A text to continue, ready for `generate`.

        A blank at its end is left to the model: in training blanks were part of the words that they begin, and a lone
        one is a token that the model has hardly seen. The first new token then is one that begins with a blank.
        """
        if text.endswith(" ") and not text[:-1].endswith((" ", "\n")) and text[:-1]:
            first = frozenset(id for token, id in self._reference.get_vocab().items() if token.startswith("\u0120"))
            if first:
                return Prompt(text[:-1], self.encode(text[:-1]), first)
        return Prompt(text, self.encode(text) or [self.eod_id], None)

    def stream_decoder(self) -> StreamDecoder:
        """Decodes ids one at a time."""
        return StreamDecoder(self)

    def _needs_reference(self, text: str) -> bool:
        if self._special is not None and self._special.search(text):
            return True
        return not text.isascii() and DISPUTED.search(text) is not None

    def _fast_encoder(self) -> Any:
        if self.exact:
            return None
        if self._fast is None:
            import gigatoken

            try:
                self._fast = gigatoken.Tokenizer.from_json((self.path / "tokenizer.json").read_text(encoding="utf-8"))
            except (ValueError, RuntimeError, NotImplementedError):  # a kind of tokenizer that it does not know
                self.exact = True
                return None
        return self._fast

    def _agrees(self, texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> bool:
        """Whether gigatoken gave what `tokenizers` gives, on some of the first batch's texts."""
        step = max(1, len(texts) // CHECKED_TEXTS)
        starts = np.cumsum(lengths) - lengths
        for i in range(0, len(texts), step):
            text = texts[i]
            if self._needs_reference(text) or len(text) > 1_000_000:
                continue
            if self.encode(text) != ids[starts[i] : starts[i] + lengths[i]].tolist():
                return False
        return True

    def _encodings(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        return self._reference.encode_batch_fast(list(texts), add_special_tokens=False)

    def _encode_exactly(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        parts = [np.asarray(encoding.ids, np.uint32) for encoding in self._encodings(texts)]
        lengths = np.array([len(part) for part in parts], np.int64)
        return (np.concatenate(parts) if parts else np.zeros(0, np.uint32)), lengths


class StreamDecoder:
    """Text as ids come in: `step` gives what is certain, `flush` the rest. Never half a character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._ids = tokenizer, []
        self._emitted = 0

    def step(self, id: int) -> str:
        """The new text after one more id; may be empty while a character is incomplete."""
        self._ids.append(id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):  # the first bytes of a longer character
            return ""
        new, self._emitted = text[self._emitted :], len(text)
        if len(self._ids) > 64:  # keep the work per token constant: what is shown needs no second look
            self._ids, self._emitted = [], 0
        return new

    def flush(self) -> str:
        """What is left, with U+FFFD for a character that never became whole."""
        text = self._tokenizer.decode(self._ids)
        new, self._ids, self._emitted = text[self._emitted :], [], 0
        return new


def _ragged(array: Any) -> tuple[np.ndarray, np.ndarray]:
    """gigatoken's ragged array as flat ids and lengths, without Python lists."""
    import awkward

    lengths = np.asarray(awkward.num(array, axis=1), dtype=np.int64)
    return np.array(awkward.to_numpy(awkward.flatten(array, axis=1)), dtype=np.uint32), lengths


def _read(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"not a tokenizer that the tokenizers library reads ({error}); make it again", file) from None


def train(texts: Iterable[str], vocab_size: int, out: Path, *, overwrite: bool = False) -> int:
    """Train a byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) and write its folder, whole or not at all.

    Args:
        texts: the documents; the same texts give the same bytes.
        vocab_size: counts the 256 bytes and the special token `<|endoftext|>`.

    Returns:
        The size reached: less than asked if the texts run out of pairs to merge.

    Raises:
        UserError: a size below 257, or no text.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"--vocab-size {vocab_size}: at least 257 are needed, for 256 bytes and {END_OF_DOCUMENT}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer.save(str(partial / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    (partial / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if overwrite:
        shutil.rmtree(out, ignore_errors=True)
    os.replace(partial, out)
    return tokenizer.get_vocab_size()
