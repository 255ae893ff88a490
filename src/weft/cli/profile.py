"""`weft profile`: where a training step's time and memory go."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.config.run import RunConfig

HELP = "show where a training step's time and memory go"


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
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m weft profile run.yaml --out /shared/profile\n\n"
        "exit codes: 0; 1 the loss is not finite; 2 a mistake in the input; 3 a process was killed; 130 Ctrl-C, 143\n"
        "SIGTERM. FOLDER appears whole, or not at all."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values that win over the file's")
    parser.add_argument("--nproc", type=int, metavar="N", help="local processes (default: all GPUs, or 1 on CPU)")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="steps to record (default: 3)")
    parser.add_argument("--warmup", type=int, default=5, metavar="W", help="steps before them (default: 5)")
    parser.add_argument("--ranks", default="all", metavar="R", help="who records: all (default), or 0,1,...")
    parser.add_argument("--out", metavar="FOLDER", help="to make (default: profiles/NAME, NAME-2, ...)")


def run(args: argparse.Namespace) -> int:
    from weft.config.run import RunConfig
    from weft.launch.threads import wait_briefly

    wait_briefly()
    # Read when torch loads: keep its profiler from telling of itself, and of memory that was taken before it began.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    ranks = checked_ranks(args)
    if "RANK" in os.environ:
        from weft.launch.local import die_with_launcher

        die_with_launcher()
        return profile(lambda: RunConfig.load(args.file, args.overrides), args, ranks)
    from weft.config.legal_mesh import check_mesh, on_ranks

    with on_ranks(args.nproc):
        config = RunConfig.load(args.file, args.overrides)
    out = Path(args.out) if args.out else default_out(config)
    raise_if_taken(out)
    from weft.launch.local import checked_nproc, launch_local

    nproc = checked_nproc(args.nproc)
    check_mesh(config, nproc)
    if nproc == 1:
        return profile(lambda: config, args, ranks)
    command = [sys.executable, "-m", "weft", "profile", args.file, *args.overrides, "--out", str(out)]
    command += ["--steps", str(args.steps), "--warmup", str(args.warmup), "--ranks", args.ranks]
    return launch_local(command, nproc, out)


def checked_ranks(args: argparse.Namespace) -> tuple[int, ...] | None:
    """The ranks that are to record; None: all.

    Raises:
        UserError: a number that makes no sense, here or elsewhere.
    """
    from weft.config.errors import UserError

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


def raise_if_taken(out: Path) -> None:
    """Before anything heavy starts. Raises UserError if `out` is there already."""
    from weft.config.errors import UserError

    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError("exists already; name another --out, or move it away", out)


def profile(load: Callable[[], RunConfig], args: argparse.Namespace, ranks: tuple[int, ...] | None) -> int:
    """Profile in this process what `load` gives; returns the exit code."""
    from weft.config.errors import UserError
    from weft.launch.failures import told, told_mistake

    config = None
    try:
        config = load()
        from weft.train.capture import Request
        from weft.train.profile import profile as take

        request = Request(Path(args.out) if args.out else default_out(config), args.steps, args.warmup, ranks)
        outcome, found = take(config, request)
    except UserError as error:
        raise told_mistake(error) from None
    except Exception as error:
        return told(error, config.as_dict() if config is not None else {})
    if outcome.status == "stopped":
        return 128 + (outcome.signal or 15)
    if found:
        show(found, request.out)
    return 1 if outcome.status == "non-finite" else 0


def show(found: dict[str, Any], out: Path) -> None:
    """Print the tables."""
    from weft.observe import profile_page as tables
    from weft.observe.console import Console

    console = Console()
    for header, rows in (
        tables.steps_table(found),
        tables.operators_table(found),
        tables.collectives_table(found),
        tables.memory_table(found),
    ):
        if rows:
            console.table(header, rows)
            console.result()
    console.result(f"{tables.shares_text(found)}\n{tables.warmup_text(found)}\n{out}/profile.html")
