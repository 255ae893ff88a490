"""`weft scaling fit`: fits scaling laws to the losses of runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.observe.console import Console
    from weft.planner.scaling_law import Observation

HELP = "fit a scaling law to the losses of runs, and the best size for a number of FLOPs"
GROUP = "work"
NAMES = {"parametric": "fit of E + A/N^alpha + B/D^beta", "isoflop": "IsoFLOP parabolas", "envelope": "envelope"}
AHEAD = (10, 100)  # times the largest FLOPs of the runs, for which the best size is printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Fits L(N, D) = E + A / N^alpha + B / D^beta to losses of models with N parameters after D tokens, and the\n"
        "size with the smallest loss for C = 6 N D FLOPs in the three ways of Hoffmann et al. (2022): the fit,\n"
        "parabolas at equal FLOPs, and the envelope of losses. Prints them with 95% intervals of resampled losses,\n"
        "and the best size for more FLOPs. RUNS are directories of finished runs, of which the last validation loss\n"
        "counts (without validation: the mean training loss of the last steps), or CSV files with the columns\n"
        "parameters, tokens and loss. --json writes a file for `weft plan --scaling`."
    )
    parser.epilog = (
        "examples:\n"
        "  weft scaling fit runs/ladder-*\n"
        "  weft scaling fit losses.csv --json > fit.json\n"
        "  weft scaling fit losses.csv --picture fit.svg"
    )
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or CSV files")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--picture", metavar="OUT.svg", help="write a plot of the losses and the fitted law")
    parser.add_argument(
        "--resamples", type=int, default=200, metavar="N", help="resampled sets of losses (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the resampling (default: 0)")


def run(args: argparse.Namespace) -> int:
    import json

    from weft.cli.options import check_output_file
    from weft.errors import UserError
    from weft.files import refuse_existing
    from weft.observe.console import Console
    from weft.planner.scaling_law import fit_all
    from weft.planner.scaling_runs import read_observations

    check_output_file("--picture", args.picture)
    if args.picture is not None:
        refuse_existing(Path(args.picture), "choose another name for --picture")
    if args.resamples < 1:
        raise UserError(f"--resamples {args.resamples}: use at least 1")
    console = Console()
    points = read_observations([Path(one) for one in args.runs])
    console.line(f"fitting {len(points)} losses")
    found = fit_all(points, args.seed, args.resamples)
    if args.picture is not None:
        _draw(points, found, Path(args.picture))
    if args.json:
        console.result(json.dumps(found, indent=2))
    else:
        _print(found, console)
    return 0


def _print(found: dict[str, Any], console: Console) -> None:
    from weft.formatting import amount
    from weft.planner.scaling_law import FLOPS

    console.table(
        ["number", "value", "95% interval"],
        ([name, *_shown(number)] for name, number in found["parametric"].items()),
    )
    console.result()
    header = ["best size for C FLOPs, N = k C^a", "a", "95% interval"]
    flops = [times * found["flops"][1] for times in AHEAD]
    header += [f"N for {one:.1e} FLOPs" for one in flops] + [f"D for {one:.1e}" for one in flops]
    rows = []
    for name, text in NAMES.items():
        power = found["optimum"][name]
        if power is None:
            rows.append([text, "not identified", ""] + [""] * 2 * len(flops))
            continue
        sizes = [power["coefficient"]["value"] * one ** power["exponent"]["value"] for one in flops]
        tokens = [one / FLOPS / size for one, size in zip(flops, sizes, strict=True)]
        rows.append([text, *_shown(power["exponent"]), *map(amount, sizes), *map(amount, tokens)])
    console.table(header, rows)


def _shown(number: dict[str, Any]) -> tuple[str, str]:
    low, high = number["interval"] or (None, None)
    return f"{number['value']:.4g}", f"{low:.4g} to {high:.4g}" if low is not None else "not known"


def _draw(points: list[Observation], found: dict[str, Any], path: Path) -> None:
    from weft.files import replace_file, report_write_errors
    from weft.formatting import amount
    from weft.observe.scatter import Points, scatter_svg
    from weft.planner.budget import ParametricLaw
    from weft.planner.scaling_law import FLOPS, KEYS

    law = ParametricLaw(**{name: found["parametric"][key]["value"] for key, name in KEYS.items()})
    sizes = sorted({one.parameters for one in points})
    shown = sizes if len(sizes) <= 10 else sizes[:: -(-len(sizes) // 10)]
    series = []
    for color, size in enumerate(shown):
        rows = sorted((one for one in points if one.parameters == size), key=lambda one: one.tokens)
        series.append(Points(f"N = {amount(size)}", [(one.flops, one.loss) for one in rows], color=color))
        low, high = found["flops"]
        line = [low * (high / low) ** (step / 40) for step in range(41)]
        fitted = [(flops, law.loss(size, flops / FLOPS / size)) for flops in line]
        most = max(one.loss for one in points) * 1.05
        inside = [point for point in fitted if point[1] <= most]
        series.append(Points("", inside, line=True, marks=False, color=color))
    title = f"L = {law.e:.3g} + {law.a:.3g} / N^{law.alpha:.3g} + {law.b:.3g} / D^{law.beta:.3g}"
    with report_write_errors(path):
        axes = "FLOPs (6 N D)", "loss, nats per token"
        replace_file(path, scatter_svg(title, axes, series, logarithmic=(True, False)))
