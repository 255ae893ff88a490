"""`weft debug nan`: repeats the step at which a loss or a gradient was not finite, and names the module at fault."""

from __future__ import annotations

import argparse
import warnings

from weft.cli.on_ranks import add_run_arguments
from weft.cli.reproduce import repeat_on_ranks, run_of

HELP = "name the module in which the first value that is not finite arises"
GROUP = "find"
# Hooks within compiled code do not run; the checks of the watch would repeat the step.
OVERRIDES = ("training.compile=false", "watch.replay_every=null", "watch.parameter_check_every=null")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Repeats a step of RUN whose loss or gradient norm was NaN or infinite, from the nearest checkpoint, with\n"
        "hooks on all modules. Prints the first weight, output, loss or gradient that is not finite, in the order of\n"
        "forward and backward: the module in whose code it arises, its samples, the range of the module's inputs, and\n"
        "the likely cause. The result is also in debug-nan.json of the new directory. RUN is not changed."
    )
    parser.epilog = (
        "examples:\n"
        "  weft debug nan runs/run                    the first step that logs/events.jsonl reports\n"
        "  weft debug nan runs/run --step 1200        another step\n"
        "  weft debug nan runs/run --from 0           from the beginning: which update made a weight bad?\n\n"
        "exit codes:\n"
        "  0    the search is complete: a module is named, or all values are finite this time\n"
        "  2    the step cannot be repeated: no such run, event, step or checkpoint, or an error in the input"
    )
    add_run_arguments(parser, "RUN", "the directory of the run", "as in the run")
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the first that was not finite)")
    parser.add_argument(
        "--from",
        dest="first",
        type=int,
        metavar="STEP",
        help="begin with the checkpoint of this step; 0: with the initial weights (default: the nearest checkpoint)",
    )
    parser.add_argument("--out", metavar="DIR", help="the new run directory (default: RUN/debug-nan-N)")


def run(args: argparse.Namespace) -> int:
    run = run_of(args, ("--step", args.step, 1), ("--from", args.first, 0))
    from weft.train.debug_nan import SearchingTrainer, changed_at, read_failure

    recorded = read_failure(run, args.step, args.first)
    if (step := changed_at(recorded)) is not None:
        what = f"the config of this run changed after step {step:,}; this repetition uses the last config"
        warnings.warn(what, stacklevel=2)
    args.overrides = [*args.overrides, *OVERRIDES]
    options = ["--step", str(recorded.last), "--from", str(recorded.first)]
    return repeat_on_ranks(args, "debug nan", recorded, options, SearchingTrainer)
