"""`weft plan`: predicts the time, memory and cost of a run on a number of devices, and finds the best plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.config.run import RunConfig
    from weft.observe.console import Console
    from weft.planner.hardware import Hardware
    from weft.planner.plan import RunPlans
    from weft.planner.simulate_plan import Compared
    from weft.train.micro_batch import Tried

HELP = "find the fastest mesh, micro-batch and recomputation of a run that fit a number of devices"
GROUP = "train"
VOCABULARY = 32_000  # rows that are assumed if neither the model nor a tokenizer gives their number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from weft.planner.hardware import hardware_names

    names = ", ".join(hardware_names())
    parser.description = (
        "Searches the meshes, pipeline schedules, micro-batches, activation checkpointing, resharding and offloading "
        "of a run for the fastest plans that fit, without a GPU. Prints each plan's memory per rank and time per step "
        "by part, and days, device-hours and energy of the run. The global batch and all keys that change the result "
        "stay as in FILE. The token stores and the tokenizer need not exist."
    )
    parser.epilog = (
        "example: weft plan run.yaml --devices 2048 --hardware h100-mn5 --apply plan.yaml. Hardware files: "
        f"{names}; `weft bench device` and `weft bench comm` write one of this machine."
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="the YAML file of the run")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="override values of FILE; the last one wins")
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices, one rank each")
    parser.add_argument(
        "--days", type=float, metavar="N", help="find the smallest number of devices that train the run in N days"
    )
    parser.add_argument("--hardware", metavar="NAME", help=f"a hardware file, or its path: {names}")
    parser.add_argument(
        "--budget", type=float, metavar="FLOPS", help="print compute-optimal sizes for these FLOPs in place of plans"
    )
    parser.add_argument(
        "--scaling", metavar="FIT.json", help="with --budget: also use a law of `weft scaling fit --json`"
    )
    parser.add_argument("--keep-mesh", action="store_true", help="predict the plan of FILE; search no other")
    parser.add_argument("--limit", type=int, default=5, metavar="K", help="number of plans (default: 5)")
    parser.add_argument(
        "--largest",
        choices=["micro_batch", "sequence", "model"],
        help="also print the largest of these that fits with the mesh of the best plan",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the plans under `plans`, best first")
    parser.add_argument("--apply", metavar="OUT", help="write a run file that extends FILE with the best plan's keys")
    parser.add_argument(
        "--picture", metavar="OUT.html", help="write a page with the plans by memory and time, and a timeline of a step"
    )
    parser.add_argument(
        "--try",
        dest="tried",
        type=int,
        default=0,
        metavar="N",
        help="make a few real steps of each of the best N plans, with a local process for each device, and print their "
        "measured beside their predicted times; the data must exist",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="also run two steps of the code on tensors without memory, for rank 0 and the pipeline rank that needs "
        "most memory with the best plan, and print their memory by part beside the formulas'",
    )
    parser.add_argument("--price", type=float, metavar="P", help="price of one device for an hour, in any currency")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from weft.observe.console import Console
    from weft.planner.hardware import load_hardware
    from weft.planner.plan_text import write_plan

    if args.budget is not None:
        return print_budget(args)
    check(args)
    hardware, console = load_hardware(args.hardware), Console()
    if args.price is not None:
        hardware = hardware.model_copy(update={"price_per_hour": args.price})
    config = load(args, console)
    if args.tried:
        check_trial(args, hardware, console)
    plans, about = find(args, config, hardware)
    measured = try_plans(plans, args.tried, console)
    if args.apply is not None:
        write_plan(plans.best[0], args.file, Path(args.apply))
    largest = find_largest(args, plans, hardware) if args.largest is not None else {}
    simulated = simulate(args, plans)
    devices = plans.best[0].devices
    if args.picture is not None:
        write_picture(args, plans, config, hardware)
    if args.json:
        print_json(args, plans, measured, {"devices": devices} | about | largest, simulated)
    else:
        print_text(args, plans, measured, about | largest, simulated)
        for out, use in ((args.apply, f"train with `weft train {args.apply}`"), (args.picture, "open it in a browser")):
            if out is not None:
                console.line(f"wrote {out}; {use}")
    return 0


def check(args: argparse.Namespace) -> None:
    """Raises UserError for options that are missing, not possible or have no meaning together."""
    from pathlib import Path

    from weft.cli.options import check_output_file, refuse_other_options
    from weft.errors import UserError
    from weft.planner.plan_text import check_out

    if args.scaling is not None:
        raise UserError("--scaling is for compute-optimal sizes; also give --budget FLOPS")
    if args.days is not None:
        used = ("--hardware", "--limit", "--largest", "--json", "--apply", "--picture", "--simulate", "--price")
        refuse_other_options(args, "--days", *used)
        if not 0 < args.days < float("inf"):
            raise UserError(f"--days {args.days:g}: use a positive number")
    count = ("--devices", args.devices if args.days is None else args.days)
    for name, value in (("FILE", args.file), count, ("--hardware", args.hardware)):
        if value is None:
            raise UserError(f"weft plan: required: {name} (weft plan --help), or --budget")
    for option, value in (("--devices", args.devices), ("--limit", args.limit)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: use at least 1")
    if args.price is not None and not 0 < args.price < float("inf"):
        raise UserError(f"--price {args.price:g}: use a positive number")
    if args.apply is not None and args.overrides:
        raise UserError("--apply writes a file that extends FILE, without overrides; write them to FILE")
    if args.picture is not None and Path(args.picture).suffix not in (".html", ".htm"):
        raise UserError(f"--picture {args.picture}: the picture is an HTML page; give a name that ends in .html")
    check_output_file("--picture", args.picture)
    check_output_file("--apply", args.apply)
    if args.apply is not None:
        check_out(Path(args.apply))


def print_json(
    args: argparse.Namespace, plans: RunPlans, measured: list[Tried | None], about: dict, simulated: list[Compared]
) -> None:
    """Prints everything as JSON."""
    import json

    found = {"file": args.file, "hardware": args.hardware} | about
    found |= {"simulated": [one.as_dict() for one in simulated]} if args.simulate else {}
    found |= plans.as_dict()
    for plan, tried in zip(found["plans"], measured, strict=False):
        plan |= {"measured_seconds": tried and tried.seconds, "measured_bytes": tried and tried.peak_bytes}
    print(json.dumps(found, indent=2))


def print_text(
    args: argparse.Namespace, plans: RunPlans, measured: list[Tried | None], about: dict, simulated: list[Compared]
) -> None:
    """Prints the plans for people."""
    from weft.formatting import counted
    from weft.planner.plan import plan_dtype
    from weft.planner.plan_text import plans_text
    from weft.planner.simulate_plan import simulated_text

    best = plans.best[0]
    title = f"{args.file} on {counted(best.devices, 'device')}: {best.hardware.device.name} ({args.hardware})"
    title += f", {plan_dtype(best)}"
    if plans.considered:
        title += f"; {plans.considered:,} plans considered, {plans.predicted:,} predicted"
    print(plans_text(plans, title, best.hardware))
    print(simulated_text(simulated), end="")
    for number, (plan, tried) in enumerate(zip(plans.best, measured, strict=False), start=1):
        predicted = plan.prediction.step_seconds
        result = "out of memory" if tried is None else f"{tried.seconds:.3g} s ({predicted / tried.seconds - 1:+.0%})"
        print(f"plan {number}: predicted {predicted:.3g} s per step, measured {result}")
    for what, value in about.items():
        if what == "tried":
            print("  days by devices: " + ", ".join(f"{count}: {_days(days)}" for count, days in value.items()))
        elif what != "days":
            print(f"  {what.replace('_', ' ')}: {value:,}")


def _days(days: float | None) -> str:
    from weft.planner.plan_text import days_text

    return "no plan fits" if days is None else days_text(days)


def write_picture(args: argparse.Namespace, plans: RunPlans, config: RunConfig, hardware: Hardware) -> None:
    """Writes the page of `--picture`. With `--keep-mesh` there is no front, since no other plan is searched."""
    from pathlib import Path

    from weft.files import replace_file, report_write_errors
    from weft.formatting import counted
    from weft.planner.plan_picture import front, plans_page

    path, devices = Path(args.picture), plans.best[0].devices
    on_front = plans.best[:1] if args.keep_mesh else front(plans, config, devices, hardware)
    title = f"{args.file} on {counted(devices, 'device')}: {hardware.device.name}"
    with report_write_errors(path):
        replace_file(path, plans_page(plans, on_front, title))


def print_budget(args: argparse.Namespace) -> int:
    """Prints compute-optimal sizes by published scaling laws, and by the law of `--scaling`."""
    import json
    from pathlib import Path

    from weft.cli.options import refuse_other_options
    from weft.errors import UserError
    from weft.planner.budget_text import budget_dict, budget_text
    from weft.planner.scaling_runs import read_law

    if args.file is not None:
        raise UserError("--budget needs no run file; remove FILE")
    refuse_other_options(args, "--budget", "--scaling", "--json")
    own = None if args.scaling is None else read_law(Path(args.scaling))
    print(json.dumps(budget_dict(args.budget, own), indent=2) if args.json else budget_text(args.budget, own))
    return 0


def check_trial(args: argparse.Namespace, hardware: Hardware, console: Console) -> None:
    """Raises UserError if the plans cannot be tried here, and warns if this machine has another device."""
    from weft.config.run import RunConfig
    from weft.errors import UserError
    from weft.launch.local import checked_nproc
    from weft.parallel.world import local_device
    from weft.planner.measure import device_name

    if args.tried < 0:
        raise UserError(f"--try {args.tried}: use at least 1")
    RunConfig.load(args.file, args.overrides, ranks=args.devices if args.keep_mesh else None)  # the data must exist
    checked_nproc(args.devices, "--devices")
    name = device_name(local_device(console))
    if name.partition(",")[0] != hardware.device.name.partition(",")[0]:
        console.warning(f"predicted for {hardware.device.name}, but this machine has {name}; the times will differ")


def try_plans(plans: RunPlans, count: int, console: Console) -> list[Tried | None]:
    """Returns what real steps of the best plans measured; None for a plan without sufficient memory."""
    if not count:
        return []
    from weft.launch.try_config import try_config

    found = []
    for number, plan in enumerate(plans.best[:count], start=1):
        console.line(f"trying plan {number}")
        found.append(try_config(plan.config, plan.devices))
    return found


def simulate(args: argparse.Namespace, plans: RunPlans) -> list[Compared]:
    """Returns the simulated memory of ranks of the best plan, with `--simulate`.

    Raises:
        UserError: the run cannot be simulated.
    """
    from weft.planner.simulate_plan import simulate_plan

    return simulate_plan(plans.best[0]) if args.simulate else []


def load(args: argparse.Namespace, console) -> RunConfig:
    """Returns the config of the run. Without a vocabulary size, assumes one, and reports it."""
    from weft.config.model import ModelSection
    from weft.config.run import RunConfig
    from weft.errors import ConfigError

    ranks = args.devices if args.keep_mesh else None
    config = RunConfig.load(args.file, args.overrides, check_data=False, ranks=ranks)
    if isinstance(config.model, ModelSection) and config.model.vocab_size is None:
        try:
            config = RunConfig.load(args.file, args.overrides, ranks=ranks)
        except ConfigError:  # the tokenizer or the stores do not exist
            if (rows := _rows(config.tokenizer, config.model.pad_vocab_to_multiple)) is None:
                rows, what = VOCABULARY, "model.vocab_size: not known without the tokenizer"
                console.warning(f"{what}; assuming {VOCABULARY:,}; set the key")
            known = [*args.overrides, f"model.vocab_size={rows}"]  # rules of the mesh need it
            config = RunConfig.load(args.file, known, check_data=False, ranks=ranks)
    return config


def _rows(tokenizer: str | None, multiple: int | None) -> int | None:
    """Returns the rows of the embedding for the run's tokenizer; None if this does not exist."""
    from weft.errors import UserError
    from weft.headers import padded_rows, read_tokenizer_header

    try:
        return None if tokenizer is None else padded_rows(read_tokenizer_header(tokenizer).vocab_size, multiple)
    except (UserError, OSError):
        return None


def find(args: argparse.Namespace, config: RunConfig, hardware: Hardware) -> tuple[RunPlans, dict[str, Any]]:
    """Returns the plans that the arguments ask for; with `--days`, also the days of the numbers of devices tried.

    Raises:
        UserError: no plan fits, or the run cannot be predicted.
    """
    from functools import partial

    from weft.planner.devices_for import devices_for
    from weft.planner.plan import RunPlans, plan_of
    from weft.planner.search import search

    if args.days is not None:
        enough = devices_for(args.days, config, hardware, partial(search, limit=args.limit))
        return enough.plans, {"days": args.days, "tried": enough.tried}
    if args.keep_mesh:
        return RunPlans([plan_of(config, args.devices, hardware)], [], 1, 0), {}
    return search(config, args.devices, hardware, limit=args.limit), {}


def find_largest(args: argparse.Namespace, plans: RunPlans, hardware: Hardware) -> dict[str, int]:
    """Returns the largest micro-batch, sequence or model with the mesh of the best plan, under the key `largest_...`.

    Raises:
        UserError: not even the smallest fits.
    """
    from weft.planner.largest import largest

    found = largest(args.largest, plans.best[0].config, plans.best[0].devices, hardware)
    return {f"largest_{args.largest}": found.value}
