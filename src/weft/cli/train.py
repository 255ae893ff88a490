"""`weft train`: a checked config in, a trained model out."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from weft.cli.on_ranks import add_run_arguments, run_on_ranks
from weft.errors import UserError

if TYPE_CHECKING:
    from weft.config.run import RunConfig
    from weft.train.loop import Outcome

HELP = "train a model as a YAML file says; go on if it was interrupted"
GROUP = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train what FILE describes, in the run directory <run.directory>/<run.name>. If that holds a checkpoint, "
        "training goes on from the last whole one. SIGTERM and Ctrl-C save a checkpoint and leave; the same command "
        "goes on."
    )
    parser.epilog = (
        "examples:\n"
        "  weft train run.yaml\n"
        "  weft train run.yaml optimizer.lr=1e-3 training.steps=2000\n"
        "  weft train run.yaml --nproc 4                       four processes on this machine (FSDP2)\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m weft train run.yaml\n\n"
        "exit codes:\n"
        "  0    finished\n"
        "  1    the loss is not finite (a checkpoint is saved); or a fault of Weft's own, with its traceback\n"
        "  2    a mistake in the input, too little memory or disk, or an exception in a class of your own\n"
        "  3    a process of --nproc was killed, or did not stop (the same command goes on from the last checkpoint)\n"
        "  130  stopped by Ctrl-C, 143 by SIGTERM (a checkpoint is saved)\n"
        "torchrun makes 1 of all that are not 0."
    )
    add_run_arguments(parser)
    parser.add_argument("--fresh", action="store_true", help="set aside what the run directory holds and start over")
    parser.add_argument(
        "--from-last-good", action="store_true", help="set damaged checkpoints aside and go on from the last whole one"
    )


def run(args: argparse.Namespace) -> int:
    if args.fresh and args.from_last_good:
        raise UserError("--fresh starts over and --from-last-good goes on; give one of the two")
    options = ["--fresh"] * args.fresh + ["--from-last-good"] * args.from_last_good
    return run_on_ranks(args, "train", lambda config: fit(config, args), lambda config: (config.run_directory, options))


def fit(config: RunConfig, args: argparse.Namespace) -> Outcome:
    """Train in this process."""
    from weft.train.trainer import Trainer

    return Trainer(config, fresh=args.fresh, from_last_good=args.from_last_good).fit()
