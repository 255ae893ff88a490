"""`weft import`: a Hugging Face model becomes a checkpoint."""

from __future__ import annotations

import argparse

HELP = "make a checkpoint of a Hugging Face folder"
DTYPES = ["float32", "bfloat16", "float16", "float64"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads config.json, safetensors (one file or several) and the tokenizer of HF_DIR, tensor by tensor, and makes "
        "the folder OUT, which `weft generate`, `weft export`, weft.load_model and `model: {from: OUT}` take like a "
        "run's checkpoint. No pickle is read unless --allow-pickle says so, and no remote code is run. "
        "`model: {from: HF_DIR}` needs no import."
    )
    parser.add_argument("source", metavar="HF_DIR", help="a folder as save_pretrained or the hub makes it")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: each as it was saved)")
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="take .bin files, where HF_DIR has no safetensors. A pickle can run any program while it is read; these "
        "are read by torch's restricted unpickler, which makes tensors and nothing else: for files that you trust",
    )


def run(args: argparse.Namespace) -> int:
    import torch

    from weft.checkpoint.huggingface.import_ import import_folder
    from weft.observe.console import Console

    console = Console()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    made = import_folder(args.source, args.out, dtype=dtype, allow_pickle=args.allow_pickle, console=console)
    console.result(f"{args.out}: {told(made)}")
    return 0


def told(made) -> str:
    """What was written, in words."""
    from weft.config.size import in_words, model_size

    files = f"{made.files} file{'s' if made.files > 1 else ''}"
    if made.section.type == "hf":
        return f"{made.section.architecture}, {made.tensors} tensors, {made.bytes:,} bytes in {files}"
    size = in_words(model_size(made.section).parameters)
    return f"{made.section.family}, {size} parameters in {made.tensors} tensors, {made.bytes:,} bytes in {files}"
