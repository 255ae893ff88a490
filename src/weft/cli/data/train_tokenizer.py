"""`weft data train-tokenizer`: trains a tokenizer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from weft.cli.data.inputs import add_inputs, check_reading_options, parse_reading, report_skipped
from weft.formatting import byte_size, counted

if TYPE_CHECKING:
    from weft.data.documents import Reject
    from weft.observe.console import Console
    from weft.observe.progress import SilentProgress

HELP = "train a byte-level BPE tokenizer"
GROUP = "make"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="number of tokens, including special ones"
    )
    parser.add_argument(
        "--special",
        action="append",
        default=[],
        metavar="TOKEN",
        help="a special token in addition to <|endoftext|>; can be repeated",
    )
    parser.add_argument(
        "--max-bytes",
        type=float,
        metavar="N",
        help="train on evenly spaced documents of N bytes in total (such as 2e9)",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the tokenizer's folder")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")


def run(args: argparse.Namespace) -> int:
    try:
        return train_tokenizer(args)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr, flush=True)
        train = sys.modules.get("weft.data.tokenizers.train")
        if train is not None and train.is_running():
            # The library still counts pairs in a thread, and would crash if the interpreter exited normally.
            sys.stdout.flush()
            os._exit(130)
        return 130


def train_tokenizer(args: argparse.Namespace) -> int:
    """Trains the tokenizer, prints a report and returns the exit code. Ctrl-C raises KeyboardInterrupt."""
    from weft.data.documents import Counts
    from weft.data.output_folder import TOKENIZER, check_out
    from weft.data.sources import find_files, read_all
    from weft.data.sources.find import format_counts
    from weft.data.tokenizers.train import check_size, subsample, train
    from weft.errors import UserError
    from weft.observe.console import Console

    console, out = Console(), Path(args.out)
    if args.max_bytes is not None and not 1 <= args.max_bytes < 2**63:
        raise UserError(f"--max-bytes {args.max_bytes:g}: give a positive, finite number of bytes, such as 2e9")
    check_size(args.vocab_size, args.special)
    files, reading, counts = find_files(args.inputs, args.files_from), parse_reading(args), Counts()
    check_reading_options(args, files)
    inputs = (path for path in files if path.name in TOKENIZER.files)
    check_out(out, TOKENIZER, inputs, overwrite=args.overwrite, new=True)

    sizes = [path.stat().st_size for path in files if path.is_file()]
    total = sum(sizes) if len(sizes) == len(files) else None
    used, skipped = _Used(), list[str]()
    with console.progress(total, "reading", unit="B") as bar:
        documents = read_all(
            files,
            reading,
            counts,
            on_reject=lambda path, reject: _reject(path, reject, args, console),
            on_skip=lambda path, reason: skipped.append(str(path)),
            on_bytes=lambda more: used.progress(more, bar),
        )
        texts = (cast(str, document.value) for document in documents)
        if args.max_bytes is not None:
            texts = subsample(texts, int(args.max_bytes), total, lambda: used.read / total if total else 1.0)
        size = train(used.counting(texts), args.vocab_size, out, special=args.special)
    if counts.rejected:
        console.warning(f"rejected {format_counts(counts.rejected)}")
    report_skipped(console, counts.skipped_files + files.skipped, skipped)
    if size < args.vocab_size:
        console.warning(
            f"the text is enough for only {size:,} tokens, not {args.vocab_size:,}; the vocabulary size is {size:,}"
        )
    console.result(
        f"{out}: {size:,} tokens, from {counted(used.documents, 'document')} ({byte_size(used.bytes, 'MB')})"
    )
    return 0


@dataclass
class _Used:
    """Counts the bytes that were read from disk, and the documents that are trained on."""

    read: int = 0
    documents: int = 0
    bytes: int = 0

    def progress(self, more: int, bar: SilentProgress) -> None:
        self.read += more
        bar.update(self.read)

    def counting(self, texts: Iterable[str]) -> Iterator[str]:
        from weft.data.sources.values import utf8_size

        for text in texts:
            self.documents += 1
            self.bytes += utf8_size(text)
            yield text


def _reject(path: Path, reject: Reject, args: argparse.Namespace, console: Console) -> None:
    from weft.data.sources import Unit
    from weft.data.sources.source_format import detect_format, document_error, reject_message

    if args.on_error == "fail":
        unit = Unit(str(path), *detect_format(path, args.format))
        raise document_error(reject_message(reject), unit, reject.line)
    if reject.line is None:
        console.warning(f"{path}: {reject.message}")
