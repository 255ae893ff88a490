"""`weft data train-tokenizer`: text to a tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.cli.data.inputs import add_inputs, reading_of

HELP = "train a byte-level BPE on text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="entries, special tokens counted")
    parser.add_argument("--out", required=True, metavar="DIR", help="the tokenizer's folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer that is there")


def run(args: argparse.Namespace) -> int:
    from weft.config.errors import UserError
    from weft.data.documents import Counts, Reject
    from weft.data.sources import find_files, read_all
    from weft.data.tokenizer import train
    from weft.observe.console import Console

    console, out = Console(), Path(args.out)
    if out.exists() and not args.overwrite:
        raise UserError("exists already; name another --out, or --overwrite replaces it", out)
    files, reading, counts = find_files(args.inputs, args.files_from), reading_of(args), Counts()

    def on_reject(path: Path, reject: Reject) -> None:
        if args.on_error == "fail":
            why = f"{reject.reason} ({reject.hint})" if reject.hint else reject.reason
            raise UserError(f"{why}; mend it, or --on-error skip leaves such documents out", path, reject.line)

    sizes = [path.stat().st_size for path in files if path.is_file()]
    with console.progress(sum(sizes) if len(sizes) == len(files) else None, "reading", unit="B") as bar:
        documents = read_all(files, reading, counts, on_reject=on_reject, on_progress=lambda done: bar.update(done))
        texts = (document.value for document in documents)
        size = train(texts, args.vocab_size, out, overwrite=args.overwrite)
    if counts.rejected:
        console.warning(f"left out: {dict(counts.rejected)}")
    if size < args.vocab_size:
        console.warning(
            f"the text has pairs for {size:,} tokens only, not {args.vocab_size:,}; the tokenizer's size is {size:,}"
        )
    console.result(f"{out}: {size:,} tokens, from {counts.documents:,} documents ({counts.bytes / 1e6:,.1f} MB)")
    return 0
