"""Packs the raw data of a run before its process groups start."""

from __future__ import annotations

import os
from pathlib import Path

from weft.config.data import DataSection
from weft.config.data_rules import missing_arguments
from weft.config.derive import sequence_length
from weft.config.objective_data import objective_data
from weft.config.raw_rules import SEPARATE, default_packing
from weft.config.run import RunConfig
from weft.data.conversations.conversation_encoder import ConversationEncoder
from weft.data.raw.cache import cached_store, template_date
from weft.data.raw.detect import FOR_CONVERSATIONS, RawData, detect
from weft.data.raw.splits import find_raw_files
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.formatting import counted
from weft.headers import read_store_header
from weft.observe.console import Console


def pack_sources(config: RunConfig, console: Console | None = None, *, train: bool = True) -> RunConfig:
    """Packs the raw data of a config into the user's cache, unless the cache has their token stores.

    Of several processes that call this function at the same time, one packs, and the others wait.

    Args:
        console: prints what was detected and packed. If a rank other than the first packs, it shows its progress
            although its console does not print.
        train: whether training data are packed too, and not only validation data.

    Returns:
        The config with the packed token stores, and with the defaults of `data.packing` and `data.document_attention`.

    Raises:
        UserError: a file or its layout is invalid, a key of `data` has no effect, or the cache cannot be written.
    """
    try:
        return _pack_sources(config, console or Console(prints=False), train)
    except UserError as error:
        error.quiet = os.environ.get("LOCAL_RANK", "0") != "0"  # all ranks raise the same error
        raise


def _pack_sources(config: RunConfig, console: Console, train: bool) -> RunConfig:
    train = train and not config.generates
    stores, progress = {}, Console(prints=console.prints or os.environ.get("RANK", "0") != "0")
    for key, raw in detect_sources(config, train=train).items():
        console.line(f"{key}: {raw.path}: {raw.description}")
        try:
            if isinstance(raw.encoder, ConversationEncoder):
                for line in raw.encoder.warnings() if console.prints else ():
                    console.warning(line)
            stores[key] = str(cached_store(raw, progress))
        except UserError as error:
            place = f"{key}: " if error.where is None and not error.what.startswith("data.") else ""
            raise UserError(place + error.what, error.where, error.line) from None
        _report(key, stores[key], console, config.data)
    data = config.data.packed_as(stores) if stores else config.data
    if data.packing is None and train:
        data = data.packed_as({}, **_packing(config, data))
    return config if data is config.data else config.model_copy(update={"data": data})


def detect_sources(config: RunConfig, *, train: bool = True) -> dict[str, RawData]:
    """Determines how each raw source is packed. Returns the results by dotted configuration key. Packs nothing.

    Args:
        train: whether training data are included, and not only validation data.

    Raises:
        UserError: a file or its layout is invalid, or a key of `data` has no effect.
    """
    data, found, needs = config.data, {}, objective_data(config.objective.type, config.objective.arguments.get)
    for key, path in data.raw.items():
        if config.generates or (key.startswith("data.train") and not train):  # prompts are not packed
            continue
        if config.tokenizer is None:
            raise UserError(f"{key}: {path} is raw data, which needs a tokenizer; set tokenizer")
        try:
            files = find_raw_files(path, held_out=key.startswith("data.validation"))
            found[key] = detect(path, files, data, config.tokenizer, sequence_length(config), needs)
        except UserError as error:
            what = str(error)
            place = "" if what.startswith("data.") else f"{key}: " if path in what else f"{key}: {path}: "
            raise UserError(place + what) from None
    if found and train and not any(isinstance(raw.encoder, ConversationEncoder) for raw in found.values()):
        for name in FOR_CONVERSATIONS:
            if getattr(data, name) is not None:
                key, raw = next(iter(found.items()))
                what = f"no effect, because {key} ({raw.path}) has texts, not conversations"
                raise UserError(f"data.{name}: {what}; remove the key, or set data.layout and data.fields")
    return found


def _packing(config: RunConfig, data: DataSection) -> dict[str, object]:
    """Returns the defaults of `packing` and `document_attention`, which depend on the token stores."""
    stated = config.origins.get("data.document_attention", "default") != "default"
    stores = data.stores or data.held_out_stores  # custom datasets and batches of `Trainer.step` are not packed
    separate = any(read_store_header(store).kind in SEPARATE for store in stores.values())
    values = default_packing(separate, data.document_attention if stated else None)
    what = missing_arguments(config.model.type) if values["document_attention"] else None
    if what is not None:
        raise UserError(f"data.packing: best_fit is the default for conversations, but {what}; add it")
    if config.objective.arguments.get("loss") == "sequences" and not values["document_attention"]:
        what = "sequences needs to know the documents of a sequence, but texts are joined by default"
        raise UserError(f"objective.loss: {what}; set data.packing to best_fit")
    return values


def _report(key: str, store: str, console: Console, data: DataSection) -> None:
    """Prints how many documents of raw data were packed, and warns of documents that were dropped or changed.

    Raises:
        UserError: documents are too long, and `data.overlong` is `refuse`.
    """
    info = TokenStore(store).info
    noun = {"conversations": "conversation", "preferences": "preference pair"}.get(info.kind, "document")
    items = info.documents // info.item_documents
    console.line(f"{key}: {counted(items, noun)}, {counted(info.tokens, 'token')}, packed in {store}")
    if (day := template_date(Path(store))) is not None:
        console.warning(f"{key}: the chat template can write the current date: {day} is used")
    total = items + sum(info.rejected.values())
    for what, number in info.rejected.items():
        remedy = "; raise data.sequence_length" if what.endswith("tokens") else ""
        remedy += ", or set data.overlong: truncate" * what.startswith("longer")
        if data.overlong == "refuse" and what.startswith("longer"):
            raise UserError(f"{key}: {number:,} of {counted(total, noun)}: {what}{remedy}")
        console.warning(f"{key}: dropped {number:,} of {counted(total, noun)}: {what}{remedy}")
    for what, number in info.notes.items():
        console.warning(f"{key}: {counted(number, noun)} of {total:,}: {what}")
