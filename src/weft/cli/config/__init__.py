"""`weft config SUB-VERB`: a run's file checked, shown, described; one file a sub-verb."""

import argparse

HELP = "check a run's YAML file, show it resolved, print its schema"

GROUP = "train"
GROUPS = ("run", "keys")  # of its sub-verbs


def add_file(parser: argparse.ArgumentParser) -> None:
    """A run's file and what wins over it."""
    parser.add_argument("file", metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values that win over the file's")
    parser.add_argument("--no-data", action="store_true", help="do not open the tokenizer's and the stores' headers")
