"""`weft models`: lists model families, and presets with their sizes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.families import Family

from weft.formatting import amount

HELP = "list model families and presets with their sizes"
GROUP = "train"
VOCABULARY = 32_000  # vocabulary size that is assumed for presets without a vocabulary size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the presets of all families with their numbers of parameters and training FLOPs per token. If NAME is a "
        "preset, prints the model section of a run file. If NAME is a family or a Transformers class, prints the "
        "architectures and presets of the family."
    )
    parser.epilog = "example: weft models qwen3-8b > model.yaml, then `extends: model.yaml` in run.yaml"
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a preset, a family, or a Transformers class such as LlamaForCausalLM"
    )
    parser.add_argument(
        "--sequence-length", type=int, metavar="N", help="sequence length for FLOPs (default: the model's context)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the result as JSON")
    form.add_argument("--markdown", action="store_true", help="print all families as Markdown (docs/models.md)")


def run(args: argparse.Namespace) -> int:
    from weft.errors import UserError

    if args.sequence_length is not None and args.sequence_length < 1:
        raise UserError(f"--sequence-length {args.sequence_length}: use at least 1")
    if args.markdown:
        if args.name is not None:
            raise UserError("--markdown prints all families; remove NAME")
        print(page(), end="")
        return 0
    if args.name is None:
        found, text = listing(args.sequence_length)
    else:
        found, text = described(args.name, args.sequence_length)
    if args.json:
        import json

        print(json.dumps(found, indent=2))
    else:
        print(text, end="")
    return 0


def listing(sequence_length: int | None) -> tuple[list[dict[str, Any]], str]:
    """Returns the parameters and FLOPs of all presets as (JSON values, text of a table)."""
    from weft.families import presets

    found = [facts(name, sequence_length) for name in presets()]
    return found, table(found, sequence_length)


def described(name: str, sequence_length: int | None) -> tuple[dict[str, Any], str]:
    """Returns a preset, or a family with its presets, as (JSON values, text).

    Args:
        name: name of a preset, a family, or an architecture of a family.
        sequence_length: sequence length for FLOPs. Default: each model's context.

    Raises:
        UserError: `name` is unknown.
    """
    from weft.config.dump import dump_section
    from weft.config.suggest import did_you_mean
    from weft.errors import UserError
    from weft.families import families, presets

    if name in presets():
        found = facts(name, sequence_length)
        family = families()[found["family"]]
        size = f"{amount(found['parameters'])} parameters, {amount(found['matmul_parameters'])} in matrix products"
        if found["vocab_size"] is None:
            size += f" with a vocabulary of {VOCABULARY:,}"
        text = (
            f"# {name}: {size}, {gigas(found)} GFLOPs per token at {found['sequence_length']:,}\n"
            f"# family {found['family']}: {' '.join(family.ARCHITECTURES)}\n"
        )
        keys = resolved(name)
        return {**found, "keys": keys}, text + dump_section("model", keys)
    for family, module in families().items():
        if name == family or name in module.ARCHITECTURES:
            sizes = [facts(preset, sequence_length) for preset in presets() if presets()[preset]["family"] == family]
            found = {"family": family, "what": about(module), "architectures": module.ARCHITECTURES, "presets": sizes}
            text = f"{family}: {about(module)}\nreads {' '.join(module.ARCHITECTURES)}\n"
            return found, text + ("\n" + table(sizes, sequence_length) if sizes else "")
    known = [*presets(), *families(), *(name for module in families().values() for name in module.ARCHITECTURES)]
    hint = did_you_mean(name, known)
    raise UserError(f"{name}: no preset, family or architecture has this name{hint}; `weft models` lists them")


def facts(name: str, sequence_length: int | None) -> dict[str, Any]:
    """Returns a preset's numbers of parameters and FLOPs per token, by JSON key.

    Args:
        name: name of the preset.
        sequence_length: sequence length for the FLOPs. Default: the preset's context.
    """
    from weft.config.model import ModelSection
    from weft.families import presets
    from weft.observe.flop_count import flops_per_token

    section = ModelSection(**presets()[name])
    size = section.size(VOCABULARY)
    length = sequence_length or section.max_position_embeddings
    return {
        "preset": name,
        "family": section.family,
        "parameters": size.parameters,
        "matmul_parameters": size.matmul,
        "flops_per_token": flops_per_token(size.matmul, section.all_layers, section.attention_width, length),
        "sequence_length": length,
        "vocab_size": section.vocab_size,
        "max_position_embeddings": section.max_position_embeddings,
    }


def resolved(name: str) -> dict[str, Any]:
    """Returns a preset's model keys in the order of docs/configuration.md, with derived sizes such as head_dim."""
    from weft.config.model import ModelSection
    from weft.families import presets

    section = ModelSection(**presets()[name])
    keys = section.model_dump(exclude_unset=True)
    keys |= {"num_key_value_heads": section.kv_heads, "intermediate_size": section.inner_width}
    if section.mla is None:
        keys["head_dim"] = section.qk_head_dim
    return {key: keys[key] for key in ModelSection.model_fields if key in keys}


