"""`weft models`: which models there are, and how large they are."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.families import Family

from weft.formatting import amount

HELP = "list families and presets of models, with their sizes"
GROUP = "train"
# Of a preset whose vocabulary is the tokenizer's.
VOCABULARY = 32_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the presets of all families with their parameters and the operations that training takes. With a "
        "preset's NAME: its keys, as a run's file has them. With a family's, or that of a class of transformers: what "
        "it reads."
    )
    parser.epilog = "example: weft models qwen3-8b > model.yaml, and `extends: model.yaml` in run.yaml"
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a preset, a family, or a class such as LlamaForCausalLM"
    )
    parser.add_argument(
        "--sequence-length", type=int, metavar="N", help="count FLOPs for it (default: each model's longest)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the same as JSON")
    form.add_argument("--markdown", action="store_true", help="the page of families (docs/models.md) instead")


def run(args: argparse.Namespace) -> int:
    from weft.errors import UserError

    if args.sequence_length is not None and args.sequence_length < 1:
        raise UserError(f"--sequence-length {args.sequence_length}: give a number of at least 1")
    if args.markdown:
        if args.name is not None:
            raise UserError("--markdown is of all families; leave out the name")
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
    """All presets, family by family."""
    from weft.families import presets

    found = [facts(name, sequence_length) for name in presets()]
    return found, table(found, sequence_length)


def described(name: str, sequence_length: int | None) -> tuple[dict[str, Any], str]:
    """A preset or a family. Raises UserError for what is neither."""
    from weft.config.dump import dump_section
    from weft.config.suggest import did_you_mean
    from weft.errors import UserError
    from weft.families import families, presets

    if name in presets():
        found = facts(name, sequence_length)
        family = families()[found["family"]]
        size = f"{amount(found['parameters'])} parameters, {amount(found['matmul_parameters'])} in matrix products"
        if found["vocab_size"] is None:
            size += f" with {VOCABULARY:,} tokens"
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
    raise UserError(f"{name}: there is no preset, family or architecture of this name{hint}; `weft models` lists them")


def facts(name: str, sequence_length: int | None) -> dict[str, Any]:
    """A preset's sizes."""
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
        "flops_per_token": flops_per_token(size.matmul, section.num_hidden_layers, section.attention_width, length),
        "sequence_length": length,
        "vocab_size": section.vocab_size,
        "max_position_embeddings": section.max_position_embeddings,
    }


def resolved(name: str) -> dict[str, Any]:
    """A preset's keys, in the order of the reference, with sizes that follow from others."""
    from weft.config.model import ModelSection
    from weft.families import presets

    section = ModelSection(**presets()[name])
    keys = section.model_dump(exclude_unset=True)
    keys |= {"num_key_value_heads": section.kv_heads, "intermediate_size": section.inner_width}
    if section.mla is None:
        keys["head_dim"] = section.qk_head_dim
    return {key: keys[key] for key in ModelSection.model_fields if key in keys}


def table(found: list[dict[str, Any]], sequence_length: int | None) -> str:
    """Presets as aligned columns, and how their numbers are counted."""
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
        "matmul: parameters that a token is multiplied with: a tied head is among them, an embedding's look-up is not,",
        "and of experts those that a token goes through.",
        f"FLOPs per token = {FLOPS_PER_TOKEN}, forward and backward. The",
        f"width is heads x their size, the sequence {length}; nothing is taken off for causal masks and windows.",
    ]
    if any(one["vocab_size"] is None for one in found):
        lines.append(f"Where the vocabulary is the tokenizer's, {VOCABULARY:,} tokens are counted.")
    return "\n".join(lines) + "\n"


def gigas(found: dict[str, Any]) -> str:
    """FLOPs per token in 10^9."""
    return f"{found['flops_per_token'] / 1e9:,.2f}"


PAGE = """\
# Models

<!-- Written by `make docs` from the family files in src/weft/families; change those, not this page. -->

A family is one file in `src/weft/families/` that says in the decoder's keys what a model of Hugging Face's is. Each is
proven against transformers' own class: logits, gradients, losses, generated tokens, and the way back. `weft models`
lists the presets with their operations per token; `weft models NAME` prints one's keys, or what a family reads.

`model: llama-60m` in a run file takes a preset's shape with new weights. `model: {from: HF_DIR}` takes a folder's shape
and weights; `weft import` and `weft export` take models in and out ([Hugging Face](huggingface.md)). Any other causal
language model that transformers builds is trained, data parallel only, with `model: {type: hf, path: HF_DIR}`; to have
it as a family takes one file: [Add a model](add-a-model.md).

| family | what it is | architectures that it reads | presets |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The page of families, docs/models.md."""
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
    """What a family file says of itself in its first line."""
    return (family.__doc__ or "").partition("\n")[0]
