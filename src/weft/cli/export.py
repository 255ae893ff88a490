"""`weft export`: writes a trained model in the format of another tool."""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

HELP = "write a trained model for other tools, such as Hugging Face's transformers"
GROUP = "use"


@dataclass(frozen=True)
class TargetOption:
    """An option of a built-in export target: a keyword-only argument of its function `export`.

    Attributes:
        name: name of the argument.
        annotation: source code of the argument's annotation.
        help: description of the argument in the docstring.
    """

    name: str
    annotation: str
    help: str


@dataclass(frozen=True)
class Target:
    """A built-in export target.

    Attributes:
        options: the options.
        summary: first line of the docstring of the module, without the verb.
        families: the constant FAMILIES of the module, which says what models the target can hold.
    """

    options: list[TargetOption]
    summary: str
    families: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    found = built_in_targets()
    targets = {name: target.options for name, target in found.items()}
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(
        "Writes the model of a run's newest checkpoint, of one checkpoint, or of an imported or Hugging Face folder. "
        "--to hf, the default, writes config.json, safetensors and tokenizer files for AutoModelForCausalLM and "
        "AutoTokenizer, without remote code. A sharded checkpoint is assembled one tensor at a time. --to peft writes "
        "the adapter of a run for PEFT. Each option below names the formats that have it.",
        width=100,
    )
    parser.epilog = "formats:\n" + "\n".join(
        textwrap.fill(
            f"{target.summary} Families: {target.families}",
            100,
            initial_indent=f"  {name:12}",
            subsequent_indent=" " * 14,
        )
        for name, target in found.items()
    )
    parser.add_argument("source", metavar="SRC", help="a run, a checkpoint, an imported or a Hugging Face folder")
    parser.add_argument("out", metavar="OUT", help="the folder or file to write")
    parser.add_argument(
        "options", metavar="key=value", nargs="*", help="options of a plugin's format; each value is YAML"
    )
    parser.add_argument(
        "--to",
        default="hf",
        metavar="FORMAT",
        help=f"output format: {', '.join(targets)} (default: hf), the name of a plugin, or module:function",
    )
    for name in dict.fromkeys(option.name for options in targets.values() for option in options):
        same = {target: option for target, options in targets.items() for option in options if option.name == name}
        texts: dict[str, list[str]] = {}
        for target, option in same.items():
            texts.setdefault(option.help, []).append(target)
        text = "; ".join(f"{', '.join(names)}: {help}" for help, names in texts.items()).replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if all(option.annotation == "bool" for option in same.values()):
            parser.add_argument(flag, action="store_const", const=True, help=text)
        else:
            parser.add_argument(flag, metavar=name.upper(), help=text)


def built_in_targets() -> dict[str, Target]:
    """Returns the built-in targets by name, read from their source code, because importing needs torch."""
    found = {}
    for path in sorted((Path(__file__).parent.parent / "export").glob("*.py")):
        module = ast.parse(path.read_bytes())
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name == "export":
                texts = _described(ast.get_docstring(node) or "")
                options = [
                    TargetOption(one.arg, ast.unparse(one.annotation) if one.annotation else "", texts.get(one.arg, ""))
                    for one in node.args.kwonlyargs
                ]
                summary = (ast.get_docstring(module) or "").partition("\n")[0].removeprefix("Exports ")
                found[path.stem] = Target(options, summary[:1].upper() + summary[1:], _families(module))
    return found


def _families(module: ast.Module) -> str:
    """Returns the value of the constant FAMILIES of a module; "" without this constant."""
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILIES":
            return str(ast.literal_eval(node.value))
    return ""


def _described(docstring: str) -> dict[str, str]:
    """Returns the descriptions of arguments in a docstring with a section `Args:`, each as one line."""
    _, _, section = docstring.partition("\nArgs:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section.partition("\n\n")[0], re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in entries}


def run(args: argparse.Namespace) -> int:
    from weft.errors import UserError
    from weft.export.export_model import export_model
    from weft.observe.console import Console

    options = {}
    for option in (option for target in built_in_targets().values() for option in target.options):
        if (value := getattr(args, option.name)) is not None:
            is_text = "str" in re.split(r"[ |]+", option.annotation)
            options[option.name] = value if isinstance(value, bool) or is_text else _yaml_value(value)
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
