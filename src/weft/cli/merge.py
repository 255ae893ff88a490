"""`weft merge`: merges an adapter with the weights of its base model."""

from __future__ import annotations

import argparse

HELP = "merge an adapter (LoRA) into the weights of its base model"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the base model of an adapter, with the adapter merged into its weights, to the folder OUT. Merged "
        "weights are computed in float32 and cast to the base model's dtype. Special tokens, generation_config.json, "
        "the tokenizer and its chat template are kept."
    )
    parser.add_argument(
        "source", metavar="RUN", help="a run or checkpoint of an adapter; with --adapter, the base model of the adapter"
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--adapter", metavar="DIR", help="a folder that PEFT wrote (default: the adapter of RUN)")
    parser.add_argument(
        "--to",
        choices=["hf", "checkpoint"],
        default="hf",
        help="write a Hugging Face folder (default), or a checkpoint as `weft import` does",
    )
    parser.add_argument("--dtype", help="dtype of the weights, such as float32 (default: that of the base model)")
    parser.add_argument(
        "--dequantize",
        action="store_true",
        help="merge an adapter that was trained on a quantized base model with the dequantized weights",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="maximum size of a file (default: 5GB)")


def run(args: argparse.Namespace) -> int:
    from weft.export.merge_adapter import merge_adapter
    from weft.observe.console import Console

    console, options = Console(), ("adapter", "to", "dtype", "dequantize", "max_shard_size")
    settings = {name: getattr(args, name) for name in options}
    console.result(f"{args.out}: {merge_adapter(args.source, args.out, console=console, **settings)}")
    return 0
