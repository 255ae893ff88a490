"""What must hold between a run's keys and the headers of its tokenizer and token stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from weft.config.data_rules import check_shares, data_section, run_steps, sequences_of
from weft.config.draft import Draft
from weft.config.relative_paths import beside
from weft.errors import UserError
from weft.formatting import counted
from weft.headers import StoreHeader, TokenizerHeader, read_store_header, read_tokenizer_header
from weft.mixing import shortfall

_Header = TypeVar("_Header")


class Opened(NamedTuple):
    """A token store whose header was read: the key to tell a mistake at, its path, and what it says."""

    key: str
    path: str
    header: StoreHeader


def check_headers(draft: Draft) -> int | None:
    """Open the headers. Returns the number of training sequences, if known."""
    folder, length = draft.get("tokenizer"), draft.get("data.sequence_length")
    tokenizer = _read(draft, "tokenizer", folder, read_tokenizer_header) if isinstance(folder, str) else None
    section = data_section(draft)
    train, held_out = _open(draft, section.stores), _open(draft, section.held_out_stores)
    for key, path, header in (*train, *held_out):
        if length is not None and header.num_tokens < length + 1:
            what = f"{path} has {counted(header.num_tokens, 'token')}, which is shorter than one sequence "
            what += f"(sequence_length {length} and the token after it); shorten data.sequence_length or pack more text"
            draft.problem(key, what)
    _tokenizers(draft, tokenizer, train, held_out)
    _unknown_tokenizers(draft, [*train, *held_out])
    _preferences(draft, [*train, *held_out])
    _vocabulary(draft, tokenizer, train)
    _ids_fit(draft, [*train, *held_out])
    # What cannot be opened has no size, and a dataset of the user's own tells it when the run starts.
    if not train or length is None or len(train) < max(len(section.stores), len(section.sources)):
        return None
    sizes = [max(0, (store.header.num_tokens - 1) // length) for store in train]
    if section.sources:
        _limits(draft, sizes, length)
    return sum(sizes)


def _open(draft: Draft, stores: dict[str, str]) -> list[Opened]:
    """Those that can be opened."""
    found = ((key, path, _read(draft, key, path, read_store_header)) for key, path in stores.items())
    return [Opened(key, path, header) for key, path, header in found if header is not None]


def _read(draft: Draft, key: str, path: str, read: Callable[[str], _Header]) -> _Header | None:
    try:
        return read(path)
    except UserError as error:
        elsewhere = beside(draft.node(key), path)
        draft.problem(key, f"{path}: {elsewhere}" if elsewhere else str(error))
    except OSError as error:
        draft.problem(key, f"{path}: cannot be read: {error.strerror}; check the path and its permissions")
    return None


def _limits(draft: Draft, sizes: list[int], length: int) -> None:
    """Whether the sources can feed the run. How much best-fit packing gives is known when the run starts."""
    section, steps = data_section(draft), run_steps(draft)
    if draft.problems or not section.weighted or not all(sizes):
        return
    check_shares(draft, sizes, length)
    if draft.problems or draft.get("data.packing") != "concatenate" or steps is None:
        return
    what = shortfall(section.phases(sizes, length), steps * (sequences_of(draft) or 0), length)
    if what is not None:
        limited = [number for number, source in enumerate(section.sources) if source.max_epochs is not None]
        draft.problem(f"data.train[{limited[0]}].max_epochs", what)


def _tokenizers(draft: Draft, tokenizer: TokenizerHeader | None, train: list[Opened], held_out: list[Opened]) -> None:
    """All were packed with the one that `tokenizer:` names; or, without it, with the first store's."""
    first = next((store for store in train if store.header.tokenizer_digest is not None), None)
    if tokenizer is not None:
        digest, whose = tokenizer.digest, draft.get("tokenizer")
        remedy = "name the one that packed it, or pack it again"
    elif first is not None:
        digest, whose, remedy = first.header.tokenizer_digest, first.path, "pack both with one tokenizer"
    else:
        return
    for key, path, header in train:
        if header.tokenizer_digest not in (None, digest):
            draft.problem(key, f"{path} was packed with another tokenizer than {whose}; {remedy}")
    reference = digest if first is None else first.header.tokenizer_digest
    for key, path, header in held_out:
        if header.tokenizer_digest not in (None, reference):
            what = "was packed with another tokenizer than the training data; pack both with one tokenizer"
            draft.problem(key, f"{path} {what}")


