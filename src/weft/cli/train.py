"""`weft train`: trains the model that a run file describes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from weft.cli.on_ranks import add_run_arguments, run_on_ranks

if TYPE_CHECKING:
    from weft.config.run import RunConfig
    from weft.train.stop import Outcome

HELP = "train the model that a run file describes; resume an interrupted run"
GROUP = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the model that FILE describes. The run directory is <run.directory>/<run.name>. If the run directory\n"
        "has checkpoints, training resumes from the newest. SIGTERM and Ctrl-C save a checkpoint and exit. The same\n"
        "command resumes the run."
    )
    parser.epilog = (
        "examples:\n"
        "  weft train run.yaml\n"
        "  weft train run.yaml optimizer.lr=1e-3 training.steps=2000\n"
        "  weft train run.yaml --nproc 4                       four processes on this machine (FSDP2)\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m weft train run.yaml\n\n"
        "exit codes:\n"
        "  0    finished\n"
        "  1    the loss is not finite (a checkpoint is saved), or a bug of Weft (a traceback is printed)\n"
        "  2    an error in the input, too little memory or disk space, or an exception in custom code\n"
        "  3    a local process was killed, or did not stop (the same command resumes from the last checkpoint)\n"
        "  130  stopped by Ctrl-C (a checkpoint is saved)\n"
        "  143  stopped by SIGTERM (a checkpoint is saved)\n"
        "Under torchrun every exit code other than 0 becomes 1."
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="move the contents of the run directory aside and start over"
    )
    parser.add_argument(
        "--from-last-good",
        action="store_true",
        help="move damaged checkpoints aside and resume from the last complete one",
    )


def run(args: argparse.Namespace) -> int:
    options = ["--fresh"] * args.fresh + ["--from-last-good"] * args.from_last_good
    return run_on_ranks(args, "train", lambda config: fit(config, args), lambda config: (config.run_directory, options))


def fit(config: RunConfig, args: argparse.Namespace) -> Outcome:
    """Trains on this rank, and returns the outcome."""
    from weft.train.trainer import Trainer

    return Trainer(config, fresh=args.fresh, from_last_good=args.from_last_good).fit()
