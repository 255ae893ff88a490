"""Defines the arguments of `weft data pack` for instruction data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.data.conversations.conversation_encoder import ConversationEncoder
    from weft.data.conversations.layouts import RecordLayout
    from weft.data.sources import Reading
    from weft.observe.console import Console

OPTIONS = (
    *("layout", "fields", "document_fields", "chat_template", "train_on", "max_tokens", "overlong"),
    *("template_variables", "date"),
)
LAYOUTS = ("messages", "sharegpt", "alpaca", "pairs", "preferences")


def add_conversation_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for instruction data. Each of these options selects instruction data."""
    group = parser.add_argument_group(
        "instruction data",
        "Records are conversations, rendered by a chat template, with a loss mask on assistant messages. Any of these "
        "options selects instruction data; --conversations selects it with default options.",
    )
    group.add_argument("--conversations", action="store_true", help="records are conversations or preferences")
    group.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="layout of the records: role/content messages (messages), from/value messages (sharegpt), "
        "instruction/input/output (alpaca), prompt and completion (pairs), chosen/rejected (preferences) (default: "
        "detected from the first records)",
    )
    group.add_argument(
        "--fields",
        metavar="NAME=KEY,...",
        help="keys of the records that differ from the layout, such as input=question",
    )
    group.add_argument(
        "--document-fields",
        metavar="KEY,...",
        help="keys of the records with a number, or true or false, to store for each document, such as label",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE|NAME",
        help="a template file, or a built-in template: chatml, llama2, llama3, gemma, mistral, zephyr, vicuna, plain "
        "(default: the template in the tokenizer's folder)",
    )
    group.add_argument(
        "--train-on",
        choices=["assistant", "last", "all"],
        help="train on all assistant messages (default), the last assistant message, or all tokens",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens of a document, or of both documents of a preference (default: unlimited)",
    )
    group.add_argument(
        "--overlong",
        choices=["drop", "truncate", "keep"],
        help="drop (default), truncate or keep documents longer than --max-tokens",
    )
    group.add_argument(
        "--template-variables",
        metavar="JSON",
        help="""variables of the chat template, in JSON: '{"enable_thinking": false}'""",
    )
    group.add_argument("--date", metavar="YYYY-MM-DD", help="current date for the chat template (default: today)")


def wants_conversations(args: argparse.Namespace) -> bool:
    """Whether the arguments select instruction data."""
    return args.conversations or any(getattr(args, option) is not None for option in OPTIONS)


def reading_of_conversations(args: argparse.Namespace) -> Reading:
    """Returns the options for reading the sources as records.

    Raises:
        UserError: --field, --template or --separator is given; these options apply only to texts.
    """
    from weft.data.sources import Reading
    from weft.errors import UserError

    for option, default in (("field", "text"), ("template", None), ("separator", None)):
        if getattr(args, option, default) != default:
            raise UserError(
                f"--{option} applies only to texts; for the keys of conversations use --fields NAME=KEY,..."
            )
    return Reading(records=True, format=args.format)


def encoder_of(
    args: argparse.Namespace, files: Sequence[Path], reading: Reading, console: Console
) -> ConversationEncoder:
    """Returns the encoder of conversations, and prints the detected layout and template in one line.

    Args:
        files: the input files, from which the layout is detected.

    Raises:
        UserError: an option is invalid, the layout is unknown, or no chat template is found.
    """
    from datetime import date

    from weft.data.conversations.conversation_encoder import ConversationEncoder, ConversationSpec
    from weft.data.conversations.records import describe_encoding
    from weft.data.conversations.template import find_template
    from weft.data.stores.field_files import check_field_names
    from weft.errors import UserError

    folder = Path(args.tokenizer)
    if not folder.is_dir():
        raise UserError("no such folder; set --tokenizer to a folder with a tokenizer.json", folder)
    template = find_template(folder, args.chat_template)
    document_fields = [name.strip() for name in (args.document_fields or "").split(",") if name.strip()]
    check_field_names(document_fields)
    layout = _layout(args, files, reading, document_fields)
    try:
        day = date.today() if args.date is None else date.fromisoformat(args.date)
    except ValueError:
        raise UserError(f"--date {args.date}: not a date; write it as 2026-01-31") from None
    if args.overlong is not None and args.max_tokens is None:
        raise UserError(f"--overlong {args.overlong} has no effect without --max-tokens; add --max-tokens N")
    spec = ConversationSpec(
        tokenizer=folder,
        layout=layout,
        template=template,
        train_on=args.train_on or "assistant",
        max_tokens=args.max_tokens,
        overlong=args.overlong or "drop",
        variables=_variables(args.template_variables),
        document_fields=tuple(document_fields),
        date=day.isoformat(),
        exact=args.exact,
    )
    encoder = ConversationEncoder(spec)
    console.line(describe_encoding(encoder))
    for line in encoder.warnings():
        console.warning(line)
    if encoder.template_date is not None:
        what = f"the chat template can write the current date: {encoder.template_date} is used"
        console.warning(f"{what}; set another date with --date")
    return encoder


def report_lengths(out: str | Path, console: Console) -> None:
    """Prints the document lengths of a new store, and the fraction of its tokens that are trained on."""
    import numpy as np

    from weft.data.inspect import sample_array
    from weft.data.stores.store import TokenStore

    store = TokenStore(out)
    lengths, complete = sample_array(store.lengths)
    if not len(lengths) or store.loss_mask is None:
        return
    groups = {"documents": lengths}
    if store.info.kind == "preferences" and complete:
        groups = {"chosen": lengths[::2], "rejected": lengths[1::2]}
    spread = "; ".join(
        f"{name} have {group.min():,} to {group.max():,} tokens, median {np.median(group):,.0f}"
        for name, group in groups.items()
    )
    mask, _ = sample_array(store.loss_mask)
    console.line(f"{spread}; {np.count_nonzero(mask) / len(mask):.1%} of the tokens are trained on")


def _layout(
    args: argparse.Namespace, files: Sequence[Path], reading: Reading, document_fields: Sequence[str]
) -> RecordLayout:
    from weft.data.conversations.layouts import choose_layout
    from weft.data.conversations.records import first_records, raise_if_no_record
    from weft.errors import UserError

    fields = {}
    for pair in filter(None, (args.fields or "").split(",")):
        name, equals, key = pair.partition("=")
        if not (name.strip() and equals and key.strip()):
            raise UserError(
                f"--fields {args.fields}: must be NAME=KEY pairs separated by commas, such as input=question"
            )
        fields[name.strip()] = key.strip()
    if Path("-") in files:  # the standard input can be read only once
        if args.layout is None:
            raise UserError(f"the layout of standard input cannot be detected; give --layout {'|'.join(LAYOUTS)}")
        return choose_layout([], args.layout, fields, document_fields=document_fields)
    records = first_records(files, reading)
    if args.layout is None and not records:
        raise_if_no_record(files, reading)
    return choose_layout(records, args.layout, fields, document_fields=document_fields)


def _variables(text: str | None) -> dict[str, Any]:
    import json

    from weft.errors import UserError

    try:
        variables = json.loads(text or "{}")
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise UserError(f'--template-variables {text}: not a JSON object; write it as {{"name": value}}')
    return variables
