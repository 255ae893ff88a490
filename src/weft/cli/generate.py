"""`weft generate`: continues prompts with a trained model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "generate text with a trained model"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continues PROMPTs with the model of a run's newest checkpoint, of one checkpoint or of a Hugging Face folder. "
        "A blank at the end of a prompt is treated as the beginning of the next word if tokens begin with blanks. The "
        "text of a single prompt streams to the terminal; several prompts are continued in batches of up to 16 and "
        "printed when done."
    )
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="a run directory, a checkpoint, or a Hugging Face folder"
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to continue; - reads it from standard input")
    parser.add_argument(
        "--prompts", metavar="FILE", dest="prompts_file", help="continue each line of a text file, except blank lines"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: greedy decoding (default: 0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the most likely tokens of probability P")
    parser.add_argument("--seed", type=int, default=0, help="the same seed and prompt give the same text (default: 0)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], help="default: as saved (float32)")
    parser.add_argument("--no-cache", action="store_true", help="recompute all tokens at each step (for comparison)")


def run(args: argparse.Namespace) -> int:
    from weft.launch.threads import wait_briefly

    wait_briefly()
    import torch

    from weft.checkpoint.load import resolve
    from weft.checkpoint.load_model import load_model
    from weft.generation.sample import Sampling
    from weft.generation.text import stop_ids_of, stream_text, tokenizer_of
    from weft.observe.console import Console
    from weft.parallel.world import local_device

    # Arguments are checked before the model is loaded.
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    texts = _read_prompts(args)
    checkpoint = resolve(args.source)
    tokenizer, stop_ids = tokenizer_of(checkpoint), stop_ids_of(checkpoint)
    model = load_model(checkpoint, local_device(Console()), getattr(torch, args.dtype) if args.dtype else None)
    prompts = [tokenizer.prompt(text) for text in texts]
    written = [prompt.text for prompt in prompts]
    begun, shown, single = 0, 0, len(prompts) == 1
    try:
        pieces = stream_text(model, tokenizer, prompts, sampling, stop_ids=stop_ids, cache=not args.no_cache)
        for number, piece, last in pieces:
            if single:
                _write(piece if begun else written[0] + piece)
            elif last:
                _show(number, written[number] + piece)
                shown = number + 1
            begun = max(begun, number + 1)
            written[number] += piece
    finally:  # also after Ctrl-C
        if single and begun:
            _write("\n")
        elif not single:
            for number in range(shown, begun):
                _show(number, written[number])
    return 0


def _show(number: int, text: str) -> None:
    """Prints one of several texts with its number."""
    _write(f"{chr(10) if number else ''}[{number + 1}] {text}\n")


def _read_prompts(args: argparse.Namespace) -> list[str]:
    """Returns the prompts of the command line and of the file. Raises UserError if there is none, or one is invalid."""
    from weft.errors import UserError

    if args.prompts.count("-") > 1:
        raise UserError("standard input is read once; give - once")
    texts = [_read_prompt(argument) for argument in args.prompts]
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
                raise UserError("this prompt is not UTF-8 text; convert the file to UTF-8", path, number) from None
            if text.strip():
                texts.append(text)
        if not texts:
            raise UserError("there is no prompt in it; write one per line", path)
    if not texts:
        raise UserError("there is nothing to continue; give a PROMPT, - for standard input, or --prompts FILE")
    return texts


def _read_prompt(argument: str) -> str:
    """Returns a PROMPT argument, or standard input for -. Raises UserError if it is not UTF-8."""
    from weft.errors import UserError

    # Python decodes invalid UTF-8 in an argument to surrogates, which no tokenizer accepts.
    raw = sys.stdin.buffer.read() if argument == "-" else argument.encode("utf-8", "surrogateescape")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = "the prompt on standard input" if argument == "-" else f"the prompt {argument!r}"
        raise UserError(f"{place} is not UTF-8 text, from byte {error.start:,} on; convert it to UTF-8") from None


def _write(text: str) -> None:
    """Prints without a line end. Characters outside the terminal's encoding become `?`."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
