"""The arguments of `weft data pack` for instruction data: records of messages in place of texts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.data.conversations.conversation_encoder import ConversationEncoder
    from weft.data.conversations.layouts import Layout
    from weft.data.sources import Reading
    from weft.observe.console import Console

FIRST = 16  # records looked at to tell their layout
OPTIONS = ("layout", "fields", "chat_template", "train_on", "max_tokens", "overlong", "template_variables", "date")
LAYOUTS = ("messages", "sharegpt", "alpaca", "pairs", "preferences")


def add_conversation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; any of them means that records are conversations."""
    group = parser.add_argument_group(
        "instruction data",
        "Records are conversations, written by a chat template, with a loss mask on the assistant's turns. Any of "
        "these options says so; --conversations says it with all others at their defaults.",
    )
    group.add_argument("--conversations", action="store_true", help="records are conversations or preferences")
    group.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="what the records are: role/content turns, from/value turns, instruction/input/output, a question and "
        "its answer, chosen/rejected (default: told from the first records)",
    )
    group.add_argument(
        "--fields", metavar="NAME=KEY,...", help="keys that are not the usual ones: input=question,target=answer"
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE|NAME",
        help="a template, or a format: chatml, llama2, llama3, gemma, mistral, zephyr, vicuna, plain (default: the "
        "tokenizer folder's own)",
    )
    group.add_argument(
        "--train-on",
        choices=["assistant", "last", "all"],
        help="what is learned: all the assistant's turns (default), its last one, or every token",
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="the longest document (default: no limit)")
    group.add_argument(
        "--overlong",
        choices=["drop", "truncate", "keep"],
        help="longer ones: leave them out, counted and noted (default), cut their end off, or keep them",
    )
    group.add_argument(
        "--template-variables", metavar="JSON", help="""told to the template: '{"enable_thinking": false}'"""
    )
    group.add_argument(
        "--date", metavar="YYYY-MM-DD", help="the day told to a template that asks for it (default: today)"
    )


def wants_conversations(args: argparse.Namespace) -> bool:
    """Whether the arguments say that records are conversations."""
    return args.conversations or any(getattr(args, option) is not None for option in OPTIONS)


def reading_of_conversations(args: argparse.Namespace) -> Reading:
    """How the sources are read: as records.

    Raises:
        UserError: --field, --template or --separator, which are for texts.
    """
    from weft.data.sources import Reading
    from weft.errors import UserError

    for option, default in (("field", "text"), ("template", None), ("separator", None)):
        if getattr(args, option, default) != default:
            raise UserError(f"--{option} is for texts; keys of conversations are named by --fields NAME=KEY,...")
    return Reading(records=True, format=args.format)


def encoder_of(
    args: argparse.Namespace, files: Sequence[Path], reading: Reading, console: Console
) -> ConversationEncoder:
    """The encoder that the arguments ask for; what was chosen for the user is told in a line.

    Args:
        files: as `find_files` gives them.

    Raises:
        UserError: options that mean nothing, records of no known layout, no chat template.
    """
    from datetime import date

    from weft.data.conversations.conversation_encoder import ConversationSpec
    from weft.data.conversations.template import find_template
    from weft.errors import UserError

    folder = Path(args.tokenizer)
    if not folder.is_dir():
        raise UserError("no such tokenizer folder; conversations need one with a tokenizer.json", folder)
    template = find_template(folder, args.chat_template)
    layout = _layout(args, files, reading)
    try:
        day = date.today() if args.date is None else date.fromisoformat(args.date)
    except ValueError:
        raise UserError(f"--date {args.date}: not a day such as 2026-01-31") from None
    if args.overlong is not None and args.max_tokens is None:
        raise UserError(f"--overlong {args.overlong} says nothing without --max-tokens N")
    encoder = ConversationSpec(
        tokenizer=folder,
        layout=layout,
        template=template,
        train_on=args.train_on or "assistant",
        max_tokens=args.max_tokens,
        overlong=args.overlong or "drop",
        variables=_variables(args.template_variables),
        date=day.isoformat(),
        exact=args.exact,
    ).build()
    marks = "its marks" if template.marked else "comparing what each turn adds"
    learned = {
        "assistant": f"the assistant's turns, by {marks}",
        "last": f"the assistant's last turn, by {marks}",
        "all": "every token",
    }
    console.line(f"records: {layout}; template: {template.origin}; learned: {learned[encoder.spec.train_on]}")
    for line in encoder.warnings():
        console.warning(line)
    return encoder


def tell_lengths(out: str | Path, console: Console) -> None:
    """How long the documents of a new store are, and how much of them is learned."""
    import numpy as np

    from weft.data.inspect import sample_array
    from weft.data.stores.store import TokenStore

    store = TokenStore(out)
    lengths, whole = sample_array(store.lengths)
    if not len(lengths) or store.loss_mask is None:
        return
    rows = {"documents": lengths}
    if store.info.kind == "preferences" and whole:
        rows = {"chosen": lengths[::2], "rejected": lengths[1::2]}
    spread = "; ".join(
        f"{name} have {row.min():,} to {row.max():,} tokens, median {np.median(row):,.0f}" for name, row in rows.items()
    )
    mask, _ = sample_array(store.loss_mask)
    console.line(f"{spread}; {np.count_nonzero(mask) / len(mask):.1%} of the tokens are learned")


def _layout(args: argparse.Namespace, files: Sequence[Path], reading: Reading) -> Layout:
    from weft.data.conversations.layouts import choose_layout
    from weft.errors import UserError

    fields = {}
    for part in filter(None, (args.fields or "").split(",")):
        name, equals, key = part.partition("=")
        if not (name.strip() and equals and key.strip()):
            raise UserError(f"--fields {args.fields}: NAME=KEY, with commas between, such as input=question")
        fields[name.strip()] = key.strip()
    if Path("-") in files:  # it can be read once only
        if args.layout is None:
            raise UserError(f"the standard input's layout must be said: --layout {'|'.join(LAYOUTS)}")
        return choose_layout([], args.layout, fields)
    return choose_layout(_first_records(files, reading), args.layout, fields)


def _first_records(files: Sequence[Path], reading: Reading) -> list[Mapping[str, Any]]:
    from weft.data.documents import Counts, Document
    from weft.data.sources import plan, read

    records: list[Mapping[str, Any]] = []
    for unit in plan(files, reading):
        for item in read(unit, reading, Counts()):
            if isinstance(item, Document) and isinstance(item.value, dict):
                records.append(item.value)
                if len(records) == FIRST:
                    return records
    return records


def _variables(text: str | None) -> dict[str, Any]:
    import json

    from weft.errors import UserError

    try:
        variables = json.loads(text or "{}")
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise UserError(f"--template-variables {text}: not a JSON object")
    return variables
