"""What must hold between keys (`config/data_rules.py`: within `data:`, and between it and the data)."""

from __future__ import annotations

import os

from weft.config.custom_components import check_parts
from weft.config.data_rules import check_data_section, check_warm_up, run_steps, sequences_of
from weft.config.draft import Draft
from weft.config.header_rules import check_headers
from weft.config.legal_mesh import SIZES, reasons_against
from weft.config.mesh import ParallelSection
from weft.config.model_rules import known_model, mistakes
from weft.config.transformers_model import longest_sequence

MOST_STEPS = 10**12  # beyond it samples cannot be numbered in 64 bits
MOST_NAME = 200  # bytes: file systems allow 255, and names made of it are longer


def apply_rules(draft: Draft, *, check_data: bool) -> None:
    """Fill in what follows from other keys, and note what does not fit together."""
    for key, what, also in mistakes(known_model(draft.get)):
        draft.problem(f"model.{key}", what, *(f"model.{name}" for name in also))
    check_parts(draft)
    _length_of_run(draft)
    _positions(draft)
    _batch(draft)
    _name(draft)
    check_data_section(draft)
    samples = check_headers(draft) if check_data else None
    _too_long(draft, samples)
    _twice(draft)
    _early_stopping(draft)
    _mesh(draft)
    _warm_up(draft, samples)
    _only_rows(draft)
    _recomputed(draft)
    _precision(draft, samples)
    if draft.get("samples.prompts") and "tokenizer" in draft.values and draft.get("tokenizer") is None:
        draft.problem(
            "samples.prompts", "there is no tokenizer to read them with; set tokenizer, or remove the prompts"
        )


def _length_of_run(draft: Draft) -> None:
    names = ("training.steps", "training.tokens", "training.epochs")
    given = [name for name in names if draft.get(name) is not None]
    broken = [name for name in names if name not in draft.values]
    if len(given) > 1:
        words = " and ".join(name.removeprefix("training.") for name in given)
        for name in given:
            draft.problem(name, f"{words} both say how long the run is; keep one")
            break
    elif not given and not broken and not any(p.key == "training" for p in draft.problems):
        draft.problem("training", "how long is the run? set one of steps, tokens or epochs")


def _too_long(draft: Draft, samples: int | None) -> None:
    steps = run_steps(draft, samples)
    if steps is not None and steps > MOST_STEPS:
        key = next(name for name in ("steps", "tokens", "epochs") if draft.get(f"training.{name}") is not None)
        draft.problem(f"training.{key}", f"a run has at most {MOST_STEPS:.0e} steps, and this would be more; lower it")


def _twice(draft: Draft) -> None:
    for key in ("log.trackers", "log.metrics", "callbacks"):
        chosen = draft.get(key) or []
        for number, one in enumerate(chosen):
            if one in chosen[:number]:
                name = one if isinstance(one, str) else one.type
                draft.problem(f"{key}[{number}]", f"{name} is in the list already; remove one of the two")


def _early_stopping(draft: Draft) -> None:
    if draft.values.get("data.validation", "not known") is not None:
        return
    for number, callback in enumerate(draft.get("callbacks") or []):
        if callback.type.replace("-", "_") == "early_stopping":
            what = "early_stopping needs validations; set data.validation, or remove the callback"
            draft.problem(f"callbacks[{number}]", what, "data.validation")


def _positions(draft: Draft) -> None:
    """The sequence length: its default, and the longest that the model takes."""
    longest, key, theirs = (
        draft.get("model.max_position_embeddings"),
        "max_position_embeddings",
        draft.get("model.config"),
    )
    if theirs is not None:
        longest, key = longest_sequence(theirs), "config.max_position_embeddings"
    if "data.sequence_length" not in draft.values:
        return
    length = draft.get("data.sequence_length")
    if length is None:
        # A class of the user's own, or of transformers, of which no longest may be known.
        own = isinstance(draft.get("model"), dict) or theirs is not None
        if draft.tree.get("data") is None or not (own or longest):
            return  # told already: what the data or the model are is not known
        draft.fill("data.sequence_length", min(1024, longest or 1024), "from the model's max_position_embeddings")
    elif longest is not None and length > longest:
        learned = " (a learned table)" if draft.get("model.position") == "learned" else ""
        draft.problem(
            "data.sequence_length",
            f"{length} is longer than the model's {longest} positions{learned}; "
            f"shorten it, or set model.{key}: {length}",
            f"model.{key}",
        )


def _batch(draft: Draft) -> None:
    length, tokens = draft.get("data.sequence_length"), draft.get("training.batch_tokens")
    if not length or "training.batch_tokens" not in draft.values:
        return
    if tokens is not None and tokens % length:
        lower, upper = tokens // length * length, -(-tokens // length) * length
        choice = f"{lower} or {upper}" if lower else str(upper)
        draft.problem(
            "training.batch_tokens",
            f"{tokens} tokens are not whole sequences of {length}; set {choice}",
            "data.sequence_length",
        )
        return
    micro, sequences = draft.get("training.micro_batch_size"), sequences_of(draft)
    if micro is not None and sequences is not None and micro > sequences:
        draft.problem(
            "training.micro_batch_size",
            f"{micro} sequences per forward, but the whole batch has {sequences}; "
            f"set {sequences} or less, or raise training.batch_tokens",
            "training.batch_tokens",
        )


