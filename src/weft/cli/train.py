"""`weft train`: trains the model of a config."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from weft.cli.on_ranks import add_run_arguments, run_on_ranks
from weft.errors import UserError

if TYPE_CHECKING:
    from weft.config.run import RunConfig
    from weft.train.loop import Outcome

HELP = "train the model of a YAML file; resume if the run was interrupted"
GROUP = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train the model that FILE describes, in the run directory <run.directory>/<run.name>. If that holds a "
        "checkpoint, training resumes from the last complete one. SIGTERM and Ctrl-C save a checkpoint and exit; the "
        "same command resumes."
    )
    parser.epilog = (
        "examples:\n"
        "  weft train run.yaml\n"
        "  weft train run.yaml optimizer.lr=1e-3 training.steps=2000\n"
        "  weft train run.yaml --nproc 4                       four processes on this machine (FSDP2)\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m weft train run.yaml\n\n"
        "exit codes:\n"
        "  0    finished\n"
        "  1    the loss is not finite (a checkpoint is saved), or a bug of Weft (with its traceback)\n"
        "  2    a mistake in the input, too little memory or disk space, or an exception in custom code\n"
        "  3    a process of --nproc was killed, or did not stop (the same command resumes from the last checkpoint)\n"
        "  130  stopped by Ctrl-C, 143 by SIGTERM (a checkpoint is saved)\n"
        "Under torchrun every exit code other than 0 becomes 1."
    )
    add_run_arguments(parser)
    parser.add_argument("--fresh", action="store_true", help="move the content of the run directory aside and restart")
    parser.add_argument(
        "--from-last-good",
        action="store_true",
        help="move damaged checkpoints aside and resume from the last complete one",
    )


def run(args: argparse.Namespace) -> int:
    if args.fresh and args.from_last_good:
        raise UserError("--fresh starts over and --from-last-good resumes; give one of the two")
    options = ["--fresh"] * args.fresh + ["--from-last-good"] * args.from_last_good
    return run_on_ranks(args, "train", lambda config: fit(config, args), lambda config: (config.run_directory, options))


def fit(config: RunConfig, args: argparse.Namespace) -> Outcome:
    """Trains in this process."""
    from weft.train.trainer import Trainer

    return Trainer(config, fresh=args.fresh, from_last_good=args.from_last_good).fit()
