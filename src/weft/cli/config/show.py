"""`weft config show`: a run's file resolved."""

from __future__ import annotations

import argparse

from weft.cli.config import add_file

HELP = "print the resolved whole"
GROUP = "run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints FILE with everything that it extends, presets, overrides, defaults and derived values, as YAML."
    )
    parser.epilog = "example: weft config show run.yaml --origin"
    add_file(parser)
    parser.add_argument("--origin", action="store_true", help="say where each value came from")


def run(args: argparse.Namespace) -> int:
    from weft.config.load import dump_yaml
    from weft.config.run import RunConfig

    config = RunConfig.load(args.file, args.overrides, check_data=not args.no_data)
    print(dump_yaml(config, origins=args.origin), end="")
    return 0
