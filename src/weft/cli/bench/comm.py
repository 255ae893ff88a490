"""`weft bench comm`: measures collectives between ranks, and writes them into a hardware file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.observe.console import Console
    from weft.parallel.world import World
    from weft.planner.measure_links import LinkMeasurement

HELP = "measure collectives between ranks, and write them into a hardware file for plans"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Measures all_gather, reduce_scatter, all_reduce, all_to_all and send between N local processes (gloo on\n"
        "CPUs, NCCL on GPUs) or between the ranks of torchrun, for messages of several sizes and every size of\n"
        "groups that meshes use. Fits latency and bandwidth to each, prints them with the error of the fit, and with\n"
        "--into writes them into a hardware file of this machine (docs/planning.md)."
    )
    parser.epilog = (
        "examples:\n"
        "  weft bench comm --nproc 2 --into here.yaml --plot links.svg\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m weft bench comm --into here.yaml"
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="number of local processes (default: number of GPUs)")
    parser.add_argument("--into", metavar="FILE", help="a file of `weft bench device`, which gets the measured links")
    parser.add_argument("--plot", metavar="OUT.svg", help="write a plot of times and fitted lines")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--seconds", type=float, default=20, metavar="S", help="duration (default: 20)")


def run(args: argparse.Namespace) -> int:
    from weft.cli.on_ranks import measure_on_ranks

    return measure_on_ranks(args, "bench comm", _check, _measure)


def _check(args: argparse.Namespace) -> None:
    from weft.cli.options import check_output_file
    from weft.errors import UserError
    from weft.files import refuse_existing
    from weft.planner.hardware import load_hardware

    if args.into is not None:
        check_output_file("--into", args.into)
        if not Path(args.into).exists():
            raise UserError("no such file; write one first: weft bench device --out FILE", args.into)
        load_hardware(Path(args.into))
    check_output_file("--plot", args.plot)
    if args.plot is not None:
        refuse_existing(Path(args.plot), "choose another name for --plot")


def _measure(args: argparse.Namespace, world: World) -> None:
    import os

    from weft.config.training import TrainingSection
    from weft.errors import UserError
    from weft.observe.console import Console
    from weft.observe.manifest import now
    from weft.planner.hardware import load_hardware
    from weft.planner.hardware_files import add_links
    from weft.planner.measure import busy_warning, device_name
    from weft.planner.measure_host import measure_host
    from weft.planner.measure_links import KINDS, fitted_levels, group_sizes, measure_links, measure_slowdown
    from weft.train.auto_settings import agree_on_settings

    if world.ranks == 1:
        raise UserError("collectives need at least two processes; use --nproc 2 or more, or torchrun")
    agree_on_settings(TrainingSection(), world)
    console, name = Console(prints=world.rank == 0), device_name(world.device)

    def check() -> None:
        if args.into is not None and (other := load_hardware(Path(args.into)).device.name) != name:
            raise UserError(
                f"the file is of {other}, but this machine has {name}; measure this machine with the same number of "
                "processes: weft bench device --nproc N --out FILE",
                args.into,
            )

    world.agree(check, only_first=True)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.ranks))
    local = local if local > 1 and world.ranks % local == 0 else world.ranks
    total = len(group_sizes(world.ranks, local)) * len(KINDS) + 1
    console.line(f"measuring links of {world.ranks} ranks on {name}, for about {args.seconds:.0f} s")
    if (warning := busy_warning()) is not None:
        console.warning(warning)
    steps = iter(range(total))
    with console.progress(total, "measuring", "measurement") as bar:
        found = measure_links(
            world.device,
            local,
            args.seconds * 0.9,
            progress=lambda what: bar.update(next(steps), now=what),
        )
        bar.update(total - 1, now="computation beside communication")
        slowdown = measure_slowdown(world.device, args.seconds * 0.1)
        host = measure_host(world) if world.device.type == "cpu" else {}
        bar.update(total)
    if world.rank:
        return
    _print(found, slowdown, host, console, json_only=args.json)
    if args.plot is not None:
        _plot(found, Path(args.plot), name)
    if args.into is not None:
        source = f"weft bench comm, {now()[:10]}; {world.ranks} ranks"
        rows = [one.row for one in found]
        add_links(Path(args.into), fitted_levels(found, local), rows, slowdown=slowdown, source=source, host=host)
        console.line(f"written into {args.into}")


def _print(
    found: list[LinkMeasurement], slowdown: float, host: dict[str, float], console: Console, *, json_only: bool
) -> None:
    import json

    if json_only:
        rows = [{**one.row.model_dump(), "error": one.error, "seconds": one.seconds} for one in found]
        console.result(json.dumps({"collectives": rows, "slowdown": slowdown, "host": host}))
        return
    header = ["collective", "ranks", "hosts", "latency us", "GB/s", "error of the fit"]
    rows = [one.row for one in found]
    console.table(
        header,
        (
            [row.kind, row.ranks, row.nodes, round(row.latency_us, 1), round(row.bandwidth_gb_s, 3), f"{one.error:.0%}"]
            for one, row in zip(found, rows, strict=True)
        ),
    )
    console.result(f"while ranks communicate, computation has {1 / (1 + slowdown):.0%} of its speed")
    for key, name in {"tp_us": "tensor parallelism", "fsdp_us": "FSDP2"}.items():
        if key in host:
            console.result(f"the host takes {host[key]:,.0f} us for each collective of {name}")
    if "fsdp_gb_s" in host:
        console.result(f"FSDP2 copies parameters with {host['fsdp_gb_s']:.1f} GB/s")


def _plot(found: list[LinkMeasurement], path: Path, name: str) -> None:
    from weft.files import replace_file, report_write_errors
    from weft.observe.scatter import Points, scatter_svg

    series = []
    for color, one in enumerate(found):
        hosts = f" on {one.group.nodes} hosts" if one.group.nodes > 1 else ""
        times = [(size, seconds * 1e6) for size, seconds in one.seconds.items()]
        line = [(size, (one.latency + size * one.per_byte) * 1e6) for size in one.seconds]
        series.append(Points(f"{one.kind}, {one.group.ranks} ranks{hosts}", times, color=color))
        series.append(Points("", line, line=True, marks=False, color=color))
    text = scatter_svg(f"Collectives: {name}", ("bytes", "microseconds"), series)
    with report_write_errors(path):
        replace_file(path, text)
