"""`weft config`: checks and prints run files. Each sub-verb is one module."""

import argparse

HELP = "check a run file, print it resolved, print its schema"

GROUP = "train"
GROUPS = ("run", "keys")  # of its sub-verbs


def add_file(parser: argparse.ArgumentParser) -> None:
    """Adds the run file and its overrides."""
    parser.add_argument("file", metavar="FILE", help="the YAML file of the run")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="override a value of the file")
    parser.add_argument(
        "--no-data", action="store_true", help="do not read the headers of the tokenizer and the token stores"
    )
