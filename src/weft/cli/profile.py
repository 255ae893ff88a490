"""`weft profile`: measures the time and memory of training steps."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.on_ranks import add_run_arguments, run_on_ranks
from weft.errors import UserError
from weft.files import refuse_existing

if TYPE_CHECKING:
    from weft.config.run import RunConfig
    from weft.train.stop import Outcome

HELP = "profile the time and memory of training steps"
GROUP = "train"
TURNS = 3  # processes of each level that --determinism compares
DEFAULTS = {"steps": 3, "warmup": 5, "ranks": "all", "out": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs the first training steps of the run that FILE describes under PyTorch's profiler, from the initial\n"
        "weights, without validation, samples, trackers or checkpoints. The run directory does not change. Writes\n"
        "profile.html, profile.json, and a Chrome trace and a plot of the memory for each rank to FOLDER."
    )
    parser.epilog = (
        "in the table:\n"
        "  compute        GPU: kernels (except NCCL's) and copies; CPU: torch operators on any thread (except\n"
        "                 collectives), and compiled code\n"
        "  communication  GPU: NCCL's kernels, gloo's work; CPU: gloo's work, calls of collectives, waits for them\n"
        "  exposed        communication during which this rank computes nothing\n"
        "  idle           the remaining time of the step: Python code, and waiting for data (see 'data')\n"
        "operators and collectives: means per step and rank; waiting times count as communication, not as operators\n\n"
        "examples:\n"
        "  weft profile run.yaml\n"
        "  weft profile run.yaml training.compile=true --nproc 4 --ranks 0,3 --out compiled\n"
        "  weft profile run.yaml --structure --nproc 16\n"
        "  weft profile run.yaml --determinism\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m weft profile run.yaml --out /shared/profile\n\n"
        "exit codes: 0 success; 1 the loss is not finite; 2 an error in the input; 3 a process was killed;\n"
        "129 SIGHUP; 130 Ctrl-C; 143 SIGTERM. FOLDER appears only when it is complete."
    )
    add_run_arguments(parser)
    parser.set_defaults(**DEFAULTS)
    parser.add_argument("--steps", type=int, metavar="K", help="number of steps to record (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=int, metavar="W", help="number of warm-up steps before these (default: %(default)s)"
    )
    parser.add_argument("--ranks", metavar="R", help="ranks to record: all (default), or 0,1,...")
    parser.add_argument("--out", metavar="FOLDER", help="output folder (default: profiles/NAME, NAME-2, ...)")
    parser.add_argument(
        "--structure",
        action="store_true",
        help="run no step; print the sharded model of rank 0, the wrappers of each module's forward, the placements of "
        "the parameters, and the estimated memory of a step. --nproc sets the number of ranks (default: the fewest "
        "that fit the mesh). No ranks are started, and no memory for weights is needed",
    )
    parser.add_argument(
        "--determinism",
        action="store_true",
        help="record nothing; measure what training.determinism: exact costs beside order, by steps of both in turns",
    )


def run(args: argparse.Namespace) -> int:
    # torch reads these variables when it is imported. They suppress log lines of its profiler.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    ranks = checked_ranks(args)
    if args.structure:
        refuse_unused(args, "--structure")
        return show_structure(args)
    if args.determinism:
        refuse_unused(args, "--determinism")
        return compare_determinism(args)

    def prepare(config: RunConfig) -> tuple[None, list[str]]:
        args.out = str(args.out or default_out(config))
        refuse_existing(Path(args.out), "choose another --out")  # before torch is imported
        options = {"--out": args.out, "--steps": args.steps, "--warmup": args.warmup, "--ranks": args.ranks}
        return None, [str(word) for option in options.items() for word in option]

    return run_on_ranks(args, "profile", lambda config: profile(config, args, ranks), prepare)


def refuse_unused(args: argparse.Namespace, option: str) -> None:
    """Raises UserError if another option has no effect with `option`, or --nproc is below 1."""
    if args.nproc is not None and args.nproc < 1:
        raise UserError(f"--nproc {args.nproc}: use at least 1 process")
    others = [f"--{name}" for name, default in DEFAULTS.items() if getattr(args, name) != default]
    others += ["--determinism"] * (args.determinism and option != "--determinism")
    if others:
        raise UserError(f"{others[0]} has no effect with {option}; omit one of the two options")


def compare_determinism(args: argparse.Namespace) -> int:
    """Measures steps with `training.determinism: order` and `exact` in turns, and prints the cost of `exact`."""
    from weft.config.run import RunConfig
    from weft.launch.local import checked_nproc
    from weft.launch.try_config import try_config
    from weft.observe.console import Console

    console, seconds = Console(), {"order": [], "exact": []}
    ranks = checked_nproc(args.nproc)
    configs = {
        level: RunConfig.load(args.file, [*args.overrides, f"training.determinism={level}"], ranks=ranks, for_fit=True)
        for level in seconds
    }
    for turn in range(1, TURNS + 1):
        for level, config in configs.items():
            console.line(f"turn {turn} of {TURNS}: steps with training.determinism: {level}")
            tried = try_config(config, ranks)
            if tried is None:
                raise UserError("memory is not sufficient for a step; lower training.micro_batch_size")
            seconds[level].append(tried.seconds)
    order, exact = statistics.median(seconds["order"]), statistics.median(seconds["exact"])
    spread = "; ".join(f"{level} {min(found):.4g} to {max(found):.4g} s" for level, found in seconds.items())
    console.result(
        f"training.determinism: exact costs {exact / order - 1:+.1%} of a step: {exact:.4g} s, order {order:.4g} s "
        f"(medians of {TURNS} processes each, in turns; {spread})"
    )
    return 0


def show_structure(args: argparse.Namespace) -> int:
    """Prints the modules of rank 0's sharded model, their wrappers, placements of parameters, and estimated memory."""
    from weft.config.derive import batch_sequences, sequence_length, split_batch
    from weft.config.legal_mesh import check_mesh
    from weft.config.mesh import least_ranks
    from weft.config.plan_rules import is_custom
    from weft.config.run import RunConfig

    config = RunConfig.load(args.file, args.overrides, ranks=args.nproc, for_fit=True)
    if config.parallel.plan is not None or (config.parallel.auto and is_custom(config.model.type)):
        raise UserError("parallel.plan: --structure does not show plans of custom models; read the plan's tables")
    ranks = args.nproc or least_ranks(config.parallel)
    shape, given = check_mesh(config, ranks), config.training.micro_batch_size
    _, size = split_batch(batch_sequences(config), sequence_length(config), shape, given, config.parallel)

    from weft.config.components import make_component
    from weft.observe.console import Console
    from weft.parallel.model_state import model_plan
    from weft.parallel.structure import structure
    from weft.parallel.world import local_device
    from weft.train.auto_settings import choose
    from weft.train.frozen_sources import cached_fields, check_sources, frozen_plans

    config = config.model_copy(update={"training": choose(config.training, local_device(Console()))})
    states = 1 if config.optimizer.type == "muon" else 2  # tensors per parameter, mostly; AdamW has two moments
    plan, objective = model_plan(config), make_component(config.objective, "objective")
    cached = cached_fields(objective).values()
    sources = {name: source for name, source in check_sources(config, objective).items() if name not in cached}
    Console().result(structure(plan, ranks, size, states, frozen_plans(config, plan, sources, shape)))
    return 0


