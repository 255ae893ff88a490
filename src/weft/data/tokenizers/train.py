"""Trains a byte-level BPE tokenizer."""

from __future__ import annotations

import itertools
import json
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from weft.data.output_folder import publish
from weft.data.sources.values import utf8_size
from weft.data.tokenizers.exactness import PATTERNS
from weft.errors import UserError
from weft.files import hidden_folder, report_write_errors

THREAD = "weft-train-tokenizer"
END_OF_DOCUMENT = "<|endoftext|>"
LARGEST = 10_000_000  # largest vocabulary size: the trainer allocates memory for all tokens at the start
# Number of characters. A word of more than twice this length is split, because the time of merging is quadratic in
# the length of a word.
LONG = 1000
# Apart from a few characters, each word consists of letters, of white space or of signs.
SIGNS = re.compile(r"(?:[^\w\s]|_)+")


def train(
    texts: Iterable[str],
    vocab_size: int,
    out: Path,
    *,
    special: Sequence[str] = (),
) -> int:
    """Trains a byte-level BPE tokenizer (Sennrich et al., 2016; Radford et al., 2019), and writes it atomically.

    An existing tokenizer at `out` is replaced. The result is deterministic. Words of thousands of characters (base64, a
    line of dashes) are split into pieces of about 1,000; words of up to 1,000 characters are never split.

    Args:
        texts: the documents.
        vocab_size: number of tokens, including the 256 bytes and the special tokens.
        out: folder to write.
        special: special tokens in addition to `<|endoftext|>`, such as tokens that delimit chat messages.

    Returns:
        The resulting vocabulary size. It is less than `vocab_size` if the texts have too few pairs to merge.

    Raises:
        UserError: `vocab_size` is too small for the bytes and special tokens, a special token is empty or repeated, or
            all texts are empty.
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
    any_text = False

    def pieces() -> Iterator[str]:
        nonlocal any_text
        for text in texts:
            any_text = any_text or bool(text)
            yield from split_long_words(text)

    _run_in_thread(lambda stream: tokenizer.train_from_iterator(stream, trainer), pieces())
    if not any_text:
        raise UserError("no text to learn from: all documents are empty; name other inputs")
    write_folder(tokenizer.to_str(pretty=True), END_OF_DOCUMENT, out, special=special)
    return tokenizer.get_vocab_size()


def check_size(vocab_size: int, special: Sequence[str]) -> None:
    """Raises UserError if the vocabulary size or the special tokens are invalid."""
    specials = [END_OF_DOCUMENT, *special]
    if len(set(specials)) < len(specials) or "" in specials:
        raise UserError(
            f"--special: a token is empty or repeated; give each token once ({END_OF_DOCUMENT} is always included)"
        )
    least = 256 + len(specials)
    if vocab_size < least:
        raise UserError(f"--vocab-size {vocab_size}: give at least {least}, for 256 bytes and {', '.join(specials)}")
    if vocab_size > LARGEST:
        raise UserError(f"--vocab-size {vocab_size}: give at most {LARGEST:,}; 32,000 to 300,000 are usual")


def split_long_words(text: str) -> Iterator[str]:
    """Splits a text into pieces in which no word is longer than about 2 * LONG characters; most texts are not split.

    A word of at least 2 * LONG characters covers all positions between two consecutive multiples of LONG. The text is
    split at both multiples.
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
    extra_files: Sequence[Path] = (),
) -> None:
    """Writes a tokenizer's folder atomically; replaces an existing tokenizer.

    Args:
        content: content of tokenizer.json.
        eod: the end-of-document token.
        special: further special tokens.
        settings: content of tokenizer_config.json, in which `eos_token` is set to `eod`; None: default settings.
        extra_files: files to copy into the folder.

    Raises:
        UserError: the folder cannot be written.
    """
    config = settings or {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config = {**config, "eos_token": eod}
    if special:
        config["additional_special_tokens"] = list(special)
    with report_write_errors(out), hidden_folder(out) as partial:
        (partial / "tokenizer.json").write_text(content, encoding="utf-8")
        config_text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (partial / "tokenizer_config.json").write_text(config_text, encoding="utf-8")
        for file in extra_files:
            shutil.copy(file, partial / file.name)
        publish(partial, out)


def _run_in_thread(work: Callable[[Iterator[str]], None], texts: Iterable[str]) -> None:
    """Reads texts in this thread and runs `work` on them in another thread, so that Ctrl-C does not wait for `work`."""
    errors: list[BaseException] = []
    texts_queue: queue.Queue[str | None] = queue.Queue(256)
    canceled = threading.Event()

    def stream() -> Iterator[str]:
        while not canceled.is_set():
            try:
                text = texts_queue.get(timeout=0.2)
            except queue.Empty:
                continue
            if text is None:
                return
            yield text
        raise InterruptedError

    def run() -> None:
        try:
            work(stream())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=THREAD, daemon=True)
    thread.start()
    try:
        for text in itertools.chain(texts, [None]):
            while thread.is_alive():
                try:
                    texts_queue.put(text, timeout=1)
                    break
                except queue.Full:
                    continue
        while thread.is_alive():
            thread.join(0.2)
    except BaseException as error:
        # The queue is not used from here on: Ctrl-C within `put` can leave its lock acquired for ever.
        canceled.set()
        # While the library counts pairs, it cannot be interrupted: Ctrl-C does not wait for it.
        thread.join(0.5 if isinstance(error, KeyboardInterrupt) else None)
        raise
    if errors:
        raise errors[0]


def is_running() -> bool:
    """Whether the thread of an interrupted training is still running."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def subsample(texts: Iterable[str], most: int, total: int | None, progress: Callable[[], float]) -> Iterator[str]:
    """Yields evenly spaced texts of `texts`, with about `most` UTF-8 bytes in total.

    Args:
        total: number of bytes of the files that are read; None: unknown, so the first texts are yielded.
        progress: returns the fraction of the files that has been read.
    """
    seen = taken = 0
    for text in texts:
        size = utf8_size(text)
        # The second condition applies to compressed files, whose texts are larger than `total`.
        if taken <= most * (seen / total if total else 1) and taken < most * progress():
            taken += size
            yield text
        seen += size
