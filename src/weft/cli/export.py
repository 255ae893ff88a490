"""`weft export`: writes a trained model in the format of another tool."""

from __future__ import annotations

import argparse

HELP = "write a trained model for other tools, such as Hugging Face's transformers"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the model of a run's newest checkpoint, of one checkpoint, or of an imported or Hugging Face folder. "
        "--to hf, the default, writes config.json, safetensors and tokenizer files for AutoModelForCausalLM and "
        "AutoTokenizer, without remote code. A sharded checkpoint is assembled one tensor at a time. --to peft writes "
        "the adapter of a run for PEFT (option base=NAME: the base model's name)."
    )
    parser.add_argument("source", metavar="SRC", help="a run, a checkpoint, an imported or a Hugging Face folder")
    parser.add_argument("out", metavar="OUT", help="the folder or file to write")
    parser.add_argument("options", metavar="key=value", nargs="*", help="options of the format; each value is YAML")
    parser.add_argument(
        "--to",
        default="hf",
        metavar="FORMAT",
        help="output format: hf (default), peft, the name of a plugin, or module:function",
    )
    parser.add_argument("--dtype", help="dtype of the weights, such as bfloat16 (default: as saved)")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="maximum size of a file (default: 5GB)")


def run(args: argparse.Namespace) -> int:
    from weft.errors import UserError
    from weft.export.export_model import export_model
    from weft.observe.console import Console

    options = {name: value for name in ("dtype", "max_shard_size") if (value := getattr(args, name)) is not None}
    for option in args.options:
        name, sign, value = option.partition("=")
        if not sign or not name.isidentifier():
            raise UserError(f"{option!r} is not key=value; after SRC and OUT, give options of the format as key=value")
        options[name] = _yaml_value(value)
    console = Console()
    written = export_model(args.source, args.out, args.to, console=console, **options)
    console.result(f"{args.out}: {written}")
    return 0


def _yaml_value(text: str) -> object:
    from ruamel.yaml import YAML, YAMLError

    from weft.errors import UserError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        raise UserError(f"{text!r}: not a YAML value; put the value in quotes") from None
