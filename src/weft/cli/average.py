"""`weft average`: averages the weights of several models."""

from __future__ import annotations

import argparse

HELP = "average the weights of several models or checkpoints"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the average of the weights of several models with the same architecture to the folder OUT: a model "
        "soup, or an average of the last checkpoints of a run. OUT is a checkpoint without optimizer state, as `weft "
        "import` writes. Sums are computed in float64."
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument(
        "sources", nargs="+", metavar="SRC", help="runs, checkpoints, imported or Hugging Face folders to average"
    )
    parser.add_argument(
        "--weights",
        type=float,
        nargs="+",
        metavar="W",
        help="a positive number for each model, in their order (default: all models count equally)",
    )
    parser.add_argument("--last", type=int, metavar="N", help="average the last N checkpoints of the run SRC")
    parser.add_argument(
        "--ema", action="store_true", help="use the averages that the callback ema saved, in place of the weights"
    )
    parser.add_argument("--dtype", help="dtype of the averages, such as bfloat16 (default: that of the models)")


def run(args: argparse.Namespace) -> int:
    from weft.checkpoint.average import average_models
    from weft.observe.console import Console

    console, settings = Console(), {name: getattr(args, name) for name in ("weights", "last", "ema", "dtype")}
    console.result(f"{args.out}: {average_models(args.sources, args.out, console=console, **settings)}")
    return 0
