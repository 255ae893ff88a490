"""`weft data convert`: token stores of other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.formatting import counted

HELP = "stores of Megatron, nanoGPT, Modalities, LitData, MDS"
GROUP = "work"
FORMATS = ("weft", "megatron", "nanogpt", "pbin", "litdata", "mds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "INPUT is known by its files: a folder with store.json; Megatron's prefix, .bin, .idx or a folder with one "
        "pair; nanoGPT's .bin; Modalities' .pbin; folders of LitData and MDS. Nothing in them is executed. A store of "
        "Weft's says what its ids mean, so --to weft needs --tokenizer, or --vocab-size and --eod."
    )
    parser.add_argument("input", metavar="INPUT", help="a token store")
    parser.add_argument("--to", required=True, choices=FORMATS[:4], help="the format to write")
    parser.add_argument("--out", required=True, metavar="OUT", help="a folder (weft), a prefix (megatron), a file")
    parser.add_argument("--from", dest="source", choices=FORMATS, help="the format of INPUT, if it is not found out")
    parser.add_argument("--tokenizer", metavar="DIR", help="the tokenizer that made the ids")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids are below it; an id that is not is an error")
    parser.add_argument("--eod", type=int, metavar="ID", help="the id of the end-of-document token")
    parser.add_argument(
        "--recut",
        action="store_true",
        help="forget INPUT's documents: cut behind each end-of-document token",
    )
    parser.add_argument("--dtype", metavar="TYPE", help="of the ids of nanoGPT's .bin (default: uint16), or of MDS")
    parser.add_argument("--field", metavar="NAME", help="the column of the ids in MDS (default: tokens or input_ids)")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.external.detect import open_foreign
    from weft.data.stores.operations.convert import Vocabulary, convert
    from weft.data.stores.operations.new_store import Output
    from weft.observe.console import Console

    vocabulary = Vocabulary(args.vocab_size, args.eod)
    if args.tokenizer is not None:
        from weft.headers import read_tokenizer_header

        header = read_tokenizer_header(args.tokenizer)
        eod = header.eod_id if args.eod is None else args.eod
        vocabulary = Vocabulary(args.vocab_size or header.vocab_size, eod, header.digest)
    console = Console()
    source = open_foreign(Path(args.input), args.source, dtype=args.dtype, field=args.field)
    output = Output(Path(args.out), args.tokenizer, args.overwrite, console)
    made = convert(Path(args.input), output, args.to, vocabulary, source=source, recut=args.recut)
    if made.mask_lost:
        console.warning(f"{args.to} has no place for the store's loss mask: it was left behind")
    closed = f", {made.closed:,} of which had no end-of-document token and were given one" if made.closed else ""
    linked = " (the same files under another name)" if made.linked else ""
    console.result(
        f"{args.out}: {counted(made.documents, 'document')}{closed}; {counted(made.tokens, 'token')}{linked}"
    )
    return 0
