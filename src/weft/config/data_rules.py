"""Checks the section `data` without reading token stores."""

from __future__ import annotations

import re

from weft.config.data import DataSection
from weft.config.derive import DEFAULT_SEQUENCES, count_steps
from weft.config.draft import Draft
from weft.config.objective_data import objective_data
from weft.config.python_source import NotFound, find_class
from weft.config.rollout_rules import generates
from weft.config.section import partial_section
from weft.config.signature import method_signature
from weft.config.suggest import did_you_mean
from weft.config.training import TrainingSection
from weft.formatting import counted
from weft.mixing import BLOCK, find_empty_share

MEASUREMENTS = ("loss", "bits_per_byte", "perplexity")  # not allowed as names of held-out sets


def check_data_section(draft: Draft) -> None:
    """Reports keys of `data` that contradict each other or other sections, and derives `data.document_attention`."""
    _check_names(draft)
    _check_mixture(draft)
    _check_length_warmup(draft)
    check_document_attention(draft)
    train, held_out = data_section(draft).paths
    key, no_store = "data.document_attention", draft.get("data.train") is not None and not train and not held_out
    packing = draft.get("data.packing")
    if packing in ("best_fit", "pad"):
        if no_store:
            draft.report("data.packing", "only token stores have documents, and data.train has none; remove the key")
        if draft.origins.get(key) == "default":
            draft.fill(key, True, f"implied by packing: {packing}")
        elif draft.get(key) is False:
            draft.report(key, f"false, but packing: {packing} implies document attention; set true, or remove the key")
    elif draft.get(key) and no_store:
        what = "only token stores have documents, but data.train has no store"
        draft.report(key, f"{what}; remove the key and have the dataset return segments")


def check_document_attention(draft: Draft) -> None:
    """If document attention is enabled, checks that a custom model's `forward` accepts `segments` and `positions`."""
    model = draft.get("model")
    if not draft.get("data.document_attention") or not isinstance(model, dict):
        return
    what = missing_arguments(str(model.get("type")))
    if what is not None:
        draft.report("data.document_attention", f"{what}; add it, or remove the key")


def missing_arguments(model: str) -> str | None:
    """Returns which arguments for document attention the `forward` of a custom model lacks, for a message.

    Returns None if none is missing, or if the source of the class is not found.

    Args:
        model: the class, as `module:Class`. Other values of `model.type` are built-in models, which lack nothing.
    """
    module, colon, name = model.partition(":")
    try:
        source = find_class(module, name) if colon else None
    except NotFound:
        return None
    takes = method_signature(source, "forward") if source is not None else None
    missing = [part for part in ("segments", "positions") if takes is not None and part not in takes.arguments]
    if not missing or takes is None or takes.accepts_any:
        return None
    return f"{name}.forward has no argument {' and no argument '.join(missing)}, which document attention needs"


def data_section(draft: Draft) -> DataSection:
    """Returns the section `data`.

    A key that is not set, or that has a problem, gets its default, or None if the key is required.
    """
    return partial_section(DataSection, draft.get, "data")


def _check_names(draft: Draft) -> None:
    """Checks that the names of held-out sets can be part of metric names."""
    found = draft.get("data.validation")
    for name in found if isinstance(found, dict) and "type" not in found else ():
        what = None
        if not re.fullmatch(r"\w[\w.-]*", name):
            what = f"{name!r} is not valid as part of metric names; use only letters, digits, _, - and ."
        elif name in MEASUREMENTS:
            what = f"{name!r} is reserved (for the metric validation_loss/{name}); rename the set"
        if what is not None:
            draft.report(f"data.validation.{name}", what)


def _check_mixture(draft: Draft) -> None:
    section = data_section(draft)
    sources = section.sources
    if not sources:
        for name in ("temperature", "curriculum", "mixture_block") if "data.train" in draft.values else ():
            if draft.get(f"data.{name}") is not None:
                draft.report(f"data.{name}", "data.train is a single source, not a mixture; remove the key")
        return
    names = [source.label for source in sources]
    for number, name in enumerate(names):
        if name in names[:number]:
            draft.report(f"data.train[{number}]", f"another source has the name {name!r} too; set a different name")
    before = len(draft.problems)
    curriculum, temperature = draft.get("data.curriculum"), draft.get("data.temperature")
    limited = any(source.weight is not None or source.max_epochs is not None for source in sources)
    if draft.get("data.mixture_block") is not None and curriculum is None and temperature is None and not limited:
        what = "the sources have no weights, so they are read as one source; set weights, or remove the key"
        draft.report("data.mixture_block", what)
    given = [number for number, source in enumerate(sources) if source.weight is not None]
    for key, value in (("curriculum", curriculum), ("temperature", temperature)):
        if value is not None and given:
            what = f"data.{key} sets the weights too; remove one of the two keys"
            draft.report(f"data.train[{given[0]}].weight", what)
    if curriculum is not None and temperature is not None:
        draft.report("data.temperature", "data.curriculum sets the weights; remove one of the two keys")
    if given and len(given) < len(sources):
        missing = next(number for number in range(len(sources)) if number not in given)
        what = f"{names[missing]} has no weight, but other sources have; set all weights, or none of them"
        draft.report(f"data.train[{missing}]", what)
    elif given and not any(source.weight for source in sources):
        draft.report(f"data.train[{given[0]}].weight", "all weights are 0; raise one of them")
    if curriculum is not None:
        _check_curriculum(draft, names)
    if len(draft.problems) == before and (given or curriculum):
        check_shares(draft, [1] * len(names), 1)
    if draft.get("training.epochs") is not None and section.weighted:
        what = "a weighted mixture has no epochs, because its sources have different numbers of passes"
        draft.report("training.epochs", f"{what}; set training.tokens or steps", "data.train")