def checked_ranks(args: argparse.Namespace) -> tuple[int, ...] | None:
    """Returns the ranks to record (None: all). Raises UserError if --ranks, --steps or --warmup is invalid."""
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: use at least 1")
    if args.warmup < 0:
        raise UserError(f"--warmup {args.warmup}: use at least 0")
    if args.ranks == "all":
        return None
    words = args.ranks.split(",")
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--ranks {args.ranks}: use all, or numbers separated by commas, such as 0,1")
    return tuple(sorted({int(word) for word in words}))


def default_out(config: RunConfig) -> Path:
    """Returns profiles/NAME, or the first of NAME-2, NAME-3, ... that does not exist."""
    first = Path("profiles") / config.run_directory.name
    return next(
        out
        for number in itertools.count(1)
        if not os.path.lexists(out := first if number == 1 else first.with_name(f"{first.name}-{number}"))
    )


def profile(config: RunConfig, args: argparse.Namespace, ranks: tuple[int, ...] | None) -> Outcome:
    """Profiles training steps on this rank. Rank 0 prints the tables.

    Args:
        ranks: the ranks to record; None: all.
    """
    from weft.train.capture import Request
    from weft.train.profile import profile as run_profile

    request = Request(Path(args.out) if args.out else default_out(config), args.steps, args.warmup, ranks)
    outcome = run_profile(config, request)
    if outcome.status == "finished" and int(os.environ.get("RANK", 0)) == 0:
        print_profile(request.out)
    return outcome


def print_profile(out: Path) -> None:
    """Prints the tables of a profile.

    Args:
        out: the folder of the profile.
    """
    from weft.observe.console import Console
    from weft.observe.profile_page import shares_text, tables, warmup_text

    console, found = Console(), json.loads((out / "profile.json").read_text(encoding="utf-8"))
    for header, rows in tables(found).values():
        if rows:
            console.table(header, rows)
            console.result()
    console.result(f"{shares_text(found)}\n{warmup_text(found)}\n{out}/profile.html")
