"""Checks a run file against the headers of its tokenizer and of its token stores. Does not read tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from weft.config.data_rules import check_shares, data_section, run_steps, sequences_per_step
from weft.config.draft import Draft
from weft.config.objective_data import mismatch, objective_data, would_split
from weft.config.raw_rules import check_raw, fill_packing, fill_tokenizer
from weft.config.rollout_rules import generates
from weft.config.tree import wrong_folder_hint
from weft.errors import UserError
from weft.formatting import counted
from weft.headers import StoreHeader, TokenizerHeader, padded_rows, read_store_header, read_tokenizer_header
from weft.mixing import shortfall

_Header = TypeVar("_Header")


class Opened(NamedTuple):
    """A token store whose header was read.

    Attributes:
        key: dotted key of the run file whose value is the path of the store.
        path: path of the store.
        header: the store's header.
    """

    key: str
    path: str
    header: StoreHeader


def check_headers(draft: Draft) -> int | None:
    """Reads the headers of the run's tokenizer and token stores, and checks the run file against them.

    Returns:
        The number of training sequences; None if it is not known.
    """
    section, length = data_section(draft), draft.get("data.sequence_length")
    tokenizer = _read_tokenizer(draft)
    train, held_out = _open(draft, section.stores), _open(draft, section.held_out_stores)
    if fill_tokenizer(draft, [store.header for store in (*train, *held_out)]):
        tokenizer = _read_tokenizer(draft)
    check_raw(draft)
    fill_packing(draft, [store.header for store in train or held_out])
    for key, path, header in (*train, *held_out):
        if length is not None and header.num_tokens < length + 1:
            what = f"{path} has {counted(header.num_tokens, 'token')}, but one sequence needs {length + 1} tokens "
            what += f"(sequence_length {length}, and a label for the last token)"
            draft.report(key, f"{what}; shorten data.sequence_length or pack more text")
    _check_tokenizers(draft, tokenizer, train, held_out)
    _check_unknown_tokenizers(draft, [*train, *held_out])
    if not generates(draft):
        _check_objective_data(draft, [*train, *held_out])
    _check_vocabulary(draft, tokenizer, train)
    _check_ids(draft, [*train, *held_out])
    # The sizes of custom datasets and of raw data are known when the run starts.
    if not train or length is None or len(train) < max(len(section.stores), len(section.sources)):
        return None
    sizes = [max(0, (store.header.num_tokens - 1) // length) for store in train]
    if section.sources:
        _check_limits(draft, sizes, length)
    return sum(sizes)


def _read_tokenizer(draft: Draft) -> TokenizerHeader | None:
    folder = draft.get("tokenizer")
    return _read(draft, "tokenizer", folder, read_tokenizer_header) if isinstance(folder, str) else None


def _open(draft: Draft, stores: dict[str, str]) -> list[Opened]:
    found = ((key, path, _read(draft, key, path, read_store_header)) for key, path in stores.items())
    return [Opened(key, path, header) for key, path, header in found if header is not None]


def _read(draft: Draft, key: str, path: str, read: Callable[[str], _Header]) -> _Header | None:
    try:
        return read(path)
    except UserError as error:
        hint = wrong_folder_hint(draft.node(key), path)
        draft.report(key, f"{path}: {hint}" if hint else str(error))
    except OSError as error:
        draft.report(key, f"{path}: cannot be read: {error.strerror}; check the path and its permissions")
    return None


def _check_limits(draft: Draft, sizes: list[int], length: int) -> None:
    """Checks that the sources of a mixture have enough sequences for the run.

    With best-fit packing, only checks the share of each source in a mixture block; the run checks the rest when it
    starts.

    Args:
        sizes: number of sequences of each source.
        length: number of tokens per sequence.
    """
    section, steps = data_section(draft), run_steps(draft)
    if draft.problems or not section.weighted or not all(sizes):
        return
    check_shares(draft, sizes, length)
    if draft.problems or draft.get("data.packing") != "concatenate" or steps is None:
        return
    what = shortfall(section.phases(sizes, length), steps * (sequences_per_step(draft) or 0), length)
    if what is not None:
        limited = [number for number, source in enumerate(section.sources) if source.max_epochs is not None]
        draft.report(f"data.train[{limited[0]}].max_epochs", what)


def _check_tokenizers(
    draft: Draft, tokenizer: TokenizerHeader | None, train: list[Opened], held_out: list[Opened]
) -> None:
    """Reports stores that were packed with another tokenizer than the run's.

    If the run has no tokenizer, compares the stores with the first training store.
    """
    first = next((store for store in train if store.header.tokenizer_digest is not None), None)
    if tokenizer is not None:
        digest, name = tokenizer.digest, draft.get("tokenizer")
        remedy = "set tokenizer to the one that packed the store, or pack the store again"
    elif first is not None:
        digest, name, remedy = first.header.tokenizer_digest, first.path, "pack both with one tokenizer"
    else:
        return
    for key, path, header in train:
        if header.tokenizer_digest not in (None, digest):
            draft.report(key, f"{path} was packed with a different tokenizer than {name}; {remedy}")
    reference = digest if first is None else first.header.tokenizer_digest
    for key, path, header in held_out:
        if header.tokenizer_digest not in (None, reference):
            what = "was packed with a different tokenizer than the training data; pack both with one tokenizer"
            draft.report(key, f"{path} {what}")


def _check_unknown_tokenizers(draft: Draft, stores: list[Opened]) -> None:
    """Reports stores whose tokenizer is unknown and differs from another store's.

    Different vocabulary sizes or end-of-document ids show that two tokenizers differ.
    """
    known = [store for store in stores if store.header.tokenizer_digest is not None]
    for key, path, header in (store for store in stores if store not in known):
        _, other_path, other = (known or stores)[0]
        for name in ("vocab_size", "eod_id"):
            here, there = getattr(header, name), getattr(other, name)
            if None not in (here, there) and here != there:
                what = f"{path} has {name} {here:,}, but {other_path} has {there:,}, so their tokenizers differ"
                draft.report(key, f"{what}; pack both with one tokenizer, or convert {path} again with --tokenizer")
                break


def _check_objective_data(draft: Draft, stores: list[Opened]) -> None:
    """Reports stores that do not contain what the objective learns from."""
    objective = draft.get("objective.type")
    if objective is None:
        return
    needs = objective_data(objective, lambda name: draft.get(f"objective.{name}"))
    found = [(store, mismatch(objective, needs, store.header.kind, store.header.fields)) for store in stores]
    for store, what in found:
        if what is not None:
            draft.report(store.key, f"{store.path} {what}", "objective.type")
    suits = stores and not any(what for _, what in found)
    if suits and needs.whole and draft.get("data.packing") == "concatenate":
        draft.report("data.packing", would_split(objective, needs), "objective.type")


def _check_vocabulary(draft: Draft, tokenizer: TokenizerHeader | None, train: list[Opened]) -> None:
    """Checks that `model.vocab_size` is large enough for the tokenizer, or derives it from the tokenizer."""
    known = [(store.header.vocab_size, store.path) for store in train if store.header.vocab_size is not None]
    needed, path = max(known, key=lambda pair: pair[0], default=(None, ""))
    name = f"tokenizer of {path}"
    if tokenizer is not None:
        needed, name = tokenizer.vocab_size, f"tokenizer {draft.get('tokenizer')}"
    if (hf_config := draft.get("model.config")) is not None:
        rows = hf_config.get("vocab_size")
        if isinstance(rows, int) and needed is not None and rows < needed:
            what = f"the model's embedding has {rows:,} rows, but the {name} has {needed:,} tokens"
            draft.report("model.path", f"{what}; use the tokenizer of the model", "model.from")
        return
    if "model.vocab_size" not in draft.values or "model.hidden_size" not in draft.values:
        return
    size, multiple = draft.get("model.vocab_size"), draft.get("model.pad_vocab_to_multiple")
    if size is not None and multiple is not None and size % multiple:
        what = f"no effect, because vocab_size is set to {size}; remove vocab_size, or remove this key"
        draft.report("model.pad_vocab_to_multiple", what)
    if size is None and needed is not None:
        rows = padded_rows(needed, multiple)
        up = f", up to a multiple of {multiple}" if multiple else ""
        draft.fill("model.vocab_size", rows, f"from the {name}{up}")
    elif size is None and not draft.problems:
        draft.report("model.vocab_size", "required, because no tokenizer is known; add the key, or set tokenizer")
    elif size is not None and needed is not None and size < needed:
        remedy = f"set {needed} or remove the key"
        if draft.get("model.from") is not None:
            remedy = "add rows with `weft resize`"
        draft.report("model.vocab_size", f"{size} is less than the {needed:,} tokens of the {name}; {remedy}")


def _check_ids(draft: Draft, stores: list[Opened]) -> None:
    """Checks that the decoder's embedding has a row for every token id."""
    size = draft.get("model.vocab_size")
    reported = any(problem.key == "model.vocab_size" for problem in draft.problems)
    if size is None or reported or "model.hidden_size" not in draft.values:
        return
    for key, path, header in stores:
        if (header.vocab_size or 0) > size:
            what = f"{path} has a vocabulary of {header.vocab_size:,} tokens, but model.vocab_size is {size:,}"
            remedy = f"pack it with the run's tokenizer, or set model.vocab_size: {header.vocab_size}"
            draft.report(key, f"{what}; {remedy}")
