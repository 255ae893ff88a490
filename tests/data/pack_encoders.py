"""Encoders that fail in every way, for the tests of packing; worker processes import them from here."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.data.option_names import COMMAND
from weft.data.packing.encoder import Encoded, TextEncoder


class Panic(BaseException):
    """As a Rust library's panic: not even an Exception."""


class FailingEncoder(TextEncoder):
    """A TextEncoder that dies at texts with the word KILL, once if they also have ONCE, and raises at RAISE."""

    def __reduce__(self):
        return FailingEncoder, (self.path,)

    def encode(self, documents):
        for document in documents:
            if "RAISE" in document.value:
                raise Panic("unexpected\n  state")
            if "KILL" in document.value:
                mark = Path(document.value.split()[-1])
                if "ONCE" not in document.value or not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(documents)


@dataclass
class FakeTokenizer:
    exact: bool
    reason: str | None = None
    checked: bool = False
    vocab_size: int = 300
    eod_id: int = 0
    digest: str = "fake"


class DistrustedEncoder:
    """Gives ones; twos where it is exact, which the first part finds to be needed."""

    kind, has_mask, fields, drops, chat_template = "text", False, (), (), None
    words = COMMAND

    def __init__(self, exact=False):
        self.exact, self.tokenizer = exact, FakeTokenizer(exact)

    def __reduce__(self):
        return DistrustedEncoder, (self.exact,)

    def open(self):
        return self.tokenizer

    def identity(self):
        return {"distrusted": True}

    def as_exact(self):
        return DistrustedEncoder(True)

    def encode(self, documents):
        if not self.tokenizer.checked and not self.exact:
            self.tokenizer.exact, self.tokenizer.reason = True, "it was wrong"
        id = 2 if self.tokenizer.exact else 1
        return Encoded(np.full(len(documents), id, np.uint32), np.ones(len(documents), np.int64))
