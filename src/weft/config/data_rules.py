"""What must hold within `data:`, and between it and the headers of the tokenizer and the token stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.config.data import DataSection, DatasetSource, StoreSource
from weft.config.derive import DEFAULT_SEQUENCES, count_steps
from weft.config.draft import Draft
from weft.config.errors import UserError
from weft.config.mixture import BLOCK, phases_of, shortfall, sources_of, stages_of, unheard, weighted
from weft.config.paths import beside
from weft.config.signature import method_arguments
from weft.config.source import NotFound, find_class
from weft.config.suggest import did_you_mean

MIXING = ("temperature", "curriculum", "mixture_block")


def check_data_section(draft: Draft) -> None:
    """What needs no file."""
    _mixture(draft)
    _length_warmup(draft)
    _documents_apart(draft)
    no_store = "data.train" in draft.values and not _stores(draft)
    if draft.get("data.packing") == "best_fit":
        if no_store:
            draft.problem(
                "data.packing", "best_fit packs documents of token stores, and data.train has none; remove it"
            )
        if draft.origins.get("data.document_attention") == "default":
            draft.fill("data.document_attention", True, "best_fit keeps documents apart")
        elif draft.get("data.document_attention") is False:
            draft.problem(
                "data.document_attention", "packing: best_fit keeps documents apart; set true, or remove the key"
            )
    elif draft.get("data.document_attention") and no_store:
        draft.problem(
            "data.document_attention",
            "this keeps documents of token stores apart, and data.train has none; a dataset of your own gives segments",
        )


def _documents_apart(draft: Draft) -> None:
    """A model of the user's own must take what keeps documents apart; the built-in decoder does."""
    model = draft.get("model")
    if not draft.get("data.document_attention") or not isinstance(model, dict) or ":" not in str(model.get("type")):
        return
    module, _, name = model["type"].partition(":")
    try:
        source = find_class(module, name)
    except NotFound:
        return
    takes = method_arguments(source, "forward") if source is not None else None
    missing = [part for part in ("segments", "positions") if takes is not None and part not in takes]
    if missing:
        draft.problem(
            "data.document_attention",
            f"{name}.forward takes no {' and no '.join(missing)}, so it cannot keep documents apart; "
            "add them to it, or remove the key",
        )


def _sources(draft: Draft) -> list[StoreSource | DatasetSource] | None:
    train = draft.get("data.train")
    return train if isinstance(train, list) else None


def _stores(draft: Draft) -> list[tuple[str, str]]:
    """Training stores: the key to tell a mistake at, and the path."""
    train = draft.get("data.train")
    if isinstance(train, str):
        return [("data.train", train)]
    return [
        (f"data.train[{number}].store", source.store)
        for number, source in enumerate(_sources(draft) or [])
        if isinstance(source, StoreSource)
    ]


def _mixture(draft: Draft) -> None:
    sources = _sources(draft)
    if sources is None:
        if "data.train" in draft.values:
            for name in MIXING:
                if draft.get(f"data.{name}") is not None:
                    draft.problem(f"data.{name}", "data.train is one source: there is nothing to mix; remove the key")
        return
    names = [source.label for source in sources]
    for number, name in enumerate(names):
        if name in names[:number]:
            what = f"an earlier source is called {name!r} as well; give this one a name of its own"
            draft.problem(f"data.train[{number}]", what)
    before = len(draft.problems)
    uneven = any(draft.get(f"data.{key}") is not None for key in ("curriculum", "temperature")) or any(
        source.weight is not None or source.max_epochs is not None for source in sources
    )
    if draft.get("data.mixture_block") is not None and not uneven:
        what = "the sources have no weights, so they are read as one; give them weights, or remove the key"
        draft.problem("data.mixture_block", what)
    curriculum, temperature = draft.get("data.curriculum"), draft.get("data.temperature")
    given = [number for number, source in enumerate(sources) if source.weight is not None]
    for key, value in (("curriculum", curriculum), ("temperature", temperature)):
        if value is not None and given:
            what = {"curriculum": "says the weights", "temperature": "makes weights from sizes"}[key]
            draft.problem(f"data.train[{given[0]}].weight", f"data.{key} {what}; remove one of the two")
    if curriculum is not None and temperature is not None:
        draft.problem("data.temperature", "data.curriculum says the weights; remove one of the two")
    if given and len(given) < len(sources):
        missing = next(number for number in range(len(sources)) if number not in given)
        draft.problem(
            f"data.train[{missing}]",
            f"{names[missing]} has no weight and others have; give all sources one, or none (then sizes count)",
        )
    elif given and not any(source.weight for source in sources):
        draft.problem(f"data.train[{given[0]}].weight", "all weights are 0; give some source more")
    if curriculum is not None:
        _curriculum(draft, names)
    if len(draft.problems) == before and (given or curriculum):
        _shares(draft, [1] * len(names), 1)
    if draft.get("training.epochs") is not None and weighted(_section(draft)):
        draft.problem(
            "training.epochs",
            "sources with weights are not all read equally often, so there is no epoch of the whole; "
            "say training.tokens or steps instead",
            "data.train",
        )


