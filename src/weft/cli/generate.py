"""`weft generate`: a trained model writes."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

HELP = "let a trained model write"
TOGETHER = 16  # prompts that are continued at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continues PROMPTs with the model of a run's newest checkpoint, of one checkpoint or of a Hugging Face folder. "
        "A blank at a prompt's end is taken for the beginning of its next word, where tokens begin with blanks. "
        "A single prompt's text streams to the terminal as it is written; several are continued at once, "
        f"up to {TOGETHER}, and shown when done."
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

    from weft.checkpoint.load import resolve, tokenizer_folder
    from weft.checkpoint.model import load_model
    from weft.config.errors import UserError
    from weft.config.huggingface import is_huggingface
    from weft.data.tokenizers.tokenizer import Tokenizer
    from weft.generate.sample import check_settings, earlier

    check_settings(args.max_new_tokens, args.temperature, args.top_k, args.top_p)  # before a large model is read
    texts = prompts_of(args)
    checkpoint = resolve(args.source)
    folder = tokenizer_folder(checkpoint)
    if folder is None and (is_huggingface(checkpoint) or checkpoint.absolute().parent.name != "checkpoints"):
        raise UserError("there is no tokenizer.json with this model; put its tokenizer's files there", checkpoint)
    if folder is None:
        raise UserError("this run has no tokenizer of its own; train with `tokenizer:` set", checkpoint.parent.parent)
    tokenizer = Tokenizer.load(folder)
    stop_ids = stop_ids_of(checkpoint) | {tokenizer.eod_id}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(checkpoint, device, getattr(torch, args.dtype) if args.dtype else None)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    prompts = [tokenizer.prompt(text) for text in texts]
    copies = earlier(tuple(prompt.ids) for prompt in prompts)
    for begin in range(0, len(prompts), TOGETHER):
        some = slice(begin, begin + TOGETHER)
        write(args, model, tokenizer, prompts[some], copies[some], stop_ids, begin + 1 if len(prompts) > 1 else None)
    return 0


def write(args, model, tokenizer, prompts, copies: list[int], stop_ids: set[int], number: int | None) -> None:
    """Continue some prompts at once.

    Args:
        prompts: of `Tokenizer.prompt`.
        copies: as in `generate`.
        number: of the first one, shown before its text; None: there is only one, whose text is shown as it comes.
    """
    from weft.generate.sample import generate

    steps = generate(
        model,
        [prompt.ids for prompt in prompts],
        first=[prompt.first for prompt in prompts],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop_ids=stop_ids,
        copies=copies,
        cache=not args.no_cache,
    )
    decoders = [tokenizer.stream_decoder() for _ in prompts]
    written = [prompt.text for prompt in prompts]
    if number is None:
        say(written[0])
    try:
        for new in steps:
            for row, token in enumerate(new):
                if token is not None and token not in stop_ids:
                    piece = decoders[row].step(token)
                    written[row] += piece
                    if number is None:
                        say(piece)
    finally:  # Ctrl-C loses nothing of what there is
        for row, decoder in enumerate(decoders):
            rest = decoder.flush()
            if number is None:
                say(rest + "\n")
            else:
                say(f"{'' if number + row == 1 else chr(10)}[{number + row}] {written[row]}{rest}\n")


def stop_ids_of(checkpoint: Path) -> set[int]:
    """What a Hugging Face folder, or what was imported from one, says besides its tokenizer of where texts end.

    Chat models end a turn with another token than a text.
    """
    from weft.checkpoint import files
    from weft.checkpoint.load import read_json

    generation = {}
    if (checkpoint / files.ORIGIN).is_file():
        generation = read_json(checkpoint, files.ORIGIN).get("generation_config") or {}
    elif (checkpoint / "generation_config.json").is_file():
        generation = read_json(checkpoint, "generation_config.json")
    ids = generation.get("eos_token_id")
    return set(ids) if isinstance(ids, list) else set() if ids is None else {ids}


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The texts to continue, of the command line and of the file.

    Raises:
        UserError: none, or one that is not UTF-8, or standard input twice, or no such file.
    """
    from weft.config.errors import UserError

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
    from weft.config.errors import UserError

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
