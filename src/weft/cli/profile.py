"""`weft profile`: where a training step's time and memory go."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.on_ranks import add_run_arguments, run_on_ranks
from weft.files import refuse_taken

if TYPE_CHECKING:
    from weft.config.run import RunConfig
    from weft.train.loop import Outcome

HELP = "show where a training step's time and memory go"
GROUP = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Take the first steps of the run that FILE describes under PyTorch's profiler, from its initial weights, "
        "without validation, samples, trackers or checkpoints; its run directory stays as it is. FOLDER gets a Chrome "
        "trace and a picture of the memory for each rank, profile.json and profile.html."
    )
    parser.epilog = (
        "in the table:\n"
        "  compute        GPU: kernels and copies but NCCL's; CPU: torch operators (on any thread) that are no\n"
        "                 collectives, and compiled code\n"
        "  communication  GPU: NCCL's kernels, gloo's work; CPU: gloo's work, calls of collectives, waits for them\n"
        "  exposed        communication during which this rank computes nothing\n"
        "  idle           the rest of the step: neither (Python; waiting for data, which 'data' tells)\n"
        "operators and collectives: means of a step and a rank, without the waits that communication counts\n\n"
        "examples:\n"
        "  weft profile run.yaml\n"
        "  weft profile run.yaml training.compile=true --nproc 4 --ranks 0,3 --out compiled\n"
        "  weft profile run.yaml --structure --nproc 16\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m weft profile run.yaml --out /shared/profile\n\n"
        "exit codes: 0; 1 the loss is not finite; 2 a mistake in the input; 3 a process was killed; 130 Ctrl-C, 143\n"
        "SIGTERM. FOLDER appears whole, or not at all."
    )
    add_run_arguments(parser)
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="steps to record (default: 3)")
    parser.add_argument("--warmup", type=int, default=5, metavar="W", help="steps before them (default: 5)")
    parser.add_argument("--ranks", default="all", metavar="R", help="who records: all (default), or 0,1,...")
    parser.add_argument("--out", metavar="FOLDER", help="to make (default: profiles/NAME, NAME-2, ...)")
    parser.add_argument(
        "--structure",
        action="store_true",
        help="take no step: print the sharded model of rank 0 of N (--nproc; default: the fewest that the mesh can "
        "have), what wraps its forwards, and the placements of its parameters; needs neither ranks nor memory",
    )


def run(args: argparse.Namespace) -> int:
    # Read when torch loads: keep its profiler from telling of itself, and of memory that was taken before it began.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    ranks = checked_ranks(args)
    if args.structure:
        return show_structure(args)

    def prepare(config: RunConfig) -> tuple[Path, list[str]]:
        args.out = str(args.out or default_out(config))
        refuse_taken(Path(args.out), "name another --out")  # before anything heavy starts
        options = {"--out": args.out, "--steps": args.steps, "--warmup": args.warmup, "--ranks": args.ranks}
        return Path(args.out), [str(word) for option in options.items() for word in option]

    return run_on_ranks(args, "profile", lambda config: profile(config, args, ranks), prepare)


def show_structure(args: argparse.Namespace) -> int:
    """Print what wraps what in the model of rank 0."""
    from weft.config.legal_mesh import check_mesh
    from weft.config.mesh import least_ranks
    from weft.config.run import RunConfig

    config = RunConfig.load(args.file, args.overrides, ranks=args.nproc)
    ranks = args.nproc or least_ranks(config.parallel)
    check_mesh(config, ranks)

    from weft.observe.console import Console
    from weft.parallel.structure import structure
    from weft.parallel.world import local_device
    from weft.train.auto_settings import choose
    from weft.train.trainer import model_plan

    config = config.model_copy(update={"training": choose(config.training, local_device(Console()))})
    Console().result(structure(model_plan(config), ranks))
    return 0


def checked_ranks(args: argparse.Namespace) -> tuple[int, ...] | None:
    """The ranks that are to record; None: all.

    Raises:
        UserError: a number that makes no sense, here or elsewhere.
    """
    from weft.errors import UserError

    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: at least 1 step is recorded")
    if args.warmup < 0:
        raise UserError(f"--warmup {args.warmup}: 0 or more steps")
    if args.ranks == "all":
        return None
    words = args.ranks.split(",")
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--ranks {args.ranks}: all, or numbers with commas between them, such as 0,1")
    return tuple(sorted({int(word) for word in words}))


def default_out(config: RunConfig) -> Path:
    """profiles/NAME, or the first of NAME-2, NAME-3, ... that is not there."""
    first = Path("profiles") / config.run_directory.name
    number, out = 1, first
    while os.path.lexists(out):
        number += 1
        out = first.with_name(f"{first.name}-{number}")
    return out


def profile(config: RunConfig, args: argparse.Namespace, ranks: tuple[int, ...] | None) -> Outcome:
    """Profile in this process and print what was found."""
    from weft.train.capture import Request
    from weft.train.profile import profile as take

    request = Request(Path(args.out) if args.out else default_out(config), args.steps, args.warmup, ranks)
    outcome, found = take(config, request)
    if found and outcome.status != "stopped":
        show(found, request.out)
    return outcome


def show(found: dict[str, Any], out: Path) -> None:
    """Print the tables."""
    from weft.observe.console import Console
    from weft.observe.profile_page import shares_text, tables, warmup_text

    console = Console()
    for header, rows in tables(found).values():
        if rows:
            console.table(header, rows)
            console.result()
    console.result(f"{shares_text(found)}\n{warmup_text(found)}\n{out}/profile.html")
