"""The `weft` command, which finds a subcommand and runs it. This module imports no large packages.

A subcommand such as `weft train` is a module of this package. A subcommand such as `weft data pack` is a module of a
sub-package. The module defines HELP (one line), GROUP (the group in which `weft --help` lists the subcommand),
`add_arguments(parser)`, and `run(args)`, which returns the exit code. It imports its dependencies inside `run`.
Installed packages add subcommands as plugins of the kind `verb` (docs/plugins.md).
"""

from __future__ import annotations

import argparse
import difflib
import gc
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TextIO

import weft
from weft import cli
from weft.cli.stopping import report_stop, terminable
from weft.errors import UserError, reported_elsewhere
from weft.plugins import built_in, built_ins, plugins

GROUPS = ("start", "data", "train", "use")
COLLECT_EVERY = 50_000  # objects; at Python's 700, collections take a sixth of the time of imports

PAGE = """\
usage: weft COMMAND ... | weft --help | weft --version

Weft trains language models, from raw text to a trained, evaluated and exported model. A run is described by one short
YAML file. The same file trains on a laptop's CPU and on many GPUs. An interrupted run resumes when it is started again.

{verbs}

examples:
  weft quickstart                                        train a small code model from scratch in five minutes
  weft train run.yaml optimizer.lr=1e-3                  train with one value overridden
  weft generate runs/run "Once upon a time"              generate text

`weft COMMAND --help` describes a command.
"""

SUB_PAGE = """\
usage: {command} SUBCOMMAND ...

{what}.

{verbs}

`{command} SUBCOMMAND --help` describes a subcommand.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line and suggests the most similar valid name."""

    def read(self, words: list[str]) -> argparse.Namespace:
        """Parses options and positional arguments in any order, such as `run.yaml --nproc 4 optimizer.lr=1e-3`.

        An unknown option is reported before any other error.

        Args:
            words: the arguments of the subcommand.
        """
        for word in words:
            if word == "--":
                break
            known = word in self._option_string_actions or word.partition("=")[0] in self._option_string_actions
            if word.startswith("--") and not known and " " not in word:
                self.unknown_option(word)
        found, rest = self.parse_known_intermixed_args(words)
        for word in rest:
            if word.startswith("-") and len(word) > 1:
                self.unknown_option(word)
        if rest:
            self.error(f"unexpected arguments: {' '.join(rest)}; remove them")
        return found

    def unknown_option(self, word: str) -> NoReturn:
        """Reports an unknown option and exits with code 2."""
        name = word.partition("=")[0]
        options = {option.lstrip("-"): option for option in self._option_string_actions}
        near = difflib.get_close_matches(name.lstrip("-"), options, n=1)
        what = f"unknown option {name}"
        if near:
            what += f"; did you mean '{options[near[0]]}'?"
        elif "." in name and any(action.dest == "overrides" for action in self._actions):
            what += f"; write a configuration override without dashes: {name.lstrip('-')}=..."
        self.error(what)

    def error(self, message: str) -> NoReturn:
        """Prints an error in one line and exits with code 2."""
        message = message.replace("the following arguments are required:", "required:")
        chosen, choices, listed = message.partition(" (choose from ")
        _, invalid, given = chosen.partition("invalid choice: ")
        if choices and invalid:
            known = [name.strip(" '\"") for name in listed.rstrip(")").split(",")]
            near = difflib.get_close_matches(given.strip("'\""), known, n=1)
            message = chosen + (f"; did you mean '{near[0]}'?" if near else "") + choices + listed
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")

    def add_argument(self, *args, **kwargs) -> argparse.Action:
        """Adds an argument. A positional argument with `nargs="*"` defaults to an empty list."""
        if kwargs.get("nargs") == "*" and not args[0].startswith("-"):
            kwargs.setdefault("default", [])
        return super().add_argument(*args, **kwargs)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that a command line names.

    Args:
        argv: the command line without the program's name. Default: `sys.argv[1:]`.

    Returns:
        The exit code. 0: success. 2: invalid input, or standard output cannot be written. 129: SIGHUP. 130: Ctrl-C.
        143: SIGTERM. Other codes are defined by the subcommand.
    """
    is_process, argv = argv is None, list(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(COLLECT_EVERY)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character prints its escape sequence.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = dispatch(argv, cli, "weft")
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as leaving:
        if is_process:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends
        return report_stop(leaving)
    except BrokenPipeError:
        # A closed pipe (`weft config show | head`) is no error. Python must not flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is not None or not unwritable(sys.stdout):
            raise
        print(
            f"weft: cannot write to standard output: {error.strerror}; redirect the output to another file",
            file=sys.stderr,
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def unwritable(stream: TextIO) -> bool:
    """Whether writing to a stream fails, for example because the disk is full. Writes a newline to find out."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        return True
    return False