def table(found: list[dict[str, Any]], sequence_length: int | None) -> str:
    """Returns presets as text in aligned columns, with notes on how parameters and FLOPs are counted.

    Args:
        found: results of `facts`, one for each preset.
    """
    from weft.observe.flop_count import FLOPS_PER_TOKEN

    header = ("family", "preset", "parameters", "matmul", "GFLOPs/token", "vocabulary", "context")
    rows: list[tuple[str, ...]] = [header]
    last = None
    for one in found:
        rows.append(
            (
                "" if one["family"] == last else one["family"],
                one["preset"],
                amount(one["parameters"]),
                amount(one["matmul_parameters"]),
                gigas(one),
                "tokenizer's" if one["vocab_size"] is None else f"{one['vocab_size']:,}",
                f"{one['max_position_embeddings']:,}",
            )
        )
        last = one["family"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (c.ljust(w) if n < 2 else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells))
    length = "the context" if sequence_length is None else f"{sequence_length:,} tokens"
    lines += [
        "",
        "matmul: number of parameters in the matrix products of a token: with a tied head and the active experts,",
        "without embedding tables.",
        f"FLOPs per token = {FLOPS_PER_TOKEN}, forward and backward. Width",
        f"is heads x head size; the sequence is {length}. Causal masks and windows are not deducted.",
    ]
    if any(one["vocab_size"] is None for one in found):
        lines.append(f"If the vocabulary size is the tokenizer's, a size of {VOCABULARY:,} is assumed.")
    return "\n".join(lines) + "\n"


def gigas(found: dict[str, Any]) -> str:
    """Returns a preset's GFLOPs per token as text. `found` is a result of `facts`."""
    return f"{found['flops_per_token'] / 1e9:,.2f}"


PAGE = """\
# Models

<!-- Written by `make docs` from the family files in src/weft/families; change the family files, not this page. -->

A family is one file in `src/weft/families/` that converts a Hugging Face model to the decoder's keys and back. Tests
compare each family with the class in Transformers: logits, gradients, losses, generated tokens, and exported files.
`weft models` lists the presets with their FLOPs per token. `weft models NAME` prints a preset's keys, or a family's
architectures.

`model: llama-60m` in a run file is a preset with new weights. `model: {from: HF_DIR}` takes a folder's architecture
and weights; `weft import` and `weft export` convert models ([Hugging Face](huggingface.md)). Any other causal language
model of Transformers is trained, data parallel only, with `model: {type: hf, path: HF_DIR}`. A new family is one
file: [Add a model](add-a-model.md).

| family | description | architectures | presets |
| --- | --- | --- | --- |
"""


def page() -> str:
    """Returns the text of docs/models.md: the table of families."""
    from weft.families import families, presets

    text = PAGE
    for family, module in families().items():
        named = []
        for name, keys in presets().items():
            if keys["family"] == family:
                size = f" ({amount(facts(name, None)['parameters'])})" if "vocab_size" in keys else ""
                named.append(f"`{name}`{size}")
        architectures = " ".join(f"`{name}`" for name in module.ARCHITECTURES)
        text += f"| `{family}` | {about(module)} | {architectures} | {', '.join(named)} |\n"
    return text


def about(family: Family) -> str:
    """Returns the description of a family: the first line of its module's docstring."""
    return (family.__doc__ or "").partition("\n")[0]
