"""The options of `weft generate` and `weft chat` that choose how a model is loaded and how tokens are chosen."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.generation.settings import Sampling


def add_model_options(parser: argparse.ArgumentParser, *, adapter: bool = True) -> None:
    """Adds the arguments that choose how the model is loaded. `adapter`: also --adapter, for one adapter."""
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float64"], help="dtype of the model (default: as saved)"
    )
    parser.add_argument(
        "--quantize",
        choices=["int8", "int4"],
        help="load weights in 8 or 4 bits, for less memory (on a CPU also faster)",
    )
    if adapter:
        parser.add_argument("--adapter", metavar="DIR", help="add a LoRA adapter: a folder of PEFT, or a run")


def add_sampling_options(parser: argparse.ArgumentParser, max_new_tokens: int = 128) -> None:
    """Adds the arguments that `read_sampling` reads.

    Args:
        max_new_tokens: default of --max-new-tokens.
    """
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help="maximum number of new tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="maximum number of tokens of a prompt with its continuation (default: the model's maximum length)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="temperature; 0: greedy decoding (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens whose probabilities add up to P"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="sample from the tokens whose probability is at least P times the highest probability",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="divide positive logits, and multiply negative logits, of earlier tokens by R (default: 1, no penalty)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; can be given several times"
    )
    parser.add_argument(
        "--json-schema", metavar="FILE", help="write JSON that follows a JSON schema; {} allows any JSON"
    )
    parser.add_argument("--regex", metavar="R", help="write text that matches a regular expression completely")
    parser.add_argument(
        "--grammar", metavar="FILE", help="write text that follows a grammar in llguidance's Lark syntax"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed; the same seed and prompt give the same text (default: 0)"
    )


def read_sampling(args: argparse.Namespace) -> Sampling:
    """Returns the settings of generation.

    Raises:
        UserError: a setting is invalid, or the file of a JSON schema or a grammar cannot be read.
    """
    from weft.errors import UserError
    from weft.generation.settings import Sampling

    names = ("top_k", "top_p", "min_p", "repetition_penalty", "seed", "regex", "max_length")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"json_schema": _read_text(args.json_schema), "grammar": _read_text(args.grammar)}
    try:
        return Sampling(args.max_new_tokens, args.temperature, stop=tuple(args.stop), **settings)
    except UserError as error:
        files = {"json_schema": args.json_schema, "grammar": args.grammar}
        raise UserError(error.what, files.get(re.split("[: ]", error.what)[0])) from None


def _read_text(path: str | None) -> str | None:
    """Returns the text of a file; None without a path. Raises UserError if the file cannot be read."""
    from weft.errors import UserError

    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"this file cannot be read: {why}; check the path", path) from None
