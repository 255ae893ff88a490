"""Checks the configuration of a run whose model generates its training data from prompts."""

from __future__ import annotations

import os
import re
from pathlib import Path

from weft.config.data import held_out_sets
from weft.config.draft import Draft
from weft.config.model_source import newest_checkpoint
from weft.headers import is_raw

# Keys that say how given data become batches.
NO_EFFECT = (
    "data.layout",
    "data.train_on",
    "data.workers",
    "data.temperature",
    "data.curriculum",
    "data.mixture_block",
    "data.packing",
    "data.length_warmup",
    "training.batch_tokens",
)
FOR_PROMPTS = ("validation.prompts", "validation.temperature")
LENGTHS = ("training.tokens", "training.epochs")
FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def generates(draft: Draft) -> bool:
    """Whether the model generates the training data from prompts, and does not read them from a custom dataset."""
    chosen = draft.get("data.train")
    return isinstance(chosen, str | list) and draft.get("objective.updates_per_rollout") is not None


def check_rollouts(draft: Draft) -> None:
    """Reports keys that have no effect on generated training data, and settings that contradict each other."""
    if not generates(draft):
        for key in FOR_PROMPTS:
            if draft.get(key) is not None:
                draft.report(key, "no effect, because the model does not generate the training data; remove the key")
        return
    for key in NO_EFFECT:
        if draft.get(key) not in (None, 0):
            draft.report(key, "no effect, because the model generates the training data; remove the key")
    for key in LENGTHS:
        if draft.get(key) is not None:
            what = "the model generates the training data, whose size is not known in advance"
            draft.report(key, f"{what}; set training.steps instead, a number of updates")
    chosen = draft.get("data.train")
    if not _can_be_prompts(chosen):
        draft.report("data.train", "prompts must be a file, a folder or a pattern of records; give one path")
    for name, held_out in held_out_sets(draft.get("data.validation")).items():
        if not _can_be_prompts(held_out):
            what = "held-out prompts must be a file, a folder or a pattern of records; give a path of prompts"
            draft.report("data.validation" + f".{name}" * bool(name), what)
    for key in ("validation.tokens", "validation.micro_batch_size"):
        if draft.get(key) is not None:
            draft.report(key, "no effect on completions of held-out prompts; set validation.prompts instead")
    if draft.get("training.micro_batch_size") == "auto":
        what = "sizes are tried with batches of data.train, but the model generates the training data"
        draft.report("training.micro_batch_size", f"{what}; set a number, or remove the key")
    if draft.get("data.overlong") == "truncate":
        draft.report("data.overlong", "a prompt is not truncated; set drop or refuse")
    if draft.get("training.qat.type") is not None:
        what = "answers are sampled from weights that are not rounded, so they would not be those of the trained model"
        remedy = "remove the section, and use it in a later run on given data"
        draft.report("training.qat", f"{what}; {remedy}", "objective.type")
    _check_functions(draft)
    _check_sizes(draft)


def _can_be_prompts(given: object) -> bool:
    """Whether a value is a path of raw data. A path that does not exist is reported elsewhere."""
    return isinstance(given, str) and (is_raw(given) or not os.path.exists(given))


def _check_functions(draft: Draft) -> None:
    reward, tools = draft.get("objective.reward"), draft.get("objective.tools") or []
    stated = draft.tree.get("objective", "reward")
    if not reward and (stated is None or stated.plain() in (None, "", [], {})):  # other values are reported already
        draft.report(
            "objective.reward",
            "required: a function that returns rewards, as module:function, or the path of a reward model; add it",
        )
    rewards: list[str] = [reward] if reward and isinstance(reward, str) else list(reward or ())
    for name in dict.fromkeys(rewards):
        if rewards.count(name) > 1:
            what = f"{name!r} is listed {rewards.count(name)} times, but counts once; remove it, or give weights"
            draft.report("objective.reward", f"{what}, such as {{{name}: {rewards.count(name)}.0}}")
        if not FUNCTION.fullmatch(str(name)):
            found = newest_checkpoint(Path(str(name)))
            if isinstance(found, str):
                what = f"{name!r} is neither a function (module:function) nor the path of a reward model"
                draft.report("objective.reward", f"{what}: {found}")
    for name in tools:
        if not FUNCTION.fullmatch(str(name)):
            draft.report("objective.tools", f"{name!r} is not a function; write it as module:function")
    turns = draft.get("objective.max_turns")
    if tools and turns == 1:
        what = "1 turn has no room for the result of a tool; set 2 or more, or remove tools"
        draft.report("objective.max_turns", what, "objective.tools")
    if not tools and "objective.tools" in draft.values and isinstance(turns, int) and turns > 1:
        what = f"{turns} turns have no effect without tools; set objective.tools, or remove the key"
        draft.report("objective.max_turns", what)


def _check_sizes(draft: Draft) -> None:
    length, new = draft.get("data.sequence_length"), draft.get("objective.max_new_tokens")
    if length and new and new >= length:
        what = f"{new} new tokens leave no room for a prompt in {length} tokens (data.sequence_length)"
        draft.report("objective.max_new_tokens", f"{what}; lower the number", "data.sequence_length")
    updates, parts = draft.get("objective.updates_per_rollout"), draft.get("objective.minibatches")
    prompts = draft.get("objective.prompts")
    if updates and parts and updates % parts:
        what = f"{updates} is not a multiple of the {parts} minibatches, which are used equally often"
        draft.report("objective.updates_per_rollout", f"{what}; set a multiple", "objective.minibatches")
    if prompts and parts and prompts % parts:
        what = f"{parts} minibatches do not divide the {prompts} prompts of a rollout; set a divisor"
        draft.report("objective.minibatches", what, "objective.prompts")
