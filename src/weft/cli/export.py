"""`weft export`: a trained model for other tools."""

from __future__ import annotations

import argparse
import re

HELP = "write a trained model for Hugging Face's transformers"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from weft.cli.import_ import DTYPES

    parser.description = (
        "Writes the model of a run's newest checkpoint, of one checkpoint or of an imported folder as config.json, "
        "safetensors and tokenizer files, which AutoModelForCausalLM and AutoTokenizer load without remote code. A "
        "checkpoint of many ranks is put together one tensor at a time."
    )
    parser.add_argument("source", metavar="SRC", help="a run directory, a checkpoint, or what `weft import` made")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--to", choices=["hf"], default="hf", help="whose format (default: hf)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: each as it was saved)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: 5GB)")


def run(args: argparse.Namespace) -> int:
    shard_bytes = size_of(args.max_shard_size)
    import torch

    from weft.checkpoint.huggingface.export import export
    from weft.cli.import_ import told
    from weft.observe.console import Console

    console = Console()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    made = export(args.source, args.out, dtype=dtype, shard_bytes=shard_bytes, console=console)
    console.result(f"{args.out}: {told(made)}")
    return 0


def size_of(text: str) -> int:
    """Bytes of `5GB`, `500 MB`, `2GiB` or a plain number. Raises UserError for anything else."""
    from weft.config.errors import UserError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS or float(match[1]) == 0:
        raise UserError(f"--max-shard-size {text}: no size; write it as 5GB or 500MB")
    return max(1, int(float(match[1]) * UNITS[match[2].upper()]))