def dispatch(argv: list[str], package: ModuleType, command: str) -> int:
    """Finds a subcommand, parses its arguments, runs it and returns its exit code.

    If the subcommand raises a UserError, returns 2, and prints the error unless another rank reports it.

    Args:
        argv: the words of the command line after `command`.
        package: the package with the modules of the subcommands.
        command: the beginning of the command line that was already parsed: "weft", or for example "weft data".
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        if argv[1:] and argv[0] == "help":
            return dispatch([*argv[1:], "--help"], package, command)
        print(help_page(package, command), end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] in ("-V", "--version") and package is cli:
        print(f"weft {weft.__version__}")
        return 0
    try:
        verb = find_verb(argv[0], package, command)
        if verb is None:
            return unknown(argv[0], package, command)
        command = f"{command} {argv[0]}"
        if hasattr(verb, "GROUPS"):  # a package of subcommands
            return dispatch(argv[1:], verb, command)
        parser = Parser(prog=command, description=verb.HELP, allow_abbrev=False)
        verb.add_arguments(parser)
        try:
            args = parser.read(argv[1:])
            args.words = argv[1:]  # for verbs that run in several processes
        except SystemExit as leaving:  # argparse has printed its help (code 0) or the error (code 2)
            return int(leaving.code or 0)
        # `weft quickstart` passes the signal on. A rank that does not train yet dies, and its launcher reports that.
        default = command == "weft quickstart" or (command == "weft train" and "RANK" in os.environ)
        with one_line_warnings(), nullcontext() if default else terminable():
            return int(verb.run(args) or 0)
    except UserError as error:
        if not reported_elsewhere(error):
            print(error, file=sys.stderr, flush=True)
        return 2


def find_verb(name: str, package: ModuleType, command: str) -> ModuleType | None:
    """Returns the module of a built-in subcommand or of a plugin; None if there is no such subcommand.

    The plugin of `weft NAME` is `verb.NAME`, and the plugin of `weft data NAME` is `verb.data.NAME`.
    """
    module = None if name.startswith("-") else built_in(package, name, "HELP")
    if module is not None:
        return module
    plugin = plugins("verb").get(".".join([*command.split()[1:], name]))
    if plugin is None:
        return None
    module = plugin.load()
    for needed in ("HELP",) if hasattr(module, "GROUPS") else ("HELP", "add_arguments", "run"):
        if not hasattr(module, needed):
            what = f"the plugin verb.{plugin.name} of {plugin.package}: {plugin.reference} has no {needed}"
            raise UserError(f"{what}; a command needs HELP, add_arguments(parser) and run(args) (docs/plugins.md)")
    return module


def verbs_by_group(package: ModuleType, command: str) -> dict[str, dict[str, str]]:
    """Returns, for each group of subcommands, the name and the help line of each subcommand.

    Plugins are not imported, so the help line of a plugin only names its package.
    """
    groups: dict[str, dict[str, str]] = {group: {} for group in (GROUPS if package is cli else package.GROUPS)}
    for name, module in built_ins(package, "HELP").items():
        groups[module.GROUP][name] = module.HELP
    outer = ".".join(command.split()[1:])
    for name, plugin in plugins("verb").items():
        before, _, last = name.rpartition(".")
        if before == outer:
            groups.setdefault("plugins", {}).setdefault(last, f"from the package {plugin.package}")
    return groups


def help_page(package: ModuleType, command: str) -> str:
    """Returns the help page of `weft`, or of a `command` with subcommands, such as `weft data`."""
    groups, lines = verbs_by_group(package, command), []
    width = max(len(verb) for verbs in groups.values() for verb in verbs) + 3
    for group, verbs in groups.items():
        for number, (verb, help_line) in enumerate(verbs.items()):
            lines.append(f"  {group if number == 0 else '':8}{verb:{width}}{help_line}")
    table = "\n".join(lines)
    if package is cli:
        return PAGE.format(verbs=table)
    return SUB_PAGE.format(command=command, what=package.HELP[0].upper() + package.HELP[1:], verbs=table)


def unknown(given: str, package: ModuleType, command: str) -> int:
    """Reports an unknown subcommand or option, suggests the most similar valid name, and returns exit code 2."""
    kind, known = (
        "command" if package is cli else "subcommand",
        [v for g in verbs_by_group(package, command).values() for v in g],
    )
    if given.startswith("-"):
        kind, known = "option", ["--help", "--version"] if package is cli else ["--help"]
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(known)}"
    print(f"{command}: unknown {kind} {given!r}; {hint} ({command} --help lists them)", file=sys.stderr)
    return 2


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Context in which a warning of Weft is printed in one line. Warnings of other libraries keep their format."""
    before, here = warnings.formatwarning, str(Path(__file__).parent.parent)

    def format_warning(message, category, filename, lineno, line=None) -> str:
        ours = filename.startswith(here)
        return f"warning: {message}\n" if ours else before(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = before