def _section(draft: Draft) -> DataSection:
    """The section as far as mixing goes."""
    keys = ("train", *MIXING)
    return DataSection.model_construct(**{key: draft.get(f"data.{key}") for key in keys})


def _curriculum(draft: Draft, names: list[str]) -> None:
    stages = draft.get("data.curriculum")
    for number, stage in enumerate(stages):
        key = f"data.curriculum[{number}]"
        for name in stage.weights:
            if name not in names:
                hint = did_you_mean(name, names)
                draft.problem(f"{key}.weights.{name}", f"no source has this name{hint} (there are {', '.join(names)})")
        if not any(stage.weights.values()):
            draft.problem(f"{key}.weights", "all weights are 0; give some source more")
        if stage.tokens is None and number < len(stages) - 1:
            draft.problem(key, "how long does this stage last? only the last one may leave out tokens; add them")
    for number, name in enumerate(names):
        if not any(stage.weights.get(name) for stage in stages):
            what = f"no stage of the curriculum uses {name}; give it weight in one, or remove it"
            draft.problem(f"data.train[{number}]", what)
    tokens = _run_tokens(draft)
    started = 0
    for number, stage in enumerate(stages):
        if tokens is not None and started >= tokens:
            draft.problem(
                f"data.curriculum[{number}]",
                f"this stage begins after {started:,} tokens, and the run has {tokens:,}; "
                "remove it, shorten those before it or lengthen the run",
            )
            break
        started += stage.tokens or 0


def _shares(draft: Draft, sizes: list[int], length: int) -> None:
    """A weight too small for a block would never be heard."""
    section = _section(draft)
    if "data.mixture_block" not in draft.values:
        return
    found = unheard(stages_of(section, sizes, length), section.mixture_block or BLOCK)
    if found is None:
        return
    stage, place, what = found
    source = sources_of(section)[place]
    name = source.label
    key = f"data.train[{place}]"
    if section.curriculum is not None:
        key = f"data.curriculum[{stage}].weights.{name}"
    elif source.weight is not None:
        key += ".weight"
    draft.problem(key, f"{name} has {what}")


def _length_warmup(draft: Draft) -> None:
    length, start = draft.get("data.sequence_length"), draft.get("data.length_warmup.start")
    if start and length:
        ratio = length // start
        if length % start or ratio & (ratio - 1) or ratio < 2:
            fitting = [length >> n for n in range(1, length.bit_length()) if length % (1 << n) == 0]
            choices = f"; choose {' or '.join(map(str, fitting[:4]))}" if fitting else "; make sequence_length even"
            draft.problem(
                "data.length_warmup.start",
                f"{start} is not sequence_length ({length}) divided by 2, 4, 8 ...{choices}",
                "data.sequence_length",
            )
    steps, total = draft.get("data.length_warmup.steps"), run_steps(draft)
    if steps and total is not None and steps > total:
        draft.problem(
            "data.length_warmup.steps",
            f"{steps} steps of warm-up, but the run has {total}; set it to {max(1, total // 5)}, or lengthen the run",
            "training.steps",
        )


