"""Checks keys that depend on each other, and fills in derived keys.

`config/data_rules.py` checks the section `data`, and `config/header_rules.py` the token stores.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from weft.config.adapter_rules import check_adapter_section
from weft.config.custom_components import check_components
from weft.config.data_rules import check_data_section, check_warm_up, data_section, run_steps, sequences_per_step
from weft.config.draft import Draft
from weft.config.header_rules import check_headers
from weft.config.inherited_dropout import turn_off_inherited_dropout
from weft.config.legal_mesh import SIZES, reasons_against
from weft.config.mesh import ParallelSection
from weft.config.model_rules import known_model, model_mistakes
from weft.config.model_source import newest_checkpoint
from weft.config.plan_rules import check_planned
from weft.config.python_source import NotFound, find_class
from weft.config.rollout_rules import check_rollouts
from weft.config.signature import has_attribute
from weft.config.transformers_model import longest_sequence
from weft.config.watch_rules import check_watch
from weft.errors import Problem

MOST_STEPS = 10**12  # with more steps, the number of a sample would not fit into 64 bits
MOST_NAME = 200  # bytes: file systems allow 255, and longer names are derived from the run's name
LENGTHS = ("training.steps", "training.tokens", "training.epochs")


def apply_rules(draft: Draft, *, check_data: bool) -> list[Problem]:
    """Fills in derived keys, and reports keys that contradict each other.

    Args:
        check_data: whether the headers of the tokenizer and of the token stores are checked too.

    Returns:
        Problems that are not reported: the training data or the length of the run are missing. `Trainer.step` needs
        neither.
    """
    unknown = {problem.key for problem in draft.problems} | draft.meant
    for key, what, also in model_mistakes(known_model(draft.get)):
        others = [f"model.{name}" for name in also]
        if unknown.isdisjoint(others):
            draft.report(f"model.{key}", what, *others)
    check_components(draft)
    lacks = _missing_for_fit(draft)
    _check_run_length(draft)
    _check_sequence_length(draft)
    _check_batch(draft)
    _check_name(draft)
    check_data_section(draft)
    check_rollouts(draft)
    turn_off_inherited_dropout(draft)
    samples = check_headers(draft) if check_data else None
    steps = run_steps(draft, samples)
    if steps is not None and steps > MOST_STEPS:
        key = next(name for name in LENGTHS if draft.get(name) is not None)
        draft.report(key, f"more than {MOST_STEPS:.0e} steps, the maximum of a run; lower the value")
    _check_lists(draft)
    _check_best(draft)
    _check_remote(draft)
    check_planned(draft)
    _check_mesh(draft)
    if draft.get("schedule.warmup_steps") is not None and draft.get("schedule.warmup_fraction") is not None:
        draft.report("schedule.warmup_steps", "warmup_fraction is set too; remove one of the two keys")
    else:
        check_warm_up(draft, "schedule.warmup_steps", steps, 20)
    _check_fine_tuning(draft)
    _check_frozen_models(draft)
    _check_preferences(draft)
    _check_trained_rows(draft)
    check_adapter_section(draft)
    _check_recomputation(draft)
    _check_precision(draft, steps)
    check_watch(draft)
    if draft.get("samples.prompts") and "tokenizer" in draft.values and draft.get("tokenizer") is None:
        draft.report("samples.prompts", "prompts need a tokenizer; set tokenizer, or remove the prompts")
    return lacks


def _missing_for_fit(draft: Draft) -> list[Problem]:
    """Returns the problems of a file without training data or without a length of the run. Reports none of them."""
    before = len(draft.problems)
    if draft.values.get("data.train", "not known") is None:
        draft.report("data.train", "required: the token store to train on (`weft data pack` makes one); add it")
    reported = any(problem.key == "training" for problem in draft.problems)
    if not reported and all(draft.values.get(name, "not known") is None for name in LENGTHS):
        draft.report("training", "the run has no length; set one of steps, tokens or epochs")
    found = draft.problems[before:]
    del draft.problems[before:]
    return found


def _check_run_length(draft: Draft) -> None:
    given = [name for name in LENGTHS if draft.get(name) is not None]
    if len(given) > 1:
        names = " and ".join(name.removeprefix("training.") for name in given)
        what = f"{names} each set the length of the run"
        draft.report(given[0], f"{what}; keep one of these keys, and set an inherited one to null")


def _check_lists(draft: Draft) -> None:
    for key in ("log.trackers", "log.metrics", "callbacks"):
        chosen = draft.get(key) or []
        for number, one in enumerate(chosen):
            if one in chosen[:number]:
                name = one if isinstance(one, str) else one.type
                draft.report(f"{key}[{number}]", f"{name} is in the list twice; remove one of the two items")
    if draft.values.get("data.validation", "not known") is None:
        for number, callback in enumerate(draft.get("callbacks") or []):
            if callback.type.replace("-", "_") == "early_stopping":
                what = "early_stopping needs validation; set data.validation, or remove the callback"
                draft.report(f"callbacks[{number}]", what, "data.validation")


def _check_best(draft: Draft) -> None:
    if not draft.get("checkpoint.keep_best"):
        return
    if draft.values.get("data.validation", "not known") is None:
        what = "the best checkpoints are found by validation; set data.validation, or remove the key"
        draft.report("checkpoint.keep_best", what, "data.validation")
    saves, validations = draft.values.get("checkpoint.every"), draft.values.get("validation.every")
    if saves and validations and saves % validations:
        what = f"{saves} is not a multiple of validation.every ({validations}), so most checkpoints have no validation"
        draft.report(
            "checkpoint.every", f"{what}; change one of them, or remove checkpoint.keep_best", "validation.every"
        )


def _check_remote(draft: Draft) -> None:
    remote = urlsplit(draft.get("checkpoint.remote") or "")
    if remote.username is not None or remote.query:
        what = "credentials do not belong in a config, which is saved and copied"
        draft.report(
            "checkpoint.remote", f"{what}; remove them, and set environment variables (AWS_ACCESS_KEY_ID, ...)"
        )


def _check_sequence_length(draft: Draft) -> None:
    """Checks that the model supports the sequence length, or fills in the default sequence length."""
    longest, key = draft.get("model.max_position_embeddings"), "max_position_embeddings"
    hf_config = draft.get("model.config")
    if hf_config is not None:
        longest, key = longest_sequence(hf_config), "config.max_position_embeddings"
    if "data.sequence_length" not in draft.values:
        return
    length = draft.get("data.sequence_length")
    if length is None:
        # The maximum sequence length of a custom model or of a Transformers model can be unknown.
        may_lack = isinstance(draft.get("model"), dict) or hf_config is not None
        if draft.tree.get("data") is not None and (may_lack or longest):  # otherwise a problem is reported already
            draft.fill("data.sequence_length", min(1024, longest or 1024), "from the model's max_position_embeddings")
    elif longest is not None and length > longest:
        learned = " (a learned table)" if draft.get("model.position") == "learned" else ""
        what = (
            f"{length} is more than the model's {longest} positions{learned}; shorten it, or set model.{key}: {length}"
        )
        draft.report("data.sequence_length", what, f"model.{key}")


def _check_batch(draft: Draft) -> None:
    length, tokens = draft.get("data.sequence_length"), draft.get("training.batch_tokens")
    if not length or "training.batch_tokens" not in draft.values:
        return
    if tokens is not None and tokens % length:
        lower, upper = tokens // length * length, -(-tokens // length) * length
        choice = f"{lower} or {upper}" if lower else str(upper)
        what = f"{tokens} is not a multiple of the sequence length, {length}; set {choice}"
        draft.report("training.batch_tokens", what, "data.sequence_length")
        return
    micro, sequences = draft.get("training.micro_batch_size"), sequences_per_step(draft)
    if isinstance(micro, int) and sequences is not None and micro > sequences:
        what = f"{micro} sequences are more than the {sequences} of the global batch"
        what += f"; set at most {sequences}, or raise training.batch_tokens"
        draft.report("training.micro_batch_size", what, "training.batch_tokens")


def _check_name(draft: Draft) -> None:
    name = draft.get("run.name")
    if "run.name" not in draft.values:
        return
    if name is None:
        stem = os.path.basename(draft.tree.file or "run").rsplit(".", 1)[0] or "run"
        draft.fill("run.name", stem, "the file's name")
    elif not name.strip() or name in (".", "..") or any(c in name for c in "/\\\0\n"):
        draft.report(
            "run.name",
            f"{name!r} is not a valid folder name; use a plain name, and set the parent folder with run.directory",
        )
    elif (length := len(os.fsencode(name))) > MOST_NAME:
        draft.report("run.name", f"{length} bytes are too long for a folder name; use at most {MOST_NAME}")


def _check_mesh(draft: Draft) -> None:
    """Checks the mesh for the world size or, if this is not known, for the smallest possible world size."""
    reported = any(problem.key.partition(".")[0] == "parallel" for problem in draft.problems)
    keys = {f"parallel.{name}" for name in ParallelSection.model_fields} - {"parallel.compress"}
    if reported or not keys <= draft.values.keys():
        return
    known = all(key in draft.values for key in ("training.batch_tokens", "training.micro_batch_size"))
    ranks = None if draft.get("parallel.auto") else draft.ranks  # the planner chooses the mesh for the ranks
    for reason in reasons_against(draft.get, sequences_per_step(draft) if known else None, ranks):
        draft.report(reason.key, reason.what, *(f"parallel.{axis}" for axis in SIZES))


def _check_fine_tuning(draft: Draft) -> None:
    """Reports arguments of the objective `sft` that the data or the model do not support."""
    if draft.get("objective.type") != "sft":
        return
    model, data = draft.get("model"), data_section(draft)
    if draft.get("objective.neftune") and isinstance(model, dict) and ":" in str(model.get("type")):
        module, _, name = model["type"].partition(":")
        with contextlib.suppress(NotFound):
            source = find_class(module, name)
            if source is not None and has_attribute(source, "get_input_embeddings") is False:
                what = f"the embedding of {name} is not known; add a method get_input_embeddings that returns it"
                draft.report("objective.neftune", f"{what}, or set neftune to 0", "model.type")
    unknown = data.packing == "concatenate" and draft.get("data.document_attention") is False and data.paths[0]
    if draft.get("objective.loss") == "sequences" and unknown:
        what = "sequences needs to know the documents of a sequence; set data.packing to best_fit"
        draft.report("objective.loss", f"{what}, or data.document_attention to true", "data.packing")


def _check_frozen_models(draft: Draft) -> None:
    """Reports a `reference` or `teacher` of a built-in objective if the path has no model."""
    for key in ("objective.reference", "objective.teacher"):
        chosen = draft.get(key)
        if isinstance(chosen, str) and chosen != "start" and ":" not in draft.get("objective.type"):
            found = newest_checkpoint(Path(chosen))
            if isinstance(found, str):
                draft.report(key, f"{chosen}: {found}")


def _check_preferences(draft: Draft) -> None:
    """Reports a head that does not fit the objective, and arguments of objectives that contradict each other."""
    objective, labels, loss = draft.get("objective.type"), draft.get("model.num_labels"), draft.get("objective.loss")
    if objective == "reward" and draft.get("model.type") == "hf":
        draft.report("objective.type", "reward needs the built-in decoder; use model: {from: ...} with num_labels: 1")
    elif objective == "reward" and draft.values.get("model.num_labels", 1) is None:  # not set, and no wrong value
        draft.report("model.num_labels", "required by the objective reward; set num_labels: 1", "objective.type")
    elif labels and objective is not None and objective != "reward" and ":" not in objective:
        what = f"the model returns scores, which the objective {objective} cannot train"
        draft.report("model.num_labels", f"{what}; set objective: {{type: reward}}", "model.from")
    smooths = loss in ("cdpo", "robust")
    if (
        objective in ("dpo", "online_dpo")
        and loss is not None
        and bool(draft.get("objective.label_smoothing")) != smooths
    ):
        what = f"the loss {loss} needs a value above 0, such as 0.1" if smooths else f"no effect on the loss {loss}"
        remedy = "" if smooths else "; remove the key, or set loss: cdpo"
        draft.report("objective.label_smoothing", f"{what}{remedy}", "objective.loss")
    if objective == "grpo" and draft.get("objective.beta") == 0:
        for key, default in (("reference", "start"), ("kl", None)):
            if draft.get(f"objective.{key}") not in (default, None):
                what = "no effect with beta: 0; set beta, such as 0.04"
                draft.report(f"objective.{key}", what, "objective.beta")


def _check_trained_rows(draft: Draft) -> None:
    key, first, rows = "training.only_rows_from", draft.get("training.only_rows_from"), draft.get("model.vocab_size")
    if first is None:
        return
    if "model.hidden_size" not in draft.values:
        if isinstance(draft.get("model"), dict):
            draft.report(key, "only the built-in decoder supports this key; remove the key")
    elif rows is not None and first >= rows:
        what = f"{first}, but the embedding has rows 0 to {rows - 1} (model.vocab_size {rows}); set the first new row"
        draft.report(key, f"{what} (`weft resize` adds rows)", "model.vocab_size")
    elif draft.get("model.load_optimizer"):
        what = "the saved optimizer state is for all parameters, but training.only_rows_from freezes most of them"
        draft.report("model.load_optimizer", f"{what}; remove one of the two keys")


def _check_recomputation(draft: Draft) -> None:
    mode, layers = draft.get("training.activation_checkpointing"), draft.get("model.num_hidden_layers")
    kind, _, each = (mode or "").partition("-")
    if kind == "every" and layers is not None and int(each) > layers:
        what = f"{mode} recomputes none of the model's {layers} layers; lower the number, or set none"
        draft.report("training.activation_checkpointing", what, "model.num_hidden_layers")


def _check_precision(draft: Draft, steps: int | None) -> None:
    """Reports keys that have no effect, or do not work, with the chosen dtypes or the length of the run.

    Args:
        steps: number of steps of the run; None if it is not known.
    """
    start = draft.get("parallel.compress.start_step")
    if start is not None and steps is not None and start >= steps:
        what = f"{start:,}, but the run has {steps:,} steps; lower the number, or remove the section"
        draft.report("parallel.compress.start_step", what, "training.steps")
    _check_qat(draft)
    dtype, reduced = draft.get("training.dtype"), draft.get("training.reduce_dtype")
    if dtype is None or reduced is None:
        return
    if "float16" not in (dtype, reduced):
        for key in ("training.initial_loss_scale", "training.loss_scale_window"):
            if draft.get(key) is not None:
                what = f"loss scaling is for float16 only, but training.dtype is {dtype}; remove the key"
                draft.report(key, what, "training.dtype")
    if reduced == "float16" and start is not None:
        what = "compressed gradients are not scaled, so they can exceed the range of float16; set bfloat16 or auto"
        draft.report("training.reduce_dtype", what, "parallel.compress")
    if draft.get("training.compile") == "reduce-overhead":
        # Other gradients would be memory of a graph, which its next replay overwrites.
        if dtype in ("float32", "float64"):
            what = f"{dtype}, but CUDA graphs (reduce-overhead) need 16 bits; set bfloat16, or training.compile: true"
            draft.report("training.dtype", what, "training.compile")
        elif reduced not in ("auto", "float32"):
            what = f"{reduced}, but CUDA graphs (reduce-overhead) need float32; set auto, or training.compile: true"
            draft.report("training.reduce_dtype", what, "training.compile")
    if draft.get("training.fp8") and dtype not in ("auto", "bfloat16"):
        what = f"{dtype}, but with fp8 all other operations are computed in bfloat16; set bfloat16 or auto"
        draft.report("training.dtype", what, "training.fp8")


def _check_qat(draft: Draft) -> None:
    """Reports keys that contradict quantization-aware training."""
    kind, size = draft.get("training.qat.type"), draft.get("training.qat.group_size")
    if kind is None:
        return
    if kind == "int4" and size not in (None, 32):
        what = f"{size}, but int4 has groups of 32 columns; remove the key, or set type: int8_int4"
        draft.report("training.qat.group_size", what, "training.qat.type")
    if draft.get("training.fp8"):
        what = "quantization-aware training does not support fp8; remove one of the two keys"
        draft.report("training.qat", what, "training.fp8")
