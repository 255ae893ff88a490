"""`weft generate`: continues prompts with a trained model."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.generation_options import add_model_options, add_sampling_options, read_sampling

if TYPE_CHECKING:
    from torch import nn

    from weft.data.tokenizers.tokenizer import Tokenizer
    from weft.generation.engine import Engine
    from weft.generation.settings import Sampling
    from weft.parallel.world import World

HELP = "generate text with a trained model"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continues each PROMPT with the model of a run's newest checkpoint, of one checkpoint or of a Hugging Face "
        "folder. If tokens of the tokenizer begin with a blank, a blank at the end of a prompt becomes part of the "
        "next word. The text of a single prompt is printed while it is generated. Several prompts are continued "
        "at once, and each text is printed when it is complete, in the order of the prompts."
    )
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="a run directory, a checkpoint, or a Hugging Face folder"
    )
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="text to continue; - reads the text from standard input"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", dest="prompts_file", help="continue each line of a text file, except blank lines"
    )
    add_sampling_options(parser)
    add_model_options(parser)
    _add_proposals(parser)
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="compute each prompt alone, so that no bit of a text depends on the other prompts (slower)",
    )
    parser.add_argument(
        "--stats", action="store_true", help="print tokens per second and the use of the cache to standard error"
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="shard the model over N processes on this machine, one per GPU (tensor parallelism; default: 1)",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="recompute all tokens at each step, without a key-value cache (for comparison)",
    )


def _add_proposals(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of speculative decoding."""
    parser.add_argument(
        "--draft",
        metavar="RUN",
        help="propose tokens by a smaller model with the same tokenizer: a run directory, a checkpoint, or a Hugging "
        "Face folder. The model accepts or replaces them, so texts have the same probabilities",
    )
    parser.add_argument(
        "--draft-tokens", type=int, metavar="N", help="number of tokens that the draft model proposes (default: 4)"
    )
    parser.add_argument(
        "--lookup",
        type=int,
        metavar="N",
        help="propose up to N tokens that followed the same tokens earlier in the text; changes no text",
    )


def run(args: argparse.Namespace) -> int:
    from weft.launch.threads import wait_briefly

    wait_briefly()
    if args.tp == 1:
        _generate(args)
        return 0
    from weft.checkpoint.load_model import check_shardable
    from weft.cli.on_ranks import run_generation_on_ranks
    from weft.errors import UserError

    if args.quantize is not None:
        raise UserError("--tp: quantized weights cannot be sharded over processes; omit --quantize or --tp")
    if args.adapter is not None:
        raise UserError("--tp: adapters need a model on a single process; omit --tp, or merge the adapter (weft merge)")
    if "-" in args.prompts:
        raise UserError("--tp: several processes cannot read standard input; give the prompt as text or in --prompts")
    if "RANK" not in os.environ:  # mistakes are reported before processes are started
        _, _, checkpoint, *_ = _read(args)
        for path in (checkpoint, args.draft):
            if path is not None:
                check_shardable(path, args.tp)
    return run_generation_on_ranks(args, "generate", args.tp, lambda world: _generate(args, world))


def _read(args: argparse.Namespace) -> tuple[Sampling, list[str], Path, Tokenizer, set[int]]:
    """Checks the arguments. Returns the settings, the prompts, the checkpoint, its tokenizer and its stop tokens."""
    from weft.checkpoint.adapter_start import check_adapter_fits
    from weft.checkpoint.load import resolve
    from weft.errors import UserError
    from weft.generation.text import stop_ids_of, tokenizer_of

    if args.lookup is not None and args.lookup < 1:
        raise UserError(f"--lookup {args.lookup}: set it to at least 1, or omit it")
    sampling, texts, checkpoint = read_sampling(args), _read_prompts(args), resolve(args.source)
    if args.adapter is not None:
        check_adapter_fits(args.adapter, checkpoint)
    return sampling, texts, checkpoint, tokenizer_of(checkpoint), stop_ids_of(checkpoint)


