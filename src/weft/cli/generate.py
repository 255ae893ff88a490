"""`weft generate`: a trained model writes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "let a trained model write"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continues PROMPTs with the model of a run's newest checkpoint, of one checkpoint or of a Hugging Face folder. "
        "A blank at a prompt's end is taken for the beginning of its next word, where tokens begin with blanks. "
        "A single prompt's text streams to the terminal as it is written; several are continued at once, up to 16, and "
        "shown when done."
    )
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="a run directory, one checkpoint of it, or a Hugging Face folder"
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to continue; - reads it from standard input")
    parser.add_argument(
        "--prompts", metavar="FILE", dest="prompts_file", help="continue each line of a text file, blank ones aside"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens of probability P")
    parser.add_argument("--seed", type=int, default=0, help="the same seed and prompt give the same text (default: 0)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], help="default: as saved (float32)")
    parser.add_argument("--no-cache", action="store_true", help="compute everything again for every token (to compare)")


def run(args: argparse.Namespace) -> int:
    from weft.launch.threads import wait_briefly

    wait_briefly()
    import torch

    from weft.checkpoint.load import resolve
    from weft.checkpoint.load_model import load_model
    from weft.generation.sample import Sampling
    from weft.generation.text import stop_ids_of, stream, tokenizer_of
    from weft.observe.console import Console
    from weft.parallel.world import local_device

    # Mistakes are told before a large model is read.
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    texts = prompts_of(args)
    checkpoint = resolve(args.source)
    tokenizer, stop_ids = tokenizer_of(checkpoint), stop_ids_of(checkpoint)
    model = load_model(checkpoint, local_device(Console()), getattr(torch, args.dtype) if args.dtype else None)
    prompts = [tokenizer.prompt(text) for text in texts]
    written = [prompt.text for prompt in prompts]
    begun, shown, single = 0, 0, len(prompts) == 1  # a single one is shown as it comes
    try:
        pieces = stream(model, tokenizer, prompts, sampling, stop_ids=stop_ids, cache=not args.no_cache)
        for number, piece, last in pieces:
            if single:
                say(piece if begun else written[0] + piece)
            elif last:
                show(number, written[number] + piece)
                shown = number + 1
            begun = max(begun, number + 1)
            written[number] += piece
    finally:  # Ctrl-C loses nothing of what there is
        if single and begun:
            say("\n")
        elif not single:
            for number in range(shown, begun):
                show(number, written[number])
    return 0


def show(number: int, text: str) -> None:
    """Print one of several texts under its number."""
    say(f"{chr(10) if number else ''}[{number + 1}] {text}\n")


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The texts to continue, of the command line and of the file.

    Raises:
        UserError: none, or one that is not UTF-8, or standard input twice, or no such file.
    """
    from weft.errors import UserError

    if args.prompts.count("-") > 1:
        raise UserError("standard input is read once; give - once")
    texts = [prompt_of(argument) for argument in args.prompts]
    if args.prompts_file is not None:
        path = Path(args.prompts_file)
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise UserError(f"the file of prompts cannot be read: {error.strerror}", path) from None
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
            except UnicodeDecodeError:
                raise UserError("this prompt is not UTF-8 text; convert the file to that", path, number) from None
            if text.strip():
                texts.append(text)
        if not texts:
            raise UserError("there is no prompt in it; write one a line", path)
    if not texts:
        raise UserError("there is nothing to continue; give a PROMPT, - for standard input, or --prompts FILE")
    return texts


def prompt_of(argument: str) -> str:
    """The text of one PROMPT argument; of standard input for -.

    Raises:
        UserError: it is not UTF-8.
    """
    from weft.errors import UserError

    # What is no UTF-8 in an argument, Python hands on as half characters that no tokenizer takes.
    raw = sys.stdin.buffer.read() if argument == "-" else argument.encode("utf-8", "surrogateescape")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = "the prompt on standard input" if argument == "-" else f"the prompt {argument!r}"
        raise UserError(f"{place} is not UTF-8 text, from byte {error.start:,} on; convert it to that") from None


def say(text: str) -> None:
    """Print without a line end; what the terminal's encoding lacks becomes `?`."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