def _unknown_tokenizers(draft: Draft, stores: list[Opened]) -> None:
    """Of stores without a tokenizer's digest, what can be compared: number of tokens and end-of-document token."""
    known = [store for store in stores if store.header.tokenizer_digest is not None]
    for key, path, header in (store for store in stores if store not in known):
        _, whose, other = (known or stores)[0]
        for what in ("vocab_size", "eod_id"):
            here, there = getattr(header, what), getattr(other, what)
            if None not in (here, there) and here != there:
                remedy = "they were made with two tokenizers; pack both with one, or convert again with --tokenizer"
                draft.problem(key, f"{path} has {what} {here:,} and {whose} has {there:,}: {remedy}")
                break


def _preferences(draft: Draft, stores: list[Opened]) -> None:
    """None of the built-in objectives learns from pairs; one of the user's own may."""
    objective = draft.get("objective.type")
    for key, path, header in stores:
        if header.kind == "preferences" and objective is not None and ":" not in objective:
            what = (
                f"{path} holds pairs of a chosen and a rejected answer, and the objective {objective} would take both "
            )
            what += "for text to learn; name a store of texts or conversations, or an objective of your own"
            draft.problem(key, what)


def _vocabulary(draft: Draft, tokenizer: TokenizerHeader | None, train: list[Opened]) -> None:
    """`model.vocab_size`: no less than the tokenizer's; that, if it is not set."""
    known = [(store.header.vocab_size, store.path) for store in train if store.header.vocab_size is not None]
    needed, path = max(known, key=lambda pair: pair[0], default=(None, ""))
    whose = f"tokenizer of {path}"
    if tokenizer is not None:
        needed, whose = tokenizer.vocab_size, f"tokenizer {draft.get('tokenizer')}"
    if (theirs := draft.get("model.config")) is not None:
        rows = theirs.get("vocab_size")
        if isinstance(rows, int) and needed is not None and rows < needed:
            what = f"its embedding has {rows:,} rows, and the {whose} has {needed:,} tokens; "
            draft.problem("model.path", f"{what}take the tokenizer that the model was trained with", "model.from")
        return
    if "model.vocab_size" not in draft.values or "model.hidden_size" not in draft.values:
        return
    size, multiple = draft.get("model.vocab_size"), draft.get("model.pad_vocab_to_multiple")
    if size is not None and multiple is not None and size % multiple:
        what = f"vocab_size is {size} already; leave it out to have it follow from the tokenizer, or remove this key"
        draft.problem("model.pad_vocab_to_multiple", what)
    if size is None and needed is not None:
        rows = -(-needed // (multiple or 1)) * (multiple or 1)
        up = f", up to a multiple of {multiple}" if multiple else ""
        draft.fill("model.vocab_size", rows, f"from the {whose}{up}")
    elif size is None and not draft.problems:
        draft.problem("model.vocab_size", "required: no tokenizer says how many tokens there are; add it")
    elif size is not None and needed is not None and size < needed:
        remedy = f"set {needed} or remove the key"
        if draft.get("model.from") is not None:
            remedy = "`weft resize` makes a model that has rows for them"
        draft.problem("model.vocab_size", f"{size} is smaller than the {whose}, which has {needed:,} tokens; {remedy}")


def _ids_fit(draft: Draft, stores: list[Opened]) -> None:
    """No store has ids that the decoder's embedding lacks."""
    size = draft.get("model.vocab_size")
    told = any(problem.key == "model.vocab_size" for problem in draft.problems)
    if size is None or told or "model.hidden_size" not in draft.values:
        return
    for key, path, header in stores:
        if (header.vocab_size or 0) > size:
            what = f"{path} has ids of {header.vocab_size:,} tokens, and the model's vocab_size is {size:,}; "
            what += f"pack it with the run's tokenizer, or set model.vocab_size: {header.vocab_size}"
            draft.problem(key, what)
