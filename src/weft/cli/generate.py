"""`weft generate`: a trained model writes."""

from __future__ import annotations

import argparse
import sys
import warnings

HELP = "let a trained model write"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continues PROMPTs with the model of a run's newest checkpoint, of one checkpoint or of a Hugging Face folder. "
        "A single prompt's text streams to the terminal as it is written; several are continued at once and shown when "
        "done."
    )
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="a run directory, one checkpoint of it, or a Hugging Face folder"
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="+", help="text to continue; - reads it from standard input")
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
    from weft.generate.sample import generate

    checkpoint = resolve(args.source)
    folder = tokenizer_folder(checkpoint)
    if folder is None and (is_huggingface(checkpoint) or checkpoint.absolute().parent.name != "checkpoints"):
        raise UserError("there is no tokenizer.json with this model; put its tokenizer's files there", checkpoint)
    if folder is None:
        raise UserError("this run has no tokenizer of its own; train with `tokenizer:` set", checkpoint.parent.parent)
    tokenizer = Tokenizer.load(folder)
    texts = [prompt_of(argument) for argument in args.prompts]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(checkpoint, device, getattr(torch, args.dtype) if args.dtype else None)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    prompts = [tokenizer.prompt(text) for text in texts]
    texts = [prompt.text for prompt in prompts]
    steps = generate(
        model,
        [prompt.ids for prompt in prompts],
        first=[prompt.first for prompt in prompts],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop_ids={tokenizer.eod_id},
        cache=not args.no_cache,
    )
    decoders = [tokenizer.stream_decoder() for _ in texts]
    alone = len(texts) == 1
    written = list(texts)
    if alone:
        say(texts[0])
    for new in steps:
        for number, token in enumerate(new):
            if token is None or token == tokenizer.eod_id:
                continue
            piece = decoders[number].step(token)
            written[number] += piece
            if alone:
                say(piece)
    for number, decoder in enumerate(decoders):
        rest = decoder.flush()
        written[number] += rest
        if alone:
            say(rest + "\n")
    if not alone:
        for number, text in enumerate(written, start=1):
            say(f"{'' if number == 1 else chr(10)}[{number}] {text}\n")
    return 0


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
