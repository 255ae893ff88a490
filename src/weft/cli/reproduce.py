"""`weft reproduce`: repeats steps of a run, and compares each with what the run recorded."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.on_ranks import add_run_arguments, run_on_ranks
from weft.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.config.run import RunConfig
    from weft.train.reproduce import Recorded
    from weft.train.stop import Outcome
    from weft.train.trainer import Trainer

HELP = "repeat steps of a run, and compare each loss with the recorded one, bit by bit"
GROUP = "train"
CONFIG = "config.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains again with RUN/config.yaml, in a new run directory, and compares the loss and the gradient norm of\n"
        "each logged step with RUN/metrics.jsonl, bit by bit. Ends at the first difference, and prints what differs\n"
        "between the two sessions: config, data, code, mesh, threads, versions, hardware. RUN is not changed, and no\n"
        "checkpoint is saved. The result is also in reproduce.json of the new directory."
    )
    parser.epilog = (
        "examples:\n"
        "  weft reproduce runs/run --steps 20\n"
        "  weft reproduce runs/run --from 1000 --steps 50     from the checkpoint of step 1000 on\n"
        "  weft reproduce runs/run training.threads=1         does the number of threads explain a difference?\n\n"
        "exit codes:\n"
        "  0    all compared steps are equal\n"
        "  1    a step differs\n"
        "  2    the run cannot be repeated: no such run, step or checkpoint, or an error in the input"
    )
    add_run_arguments(parser, "RUN", "the directory of the run to repeat", "as in the run")
    parser.add_argument("--steps", type=int, metavar="N", help="number of steps to repeat (default: all logged steps)")
    parser.add_argument(
        "--from", dest="first", type=int, default=0, metavar="STEP", help="begin with the checkpoint of this step"
    )
    parser.add_argument("--out", metavar="DIR", help="the new run directory (default: RUN/reproduce-N)")


def run(args: argparse.Namespace) -> int:
    run = run_of(args, ("--steps", args.steps, 1), ("--from", args.first, 0))
    from weft.train.reproduce import ReproducingTrainer, read_recorded

    recorded = read_recorded(run, args.first, args.steps)
    options = ["--from", str(args.first), *([] if args.steps is None else ["--steps", str(args.steps)])]
    return repeat_on_ranks(args, "reproduce", recorded, options, ReproducingTrainer)


def run_of(args: argparse.Namespace, *numbers: tuple[str, int | None, int]) -> Path:
    """Returns the run directory that the argument `file` names. Local processes get the file config.yaml in it.

    Args:
        numbers: options with their values and least values, which are checked.

    Raises:
        UserError: a value is too small, this is a rank under torchrun and `--out` is missing, or the directory is not
            that of a run.
    """
    for option, value, least in numbers:
        if value is not None and value < least:
            raise UserError(f"{option} {value}: use a number of at least {least}")
    if "RANK" in os.environ and args.out is None:
        raise UserError("several processes need the same new directory; give --out")
    from weft.observe.manifest import check_run_directory

    run = Path(args.file)
    run = run.parent if run.name == CONFIG else run
    check_run_directory(run)  # before torch is imported, which takes seconds
    return run


def repeat_on_ranks(
    args: argparse.Namespace,
    verb: str,
    recorded: Recorded,
    options: list[str],
    trainer: Callable[[RunConfig, Recorded], Trainer],
) -> int:
    """Repeats steps of a run in another run directory, on as many ranks as the run had, and returns the exit code.

    Args:
        verb: name of the subcommand.
        recorded: the run and its steps.
        options: the options of the subcommand for local processes, without `--out`.
        trainer: returns the trainer of a rank.
    """
    from weft.config.dump import read_saved
    from weft.config.trust import raise_unless_trusted
    from weft.train.reproduce import default_out, make_directory

    run = recorded.run
    saved = read_saved(run / CONFIG)
    raise_unless_trusted(saved, run / CONFIG)
    if args.nproc is None and "RANK" not in os.environ:
        args.nproc = recorded.ranks
    ranks = args.nproc or int(os.environ.get("WORLD_SIZE", 1))
    if ranks == recorded.ranks and (saved.get("parallel") or {}).get("auto"):  # the file has the plan's keys
        args.overrides = ["parallel.auto=false", "parallel.hardware=null", *args.overrides]
    out = Path(args.out) if args.out is not None else default_out(run, verb.replace(" ", "-"))
    args.file = str(run / CONFIG)
    quoted = json.dumps({"name": out.name, "directory": str(out.parent)}, ensure_ascii=False)
    args.overrides = [*args.overrides, f"run={quoted}", "log.trackers=[]", "samples.prompts=[]"]

    def prepare(config: RunConfig) -> tuple[Path, list[str]]:
        make_directory(recorded, out)
        return out, [*options, "--out", str(out)]

    def act(config: RunConfig) -> Outcome:
        if os.environ.get("RANK", "0") == "0" and not out.is_dir():  # under torchrun
            make_directory(recorded, out)
        return trainer(config, recorded).fit()

    return run_on_ranks(args, verb, act, prepare)
