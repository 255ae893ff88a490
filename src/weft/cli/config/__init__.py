"""`weft config`: checks and prints run files. Each subcommand is one module."""

import argparse

HELP = "check a run file, print its resolved values, print the schema of run files"

GROUP = "train"
GROUPS = ("run", "keys")  # groups of its subcommands


def add_file(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for a run file and its overrides to a parser."""
    parser.add_argument("file", metavar="FILE", help="the YAML file of the run")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="override values of FILE; the last one wins")
    parser.add_argument(
        "--no-data", action="store_true", help="do not read the headers of the tokenizer and the token stores"
    )
