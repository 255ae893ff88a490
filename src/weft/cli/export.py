"""`weft export`: a trained model for other tools."""

from __future__ import annotations

import argparse

HELP = "write a trained model for other tools, Hugging Face's transformers first"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the model of a run's newest checkpoint, of one checkpoint, of an imported or a Hugging Face folder. "
        "With --to hf, the default, as config.json, safetensors and tokenizer files, which AutoModelForCausalLM and "
        "AutoTokenizer load without remote code. A checkpoint of many ranks is put together one tensor at a time."
    )
    parser.add_argument("source", metavar="SRC", help="a run, a checkpoint, an imported or a Hugging Face folder")
    parser.add_argument("out", metavar="OUT", help="what to make")
    parser.add_argument("options", metavar="key=value", nargs="*", help="options of the target, each a YAML value")
    parser.add_argument("--to", default="hf", metavar="TARGET", help="hf (default), a plugin's, or module:function")
    parser.add_argument("--dtype", help="of the weights, such as bfloat16 (default: each as it was saved)")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="of one file (default: 5GB)")


def run(args: argparse.Namespace) -> int:
    from weft.errors import UserError
    from weft.export.export_model import export_model
    from weft.observe.console import Console

    options = {name: value for name in ("dtype", "max_shard_size") if (value := getattr(args, name)) is not None}
    for option in args.options:
        name, sign, value = option.partition("=")
        if not sign or not name.isidentifier():
            raise UserError(f"{option!r}: SRC and OUT are followed by options of the target, each as key=value")
        options[name] = yaml_value(value)
    console = Console()
    made = export_model(args.source, args.out, args.to, console=console, **options)
    console.result(f"{args.out}: {made}")
    return 0


def yaml_value(text: str) -> object:
    """What a value on the command line means. Raises UserError if it is no YAML."""
    from ruamel.yaml import YAML, YAMLError

    from weft.errors import UserError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        raise UserError(f"{text!r}: no YAML value; put it in quotes") from None
