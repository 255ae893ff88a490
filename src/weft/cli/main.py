"""`weft VERB ...`: finds the verb and runs it. Nothing heavy, and no verb but the one asked for, is imported here."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TextIO

from weft import __version__
from weft.cli.stopping import Terminated, terminable

# Verb -> its module (with HELP, add_arguments, run) and its line in `weft --help`, by group.
VERBS: dict[str, dict[str, tuple[str, str]]] = {
    "start": {
        "quickstart": ("weft.cli.quickstart", "train a small model on Python's standard library in a few minutes"),
    },
    "data": {
        "data": ("weft.cli.data", "train a tokenizer, pack text into token stores, work on stores"),
    },
    "train": {
        "config": ("weft.cli.config", "check a run's YAML file, show it resolved, print its schema"),
        "models": ("weft.cli.models", "list families and presets of models, with their sizes"),
        "train": ("weft.cli.train", "train a model as a YAML file says; go on if it was interrupted"),
        "profile": ("weft.cli.profile", "show where a training step's time and memory go"),
    },
    "use": {
        "generate": ("weft.cli.generate", "let a trained model write"),
        "evaluate": ("weft.cli.evaluate", "measure a model: perplexity, bits per byte, benchmark tasks"),
        "import": ("weft.cli.import_", "make a checkpoint of a Hugging Face folder"),
        "export": ("weft.cli.export", "write a trained model for Hugging Face's transformers"),
        "resize": ("weft.cli.resize", "give a model's vocabulary another size"),
        "delta": ("weft.cli.delta", "a model as its differences from another one, and back"),
        "report": ("weft.cli.report", "write a page of a run's curves, samples and config"),
    },
}
TABLE = {verb: entry for group in VERBS.values() for verb, entry in group.items()}
SAVES_FIRST = ("train", "quickstart")  # at SIGTERM: training has a handler of its own

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
    """Takes options and positional arguments in any order: `weft train run.yaml --nproc 4 optimizer.lr=1e-3`.

    A mistake is told in one line.
    """

    _within = False

    def parse_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """As argparse's; an unknown option is told before anything else, with the nearest one that there is."""
        args = list(sys.argv[1:] if args is None else args)
        for word in args:
            if word == "--":
                break
            known = word in self._option_string_actions or word.partition("=")[0] in self._option_string_actions
            if word.startswith("--") and not known and " " not in word:
                self.unknown_option(word)
        found, rest = self.parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("-") and len(word) > 1:
                self.unknown_option(word)
        if rest:
            self.error(f"too many arguments: {' '.join(rest)}")
        return found

    def unknown_option(self, word: str) -> NoReturn:
        """Say that there is no such option, and leave."""
        name = word.partition("=")[0]
        options = {option.lstrip("-"): option for option in self._option_string_actions}
        near = difflib.get_close_matches(name.lstrip("-"), options, n=1)
        what = f"unknown option {name}"
        if near:
            what += f"; did you mean '{options[near[0]]}'?"
        elif "." in name and any(action.dest == "overrides" for action in self._actions):
            what += f"; a value of the run's file has no dashes: {name.lstrip('-')}=..."
        self.error(what)

    def error(self, message: str) -> NoReturn:
        """Tell a mistake in one line, and leave with 2."""
        message = message.replace("the following arguments are required:", "required:")
        chosen, choices, listed = message.partition(" (choose from ")
        _, invalid, given = chosen.partition("invalid choice: ")
        if choices and invalid:
            known = [name.strip(" '\"") for name in listed.rstrip(")").split(",")]
            near = difflib.get_close_matches(given.strip("'\""), known, n=1)
            message = chosen + (f"; did you mean '{near[0]}'?" if near else "") + choices + listed
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")

    def add_argument(self, *args, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
        """As argparse's; positional arguments that may be none are not called missing."""
        if kwargs.get("nargs") == "*" and not args[0].startswith("-"):
            kwargs.setdefault("default", [])
        return super().add_argument(*args, **kwargs)

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """As `parse_known_intermixed_args`."""
        if self._within:
            return super().parse_known_args(args, namespace)
        self._within = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._within = False


SUB_HELP = """\
usage: weft {verb} SUB-VERB ...

{what}.

{verbs}

`weft {verb} SUB-VERB --help` tells more about each.
"""


def help_text() -> str:
    """What `weft --help` prints."""
    return HELP.format(verbs=listing(VERBS))


def listing(groups: dict[str, dict[str, tuple[str, str]]]) -> str:
    """A table of verbs, one a line, by group."""
    lines = []
    width = max(len(verb) for verbs in groups.values() for verb in verbs) + 3
    for group, verbs in groups.items():
        for number, (verb, (_, help_line)) in enumerate(verbs.items()):
            lines.append(f"  {group if number == 0 else '':8}{verb:{width}}{help_line}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: the command line without the program's name; by default `sys.argv[1:]`.

    Returns:
        The exit code: 0; 2 for a mistake in the input or a standard output that cannot be written, each told in one
        line; 130 after Ctrl-C, 143 after SIGTERM; or the verb's own.
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
    except KeyboardInterrupt as leaving:
        terminated = isinstance(leaving, Terminated)
        print("terminated" if terminated else "interrupted", file=sys.stderr)
        return 143 if terminated else 130
    except BrokenPipeError:
        # The reader left (`weft config show | head`): that is no mistake. Python must not try to flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is not None or not unwritable(sys.stdout):
            raise
        print(f"weft: standard output cannot be written: {error.strerror}; send it elsewhere", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def unwritable(stream: TextIO) -> bool:
    """Whether not even the end of a line can be written (a full disk): then that was the error."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        return True
    return False


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
    verb, rest = argv[0], argv[1:]
    if verb not in TABLE:
        return unknown("weft", "verb", verb, list(TABLE))
    module = import_module(TABLE[verb][0])
    if hasattr(module, "VERBS"):  # a verb whose sub-verbs have a file each
        table = {name: entry for group in module.VERBS.values() for name, entry in group.items()}
        if not rest or rest[0] in ("-h", "--help", "help"):
            text = SUB_HELP.format(
                verb=verb, what=module.HELP[0].upper() + module.HELP[1:], verbs=listing(module.VERBS)
            )
            print(text, end="", file=sys.stdout if rest else sys.stderr)
            return 0 if rest else 2
        if rest[0] not in table:
            return unknown(f"weft {verb}", "sub-verb", rest[0], list(table))
        module = import_module(table[rest[0]][0])
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    parser = Parser(prog=f"weft {verb}", description=module.HELP, allow_abbrev=False)
    module.add_arguments(parser)
    try:
        args = parser.parse_args(rest)
    except SystemExit as leaving:  # argparse has printed its help (0) or the mistake (2)
        return int(leaving.code or 0)
    from weft.config.errors import UserError, told_by_another

    try:
        with one_line_warnings(), nullcontext() if verb in SAVES_FIRST else terminable():
            return int(module.run(args) or 0)
    except UserError as error:
        if not told_by_another(error):
            print(error, file=sys.stderr, flush=True)
        return 2


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Within it a warning that Weft gives is one line; those of libraries keep the place that they are about."""
    before, here = warnings.formatwarning, str(Path(__file__).parent.parent)

    def told(message, category, filename, lineno, line=None) -> str:
        ours = filename.startswith(here)
        return f"warning: {message}\n" if ours else before(message, category, filename, lineno, line)

    warnings.formatwarning = told
    try:
        yield
    finally:
        warnings.formatwarning = before


def unknown(command: str, kind: str, given: str, known: list[str]) -> int:
    """Say that there is no such verb (or option before one), with the nearest one that there is."""
    if given.startswith("-"):
        kind, known = "option", ["--help", "--version"] if command == "weft" else ["--help"]
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"{kind}s are {', '.join(known)}"
    print(f"{command}: there is no {kind} {given!r}; {hint} ({command} --help lists them)", file=sys.stderr)
    return 2
