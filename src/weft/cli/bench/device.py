"""`weft bench device`: measures this machine's device, and writes a hardware file for plans."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.parallel.world import World

HELP = "measure this machine's CPU or GPU, and write a hardware file for plans"
GROUP = "work"
DTYPES = ("bfloat16", "float16", "float32", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Measures matrix products by size and dtype, attention, memory bandwidth, copies from the host, and the time\n"
        "to start an operation. Writes a hardware file (docs/planning.md) to FILE, or to stdout. With N processes,\n"
        "all of them measure at the same time, as the ranks of `weft train --nproc N` would compute: on a CPU they\n"
        "share cores and memory bandwidth, so measure with the N that you plan for. Links between ranks are guesses\n"
        "until `weft bench comm` has measured them."
    )
    parser.epilog = (
        "examples:\n"
        "  weft bench device --nproc 2 --out here.yaml\n"
        "  weft bench comm --nproc 2 --into here.yaml\n"
        "  weft plan run.yaml --devices 2 --hardware ./here.yaml"
    )
    parser.add_argument("--out", metavar="FILE", help="the hardware file to write (default: print it)")
    parser.add_argument("--nproc", type=int, metavar="N", help="number of processes (default: number of GPUs, or 1)")
    parser.add_argument(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="dtype of matrix products; can be repeated, and the first one is that of attention and element-wise "
        "operations (default: the one that `training.dtype: auto` chooses, and the other of bfloat16 and float32)",
    )
    parser.add_argument(
        "--operators",
        metavar="RUN.yaml",
        help="also measure each matrix product and the attention of this run, which plans then use for these shapes",
    )
    parser.add_argument("--seconds", type=float, default=15, metavar="S", help="duration (default: 15)")


def run(args: argparse.Namespace) -> int:
    from weft.cli.on_ranks import measure_on_ranks

    return measure_on_ranks(args, "bench device", _check, _measure)


def _check(args: argparse.Namespace) -> None:
    from weft.cli.options import check_output_file
    from weft.config.run import RunConfig
    from weft.files import refuse_existing

    check_output_file("--out", args.out)
    if args.out is not None:
        refuse_existing(Path(args.out), "choose another name for --out")
    if args.operators is not None:
        RunConfig.load(args.operators, check_data=False, ranks=args.nproc)


def _measure(args: argparse.Namespace, world: World) -> None:
    from weft.config.run import RunConfig
    from weft.config.training import TrainingSection
    from weft.observe.console import Console
    from weft.observe.manifest import now
    from weft.parallel.ranks import all_gather_object
    from weft.planner.hardware_files import hardware_yaml, write_hardware
    from weft.planner.measure import busy_warning, device_name, measure_device
    from weft.planner.measured_device import device_tree, mean_of_ranks, run_operators
    from weft.train.auto_settings import agree_on_settings, keep_freed_memory

    console = Console(prints=world.rank == 0)
    chosen = agree_on_settings(TrainingSection(), world).dtype
    keep_freed_memory()  # as in a run
    others = [name for name in ("bfloat16", "float32") if name != chosen]
    dtypes = list(dict.fromkeys(args.dtype or [chosen, *others]))
    operators = []
    if args.operators is not None:
        config = RunConfig.load(args.operators, check_data=False, ranks=world.ranks)
        dtype = chosen if config.training.dtype == "auto" else config.training.dtype
        operators = run_operators(config, world.ranks, dtype)
    console.line(f"measuring {device_name(world.device)}, for about {args.seconds:.0f} s")
    if (warning := busy_warning()) is not None:
        console.warning(warning)
    total = len(dtypes) + 4 + len(operators)
    steps = iter(range(total))
    with console.progress(total, "measuring", "measurement") as bar:
        found = measure_device(
            world.device,
            dtypes,
            args.seconds,
            operators=operators,
            progress=lambda what: bar.update(next(steps), now=what),
            barrier=world.barrier,
        )
        bar.update(total)
    ranks = all_gather_object(found)
    if world.rank:
        return
    tree = device_tree(mean_of_ranks(ranks), world.device, world.ranks, now()[:10])
    if args.out is None:
        console.result(hardware_yaml(tree), end="")
        return
    write_hardware(Path(args.out), tree)
    console.result(args.out)
    console.line(f"links are a guess; measure them: weft bench comm --nproc N --into {args.out}")
