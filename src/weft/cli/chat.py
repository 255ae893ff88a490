"""`weft chat`: a conversation with a trained model, in the terminal or line by line from standard input."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.generation_options import add_model_options, add_sampling_options
from weft.cli.stopping import Terminated

if TYPE_CHECKING:
    from weft.generation.chat import Answer, Chat
    from weft.generation.settings import Sampling
    from weft.observe.console import Console

HELP = "chat with a trained model"
GROUP = "use"

ADAPTER = "adapter"  # name in the engine
QUOTES = '"""'
STEP_TOKENS = 512  # Ctrl-C ends an answer between two steps, so the steps of a long prompt must be short
# Settings that /params shows and sets.
PARAMS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
          "frequency_penalty", "seed", "max_length")  # fmt: skip
ENDS = ("/quit", "/exit", "/bye")
COMMANDS = {
    "/regenerate": "answer the last message again",
    "/system [TEXT]": 'show or set the system message; "" removes it',
    "/params [NAME=VALUE ...]": "show or set how tokens are chosen: temperature=0.7 top_p=none",
    "/save FILE": "write the conversation as JSON lines, which /load and `weft data pack` read",
    "/load FILE": "replace the conversation by that of a file",
    "/clear": "forget all messages except the system message",
    "/help": "show this list",
    "/quit": "end the chat, as Ctrl-D",
}
EPILOG = f"""\
While you type:
  A line that ends with a backslash continues on the next line. Lines between {QUOTES} and {QUOTES} are one
  message, which can begin with a slash. Ctrl-C ends an answer, which is kept as far as it was written.
  At the prompt, Ctrl-C drops the line, and a second Ctrl-C or Ctrl-D ends the chat.

Commands:
{{commands}}

Without a terminal, each line of standard input is a message or a command. Answers are written to
standard output, and everything else to standard error. The exit code is 2 if a message or a command
failed.

examples:
  weft chat runs/run --system "You answer in one sentence."
  weft chat models/base --adapter runs/lora --quantize int8
  weft chat runs/run --temperature 0 < questions.txt > answers.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Chats with the model of a run's newest checkpoint, of one checkpoint or of a Hugging Face folder.\n"
        "The model must have been trained on conversations: its chat template renders the messages."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG.format(commands=_command_list())
    parser.add_argument(
        "source", metavar="RUN_OR_HF_DIR", help="a run directory, a checkpoint, or a Hugging Face folder"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message, which tells the model how to answer")
    parser.add_argument(
        "--chat-template",
        metavar="NAME|FILE",
        help="a built-in template: chatml, llama2, llama3, gemma, mistral, zephyr, vicuna, plain; or a template file "
        "(default: the model's chat template)",
    )
    add_sampling_options(parser, max_new_tokens=1024)
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    from weft.launch.threads import wait_briefly
    from weft.observe.console import Console

    wait_briefly()
    console = Console()
    session = ChatLoop(*_open(args, console), console)
    if session.interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 (input() then edits lines and recalls earlier lines)
        console.line("/help lists the commands, Ctrl-D ends the chat", style="dim")
    return session.run()


def _open(args: argparse.Namespace, console: Console) -> tuple[Chat, Sampling]:
    """Loads the model. Arguments, tokenizer and template are checked before."""
    import torch

    from weft.checkpoint.adapter_start import check_adapter_fits
    from weft.checkpoint.load import resolve
    from weft.checkpoint.load_model import load_model
    from weft.cli.generation_options import read_sampling
    from weft.data.conversations.template import ChatTemplate, find_template, template_folder
    from weft.generation.chat import Chat
    from weft.generation.engine import Engine
    from weft.generation.text import stop_ids_of, tokenizer_of
    from weft.parallel.world import local_device

    sampling, checkpoint = read_sampling(args), resolve(args.source)
    tokenizer, stop_ids = tokenizer_of(checkpoint), stop_ids_of(checkpoint)
    if args.adapter is not None:
        check_adapter_fits(args.adapter, checkpoint)  # refused before the model is loaded
    folder = template_folder(args.adapter, tokenizer.path)
    template = ChatTemplate.for_tokenizer(find_template(folder, args.chat_template), tokenizer.path)
    for line in template.warnings(tokenizer.added_tokens):
        console.warning(line)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model = load_model(checkpoint, local_device(console), dtype, quantize=args.quantize)
    engine = Engine(model, tokenizer, stop_ids=stop_ids, max_step_tokens=STEP_TOKENS)
    if args.adapter is not None:
        engine.add_adapter(ADAPTER, args.adapter)
    return Chat(engine, template, system=args.system, adapter=args.adapter and ADAPTER), sampling


class ChatLoop:
    """Reads messages and commands, and prints answers.

    Args:
        chat: the conversation.
        sampling: settings of generation.
        console: prints answers to standard output, and everything else to standard error.

    Attributes:
        interactive: whether standard input and output are a terminal.
    """

    def __init__(self, chat: Chat, sampling: Sampling, console: Console):
        self.chat, self.sampling, self.console = chat, sampling, console
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._files: set[Path] = set()  # that this chat wrote or read, and can therefore replace
        self._failed = False
        self._lines = enumerate(sys.stdin.buffer, start=1)

    def run(self) -> int:
        """Runs the chat until its end, and returns the exit code."""
        from weft.errors import UserError

        text, leaving = None, False  # `leaving`: the last input was Ctrl-C
        while True:
            try:
                text = self._read()
                if text is None or text.split()[0] in ENDS:
                    break
                leaving = False
                self._do(text)
            except Terminated:
                raise
            except KeyboardInterrupt:
                if leaving or not self.interactive:
                    raise
                leaving = True
                self.console.line("\nCtrl-C again, or Ctrl-D, ends the chat", style="dim")
            except UserError as error:
                self._failed = True
                self.console.line(str(error), style="red")
        if self.interactive and text is None:
            self.console.result()  # the terminal's next prompt begins on its own line
        return 2 if self._failed and not self.interactive else 0

    def _do(self, text: str) -> None:
        """Runs a command, or sends a message."""
        from weft.errors import UserError

        name, _, rest = text.partition(" ")
        if text.startswith(QUOTES):
            self._show(self.chat.send(text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"), self.sampling))
        elif not text.startswith("/"):
            self._show(self.chat.send(text, self.sampling))
        else:
            command: Callable[[str], None] | None = getattr(self, f"_{name[1:]}_command", None)
            if command is None:
                names = [known.split()[0] for known in COMMANDS]
                near = get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
                raise UserError(
                    f"unknown command {name}; {hint} (a message that begins with / needs {QUOTES} around it)"
                )
            command(rest.strip())

    # --- Answers ---

    def _show(self, answer: Answer) -> None:
        """Prints an answer while it is generated. Ctrl-C ends the answer."""
        from weft.processes import signal_handler

        stopped, start, first = [], time.perf_counter(), 0.0
        try:
            with signal_handler(lambda *_: stopped.append(True), signal.SIGINT):
                for text in answer:
                    self.console.result(text, end="")
                    first = first or (time.perf_counter() if answer.tokens else 0.0)
                    if stopped:
                        answer.stop()
        finally:
            if answer.text and not answer.text.endswith("\n"):
                self.console.result()
        self.console.line(self._summary(answer, start, first), style="dim")

    def _summary(self, answer: Answer, start: float, first: float) -> str:
        """Returns the line below an answer.

        Args:
            start, first: times at which the answer and its first token were begun and ready.
        """
        from weft.formatting import counted, rate, timing

        end = time.perf_counter()
        if answer.finish == "cancelled" and not answer.text:
            return "stopped before the answer began; the message was not kept"
        speed = (answer.tokens - 1) / (end - first) if answer.tokens > 1 else 1 / (end - start)
        line = f"{counted(answer.tokens, 'token')}, {rate(speed, 'token')}, the first after {timing(first - start)}"
        if answer.full:
            line += "; the model's window is full: /clear begins a new conversation"
        elif answer.finish == "length":
            line += "; cut off: /params max_new_tokens=N allows more"
        elif answer.finish == "cancelled":
            line += "; stopped"
        return line

    # --- Commands ---

    def _regenerate_command(self, rest: str) -> None:
        self._show(self.chat.regenerate(self.sampling))

    def _system_command(self, rest: str) -> None:
        if rest:
            self.chat.system = None if rest == '""' else rest
        self.console.line("no system message" if self.chat.system is None else f"system message: {self.chat.system}")

    def _params_command(self, rest: str) -> None:
        self.sampling = replace(self.sampling, **dict(map(_parse_param, rest.split())))
        values = {name: getattr(self.sampling, name) for name in PARAMS}
        self.console.line(" ".join(f"{name}={'none' if value is None else value}" for name, value in values.items()))

    def _save_command(self, rest: str) -> None:
        from weft.errors import UserError

        path = _path(rest, "/save talk.jsonl")
        if path.exists() and path.resolve() not in self._files:
            raise UserError("this file exists already; choose another name", path)
        self.chat.save(path)
        self._files.add(path.resolve())
        self.console.line(f"{path}: {len(self.chat.conversation)} messages saved")

    def _load_command(self, rest: str) -> None:
        path = _path(rest, "/load talk.jsonl")
        self.chat.load(path)
        self._files.add(path.resolve())
        self.console.line(f"{path}: {len(self.chat.conversation)} messages loaded")

    def _clear_command(self, rest: str) -> None:
        self.chat.clear()
        self.console.line("all messages except the system message are forgotten")

    def _help_command(self, rest: str) -> None:
        self.console.line(_command_list())

    # --- Input ---

    def _read(self) -> str | None:
        """Returns the next message or command, of one or more lines; None at the end of the input."""
        text = ""
        while not text.strip():
            line = self._line(">>> ")
            if line is None:
                return None
            text = line.strip() if line.lstrip().startswith(("/", QUOTES)) else line
            while text.endswith("\\") and not text.startswith(QUOTES):
                line = self._line("... ")
                text = text[:-1] + ("" if line is None else "\n" + line)
        if text.startswith(QUOTES):
            while not text.endswith(QUOTES) or len(text) < 2 * len(QUOTES):
                if (line := self._line("... ")) is None:
                    break
                text += "\n" + line.rstrip()
        return text

    def _line(self, prompt: str) -> str | None:
        """Returns the next line without its end; None at the end of the input."""
        from weft.errors import UserError

        place, number, codec = "standard input", None, "utf-8"
        try:
            if self.interactive:
                line = input(prompt).encode("utf-8", "surrogateescape")
            else:
                number, line = next(self._lines, (None, None))
                if line is None:
                    return None
                codec = "utf-8-sig" if number == 1 else codec
            return line.decode(codec).rstrip("\r\n")
        except EOFError:
            return None
        except UnicodeDecodeError:
            raise UserError("this line is not UTF-8 text; it was ignored, write it in UTF-8", place, number) from None


def _command_list() -> str:
    width = max(map(len, COMMANDS)) + 2
    return "\n".join(f"  {name:{width}}{what}" for name, what in COMMANDS.items())


def _path(text: str, example: str) -> Path:
    from weft.errors import UserError

    if not text:
        raise UserError(f"the name of a file is missing; write for example {example}")
    return Path(text).expanduser()


def _parse_param(word: str) -> tuple[str, Any]:
    """Parses `temperature=0.7` of /params; `none` becomes None."""
    from weft.errors import UserError

    name, _, value = word.partition("=")
    if name not in PARAMS:
        near = get_close_matches(name, PARAMS, 1)
        raise UserError(
            f"unknown setting {name}; " + (f"did you mean {near[0]}?" if near else f"use {', '.join(PARAMS)}")
        )
    if value.lower() == "none":
        return name, None
    for kind in (int, float):
        with suppress(ValueError):
            return name, kind(value)
    raise UserError(f"{word}: this is not NAME=NUMBER; write for example {name}={'0' if name == 'seed' else '1'}")
