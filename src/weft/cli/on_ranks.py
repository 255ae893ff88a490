"""Runs a subcommand on ranks: in this process, as a rank of a torchrun job, or in N local processes."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import UserError

if TYPE_CHECKING:
    from weft.config.run import RunConfig
    from weft.launch.supervisor import Supervisor
    from weft.observe.console import Console
    from weft.parallel.world import World
    from weft.train.stop import Outcome

BY_WATCH = ("non-finite", "spike", "corruption")  # statuses of runs that the watch stopped


def add_run_arguments(
    parser: argparse.ArgumentParser,
    name: str = "FILE",
    what: str = "the YAML file of the run",
    default: str = "the number of GPUs, or 1 without GPUs",
) -> None:
    """Adds the arguments for a run file, its overrides and the number of ranks to a parser.

    Args:
        name: name of the argument `file` in the help.
        what: description of the argument `file`.
        default: description of the default number of ranks.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar=name, help=what)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="override values of FILE; the last one wins")
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help=f"number of local processes (default: {default})",
    )


def run_on_ranks(
    args: argparse.Namespace,
    verb: str,
    act: Callable[[RunConfig], Outcome],
    prepare: Callable[[RunConfig], tuple[Path | None, Sequence[str]]],
    supervisor: Supervisor | None = None,
) -> int:
    """Runs a function on every rank, and returns the exit code.

    Args:
        args: parsed arguments, including those that `add_run_arguments` defines.
        verb: name of the subcommand, such as "train" or "debug nan". Local processes run this subcommand.
        act: function that does the work of one rank, given the checked config.
        prepare: function that is called once, before any rank starts. It returns (the run directory, in which messages
            about failures look up checkpoints and logs, or None; command-line options of local processes).
        supervisor: restarts failed ranks; None if failed ranks end the command.
    """
    from weft.config.legal_mesh import check_mesh
    from weft.config.run import RunConfig
    from weft.launch.threads import use_huge_pages, wait_briefly

    wait_briefly()
    use_huge_pages()
    fresh = getattr(args, "fresh", False)
    if "RANK" in os.environ:
        return _run_as_rank(args, verb, act)
    hosts = getattr(args, "hosts", None)
    ranks = args.nproc if args.nproc is not None and args.nproc > 0 and hosts is None else None
    # Reports errors before torch is imported.
    config = RunConfig.load(args.file, args.overrides, ranks=ranks, for_fit=True)
    run_directory, options = prepare(config)
    from weft.launch.local import checked_nproc, launch_local
    from weft.observe.console import Console

    nproc = checked_nproc(args.nproc)
    if hosts is not None:
        from weft.launch.elastic import train_elastic

        assert run_directory is not None
        command = [sys.executable, "-m", "weft", *verb.split(), args.file, *args.overrides, *options]
        return train_elastic(command, nproc, run_directory, hosts)
    if not config.parallel.auto:  # the ranks choose the mesh
        check_mesh(config, nproc)
    config = _pack(config, Console(), fresh)  # before ranks start
    if supervisor is not None:
        supervisor.hang_timeout = config.training.hang_timeout
    if nproc == 1 and not (supervisor and supervisor.needed):
        return run_rank(lambda: config, act, verb)
    command = [sys.executable, "-m", "weft", *verb.split(), args.file, *args.overrides]
    if supervisor is None or run_directory is None:
        return launch_local([*command, *options], nproc, run_directory)
    from weft.launch.supervisor import supervise

    once = [option for option in options if option == "--fresh"]
    command += [option for option in options if option != "--fresh"]
    return supervise(command, nproc, run_directory, supervisor, once)


def _run_as_rank(args: argparse.Namespace, verb: str, act: Callable[[RunConfig], Outcome]) -> int:
    """Runs `act` in this process, which a launcher started as a rank, and returns the exit code."""
    from weft.config.run import RunConfig
    from weft.launch.local import join_launcher
    from weft.observe.console import Console
    from weft.processes import LAUNCHER

    # The local launcher has packed the raw data, and printed what was detected.
    console = Console(prints=os.environ["RANK"] == "0" and LAUNCHER not in os.environ)
    join_launcher()

    def load() -> RunConfig:
        overrides = [*args.overrides, *elastic_overrides(args, console)]
        return _pack(RunConfig.load(args.file, overrides, for_fit=True), console, getattr(args, "fresh", False))

    return run_rank(load, act, verb)


def elastic_overrides(args: argparse.Namespace, console: Console) -> list[str]:
    """Returns the sizes of the mesh as overrides, if the number of hosts can differ from what the config is made for.

    Prints the mesh if it differs from that of the config. A planned run (`parallel.auto`) needs no overrides.

    Raises:
        UserError: no mesh with this number of ranks is legal.
    """
    from weft.config.legal_mesh import elastic_mesh
    from weft.config.mesh import MeshShape, mesh_shape
    from weft.config.run import RunConfig
    from weft.processes import ELASTIC

    if ELASTIC not in os.environ:
        return []
    ranks = os.environ.pop("WORLD_SIZE")
    try:
        config = RunConfig.load(args.file, args.overrides, for_fit=True)  # on the ranks that it is made for
    finally:
        os.environ["WORLD_SIZE"] = ranks
    if config.parallel.auto:
        return []
    mesh = elastic_mesh(config, int(ranks))
    if mesh is None:
        raise UserError(f"no mesh with {ranks} ranks is legal; change the axes of parallel, or --nproc", args.file)
    hosts, shape = os.environ.get("GROUP_WORLD_SIZE", "1"), MeshShape(**mesh)
    with suppress(UserError):  # the configured mesh has another number of ranks
        if mesh_shape(config.parallel, int(ranks)) == shape:
            console.line(f"hosts: {hosts}, mesh: {shape}")
            return []
    console.line(f"hosts: {hosts}, mesh: {shape} (nearest legal to the configured one)")
    return [f"parallel.{axis}={size}" for axis, size in mesh.items()]