def sequences_of(draft: Draft) -> int | None:
    """Sequences per step, if known."""
    length, tokens = draft.get("data.sequence_length"), draft.get("training.batch_tokens")
    if not length or "training.batch_tokens" not in draft.values:
        return None
    return DEFAULT_SEQUENCES if tokens is None else tokens // length


def run_steps(draft: Draft, samples: int | None = None) -> int | None:
    """Steps of the run, if known.

    Args:
        samples: training sequences there are, if known; a run of epochs needs them.
    """
    sequences = sequences_of(draft)
    if sequences is None:
        return None
    return count_steps(
        steps=draft.get("training.steps"),
        tokens=draft.get("training.tokens"),
        epochs=draft.get("training.epochs"),
        sequences=sequences,
        length=draft.get("data.sequence_length"),
        samples=samples,
    )


def _run_tokens(draft: Draft) -> int | None:
    steps = run_steps(draft)
    return None if steps is None else steps * (sequences_of(draft) or 0) * draft.get("data.sequence_length")


# ---- the headers of the data


def check_headers(draft: Draft) -> int | None:
    """Open the headers. Returns the number of training sequences, if known."""
    from weft.config.headers import read_store_header, read_tokenizer_header

    folder, length = draft.get("tokenizer"), draft.get("data.sequence_length")
    tokenizer = _opened(draft, "tokenizer", folder, read_tokenizer_header) if isinstance(folder, str) else None
    stores = [(key, path, _opened(draft, key, path, read_store_header)) for key, path in _stores(draft)]
    path = draft.get("data.validation")
    held_out = _opened(draft, "data.validation", path, read_store_header) if isinstance(path, str) else None
    for key, name, store in (*stores, ("data.validation", path, held_out)):
        if store is not None and length is not None and store.num_tokens < length + 1:
            draft.problem(
                key,
                f"{name} has {store.num_tokens:,} tokens, which is shorter than one sequence "
                f"(sequence_length {length} and the token after it); shorten data.sequence_length or pack more text",
            )
    everything = [*stores, ("data.validation", path, held_out)]
    _tokenizers(draft, tokenizer, stores, held_out)
    _unknown_tokenizers(draft, everything)
    _preferences(draft, everything)
    _vocabulary(draft, tokenizer, [(name, store) for _, name, store in stores if store is not None])
    _ids_fit(draft, everything)
    if not stores or length is None or any(store is None for *_, store in stores):
        return None
    sizes = [max(0, (store.num_tokens - 1) // length) for *_, store in stores]
    if _sources(draft) is not None:
        if len(sizes) < len(_sources(draft) or []):
            return None  # a dataset of the user's own tells its size when the run starts
        _limits(draft, sizes, length)
    return sum(sizes)


def _limits(draft: Draft, sizes: list[int], length: int) -> None:
    """Whether the sources can feed the run. How much best-fit packing gives is known when the run starts."""
    section, steps = _section(draft), run_steps(draft)
    if draft.problems or not weighted(section) or not all(sizes):
        return
    _shares(draft, sizes, length)
    if draft.problems or draft.get("data.packing") != "concatenate" or steps is None:
        return
    found = phases_of(section, sizes, length)
    what = shortfall(found, steps * (sequences_of(draft) or 0), length)
    if what is not None:
        limited = [number for number, source in enumerate(sources_of(section)) if source.max_epochs is not None]
        draft.problem(f"data.train[{limited[0]}].max_epochs", what)


def _opened(draft: Draft, key: str, path: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(path)
    except UserError as error:
        elsewhere = beside(draft.node(key), path)
        draft.problem(key, f"{path}: {elsewhere}" if elsewhere else str(error))
    except OSError as error:
        draft.problem(key, f"{path}: cannot be read: {error.strerror}; check the path and its permissions")
    return None


def _tokenizers(draft: Draft, tokenizer: Any, stores: list[tuple[str, str, Any]], held_out: Any) -> None:
    """All were packed with the one that `tokenizer:` names; or, without it, with the first store's."""
    digest, whose = (tokenizer.digest, str(draft.get("tokenizer"))) if tokenizer is not None else (None, "")
    first = None
    for key, name, store in stores:
        if store is None or store.tokenizer_digest is None:
            continue
        first = first or store.tokenizer_digest
        if digest is None:
            digest, whose = store.tokenizer_digest, name
        elif store.tokenizer_digest != digest:
            remedy = "name the one that packed it, or pack it again"
            if tokenizer is None:
                remedy = "pack both with one tokenizer"
            draft.problem(key, f"{name} was packed with another tokenizer than {whose}; {remedy}")
    reference = first or digest
    if held_out is not None and reference and held_out.tokenizer_digest not in (None, reference):
        draft.problem(
            "data.validation",
            f"{draft.get('data.validation')} was packed with another tokenizer than the training data; "
            "pack both with one tokenizer",
        )


def _unknown_tokenizers(draft: Draft, stores: list[tuple[str, str, Any]]) -> None:
    """Of stores without a tokenizer's digest, what can be compared: number of tokens and end-of-document token."""
    found = [entry for entry in stores if entry[2] is not None]
    known = [entry for entry in found if entry[2].tokenizer_digest is not None]
    for key, name, store in found:
        _, whose, other = (known or found)[0]
        if store.tokenizer_digest is not None:
            continue
        for what in ("vocab_size", "eod_id"):
            here, there = getattr(store, what), getattr(other, what)
            if None not in (here, there) and here != there:
                draft.problem(
                    key,
                    f"{name} has {what} {here:,} and {whose} has {there:,}: they were made with two tokenizers; "
                    "pack both with one, or convert again with --tokenizer",
                )
                break


def _preferences(draft: Draft, stores: list[tuple[str, str, Any]]) -> None:
    """None of the built-in objectives learns from pairs; one of the user's own may."""
    objective = draft.get("objective.type")
    if objective is None or ":" in objective:
        return
    for key, name, store in stores:
        if store is not None and store.kind == "preferences":
            draft.problem(
                key,
                f"{name} holds pairs of a chosen and a rejected answer, and the objective {objective} would take both "
                "for text to learn; name a store of texts or conversations, or an objective of your own",
            )


def _vocabulary(draft: Draft, tokenizer: Any, stores: list[tuple[str, Any]]) -> None:
    """`model.vocab_size`: no less than the tokenizer's; that, if it is not set."""
    needed, whose = None, ""
    known = [(store.vocab_size, name) for name, store in stores if store.vocab_size is not None]
    if tokenizer is not None:
        needed, whose = tokenizer.vocab_size, f"tokenizer {draft.get('tokenizer')}"
    elif known:
        needed, name = max(known, key=lambda pair: pair[0])
        whose = f"tokenizer of {name}"
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
        whose = f"from the {whose}" + (f", up to a multiple of {multiple}" if multiple else "")
        draft.fill("model.vocab_size", rows, whose)
    elif size is None and not draft.problems:
        draft.problem("model.vocab_size", "required: no tokenizer says how many tokens there are; add it")
    elif size is not None and needed is not None and size < needed:
        remedy = f"set {needed} or remove the key"
        if draft.get("model.from") is not None:
            remedy = "`weft resize` makes a model that has rows for them"
        draft.problem("model.vocab_size", f"{size} is smaller than the {whose}, which has {needed:,} tokens; {remedy}")


def _ids_fit(draft: Draft, stores: list[tuple[str, Any, Any]]) -> None:
    """No store has ids that the decoder's embedding lacks."""
    size = draft.get("model.vocab_size")
    told = any(problem.key == "model.vocab_size" for problem in draft.problems)
    if size is None or told or "model.hidden_size" not in draft.values:
        return
    for key, name, store in stores:
        if store is not None and (store.vocab_size or 0) > size:
            draft.problem(
                key,
                f"{name} has ids of {store.vocab_size:,} tokens, and the model's vocab_size is {size:,}; "
                f"pack it with the run's tokenizer, or set model.vocab_size: {store.vocab_size}",
            )
