"""`weft train`: trains the model that a run file describes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.on_ranks import add_run_arguments, run_on_ranks
from weft.errors import UserError

if TYPE_CHECKING:
    from weft.config.run import RunConfig
    from weft.launch.elastic_hosts import ElasticHosts
    from weft.launch.supervisor import Supervisor
    from weft.train.stop import Outcome

HELP = "train the model that a run file describes; resume an interrupted run"
GROUP = "train"
ELASTIC_RESTARTS = 20  # default of --max-restarts if hosts can be lost
EPILOG = (
    "examples:\n"
    "  weft train run.yaml\n"
    "  weft train run.yaml optimizer.lr=1e-3 training.steps=2000\n"
    "  weft train run.yaml --nproc 4                       four processes on this machine (FSDP2)\n"
    "  weft train run.yaml --nproc 4 --max-restarts 20     the same, restarted after a failure\n"
    "  weft train run.yaml --nodes 2:8 --rendezvous one:29400    on each of 2 to 8 hosts\n"
    "  torchrun --nnodes 2 --nproc-per-node 8 ... -m weft train run.yaml\n\n"
    "exit codes:\n"
    "  0    finished\n"
    "  1    the loss is not finite (a checkpoint is saved), or a bug of Weft (a traceback is printed)\n"
    "  2    an error in the input, too little memory or disk space, or an exception in custom code\n"
    "  3    a local process was killed, hung, or did not stop in time (the same command resumes from the last\n"
    "       checkpoint)\n"
    "  129  stopped by SIGHUP (a checkpoint is saved)\n"
    "  130  stopped by Ctrl-C (a checkpoint is saved)\n"
    "  143  stopped by SIGTERM (a checkpoint is saved)\n"
    "Under torchrun every exit code other than 0 becomes 1."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the model that FILE describes. The run directory is <run.directory>/<run.name>. If the run directory\n"
        "has checkpoints, training resumes from the newest. SIGTERM, SIGHUP and Ctrl-C save a checkpoint and exit.\n"
        "The same command resumes the run. Failures of local processes are recorded in logs/failures.jsonl."
    )
    parser.epilog = EPILOG
    add_run_arguments(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="move the contents of the run directory aside and start over"
    )
    parser.add_argument(
        "--from-last-good",
        action="store_true",
        help="move damaged checkpoints aside and resume from the last complete one",
    )
    add_restart_arguments(parser)
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume although changes of config or data alter the training; manifest.json records them",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read every byte of the token stores first (default: sizes and a sample)"
    )


def add_restart_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that decide when processes are started again, and when they end."""
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="start all processes again, up to N times, after one of them failed; training resumes from the last "
        "checkpoint. Not after an error in the input or in custom code, a loss that is not finite, or a signal to stop "
        f"(default: 0; with --nodes MIN:MAX: {ELASTIC_RESTARTS})",
    )
    parser.add_argument(
        "--restart-window",
        type=float,
        metavar="SECONDS",
        help="count only the restarts of the last SECONDS for --max-restarts (default: all restarts)",
    )
    parser.add_argument(
        "--nodes",
        metavar="N or MIN:MAX",
        help="number of hosts, on each of which the same command runs. MIN:MAX: the run goes on when hosts are lost, "
        "as long as MIN are left, and when lost hosts return or others join",
    )
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="with --nodes, the address where the hosts meet; HOST is one of them"
    )
    parser.add_argument(
        "--stop-within",
        type=float,
        metavar="SECONDS",
        help="after SIGTERM or SIGHUP, end all processes within SECONDS. If the checkpoint may take longer, save one "
        "in the memory of the host first (default: the environment variable WEFT_STOP_WITHIN, or no deadline)",
    )


def run(args: argparse.Namespace) -> int:
    from weft.train.stop import STOP_WITHIN, stop_within

    flags = {"--fresh": args.fresh, "--from-last-good": args.from_last_good, "--accept-changes": args.accept_changes}
    flags["--verify"] = args.verify
    options = [flag for flag, given in flags.items() if given]

    def prepare(config: RunConfig) -> tuple[Path, list[str]]:
        return config.run_directory, options

    before = os.environ.get(STOP_WITHIN)
    if args.stop_within is not None:
        os.environ[STOP_WITHIN] = f"{args.stop_within:g}"  # local processes inherit it
    try:
        stop_within()
        return run_on_ranks(args, "train", lambda config: fit(config, args), prepare, supervisor_of(args))
    finally:
        os.environ.pop(STOP_WITHIN, None)
        if before is not None:
            os.environ[STOP_WITHIN] = before


def supervisor_of(args: argparse.Namespace) -> Supervisor | None:
    """Returns the supervisor of the local processes; None if this process is a rank.

    Raises:
        UserError: the options for restarts are not valid.
    """
    from weft.launch.supervisor import Supervisor

    args.hosts = hosts_of(args)
    if args.max_restarts is None:
        args.max_restarts = 0
    if args.max_restarts < 0:
        raise UserError(f"--max-restarts {args.max_restarts}: use 0 or more")
    if args.restart_window is not None and (args.restart_window <= 0 or not args.max_restarts):
        raise UserError(f"--restart-window {args.restart_window:g}: use more than 0 seconds, and --max-restarts N")
    if "RANK" not in os.environ:
        return Supervisor(args.max_restarts, args.restart_window)
    if args.max_restarts:
        raise UserError("--max-restarts restarts local processes; under torchrun, use torchrun's --max-restarts")
    return None


def hosts_of(args: argparse.Namespace) -> ElasticHosts | None:
    """Returns the hosts of an elastic run, from `--nodes` and `--rendezvous`; None without these options.

    Raises:
        UserError: the options are not valid.
    """
    if args.nodes is None and args.rendezvous is None:
        return None
    if args.nodes is None or args.rendezvous is None:
        raise UserError("--nodes and --rendezvous belong together: --nodes 2:8 --rendezvous HOST:PORT")
    least, _, most = args.nodes.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and 1 <= int(least) <= int(most or least)):
        raise UserError(f"--nodes {args.nodes}: use a number of hosts, or MIN:MAX")
    host, _, port = args.rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--rendezvous {args.rendezvous}: use HOST:PORT, such as one:29400")
    if "RANK" in os.environ:
        raise UserError("--rendezvous starts processes on each host; remove it under torchrun")
    if args.fresh:
        raise UserError("--fresh: each host would start over; rename the run directory, or choose another run.name")
    if args.restart_window is not None:
        raise UserError("--restart-window counts restarts of local processes; remove it with --rendezvous")
    from weft.launch.elastic_hosts import ElasticHosts

    elastic = int(least) < int(most or least)
    restarts = args.max_restarts if args.max_restarts is not None else ELASTIC_RESTARTS if elastic else 0
    return ElasticHosts(int(least), int(most or least), args.rendezvous, restarts)


def fit(config: RunConfig, args: argparse.Namespace) -> Outcome:
    """Trains on this rank, and returns the outcome."""
    from weft.train.trainer import Trainer

    options = {"from_last_good": args.from_last_good, "accept_changes": args.accept_changes, "verify": args.verify}
    return Trainer(config, fresh=args.fresh, **options).fit()
