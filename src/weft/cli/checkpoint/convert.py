"""`weft checkpoint convert`: writes a checkpoint in another layout, dtype or format."""

from __future__ import annotations

import argparse

HELP = "write a checkpoint unsharded, in another dtype, or in another format"
GROUP = "make"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "--to weft, the default, writes a checkpoint of Weft: from a sharded checkpoint, one with unsharded tensors, "
        "the optimizer state and the step; from a Hugging Face folder, a GGUF file or a distributed checkpoint of "
        "PyTorch (DCP), the same as `weft import`. --to hf, --to dcp and the other formats of `weft export` write the "
        "same as `weft export`."
    )
    parser.add_argument("source", metavar="SRC", help="a run, a checkpoint, or a model of another tool")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--to", default="weft", metavar="FORMAT", help="weft (the default), hf, dcp, ...")
    parser.add_argument("--dtype", help="dtype of the weights, such as bfloat16 (default: as saved)")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from weft.checkpoint.huggingface.import_model import import_model, parse_dtype
    from weft.checkpoint.inventory import is_checkpoint, newest_at
    from weft.checkpoint.rewrite import rewrite_checkpoint
    from weft.export.export_model import export_model
    from weft.formatting import counted
    from weft.observe.console import Console

    console, dtype = Console(), parse_dtype(args.dtype)
    if args.to != "weft":
        options = {} if dtype is None else {"dtype": args.dtype}
        console.result(f"{args.out}: {export_model(args.source, args.out, args.to, console=console, **options)}")
    elif is_checkpoint(args.source):
        written = rewrite_checkpoint(newest_at(args.source), Path(args.out), dtype, console)
        console.result(f"{args.out}: {counted(written[0], 'tensor')} in {counted(written[1], 'file')}")
    else:
        console.result(f"{args.out}: {import_model(args.source, args.out, dtype=dtype, console=console)}")
    return 0
