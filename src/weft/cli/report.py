"""`weft report RUN`: one HTML page on a run."""

from __future__ import annotations

import argparse

HELP = "write a page with a run's curves, samples and config"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/demo; the run may still be training")


def run(args: argparse.Namespace) -> int:
    from weft.observe.console import Console
    from weft.observe.report import build_report

    Console().result(str(build_report(args.run)))
    return 0