def _check_curriculum(draft: Draft, names: list[str]) -> None:
    stages = draft.get("data.curriculum")
    for number, stage in enumerate(stages):
        key = f"data.curriculum[{number}]"
        for name in stage.weights:
            if name not in names:
                hint = did_you_mean(name, names)
                draft.report(f"{key}.weights.{name}", f"no source has this name{hint} (use one of {', '.join(names)})")
        if not any(stage.weights.values()):
            draft.report(f"{key}.weights", "all weights are 0; raise one of them")
        if stage.tokens is None and number < len(stages) - 1:
            draft.report(key, "the stage has no length; set tokens, which only the last stage can omit")
    for number, name in enumerate(names):
        if not any(stage.weights.get(name) for stage in stages):
            what = f"no stage of the curriculum has a weight for {name}; add a weight, or remove the source"
            draft.report(f"data.train[{number}]", what)
    steps, tokens, started = run_steps(draft), None, 0
    if steps is not None:
        tokens = steps * (sequences_per_step(draft) or 0) * draft.get("data.sequence_length")
    for number, stage in enumerate(stages):
        if tokens is not None and started >= tokens:
            what = f"the stage starts after {started:,} tokens, but the run has {tokens:,}"
            remedy = "remove the stage, shorten earlier stages or lengthen the run"
            draft.report(f"data.curriculum[{number}]", f"{what}; {remedy}")
            break
        started += stage.tokens or 0


def check_shares(draft: Draft, sizes: list[int], length: int) -> None:
    """Reports a source whose share of a mixture block is less than one sequence.

    Args:
        sizes: number of sequences of each source.
        length: number of tokens per sequence.
    """
    section = data_section(draft)
    if "data.mixture_block" not in draft.values:
        return
    found = find_empty_share(section.stages(sizes, length), section.mixture_block or BLOCK)
    if found is None:
        return
    stage, place, what = found
    source = section.sources[place]
    key = f"data.train[{place}]"
    if section.curriculum is not None:
        key = f"data.curriculum[{stage}].weights.{source.label}"
    elif source.weight is not None:
        key += ".weight"
    draft.report(key, f"{source.label} has {what}")


def _check_length_warmup(draft: Draft) -> None:
    length, start = draft.get("data.sequence_length"), draft.get("data.length_warmup.start")
    if start and length:
        ratio = length // start
        if length % start or ratio & (ratio - 1) or ratio < 2:
            fitting = [length >> n for n in range(1, length.bit_length()) if length % (1 << n) == 0]
            remedy = f"set {' or '.join(map(str, fitting[:4]))}" if fitting else "set an even sequence_length"
            what = f"{start} is not sequence_length ({length}) divided by 2, 4, 8, ..."
            draft.report("data.length_warmup.start", f"{what}; {remedy}", "data.sequence_length")
    if start and (objective := draft.get("objective.type")) is not None and objective_data(objective).whole:
        what = f"a warm-up splits documents, but the objective {objective} needs complete answers; remove the key"
        draft.report("data.length_warmup", what, "objective.type")
    check_warm_up(draft, "data.length_warmup.steps", run_steps(draft), 5)


def check_warm_up(draft: Draft, key: str, total: int | None, divisor: int) -> None:
    """Reports a warm-up that is longer than the run.

    Args:
        key: dotted key of the warm-up steps.
        total: number of steps of the run; None if it is not known.
        divisor: the message suggests a warm-up of `total / divisor` steps.
    """
    steps = draft.get(key)
    if isinstance(steps, int) and total is not None and steps > total:
        what = f"{counted(steps, 'step')} of warm-up, but the run has {total}; set {max(1, total // divisor)}"
        draft.report(key, f"{what}, or lengthen the run", "training.steps")


def sequences_per_step(draft: Draft) -> int | None:
    """Returns the number of sequences in the global batch; None if it is not known.

    It is not known without `data.train`, and if the model generates the training data.
    """
    if draft.values.get("data.train", "not known") is None or generates(draft):
        return None
    length, tokens = draft.get("data.sequence_length"), draft.get("training.batch_tokens")
    if not length or "training.batch_tokens" not in draft.values:
        return None
    return DEFAULT_SEQUENCES if tokens is None else tokens // length


def run_steps(draft: Draft, samples: int | None = None) -> int | None:
    """Returns the number of steps of the run; None if it is not known.

    Args:
        samples: number of training sequences, from which the steps follow if `training.epochs` is set; None if it is
            not known.
    """
    sequences = sequences_per_step(draft)
    if not sequences:  # not known, or a batch of less than a sequence, which is reported elsewhere
        return draft.get("training.steps") if generates(draft) or sequences == 0 else None
    training = partial_section(TrainingSection, draft.get, "training")
    return count_steps(training, sequences, draft.get("data.sequence_length"), samples)
