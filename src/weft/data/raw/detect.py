"""Determines how raw data is packed: which files are read, and whether they hold texts or conversations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from weft.config.data import DataSection
from weft.config.objective_data import ObjectiveData
from weft.data.conversations.conversation_encoder import ConversationEncoder, ConversationSpec
from weft.data.conversations.layouts import RecordLayout, choose_layout, detect_layout
from weft.data.conversations.messages import Record
from weft.data.conversations.records import describe_encoding, first_records, raise_if_no_record
from weft.data.conversations.template import find_template
from weft.data.option_names import RUN_FILE
from weft.data.packing.encoder import Encoder, TextEncoder
from weft.data.sources import Files, Reading, Unfit, make_extractor
from weft.data.sources.source_format import contents_by_format
from weft.errors import UserError
from weft.formatting import counted

# Keys of `data` that apply to conversations only.
FOR_CONVERSATIONS = ("chat_template", "train_on", "overlong")
NEEDS_PAIRS = (
    ", but the run's objective learns from preference pairs; use records with a chosen and a rejected answer, or set "
    "another objective"
)


@dataclass(frozen=True)
class RawData:
    """Raw data, and how it is packed.

    Attributes:
        path: the path or pattern in the run file.
        tokenizer: folder of the tokenizer.
        description: what was detected, in one line.
    """

    path: str
    tokenizer: Path
    files: Files
    reading: Reading
    encoder: Encoder
    description: str


def detect(
    path: str, files: Files, data: DataSection, tokenizer: str | Path, length: int, needs: ObjectiveData
) -> RawData:
    """Determines how raw data is packed, from the keys of the run file, the file names and the first records.

    Args:
        path: the path or pattern in the run file.
        tokenizer: folder of the run's tokenizer.
        length: number of tokens per sequence, the limit of `data.overlong`.
        needs: what the run's objective learns from.

    Raises:
        UserError: the layout cannot be detected, the chat template is not found, or the objective does not learn from
            such records.
    """
    fields, contents = dict(data.fields or {}), set(contents_by_format(files, Reading()).values())
    plain = data.layout is None and contents == {"text"}
    records = [] if plain or data.layout == "text" else first_records(files, Reading(records=True))
    name = data.layout or ("text" if plain or fields.keys() == {"text"} else detect_layout(records, fields))
    reading = Reading(field=fields.get("text", "text"))
    if name is None and any(_has_text(record, reading) for record in records):
        name = "text"
    if name == "text":
        if not plain and (other := sorted(fields.keys() - {"text"})):
            raise UserError(f"data.fields.{other[0]}: unknown field; texts have only the field text; remove it", path)
        what = "plain text" if contents == {"text"} else f"texts in the field {reading.field!r}"
        what = f"{counted(len(files), 'file')} of {what}" if len(files) > 1 else what
        _raise_if_unsuitable(path, what, needs)
        return RawData(path, Path(tokenizer), files, reading, TextEncoder(Path(tokenizer), words=RUN_FILE), what)
    if name is None and not records:
        raise_if_no_record(files, Reading(records=True))
    layout = choose_layout(records, name, fields, RUN_FILE, needs.fields)
    if layout.name == "preferences" and needs.kind != "preferences":
        raise UserError(
            "records of preferences, a chosen and a rejected answer each, which the run's objective does not learn "
            "from; set an objective that learns from pairs, such as objective: {type: dpo}, or learn from one answer, "
            f"with {_one_answer(records[0] if records else {}, layout)}",
            path,
        )
    if layout.name != "preferences":
        _raise_if_unsuitable(path, f"conversations in the layout {layout}", replace(needs, fields=()))
    encoder = ConversationEncoder(
        ConversationSpec(
            tokenizer=Path(tokenizer),
            layout=layout,
            template=find_template(Path(tokenizer), data.chat_template, RUN_FILE),
            train_on=data.train_on or "assistant",
            max_tokens=length,
            overlong="truncate" if data.overlong == "truncate" else "drop",
            document_fields=needs.fields,
            date=date.today().isoformat(),
            words=RUN_FILE,
        )
    )
    what, unused = describe_encoding(encoder), [record for record in records if type(record.get("label")) is bool]
    if "label" not in needs.fields and unused and "label" not in layout.keys.values():
        what += "; the label of the records (true or false) is not used: all answers are learned alike"
    return RawData(path, Path(tokenizer), files, Reading(records=True), encoder, what)


def _raise_if_unsuitable(path: str, what: str, needs: ObjectiveData) -> None:
    """Raises UserError if the objective needs preferences, or numbers of each answer. `what`: what the data are."""
    if needs.kind == "preferences":
        raise UserError(f"{what}{NEEDS_PAIRS}", path)
    if needs.fields:
        need = f"needs the number {needs.fields[0]!r} of each answer; use conversations with this key"
        raise UserError(f"{what}, but the run's objective {need}", path)


def _one_answer(record: Record, layout: RecordLayout) -> str:
    """Returns the keys of `data` with which the chosen answer of a preference is learned, as in `record`."""
    keys = layout.keys
    chosen = record.get(keys["chosen"])
    if isinstance(chosen, list) and chosen and isinstance(chosen[0], dict):
        role = chosen[0].get("role", chosen[0].get("from"))
        if role not in ("assistant", "gpt"):  # the full conversation
            name = "messages" if "role" in chosen[0] else "sharegpt"
            return f"data.layout: {name} and data.fields: {{messages: {keys['chosen']}}}"
    if "instruction" in record:
        return f"data.layout: alpaca and data.fields: {{output: {keys['chosen']}}}"
    prompt = keys["messages"] if keys["messages"] in record else keys["prompt"]
    return f"data.layout: pairs and data.fields: {{input: {prompt}, target: {keys['chosen']}}}"


def _has_text(record: object, reading: Reading) -> bool:
    try:
        return isinstance(make_extractor(reading)(record), str)
    except Unfit:
        return False
