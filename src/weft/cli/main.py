"""`weft VERB ...`: finds the verb and runs it. Nothing heavy, and no verb but the one asked for, is imported here."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from weft import __version__

# Verb -> its module (with HELP, add_arguments, run) and its line in `weft --help`, by group.
VERBS: dict[str, dict[str, tuple[str, str]]] = {
    "start": {
        "quickstart": ("weft.cli.quickstart", "train a small model on Python's standard library in a few minutes"),
    },
    "data": {
        "data": ("weft.cli.data", "train a tokenizer, pack text into a token store, look into one"),
    },
    "train": {
        "config": ("weft.cli.config", "check a run's YAML file, show it resolved, print its schema"),
        "train": ("weft.cli.train", "train a model as a YAML file says; go on if it was interrupted"),
    },
    "use": {
        "generate": ("weft.cli.generate", "let a trained model write"),
        "report": ("weft.cli.report", "write a page of a run's curves, samples and config"),
    },
}
TABLE = {verb: entry for group in VERBS.values() for verb, entry in group.items()}

HELP = """\
usage: weft VERB ... | weft --help | weft --version

Weft trains language models: raw text in; a trained model that writes out. A run is one short YAML file; the same file
trains on a laptop's CPU and on many GPUs, and goes on by itself after an interruption.

{verbs}

examples:
  weft quickstart                                        from nothing to a model that writes code, in five minutes
  weft train run.yaml optimizer.lr=1e-3                  train, with one value changed
  weft generate runs/run "Once upon a time"              let it write

`weft VERB --help` tells more about each.
"""


class Parser(argparse.ArgumentParser):
    """Takes options and positional arguments in any order: `weft train run.yaml --nproc 4 optimizer.lr=1e-3`."""

    _within = False

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """As argparse's, and `parse_known_intermixed_args` where there are no sub-verbs."""
        if self._within or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._within = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._within = False


def help_text() -> str:
    """What `weft --help` prints."""
    lines = []
    for group, verbs in VERBS.items():
        for number, (verb, (_, help_line)) in enumerate(verbs.items()):
            lines.append(f"  {group if number == 0 else '':8}{verb:13}{help_line}")
    return HELP.format(verbs="\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: the command line without the program's name; by default `sys.argv[1:]`.

    Returns:
        The exit code: 0; 2 for a mistake in the input, which is told in one line; 130 after Ctrl-C; or the verb's own.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a stand-in rather than the program's end.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = dispatch(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left (`weft config show | head`): that is no mistake. Python must not try to flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def dispatch(argv: list[str]) -> int:
    """Find the verb, read its arguments, run it; a UserError becomes its text and 2."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        if len(argv) > 1 and argv[0] == "help" and argv[1] in TABLE:
            return dispatch([*argv[1:], "--help"])
        print(help_text(), end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"weft {__version__}")
        return 0
    verb = argv[0]
    if verb not in TABLE:
        near = difflib.get_close_matches(verb, TABLE, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"verbs are {', '.join(TABLE)}"
        print(f"weft: there is no verb {verb!r}; {hint} (weft --help lists them)", file=sys.stderr)
        return 2
    module = import_module(TABLE[verb][0])
    parser = Parser(prog=f"weft {verb}", description=module.HELP, allow_abbrev=False)
    module.add_arguments(parser)
    try:
        args = parser.parse_args(argv[1:])
    except SystemExit as leaving:  # argparse has printed its help (0) or the mistake (2)
        return int(leaving.code or 0)
    from weft.config.errors import ConfigError, UserError

    try:
        return int(module.run(args) or 0)
    except UserError as error:
        # All ranks read the same file: of those on one machine, the first speaks of what is wrong in it.
        alike = isinstance(error, ConfigError) and os.environ.get("LOCAL_RANK", "0") != "0"
        if not (error.quiet or alike):
            print(error, file=sys.stderr, flush=True)
        return 2
