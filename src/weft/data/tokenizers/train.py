"""Train a byte-level BPE on text."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from weft.data.output_folder import publish
from weft.data.tokenizers.exactness import PATTERNS
from weft.errors import UserError
from weft.files import hidden_folder, unwritable

THREAD = "weft-train-tokenizer"
END_OF_DOCUMENT = "<|endoftext|>"
LARGEST = 10_000_000  # entries: the trainer takes memory for all of them before it begins
# Characters. A word of more than twice that many is cut: merging within a word takes time with its length's square.
LONG = 1000
# Words are at most two characters, and a line end or two, beside letters, or blanks, or signs.
SIGNS = re.compile(r"(?:[^\w\s]|_)+")


def train(
    texts: Iterable[str],
    vocab_size: int,
    out: Path,
    *,
    special: Sequence[str] = (),
) -> int:
    """Train a byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) and write its folder, whole or not at all,
    in place of a tokenizer that is there.

    Words of thousands of characters (base64, a line of dashes) are learned from in pieces of about a thousand; words of
    up to 1,000 characters are never cut.

    Args:
        texts: the documents; the same texts give the same bytes.
        vocab_size: counts the 256 bytes and the special tokens.
        special: further special tokens, such as those that mark the turns of a chat. `<|endoftext|>` is the first.

    Returns:
        The size reached: less than asked if the texts run out of pairs to merge.

    Raises:
        UserError: a size that has no room for bytes and special tokens, or a special token twice; no text at all.
    """
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    check_size(vocab_size, special)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS["llama3"]), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    some = False

    def pieces() -> Iterator[str]:
        nonlocal some
        for text in texts:
            some = some or bool(text)
            yield from cut(text)

    _in_thread(lambda stream: tokenizer.train_from_iterator(stream, trainer), pieces())
    if not some:
        raise UserError("no text to learn from: all documents are empty; name others")
    write_folder(tokenizer.to_str(pretty=True), END_OF_DOCUMENT, out, special=special)
    return tokenizer.get_vocab_size()


def check_size(vocab_size: int, special: Sequence[str]) -> None:
    """See that a vocabulary of this size can be trained.

    Raises:
        UserError: as `train`.
    """
    specials = [END_OF_DOCUMENT, *special]
    if len(set(specials)) < len(specials) or "" in specials:
        raise UserError(f"--special: a token is empty or named twice ({END_OF_DOCUMENT} is always there)")
    least = 256 + len(specials)
    if vocab_size < least:
        raise UserError(
            f"--vocab-size {vocab_size}: at least {least} are needed, for 256 bytes and {', '.join(specials)}"
        )
    if vocab_size > LARGEST:
        raise UserError(f"--vocab-size {vocab_size}: {LARGEST:,} are the most; vocabularies have 32,000 to 300,000")


def cut(text: str) -> Iterator[str]:
    """A text in pieces, so that no word is longer than about 2 * LONG characters; nearly always it is the text itself.

    A word that long covers a stretch of LONG characters between two multiples of LONG: it is cut at both of its ends.
    """
    begin = 0
    for start in range(0, len(text) - LONG + 1, LONG):
        stretch = text[start : start + LONG]
        if stretch.isalpha() or stretch.isspace() or SIGNS.fullmatch(stretch):
            if start > begin:
                yield text[begin:start]
            yield stretch
            begin = start + LONG
    if begin < len(text) or not text:
        yield text[begin:]


def write_folder(
    content: str,
    eod: str,
    out: Path,
    *,
    special: Sequence[str] = (),
    settings: dict | None = None,
    beside: Sequence[Path] = (),
) -> None:
    """Write a tokenizer's folder, whole or not at all, in place of a tokenizer that is there.

    Args:
        content: of tokenizer.json.
        eod: the end-of-document token.
        special: further special tokens.
        settings: of a tokenizer_config.json to go by; `eos_token` is set to `eod`.
        beside: files to copy into the folder.

    Raises:
        UserError: it cannot be written.
    """
    config = settings or {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config = {**config, "eos_token": eod}
    if special:
        config["additional_special_tokens"] = list(special)
    with unwritable(out), hidden_folder(out) as partial:
        (partial / "tokenizer.json").write_text(content, encoding="utf-8")
        stated = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (partial / "tokenizer_config.json").write_text(stated, encoding="utf-8")
        for file in beside:
            shutil.copy(file, partial / file.name)
        publish(partial, out)


def _in_thread(work: Callable[[Iterator[str]], None], texts: Iterable[str]) -> None:
    """Read texts here and use them in a thread: Ctrl-C need not wait until the library is back from its counting."""
    failed: list[BaseException] = []
    waiting: queue.Queue[str | None] = queue.Queue(256)
    given_up = threading.Event()

    def stream() -> Iterator[str]:
        while (text := waiting.get()) is not None:
            if given_up.is_set():
                raise InterruptedError
            yield text

    def run() -> None:
        try:
            work(stream())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=THREAD, daemon=True)
    thread.start()
    try:
        for text in itertools.chain(texts, [None]):
            while thread.is_alive():
                try:
                    waiting.put(text, timeout=1)
                    break
                except queue.Full:
                    continue
        while thread.is_alive():
            thread.join(0.2)
    except BaseException as error:
        given_up.set()
        with contextlib.suppress(queue.Full):
            waiting.put_nowait("")  # if it waits for a text
        # While it counts pairs it does not listen; nobody who presses Ctrl-C waits for that.
        thread.join(0.5 if isinstance(error, KeyboardInterrupt) else None)
        raise
    if failed:
        raise failed[0]


def at_work() -> bool:
    """Whether a library is still at work for a training that was given up."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def thin_out(texts: Iterable[str], most: int, total: int | None, progress: Callable[[], float]) -> Iterator[str]:
    """Evenly spaced texts of a stream, together at most some `most` bytes of UTF-8; without `total` the first ones.

    Args:
        total: bytes of the files that are read.
        progress: how much of them has been read, from 0 to 1.
    """
    seen = taken = 0
    for text in texts:
        size = len(text) if text.isascii() else len(text.encode())
        # The second bound counts where the files are compressed, and their texts more than `total`.
        if taken <= most * (seen / total if total else 1) and taken < most * progress():
            taken += size
            yield text
        seen += size