def _generate(args: argparse.Namespace, world: World | None = None) -> None:
    """Writes the continuations. With `world`, all ranks must call this function; the first rank writes."""
    import torch

    from weft.checkpoint.load_model import load_model, load_sharded_model
    from weft.generation.engine import Engine
    from weft.generation.text import stream_pieces
    from weft.observe.console import Console
    from weft.parallel.world import local_device

    # Arguments are checked before the model is loaded.
    sampling, texts, checkpoint, tokenizer, stop_ids = (
        _read(args) if world is None else world.agree(lambda: _read(args))
    )
    dtype = getattr(torch, args.dtype) if args.dtype else None

    def load(path: str | Path) -> nn.Module:
        if world is None:
            return load_model(path, local_device(Console()), dtype, quantize=args.quantize)
        return load_sharded_model(path, world, dtype)

    draft, model = load(args.draft) if args.draft else None, load(checkpoint)
    prompts = [tokenizer.prompt(text) for text in texts]
    written = [prompt.text for prompt in prompts]
    options = {"cache": not args.no_cache, "batch_invariant": args.batch_invariant}
    options |= {"draft": draft, "draft_tokens": args.draft_tokens, "lookup": args.lookup or 0}
    engine = Engine(model, tokenizer, stop_ids=stop_ids, **options)
    if args.adapter is not None:
        engine.add_adapter("adapter", args.adapter)
    if world is not None and world.rank:
        list(stream_pieces(engine, prompts, sampling))  # the same steps as on the first rank
        return
    begun, shown, single = False, 0, len(prompts) == 1
    start, first = time.perf_counter(), None
    ended = [False] * len(prompts)
    try:
        for number, piece in stream_pieces(engine, prompts, sampling, adapter=args.adapter and "adapter"):
            if single:
                _write(piece.text if begun else written[0] + piece.text)
            begun, first = True, first or time.perf_counter()
            written[number] += piece.text
            ended[number] = piece.finish is not None
            while not single and shown < len(prompts) and ended[shown]:  # texts are printed in the order of the prompts
                _show(shown, written[shown])
                shown += 1
    finally:  # also after Ctrl-C
        if single and begun:
            _write("\n")
        elif begun:
            for number in range(shown, len(prompts)):
                _show(number, written[number])
        if args.stats and first is not None:
            print(_stats(engine, first - start, time.perf_counter() - start), file=sys.stderr)


def _stats(engine: Engine, first: float, total: float) -> str:
    """Returns the line of text that `--stats` prints.

    Args:
        first: time until the first new token, in seconds.
        total: total time in seconds.
    """
    line = (
        f"{engine.new_tokens:,} new tokens in {total:.2f} s ({engine.new_tokens / total:,.1f} tokens/s); first token "
        f"after {first:.2f} s; {engine.shared_tokens:,} prompt tokens from the cache; {engine.steps:,} steps"
    )
    if engine.proposed_tokens:
        line += f"; {engine.accepted_tokens:,} of {engine.proposed_tokens:,} proposed tokens accepted"
    if engine.batch_invariant:
        line += f"; batch-invariant: {engine.passes:,} forward passes instead of {engine.steps:,}"
    return line


def _show(number: int, text: str) -> None:
    """Prints one of several texts with its number, such as `[1]` for the first.

    Args:
        number: index of the text, counted from 0.
    """
    _write(f"{chr(10) if number else ''}[{number + 1}] {text}\n")


def _read_prompts(args: argparse.Namespace) -> list[str]:
    """Returns the prompts of the command line and of the file of prompts.

    Raises:
        UserError: no prompt was given, or a prompt is not UTF-8 text.
    """
    from weft.errors import UserError

    if args.prompts.count("-") > 1:
        raise UserError("'-' was given more than once, but standard input can be read only once; give '-' once")
    texts = [_read_prompt(argument) for argument in args.prompts]
    if args.prompts_file is not None:
        path = Path(args.prompts_file)
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise UserError(
                f"the file of prompts cannot be read: {error.strerror}; check the path given to --prompts", path
            ) from None
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
            except UnicodeDecodeError:
                raise UserError("this prompt is not UTF-8 text; convert the file to UTF-8", path, number) from None
            if text.strip():
                texts.append(text)
        if not texts:
            raise UserError("the file has no prompts; write one prompt per line", path)
    if not texts:
        raise UserError("no prompt was given; give a PROMPT, - for standard input, or --prompts FILE")
    return texts


def _read_prompt(argument: str) -> str:
    """Returns the text of a PROMPT argument; for -, the text of standard input.

    Raises:
        UserError: the text is not UTF-8.
    """
    from weft.errors import UserError

    # Python decodes invalid UTF-8 in an argument to surrogates. No tokenizer accepts surrogates.
    raw = sys.stdin.buffer.read() if argument == "-" else argument.encode("utf-8", "surrogateescape")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = "the prompt on standard input" if argument == "-" else f"the prompt {argument!r}"
        raise UserError(f"{place} has invalid UTF-8 at byte {error.start:,}; convert the prompt to UTF-8") from None


def _write(text: str) -> None:
    """Prints a text without a line end. A character that the terminal's encoding lacks becomes `?`."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
