"""The arguments that say which documents are read, shared by the verbs that read any."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.data.sources import Reading
    from weft.observe.console import Console

ABOUT = """\
INPUT: files; folders, searched to any depth; patterns such as 'data/**/*.jsonl' (quoted); folders that `datasets`
saved; or - for the standard input. A file is read once, however often it is named; links are followed. In folders,
hidden files, dangling links, pipes, and the files of token stores and tokenizers are left out and counted.

What a file is, its name says: .jsonl (one object a line), .json (a list of objects), .parquet, .arrow, .csv and .tsv
are records, of which --field or --template makes the text; every other file is text, one document a file, or many
between --separator. JSON, text and CSV may be packed as .gz or .zst. What is no document (broken JSON, a field that is
missing or null, invalid UTF-8, ...) is never dropped without a word.
"""


def add_inputs(verb: argparse.ArgumentParser, *, records: bool = False) -> None:
    """Add INPUT and how it is read.

    Args:
        records: the verb takes whole records: there is nothing to say about fields, templates and separators.
    """
    verb.description = ABOUT
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.add_argument("inputs", nargs="*", metavar="INPUT", help="files, folders, patterns, or -")
    verb.add_argument("--files-from", metavar="FILE", help="a file that names more inputs, one a line")
    verb.add_argument(
        "--format",
        metavar="NAME",
        help="what all files are, whatever their names say: jsonl, json, text, csv, tsv, parquet, arrow, a plugin's "
        "name, or module:Class (of the standard input: text, if it is not said)",
    )
    if not records:
        verb.add_argument(
            "--field", default="text", metavar="NAME", help="a record's text (default: text); meta.text looks within"
        )
        verb.add_argument(
            "--template", metavar="TEXT", help=r"a record's text, put together: '{title}\n{content}'; {{ is a brace"
        )
        verb.add_argument(
            "--separator", metavar="TEXT", help=r"what stands between the documents of a text file: '\n\n'"
        )
    verb.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="at what is no document: stop (default), or leave it out, counted and noted",
    )


def reading_of(args: argparse.Namespace) -> Reading:
    """How the arguments of `add_inputs` say that files are read.

    Raises:
        UserError: a template or separator that means nothing.
    """
    from weft.data.sources import Reading

    if not hasattr(args, "field"):
        return Reading(records=True, format=args.format)
    return Reading(
        field=args.field,
        template=None if args.template is None else unescaped(args.template),
        separator=None if args.separator is None else unescaped(args.separator),
        format=args.format,
    )


def check_options(args: argparse.Namespace, files: Sequence[Path]) -> None:
    """See that what is said about records and texts is of use for one of the files at least; their names tell.

    Raises:
        UserError: it is not.
    """
    from weft.data.sources.source_format import holdings
    from weft.errors import UserError

    held = holdings(files, reading_of(args))
    option = "--template" if args.template is not None else f"--field {args.field}" if args.field != "text" else None
    if option is not None and set(held.values()) == {"text"}:
        raise UserError(f"{option}: is for records, and all inputs are plain text; leave it out, or name a --format")
    if args.separator is not None and "text" not in held.values():
        raise UserError(
            f"--separator: is for plain text, and all inputs are {' and '.join(held)}; leave it out, or name "
            "their --format"
        )


def tell_skipped(console: Console, skipped: Mapping[str, int], files: Sequence[str] = (), more: str = "") -> None:
    """Say in one line which files gave no documents, by reason.

    Args:
        files: those that hold no text, of which the first are named; `more` says where all are.
    """
    from weft.data.sources.find import summary

    if skipped:
        named = ", ".join(files[:3]) + (f" and {len(files) - 3:,} more{more}" if len(files) > 3 else "")
        console.warning(f"skipped {summary(skipped)}" + (f" ({named})" if named else ""))


def unescaped(text: str) -> str:
    """A shell's argument with \\n, \\r, \\t and \\\\ as what they mean; a backslash before anything else is itself."""
    meant = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
    out, rest = [], text
    while rest:
        before, backslash, rest = rest.partition("\\")
        out.append(before)
        if backslash:
            out.append(meant.get(rest[:1], backslash + rest[:1]))
            rest = rest[1:]
    return "".join(out)
