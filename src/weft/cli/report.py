"""`weft report RUN`: one HTML page of a run."""

from __future__ import annotations

import argparse

HELP = "write a page of a run's curves, samples and config"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/demo; it may still be training")


def run(args: argparse.Namespace) -> int:
    """Write `RUN/report.html` and print its path."""
    from weft.observe.console import Console
    from weft.observe.report import build_report

    Console(speaks=True).result(str(build_report(args.run)))
    return 0
