"""`weft data pack`: packs documents into a token store."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.data.conversations import add_conversation_options, report_lengths, wants_conversations
from weft.cli.data.inputs import add_inputs, check_reading_options, name_files, parse_reading, report_skipped
from weft.cli.stopping import report_stop, terminable
from weft.formatting import byte_size, counted, rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.data.packing.pack import Packed
    from weft.observe.console import Console

HELP = "tokenize documents into a token store"
GROUP = "make"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument(
        "--tokenizer", required=True, metavar="DIR", help="the tokenizer's folder, with a tokenizer.json"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the token store's folder")
    parser.add_argument(
        "--exact", action="store_true", help="encode every document with the tokenizers library (slower)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="number of processes (default: all cores)")
    parser.add_argument("--shard", metavar="I/N", help="pack only shard I of N; `weft data merge` joins the shards")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="encode on a Ray cluster whose machines share the folders (without ADDRESS: the address in RAY_ADDRESS, "
        "or else a new cluster on this machine)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing store, or the unfinished work of another pack"
    )
    add_conversation_options(parser)


def run(args: argparse.Namespace) -> int:
    try:
        with terminable():
            return pack_documents(args)
    except KeyboardInterrupt as leaving:
        return report_stop(leaving, "; repeat the command to resume")


def pack_documents(args: argparse.Namespace) -> int:
    """Packs the documents, prints a report and returns the exit code.

    Raises:
        KeyboardInterrupt: this process was interrupted (SIGINT) or terminated (SIGTERM, SIGHUP).
    """
    from weft.errors import UserError

    shard = parse_shard(args.shard)
    if args.workers is not None:
        if args.workers < 1:
            raise UserError(f"--workers {args.workers}: give at least 1")
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # both tokenizer libraries read it at their first batch
    from weft.data.packing.encoder import Encoder, TextEncoder
    from weft.data.packing.pack import pack
    from weft.data.sources import find_files
    from weft.observe.console import Console

    console, inputs = Console(), find_files(args.inputs, args.files_from)
    encoder: Encoder
    if wants_conversations(args):
        from weft.cli.data.conversations import encoder_of, reading_of_conversations

        reading = reading_of_conversations(args)
        encoder = encoder_of(args, inputs, reading, console)
    else:
        reading = parse_reading(args)
        check_reading_options(args, inputs)
        encoder = TextEncoder(Path(args.tokenizer), exact=args.exact)
    packed = pack(
        inputs,
        Path(args.out),
        encoder,
        reading=reading,
        workers=args.workers,
        on_error=args.on_error,
        shard=shard,
        overwrite=args.overwrite,
        ray=args.ray,
        console=console,
    )
    report(packed, args.out, console)
    return 0


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """Parses a shard `I/N`, such as `2/8`. Raises UserError unless 1 <= I <= N."""
    if text is None:
        return None
    from weft.errors import UserError

    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise UserError(f"--shard {text}: give I/N with I from 1 to N, such as 1/8")
    return int(first), int(second)


def report(packed: Packed, out: str, console: Console) -> None:
    """Prints the numbers of packed, rejected and skipped documents, and warnings."""
    stored = packed.stored
    if packed.reason is not None:
        console.warning(f"all texts were encoded by the tokenizers library, which is slower: {packed.reason}")
    rejected = sum(stored["rejected"].values())
    for reason, number in stored["rejected"].items():
        noun = "pair" if stored["kind"] == "preferences" else "document"
        console.warning(f"rejected {counted(number, noun)}: {reason} (see {out}/rejects.jsonl)")
    skipped = [source["path"] for source in stored["sources"] if source.get("skipped")]
    more = f"; see {out}/store.json"
    report_skipped(console, stored["skipped_files"], skipped, more)
    if blank := [source["path"] for source in stored["sources"] if _has_no_text(source)]:
        console.warning(f"no text in {counted(len(blank), 'file')} ({name_files(blank, more)})")
    for note, number in stored["notes"].items():
        console.warning(f"{note}: {counted(number, 'document')}")
    if stored["kind"] != "text":
        report_lengths(out, console)
    speed = "up to date"
    if packed.seconds is not None:
        speed = f"{rate(packed.bytes / packed.seconds, 'B')}, {packed.tokens / packed.seconds:,.0f} tokens/s"
    pairs = stored["kind"] == "preferences"
    kept = stored["documents"] // 2 if pairs else stored["documents"]
    console.result(
        f"{out}: {counted(kept + rejected, 'pair' if pairs else 'document')} = {kept:,} packed "
        f"({stored['empty_documents']:,} empty) + {rejected:,} rejected; {counted(stored['tokens'], 'token')} of "
        f"{byte_size(stored['bytes'], 'MB')}; {speed}"
    )


def _has_no_text(source: Mapping[str, Any]) -> bool:
    """Whether an input file of a store is empty or blank. A shard can begin or end with a part of a file."""
    told = source["rejected"] or "skipped" in source or "cut" in source
    return not told and source["documents"] <= (source["size"] == 0)  # an empty text file is one empty document
