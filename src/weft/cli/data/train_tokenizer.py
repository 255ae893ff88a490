"""`weft data train-tokenizer`: text to a tokenizer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from weft.cli.data.inputs import add_inputs, check_options, reading_of, tell_skipped

HELP = "train a byte-level BPE on text"


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
    from weft.config.errors import UserError
    from weft.data.documents import Counts, Reject
    from weft.data.folders import TOKENIZER, check_out, exists_already
    from weft.data.sources import find_files, read_all
    from weft.data.sources.find import summary
    from weft.data.tokenizers.train import check_size, thin_out, train
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

    def on_reject(path: Path, reject: Reject) -> None:
        if args.on_error == "fail":
            why = f"{reject.reason} ({reject.hint})" if reject.hint else reject.reason
            raise UserError(f"{why}; mend it, or --on-error skip leaves such documents out", path, reject.line)

    sizes = [path.stat().st_size for path in files if path.is_file()]
    total = sum(sizes) if len(sizes) == len(files) else None
    with console.progress(total, "reading", unit="B") as bar:
        read = taken = taken_bytes = 0

        def on_progress(done: int) -> None:
            nonlocal read
            read = done
            bar.update(done)

        def texts() -> Iterator[str]:
            nonlocal taken, taken_bytes
            documents = read_all(files, reading, counts, on_reject=on_reject, on_progress=on_progress)
            every = (document.value for document in documents)
            if args.max_bytes is not None:
                # Where the size is not known (standard input) the first ones have to do.
                every = thin_out(every, int(args.max_bytes), total, lambda: read / total if total else 1.0)
            for text in every:
                taken += 1
                taken_bytes += len(text) if text.isascii() else len(text.encode())
                yield text

        size = train(texts(), args.vocab_size, out, special=args.special)
    if counts.rejected:
        console.warning(f"rejected {summary(counts.rejected)}")
    tell_skipped(console, counts.skipped_files + files.left_out)
    if size < args.vocab_size:
        console.warning(
            f"the text has pairs for {size:,} tokens only, not {args.vocab_size:,}; the tokenizer's size is {size:,}"
        )
    console.result(f"{out}: {size:,} tokens, from {taken:,} documents ({taken_bytes / 1e6:,.1f} MB)")
    return 0
