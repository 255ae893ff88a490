"""A verb that trains: in this process, as one rank of a torchrun job, or as N local processes of the same command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.config.run import RunConfig
    from weft.train.loop import Outcome


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which run it is, and on how many ranks."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values that win over the file's")
    parser.add_argument("--nproc", type=int, metavar="N", help="local processes (default: all GPUs, or 1 on CPU)")


def run_on_ranks(
    args: argparse.Namespace,
    verb: str,
    act: Callable[[RunConfig], Outcome],
    prepare: Callable[[RunConfig], tuple[Path, Sequence[str]]],
) -> int:
    """Run `act` on every rank.

    Args:
        args: of `add_run_arguments`.
        verb: what a local process is started with, after `weft`.
        act: what one rank does with the checked config.
        prepare: called once, before any rank starts; gives the run directory and the options of the local processes.

    Returns:
        The exit code.
    """
    from weft.config.legal_mesh import check_mesh
    from weft.config.run import RunConfig
    from weft.launch.threads import wait_briefly

    wait_briefly()
    if "RANK" in os.environ:
        from weft.launch.local import join_launcher

        join_launcher()
        return run_rank(lambda: RunConfig.load(args.file, args.overrides), act, verb)
    ranks = args.nproc if args.nproc is not None and args.nproc > 0 else None
    config = RunConfig.load(args.file, args.overrides, ranks=ranks)  # mistakes are told before anything heavy starts
    run_directory, options = prepare(config)
    from weft.launch.local import checked_nproc, launch_local

    nproc = checked_nproc(args.nproc)
    check_mesh(config, nproc)
    if nproc == 1:
        return run_rank(lambda: config, act, verb)
    command = [sys.executable, "-m", "weft", verb, args.file, *args.overrides, *options]
    return launch_local(command, nproc, run_directory)


def run_rank(load: Callable[[], RunConfig], act: Callable[[RunConfig], Outcome], verb: str) -> int:
    """Run `act` in this process; returns the exit code."""
    from weft.errors import UserError
    from weft.launch.failures import told, told_mistake

    config = None
    try:
        config = load()
        outcome = act(config)
    except UserError as error:
        raise told_mistake(error) from None
    except Exception as error:
        if config is None:
            return told(error, {})
        return told(error, config.as_dict(), config.run_directory if verb == "train" else None)  # others leave none
    if outcome.status == "stopped":
        return 128 + (outcome.signal or 15)
    return 1 if outcome.status == "non-finite" else 0
