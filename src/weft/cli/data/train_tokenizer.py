"""`weft data train-tokenizer`: text to a tokenizer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from weft.cli.data.inputs import add_inputs, check_options, reading_of, tell_skipped
from weft.formatting import byte_size, counted

if TYPE_CHECKING:
    from weft.data.documents import Reject
    from weft.observe.console import Console
    from weft.observe.progress import SilentProgress

HELP = "train a byte-level BPE on text"
GROUP = "make"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="entries, special tokens counted")
    parser.add_argument(
        "--special",
        action="append",
        default=[],
        metavar="TOKEN",
        help="one more special token beside <|endoftext|>",
    )
    parser.add_argument(
        "--max-bytes", type=float, metavar="N", help="learn from evenly spaced documents of N bytes (such as 2e9)"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the tokenizer's folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer that is there")


def run(args: argparse.Namespace) -> int:
    try:
        return train_tokenizer(args)
    except KeyboardInterrupt:
        print("interrupted; nothing was left", file=sys.stderr, flush=True)
        train = sys.modules.get("weft.data.tokenizers.train")
        if train is not None and train.at_work():
            # The library counts pairs in a thread; to end the interpreter beneath it would crash.
            sys.stdout.flush()
            os._exit(130)
        return 130


def train_tokenizer(args: argparse.Namespace) -> int:
    """The work of `run`."""
    from weft.data.documents import Counts
    from weft.data.output_folder import TOKENIZER, check_out, exists_already
    from weft.data.sources import find_files, read_all
    from weft.data.sources.find import summary
    from weft.data.tokenizers.train import check_size, thin_out, train
    from weft.errors import UserError
    from weft.observe.console import Console

    console, out = Console(), Path(args.out)
    if args.max_bytes is not None and not 1 <= args.max_bytes < 2**63:
        raise UserError(f"--max-bytes {args.max_bytes:g}: a number of bytes is needed, such as 2e9")
    check_size(args.vocab_size, args.special)
    files, reading, counts = find_files(args.inputs, args.files_from), reading_of(args), Counts()
    check_options(args, files)
    check_out(out, TOKENIZER, (path for path in files if path.name in TOKENIZER.files), overwrite=args.overwrite)
    if os.path.lexists(out) and not args.overwrite:
        raise exists_already(out, TOKENIZER)

    sizes = [path.stat().st_size for path in files if path.is_file()]
    total = sum(sizes) if len(sizes) == len(files) else None
    taken, skipped = _Taken(), list[str]()
    with console.progress(total, "reading", unit="B") as bar:
        documents = read_all(
            files,
            reading,
            counts,
            on_reject=lambda path, reject: _reject(path, reject, args, console),
            on_skip=lambda path, reason: skipped.append(str(path)),
            on_progress=lambda done: taken.progress(done, bar),
        )
        texts = (cast(str, document.value) for document in documents)
        if args.max_bytes is not None:
            # Where the size is not known (standard input) the first ones have to do.
            texts = thin_out(texts, int(args.max_bytes), total, lambda: taken.read / total if total else 1.0)
        size = train(taken.counting(texts), args.vocab_size, out, special=args.special)
    if counts.rejected:
        console.warning(f"rejected {summary(counts.rejected)}")
    tell_skipped(console, counts.skipped_files + files.left_out, skipped)
    if size < args.vocab_size:
        console.warning(
            f"the text has pairs for {size:,} tokens only, not {args.vocab_size:,}; the tokenizer's size is {size:,}"
        )
    console.result(
        f"{out}: {size:,} tokens, from {counted(taken.documents, 'document')} ({byte_size(taken.bytes, 'MB')})"
    )
    return 0


@dataclass
class _Taken:
    """How far the files are read, in bytes on disk, and the texts that are learned from."""

    read: int = 0
    documents: int = 0
    bytes: int = 0

    def progress(self, done: int, bar: SilentProgress) -> None:
        self.read = done
        bar.update(done)

    def counting(self, texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            self.documents += 1
            self.bytes += len(text) if text.isascii() else len(text.encode())
            yield text


def _reject(path: Path, reject: Reject, args: argparse.Namespace, console: Console) -> None:
    from weft.data.sources import Unit
    from weft.data.sources.source_format import kind_of, mistake_at

    why = f"{reject.reason} ({reject.hint})" if reject.hint else reject.reason
    if args.on_error == "fail":
        unit = Unit(str(path), kind_of(path, args.format), 0, None, 0)
        raise mistake_at(f"{why}; mend it, or --on-error skip leaves such documents out", unit, reject.line)
    if reject.line is None:
        console.warning(f"{path}: {why}")
