"""`weft train`: a checked config in, a trained model out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.config.run import RunConfig

HELP = "train a model as a YAML file says; go on if it was interrupted"


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
        "  2    a mistake in the input, or an exception in a class of your own\n"
        "  3    a process of --nproc was killed (the same command goes on from the last checkpoint)\n"
        "  130  stopped by Ctrl-C, 143 by SIGTERM (a checkpoint is saved)\n"
        "torchrun makes 1 of all that are not 0."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values that win over the file's")
    parser.add_argument("--nproc", type=int, metavar="N", help="local processes (default: all GPUs, or 1 on CPU)")
    parser.add_argument("--fresh", action="store_true", help="set aside what the run directory holds and start over")


def run(args: argparse.Namespace) -> int:
    from weft.config.run import RunConfig
    from weft.launch.threads import wait_briefly

    wait_briefly()
    if "RANK" in os.environ:
        from weft.launch.local import die_with_launcher

        die_with_launcher()
        return train(lambda: RunConfig.load(args.file, args.overrides), fresh=args.fresh)
    from weft.config.legal_mesh import check_mesh, on_ranks

    with on_ranks(args.nproc):
        config = RunConfig.load(args.file, args.overrides)  # mistakes are told before anything heavy starts
    from weft.launch.local import checked_nproc, launch_local

    nproc = checked_nproc(args.nproc)
    check_mesh(config, nproc)
    if nproc == 1:
        return train(lambda: config, fresh=args.fresh)
    command = [sys.executable, "-m", "weft", "train", args.file, *args.overrides]
    return launch_local([*command, "--fresh"] if args.fresh else command, nproc, config.run_directory)


def train(load: Callable[[], RunConfig], *, fresh: bool) -> int:
    """Train in this process what `load` gives; returns the exit code."""
    from weft.config.errors import UserError
    from weft.launch.failures import told, told_mistake

    config = None
    try:
        config = load()
        from weft.train.trainer import Trainer

        outcome = Trainer(config, fresh=fresh).fit()
    except UserError as error:
        raise told_mistake(error) from None
    except Exception as error:
        return told(error, config.as_dict() if config is not None else {})
    if outcome.status == "stopped":
        return 128 + (outcome.signal or 15)
    return 1 if outcome.status == "non-finite" else 0
