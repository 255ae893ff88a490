"""`weft import`: converts models of other tools to checkpoints."""

from __future__ import annotations

import argparse

HELP = "convert a Hugging Face folder, a GGUF file, or a checkpoint of Megatron-Core or torchtitan, to a checkpoint"
GROUP = "use"
ALLOW_PICKLE = (
    "read .bin files if a Hugging Face folder has no safetensors files. These are pickles, and loading a pickle can "
    "run any program. Weft uses torch's restricted unpickler, which builds only tensors. Use this option only for "
    "files that you trust"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads config.json, safetensors files and the tokenizer of a Hugging Face folder, tensor by tensor, and writes "
        "a checkpoint to the folder OUT. `weft generate`, `weft export`, weft.load_model and `model: {from: OUT}` "
        "accept OUT like the checkpoint of a run. No remote code is run, and no pickle is read without --allow-pickle. "
        "`model: {from: HF_DIR}` in a run file reads a Hugging Face folder directly, without `weft import`. SRC can "
        "also be a distributed checkpoint (a folder with .metadata) of Megatron-Core (torch_dist) or of torchtitan: "
        "its pickles are parsed without running anything that they name; or a GGUF file of llama.cpp, whose quantized "
        "tensors are dequantized."
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a Hugging Face folder, as save_pretrained writes or the Hub provides, a GGUF file, or a distributed "
        "checkpoint",
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--dtype", help="dtype of the weights, such as bfloat16 (default: as saved)")
    mtp = "import multi-token prediction layers (num_nextn_predict_layers), too, to train or export them"
    parser.add_argument("--mtp", action="store_true", help=mtp)
    parser.add_argument(
        "--config",
        metavar="PATH",
        help="for distributed checkpoints: config.json of the model, or a Hugging Face folder with config.json and the "
        "tokenizer (default: the files in SRC; for Megatron, also the arguments in common.pt)",
    )
    parser.add_argument("--allow-pickle", action="store_true", help=ALLOW_PICKLE)


def run(args: argparse.Namespace) -> int:
    from weft.checkpoint.huggingface.import_model import import_model
    from weft.observe.console import Console

    console = Console()
    options = {"dtype": args.dtype, "config": args.config, "allow_pickle": args.allow_pickle, "mtp": args.mtp}
    written = import_model(args.source, args.out, **options, console=console)
    console.result(f"{args.out}: {written}")
    return 0
