"""`weft data pack`: documents to a token store."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.data.conversations import add_conversation_options, tell_lengths, wants_conversations
from weft.cli.data.inputs import add_inputs, check_options, reading_of, tell_skipped
from weft.cli.stopping import Terminated, terminable
from weft.formatting import byte_size, counted, rate

if TYPE_CHECKING:
    from weft.data.packing.pack import Packed
    from weft.observe.console import Console

HELP = "tokenize documents into a token store"
GROUP = "make"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="a folder with a tokenizer.json")
    parser.add_argument("--out", required=True, metavar="DIR", help="the token store's folder")
    parser.add_argument(
        "--exact", action="store_true", help="send every document through the tokenizers library (slower)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument(
        "--shard", metavar="I/N", help="pack only the I-th of N shares; `weft data merge` puts them together"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="encode on a Ray cluster that sees the same folders (default: RAY_ADDRESS, or a new one on this machine)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a store that is there, or what another pack left unfinished"
    )
    add_conversation_options(parser)


def run(args: argparse.Namespace) -> int:
    try:
        with terminable():
            return pack_documents(args)
    except KeyboardInterrupt as leaving:
        terminated = isinstance(leaving, Terminated)
        print(f"{'terminated' if terminated else 'interrupted'}; the same command goes on", file=sys.stderr, flush=True)
        return 143 if terminated else 130


def pack_documents(args: argparse.Namespace) -> int:
    """The work of `run`."""
    from weft.errors import UserError

    shard = shard_of(args.shard)
    if args.workers is not None:
        if args.workers < 1:
            raise UserError(f"--workers {args.workers}: at least 1 is needed")
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # read by both tokenizer libraries at their first batch
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
        reading = reading_of(args)
        check_options(args, inputs)
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
    tell(packed, args.out, console)
    return 0


def shard_of(text: str | None) -> tuple[int, int] | None:
    """`2/8` as numbers.

    Raises:
        UserError: something else.
    """
    if text is None:
        return None
    from weft.errors import UserError

    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise UserError(f"--shard {text}: I/N with I from 1 to N, such as 1/8")
    return int(first), int(second)


def tell(packed: Packed, out: str, console: Console) -> None:
    """What was packed, and what was not; the numbers add up."""
    stored = packed.stored
    if packed.reason is not None:
        console.warning(f"all texts went through the tokenizers library, which is slower: {packed.reason}")
    left = sum(stored["rejected"].values())
    for reason, number in stored["rejected"].items():
        console.warning(f"rejected {number:,}: {reason} (see {out}/rejects.jsonl)")
    skipped = [source["path"] for source in stored["sources"] if source.get("skipped")]
    tell_skipped(console, stored["skipped_files"], skipped, f"; see {out}/store.json")
    for note, number in stored["notes"].items():
        console.warning(f"{note}: {counted(number, 'document')}")
    if stored["kind"] != "text":
        tell_lengths(out, console)
    speed = "up to date"
    if packed.seconds is not None:
        speed = f"{rate(packed.bytes / packed.seconds, 'B')}, {packed.tokens / packed.seconds:,.0f} tokens/s"
    pairs = stored["kind"] == "preferences"
    kept = stored["documents"] // 2 if pairs else stored["documents"]
    console.result(
        f"{out}: {counted(kept + left, 'pair' if pairs else 'document')} = {kept:,} packed "
        f"({stored['empty_documents']:,} empty) + {left:,} rejected; {counted(stored['tokens'], 'token')} of "
        f"{byte_size(stored['bytes'], 'MB')}; {speed}"
    )
