"""`weft config schema`: prints the JSON Schema of run files."""

from __future__ import annotations

import argparse

HELP = "print the JSON Schema of run files, for editors"
GROUP = "keys"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints the JSON Schema of run files, with the arguments of the built-in optimizers, schedules and trackers."
    )
    parser.epilog = "example: weft config schema > run.schema.json"
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="print the reference of all keys in Markdown (docs/configuration.md) instead",
    )


def run(args: argparse.Namespace) -> int:
    from weft.config.reference import json_schema, markdown

    if args.markdown:
        print(markdown(), end="")
    else:
        import json

        print(json.dumps(json_schema(), indent=2))
    return 0
