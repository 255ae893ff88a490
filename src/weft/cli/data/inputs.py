"""The arguments that say which documents are read, shared by the verbs that read any."""

from __future__ import annotations

import argparse


def add_inputs(verb: argparse.ArgumentParser) -> None:
    """Add INPUT and how it is read."""
    verb.description = (
        "INPUT: files, or folders searched to any depth. *.jsonl is one JSON object a line; every other text file is "
        "one document. What is no document (broken JSON, invalid UTF-8, ...) is never dropped without a word."
    )
    verb.add_argument("inputs", nargs="*", metavar="INPUT", help="files and folders")
    verb.add_argument("--files-from", metavar="FILE", help="a file that names more inputs, one a line")
    verb.add_argument("--field", default="text", metavar="NAME", help="a JSON line's text (default: text)")
    verb.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="at what is no document: stop (default), or leave it out, counted and noted",
    )
