"""`weft data convert`: converts token stores from and to the formats of other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.formatting import counted

HELP = "convert stores of Megatron, nanoGPT, Modalities, LitData, MDS"
GROUP = "work"
FORMATS = ("weft", "megatron", "nanogpt", "pbin", "litdata", "mds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Detects the format of INPUT from its files: a folder with store.json; Megatron's prefix, .bin, .idx or a "
        "folder with one pair; nanoGPT's .bin; Modalities' .pbin; folders of LitData and MDS. Never executes anything "
        "from these files. --to weft needs the vocabulary: --tokenizer, or --vocab-size and --eod."
    )
    parser.add_argument("input", metavar="INPUT", help="the token store to convert")
    parser.add_argument("--to", required=True, choices=FORMATS[:4], help="format to write")
    parser.add_argument(
        "--out", required=True, metavar="OUT", help="output: a folder (weft), prefix (megatron) or file"
    )
    parser.add_argument("--from", dest="source", choices=FORMATS, help="format of INPUT (default: detected)")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer that created the ids")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="vocabulary size; ids of N and above are errors")
    parser.add_argument("--eod", type=int, metavar="ID", help="id of the end-of-document token")
    parser.add_argument(
        "--recut",
        action="store_true",
        help="ignore the documents of INPUT and split its tokens after each end-of-document token",
    )
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="dtype of the token ids, for nanoGPT's .bin (default: uint16) and for MosaicML's MDS",
    )
    parser.add_argument("--field", metavar="NAME", help="column of the ids in MDS (default: tokens or input_ids)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.external.detect import open_external_store
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
    source = open_external_store(Path(args.input), args.source, dtype=args.dtype, field=args.field)
    output = Output(Path(args.out), args.tokenizer, args.overwrite, console)
    converted = convert(Path(args.input), source, output, args.to, vocabulary, recut=args.recut)
    if converted.mask_lost:
        console.warning(f"the format {args.to} has no loss mask: the store's mask was dropped")
    closed = f" ({converted.closed:,} got a missing end-of-document token)" if converted.closed else ""
    linked = " (hard links to the input)" if converted.linked else ""
    console.result(
        f"{args.out}: {counted(converted.documents, 'document')}{closed}; {counted(converted.tokens, 'token')}{linked}"
    )
    return 0
