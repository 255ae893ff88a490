"""`weft report`: writes an HTML page about a run."""

from __future__ import annotations

import argparse

HELP = "write an HTML page with a run's curves, samples and config"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/demo; the run can still be training")


def run(args: argparse.Namespace) -> int:
    from weft.observe.console import Console
    from weft.observe.report import build_report

    Console().result(str(build_report(args.run)))
    return 0
