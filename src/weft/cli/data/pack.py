"""`weft data pack`: documents to a token store."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from weft.cli.data.inputs import add_inputs

HELP = "tokenize documents into a token store"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="a folder with a tokenizer.json")
    parser.add_argument("--out", required=True, metavar="DIR", help="the token store's folder")
    parser.add_argument(
        "--exact", action="store_true", help="send every document through the tokenizers library (slower)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: all cores)")
    parser.add_argument("--overwrite", action="store_true", help="replace a store that is there")


def run(args: argparse.Namespace) -> int:
    from weft.config.errors import UserError

    if args.workers is not None:
        if args.workers < 1:
            raise UserError(f"--workers {args.workers}: at least 1 is needed")
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # read by both tokenizer libraries at their first batch
    from weft.data.pack import pack as make
    from weft.data.tokenizer import Tokenizer
    from weft.observe.console import Console

    console = Console()
    tokenizer = Tokenizer.load(args.tokenizer, exact=args.exact)
    packed = make(
        args.inputs,
        Path(args.out),
        tokenizer,
        files_from=args.files_from,
        text_field=args.field,
        skip_rejects=args.on_error == "skip",
        overwrite=args.overwrite,
        console=console,
    )
    info = packed.info
    if tokenizer.exact and not args.exact:
        console.warning("gigatoken does not give this tokenizer's exact ids: all went through the tokenizers library")
    left = sum(info.rejected.values())
    for reason, number in info.rejected.items():
        console.warning(f"rejected {number:,}: {reason} (see {args.out}/rejects.jsonl)")
    for reason, number in info.skipped_files.items():
        console.warning(f"skipped {number:,} {reason} files")
    speed = (
        "up to date"
        if packed.seconds is None
        else (f"{info.bytes / 1e6 / packed.seconds:,.1f} MB/s, {info.tokens / packed.seconds:,.0f} tokens/s")
    )
    console.result(
        f"{args.out}: {info.documents + left:,} documents = {info.documents:,} packed ({info.empty_documents:,} empty) "
        f"+ {left:,} rejected; {info.tokens:,} tokens of {info.bytes / 1e6:,.1f} MB; {speed}"
    )
    return 0