def _name(draft: Draft) -> None:
    name = draft.get("run.name")
    if "run.name" not in draft.values:
        return
    if name is None:
        file = draft.tree.file or "run"
        stem = os.path.basename(file).rsplit(".", 1)[0] or "run"
        draft.fill("run.name", stem, "the file's name")
    elif not name.strip() or name in (".", "..") or any(c in name for c in "/\\\0\n"):
        draft.problem("run.name", f"{name!r} cannot be a folder's name; where runs are kept is run.directory")
    elif (length := len(os.fsencode(name))) > MOST_NAME:
        draft.problem("run.name", f"{length} bytes are too long for a folder's name; use at most {MOST_NAME}")


def _mesh(draft: Draft) -> None:
    """The mesh, on as many ranks as are known, or as it needs at least."""
    told = any(problem.key.partition(".")[0] == "parallel" for problem in draft.problems)
    keys = {f"parallel.{name}" for name in ParallelSection.model_fields} - {"parallel.compress"}
    if told or not keys <= draft.values.keys():
        return
    known = all(key in draft.values for key in ("training.batch_tokens", "training.micro_batch_size"))
    for reason in reasons_against(draft.get, sequences_of(draft) if known else None, draft.ranks):
        draft.problem(reason.key, reason.what, *(f"parallel.{axis}" for axis in SIZES))


def _only_rows(draft: Draft) -> None:
    """Only rows of the built-in decoder can be trained alone, and only rows that it has."""
    first, size = draft.get("training.only_rows_from"), draft.get("model.vocab_size")
    if first is None:
        return
    if "model.hidden_size" not in draft.values:
        if isinstance(draft.get("model"), dict):
            what = "this is the built-in decoder's: of another model it is not known what rows are; remove the key"
            draft.problem("training.only_rows_from", what)
    elif size is not None and first >= size:
        draft.problem(
            "training.only_rows_from",
            f"{first}, and the model has rows 0 to {size - 1} (model.vocab_size {size}); name the first new one "
            "(`weft resize` adds some)",
            "model.vocab_size",
        )
    elif draft.get("model.load_optimizer"):
        what = "that optimizer's state is of all parameters, and training.only_rows_from trains rows of two; remove one"
        draft.problem("model.load_optimizer", what)


def _recomputed(draft: Draft) -> None:
    mode, layers = draft.get("training.activation_checkpointing"), draft.get("model.num_hidden_layers")
    kind, _, each = (mode or "").partition("-")
    if kind == "every" and layers is not None and int(each) > layers:
        what = f"{mode}, and the model has {layers} layers, so none would be recomputed; lower it, or set none"
        draft.problem("training.activation_checkpointing", what, "model.num_hidden_layers")


def _warm_up(draft: Draft, samples: int | None) -> None:
    steps, fraction = draft.get("schedule.warmup_steps"), draft.get("schedule.warmup_fraction")
    if steps is not None and fraction is not None:
        draft.problem("schedule.warmup_steps", "warmup_fraction is set as well; keep one of them")
    else:
        check_warm_up(draft, "schedule.warmup_steps", run_steps(draft, samples), 20)


def _precision(draft: Draft, samples: int | None) -> None:
    """Keys that the chosen dtypes, or the length of the run, leave without a meaning."""
    start, steps = draft.get("parallel.compress.start_step"), run_steps(draft, samples)
    if start is not None and steps is not None and start >= steps:
        what = f"{start:,} steps are exact, and the run has {steps:,}; lower it, or remove the section"
        draft.problem("parallel.compress.start_step", what, "training.steps")
    dtype, reduced = draft.get("training.dtype"), draft.get("training.reduce_dtype")
    if dtype is None or reduced is None:
        return
    if "float16" not in (dtype, reduced):
        for key in ("training.initial_loss_scale", "training.loss_scale_window"):
            if draft.get(key) is not None:
                what = f"the loss is scaled for float16 alone, and training.dtype is {dtype}; remove the key"
                draft.problem(key, what, "training.dtype")
    if reduced == "float16" and start is not None:
        what = "what copies tell is not scaled, and float16 is too narrow for it; choose bfloat16 or auto"
        draft.problem("training.reduce_dtype", what, "parallel.compress")
    if draft.get("training.fp8") and dtype not in ("auto", "bfloat16"):
        what = f"what 8 bits are not enough for is computed in bfloat16; set it, or auto, in place of {dtype}"
        draft.problem("training.dtype", what, "training.fp8")
