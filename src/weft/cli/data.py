"""`weft data`: text to a tokenizer, to a token store, and a look at one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

HELP = "train a tokenizer, pack text into token stores, inspect them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="data_verb", metavar="VERB", required=True)
    verb = verbs.add_parser("train-tokenizer", help="train a byte-level BPE on text")
    _inputs(verb)
    verb.add_argument("--vocab-size", type=int, required=True, metavar="N", help="entries, special tokens counted")
    verb.add_argument("--out", required=True, metavar="DIR", help="the tokenizer's folder")
    verb.add_argument("--overwrite", action="store_true", help="replace a tokenizer that is there")
    verb = verbs.add_parser("pack", help="tokenize documents into a token store")
    _inputs(verb)
    verb.add_argument("--tokenizer", required=True, metavar="DIR", help="a folder with a tokenizer.json")
    verb.add_argument("--out", required=True, metavar="DIR", help="the token store's folder")
    verb.add_argument(
        "--exact", action="store_true", help="send every document through the tokenizers library (slower)"
    )
    verb.add_argument("--workers", type=int, metavar="N", help="threads (default: all cores)")
    verb.add_argument("--overwrite", action="store_true", help="replace a store that is there")
    verb = verbs.add_parser("inspect", help="counts, lengths and decoded samples of a token store")
    verb.add_argument("store", metavar="STORE", help="a folder that `weft data pack` wrote")
    verb.add_argument("--tokenizer", metavar="DIR", help="decode samples with this tokenizer")
    verb.add_argument("--samples", type=int, default=2, metavar="N", help="documents to show (default: 2)")
    verb.add_argument("--verify", action="store_true", help="read every byte and compare it with the store's digests")


def _inputs(verb: argparse.ArgumentParser) -> None:
    verb.description = (
        "INPUT: files, or folders searched to any depth. *.jsonl is one JSON object a line; every other text file is "
        "one document. What is no document (broken JSON, invalid UTF-8, ...) is never dropped without a word."
    )
    verb.add_argument("inputs", nargs="*", metavar="INPUT", help="files and folders")
    verb.add_argument("--files-from", metavar="FILE", help="a file that names more inputs, one a line")
    verb.add_argument("--field", default="text", metavar="NAME", help="a JSON line's text (default: text)")
    verb.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="at what is no document: stop (default), or leave it out, counted and noted",
    )


def run(args: argparse.Namespace) -> int:
    return {"train-tokenizer": train_tokenizer, "pack": pack, "inspect": inspect}[args.data_verb](args)


def train_tokenizer(args: argparse.Namespace) -> int:
    from weft.config.errors import UserError
    from weft.data.documents import Counts, Reject, find_files, read_documents
    from weft.data.tokenizer import train
    from weft.observe.console import Console

    console, out = Console(), Path(args.out)
    if out.exists() and not args.overwrite:
        raise UserError("exists already; name another --out, or --overwrite replaces it", out)
    files, counts = find_files(args.inputs, args.files_from), Counts()

    def on_reject(reject: Reject) -> None:
        if args.on_error == "fail":
            raise UserError(f"{reject.reason}; mend it, or --on-error skip leaves such documents out", str(reject))

    with console.progress(sum(p.stat().st_size for p in files), "reading", unit="B") as bar:
        documents = read_documents(
            files, counts, text_field=args.field, on_reject=on_reject, on_progress=lambda done: bar.update(done)
        )
        texts = (document.text for document in documents)
        size = train(texts, args.vocab_size, out, overwrite=args.overwrite)
    if counts.rejected:
        console.warning(f"left out: {dict(counts.rejected)}")
    if size < args.vocab_size:
        console.warning(
            f"the text has pairs for {size:,} tokens only, not {args.vocab_size:,}; the tokenizer's size is {size:,}"
        )
    console.result(f"{out}: {size:,} tokens, from {counts.documents:,} documents ({counts.bytes / 1e6:,.1f} MB)")
    return 0


def pack(args: argparse.Namespace) -> int:
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


def inspect(args: argparse.Namespace) -> int:
    from weft.data.inspect import describe

    for line in describe(Path(args.store), args.tokenizer, samples=args.samples, verify=args.verify):
        print(line)
    return 0
