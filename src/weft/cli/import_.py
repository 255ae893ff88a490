"""`weft import`: a Hugging Face model becomes a checkpoint."""

from __future__ import annotations

import argparse

HELP = "make a checkpoint of a Hugging Face folder"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads config.json, safetensors (one file or several) and the tokenizer of HF_DIR, tensor by tensor, and makes "
        "the folder OUT, which `weft generate`, `weft export`, weft.load_model and `model: {from: OUT}` take like a "
        "run's checkpoint. No pickle is read unless --allow-pickle says so, and no remote code is run. "
        "`model: {from: HF_DIR}` needs no import."
    )
    parser.add_argument("source", metavar="HF_DIR", help="a folder as save_pretrained or the hub makes it")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--dtype", help="of the weights, such as bfloat16 (default: each as it was saved)")
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="take .bin files, where HF_DIR has no safetensors. A pickle can run any program while it is read; these "
        "are read by torch's restricted unpickler, which makes tensors and nothing else: for files that you trust",
    )


def run(args: argparse.Namespace) -> int:
    from weft.checkpoint.huggingface.import_model import import_model
    from weft.observe.console import Console

    console = Console()
    made = import_model(args.source, args.out, dtype=args.dtype, allow_pickle=args.allow_pickle, console=console)
    console.result(f"{args.out}: {made}")
    return 0
