"""`weft config show`: prints a run file with all values resolved."""

from __future__ import annotations

import argparse

from weft.cli.config import add_file

HELP = "print a run file with all values resolved"
GROUP = "run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints FILE as YAML, with the files that it extends, presets, overrides, defaults and derived values resolved."
    )
    parser.epilog = "example: weft config show run.yaml --origin"
    add_file(parser)
    parser.add_argument("--origin", action="store_true", help="also print where each value comes from")


def run(args: argparse.Namespace) -> int:
    from weft.config.dump import dump_yaml
    from weft.config.run import RunConfig

    config = RunConfig.load(args.file, args.overrides, check_data=not args.no_data)
    print(dump_yaml(config, origins=args.origin), end="")
    return 0
