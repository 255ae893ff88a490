"""Defines the arguments that select and read documents, which several subcommands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.data.sources import Reading
    from weft.observe.console import Console

ABOUT = """\
INPUT is a file, a folder (searched recursively), a quoted pattern such as 'data/**/*.jsonl', a folder that `datasets`
saved, or - for the standard input. Each file is read once. Links are followed. In folders, hidden files, dangling
links, pipes, token stores and tokenizers are skipped and counted.

The format is detected from the file name: .jsonl (one object per line), .json (a list of objects), .parquet, .arrow,
.csv and .tsv hold records, whose text --field or --template selects. All other files are text: one document per
file, or several with --separator. JSON, text and CSV files may be compressed as .gz or .zst. Input that is not a
document (broken JSON, a missing or null field, invalid UTF-8, ...) is always reported.
"""
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


def add_inputs(parser: argparse.ArgumentParser, *, records: bool = False) -> None:
    """Adds the arguments that select and read input files.

    Args:
        records: whether the subcommand reads only records; then the arguments for texts are left out.
    """
    parser.description = ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="files, folders, patterns, or -")
    parser.add_argument("--files-from", metavar="FILE", help="a file that lists more inputs, one per line")
    parser.add_argument(
        "--format",
        metavar="NAME",
        help="the format of all files: jsonl, json, text, csv, tsv, parquet, arrow, the name of a plugin, or "
        "module:Class (default: by file name; text for the standard input)",
    )
    if not records:
        parser.add_argument(
            "--field",
            default="text",
            metavar="NAME",
            help="the field of a record that contains the text (default: text); meta.text is a nested field",
        )
        parser.add_argument(
            "--template",
            metavar="TEXT",
            help=r"template of a record's text, with several fields: '{title}\n{content}'; {{ is a brace",
        )
        parser.add_argument(
            "--separator", metavar="TEXT", help=r"the text between the documents of a text file, such as '\n\n'"
        )
    parser.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="for input that is not a document: stop (default), or skip, count and record it",
    )


def parse_reading(args: argparse.Namespace) -> Reading:
    """Returns the options of `add_inputs` as a Reading. Raises UserError if the template or separator is invalid."""
    from weft.data.sources import Reading

    if not hasattr(args, "field"):
        return Reading(records=True, format=args.format)
    return Reading(
        field=args.field,
        template=None if args.template is None else unescape(args.template),
        separator=None if args.separator is None else unescape(args.separator),
        format=args.format,
    )


def check_reading_options(args: argparse.Namespace, files: Sequence[Path]) -> None:
    """Raises UserError if an option does not apply to the format of any of the files.

    The format is the value of --format, or is detected from the name of each file.
    """
    from weft.data.sources.source_format import contents_by_format
    from weft.errors import UserError

    contents = contents_by_format(files, parse_reading(args))
    option = "--template" if args.template is not None else f"--field {args.field}" if args.field != "text" else None
    remedy = "remove this option, or set --format to the format of the inputs"
    if option is not None and set(contents.values()) == {"text"}:
        raise UserError(f"{option}: applies to records, but all inputs are plain text; {remedy}")
    if args.separator is not None and "text" not in contents.values():
        raise UserError(f"--separator: applies to plain text, but all inputs are {' and '.join(contents)}; {remedy}")


def report_skipped(console: Console, skipped: Mapping[str, int], files: Sequence[str] = (), more: str = "") -> None:
    """Warns about skipped files.

    Args:
        skipped: reason -> number of skipped files.
        files: paths of the skipped files; the first three are named.
        more: text that says where all paths are listed; added if some paths are not named.
    """
    from weft.data.sources.find import format_counts

    if skipped:
        console.warning(f"skipped {format_counts(skipped)}" + (f" ({name_files(files, more)})" if files else ""))


def name_files(files: Sequence[str], more: str = "") -> str:
    """Returns the first three of some paths, and the number of the others followed by `more`."""
    return ", ".join(files[:3]) + (f" and {len(files) - 3:,} more{more}" if len(files) > 3 else "")


def unescape(text: str) -> str:
    r"""Replaces \n, \r, \t and \\ in a command line argument; other backslashes are kept."""
    return re.sub(r"\\([nrt\\])", lambda match: ESCAPES[match[1]], text)