def _pack(config: RunConfig, console: Console, fresh: bool) -> RunConfig:
    """Packs the raw data of a run. Reports mistakes that do not depend on the data first."""
    from weft.data.raw.pack_sources import pack_sources

    if config.data.raw:  # imports torch
        from weft.train.before_packing import check_before_packing

        check_before_packing(config, fresh=fresh)
    return pack_sources(config, console)


def run_generation_on_ranks(args: argparse.Namespace, verb: str, tp: int, act: Callable[[World], int | None]) -> int:
    """Runs a function on `tp` tensor parallel ranks, and returns the exit code (see `run_world_on_ranks`)."""
    return run_world_on_ranks(args, verb, tp, act, option="--tp", tensor_parallel=True)


def run_world_on_ranks(
    args: argparse.Namespace,
    verb: str,
    nproc: int | None,
    act: Callable[[World], int | None],
    *,
    option: str = "--nproc",
    tensor_parallel: bool = False,
) -> int:
    """Runs a function on ranks that have no run file, and returns the exit code.

    Args:
        args: parsed arguments of the command line.
        verb: name of the subcommand, such as "bench comm". Local processes run this subcommand with the same arguments.
        nproc: number of ranks. None: the number of GPUs, or 1 without GPUs; under torchrun, its ranks.
        act: function that does the work of one rank, and returns its exit code, if it has one.
        option: the command-line option that sets `nproc`, for messages.
        tensor_parallel: whether all ranks are on the mesh axis `tp`. By default, they are on `dp_shard`.

    Raises:
        UserError: `nproc` is not the number of processes that torchrun started, or exceeds the number of GPUs.
    """
    from weft.launch.local import checked_nproc, join_launcher, launch_local

    if "RANK" not in os.environ:
        nproc = checked_nproc(nproc, option)
        if nproc > 1 or tensor_parallel:
            return launch_local([sys.executable, "-m", "weft", *verb.split(), *args.words], nproc, None)
    join_launcher()
    from weft.config.mesh import ParallelSection, launched_ranks
    from weft.launch.failures import report_exception, report_mistake
    from weft.parallel.world import start_world

    launched = launched_ranks() or 1
    if nproc is not None and nproc != launched:
        raise UserError(f"{option} {nproc}, but {launched} processes were launched; set {option} {launched}")
    try:
        with ExitStack() as cleanup:
            world = start_world(ParallelSection(tp=launched, dp_shard=1) if tensor_parallel else ParallelSection())
            cleanup.callback(world.abandon)
            if world.rank:
                warnings.simplefilter("ignore")  # the first rank prints the same warnings
            code = act(world)
            world.close()
    except UserError as error:
        report_mistake(error)
        raise
    except Exception as error:
        return report_exception(error, {})
    return code or 0


def measure_on_ranks(
    args: argparse.Namespace,
    verb: str,
    check: Callable[[argparse.Namespace], None],
    measure: Callable[[argparse.Namespace, World], int | None],
) -> int:
    """Runs a measurement of `args.seconds` seconds on `args.nproc` ranks, and returns the exit code.

    Args:
        check: raises UserError for other mistakes in the arguments. The first process calls it before ranks start.
        measure: does the work of one rank.

    Raises:
        UserError: the arguments have mistakes, or those of `run_world_on_ranks`.
    """
    from weft.launch.threads import use_huge_pages, wait_briefly

    if not 0 < args.seconds <= 3600:
        raise UserError(f"--seconds {args.seconds:g}: must be more than 0 and at most 3600")
    if os.environ.get("RANK", "0") == "0":
        check(args)
    wait_briefly()
    use_huge_pages()
    return run_world_on_ranks(args, verb, args.nproc, lambda world: measure(args, world))


def run_rank(load: Callable[[], RunConfig], act: Callable[[RunConfig], Outcome], verb: str) -> int:
    """Runs `act` on this rank and returns the exit code. If `load` or `act` fails, reports the failure.

    Args:
        load: function that returns the checked config.
        act: function that does the work of this rank, given the config.
        verb: name of the subcommand.
    """
    from weft.launch.failures import NON_FINITE, STOPPED, report_exception, report_mistake, send_to_launcher
    from weft.processes import ELASTIC

    config = None
    try:
        config = load()
        outcome = act(config)
    except UserError as error:
        report_mistake(error)
        raise
    except Exception as error:
        if config is None:
            return report_exception(error, {})
        return report_exception(error, config.as_dict(), config.run_directory if verb == "train" else None)
    if outcome.status in BY_WATCH:
        send_to_launcher("the watch stopped the run", NON_FINITE)
    if outcome.status == "stopped":
        if ELASTIC in os.environ:  # the agents of the other hosts decide whether to go on
            send_to_launcher(str(outcome.signal or 15), STOPPED)
        return 128 + (outcome.signal or 15)
    return 1 if outcome.status in (*BY_WATCH, "differs") else 0
