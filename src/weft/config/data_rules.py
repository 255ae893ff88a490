"""What must hold within `data:`, and between it and the headers of the tokenizer and the token stores."""

from __future__ import annotations

import re

from weft.config.data import DataSection
from weft.config.derive import DEFAULT_SEQUENCES, count_steps
from weft.config.draft import Draft
from weft.config.python_source import NotFound, find_class
from weft.config.section import known_section
from weft.config.signature import method_signature
from weft.config.suggest import did_you_mean
from weft.config.training import TrainingSection
from weft.formatting import counted
from weft.mixing import BLOCK, find_empty_share

MEASUREMENTS = ("loss", "bits_per_byte", "perplexity")  # a held-out set of this name would read as one
MIXING = ("temperature", "curriculum", "mixture_block")


def check_data_section(draft: Draft) -> None:
    """What needs no file."""
    _names(draft)
    _mixture(draft)
    _length_warmup(draft)
    _documents_apart(draft)
    no_store = "data.train" in draft.values and not data_section(draft).stores
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
    takes = method_signature(source, "forward") if source is not None else None
    missing = [part for part in ("segments", "positions") if takes is not None and part not in takes.arguments]
    if missing and takes is not None and not takes.accepts_any:
        draft.problem(
            "data.document_attention",
            f"{name}.forward takes no {' and no '.join(missing)}, so it cannot keep documents apart; "
            "add them to it, or remove the key",
        )


def data_section(draft: Draft) -> DataSection:
    """The section as far as it is known."""
    return known_section(DataSection, draft.get, "data")


def _names(draft: Draft) -> None:
    """The names of several validation sets, which become parts of metrics' names."""
    found = draft.get("data.validation")
    for name in found if isinstance(found, dict) and "type" not in found else ():
        if not re.fullmatch(r"\w[\w.-]*", name):
            what = f"the name {name!r} becomes part of metrics' names; use letters, digits, _, - and . alone"
            draft.problem(f"data.validation.{name}", what)
        elif name in MEASUREMENTS:
            what = f"{name!r} is the name of a measurement, and would make the metric validation_loss/{name}; rename it"
            draft.problem(f"data.validation.{name}", what)


def _mixture(draft: Draft) -> None:
    sources = data_section(draft).sources
    if not sources:
        for name in MIXING if "data.train" in draft.values else ():
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
        check_shares(draft, [1] * len(names), 1)
    if draft.get("training.epochs") is not None and data_section(draft).weighted:
        draft.problem(
            "training.epochs",
            "sources with weights are not all read equally often, so there is no epoch of the whole; "
            "say training.tokens or steps instead",
            "data.train",
        )


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


def check_shares(draft: Draft, sizes: list[int], length: int) -> None:
    """A weight too small for a block would never be heard."""
    section = data_section(draft)
    if "data.mixture_block" not in draft.values:
        return
    found = find_empty_share(section.stages(sizes, length), section.mixture_block or BLOCK)
    if found is None:
        return
    stage, place, what = found
    source = section.sources[place]
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
    check_warm_up(draft, "data.length_warmup.steps", run_steps(draft), 5)


def check_warm_up(draft: Draft, key: str, total: int | None, part: int) -> None:
    """Steps of a warm-up: no more than the run has, of which advice is to take a `part`-th."""
    steps = draft.get(key)
    if isinstance(steps, int) and total is not None and steps > total:
        what = f"{counted(steps, 'step')} of warm-up, but the run has {total}; set it to {max(1, total // part)}"
        draft.problem(key, f"{what}, or lengthen the run", "training.steps")


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
    training = known_section(TrainingSection, draft.get, "training")
    return count_steps(training, sequences, draft.get("data.sequence_length"), samples)


def _run_tokens(draft: Draft) -> int | None:
    steps = run_steps(draft)
    return None if steps is None else steps * (sequences_of(draft) or 0) * draft.get("data.sequence_length")
