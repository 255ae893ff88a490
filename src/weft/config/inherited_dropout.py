"""Turns off the dropout of the model in `model.from`, for objectives that compare probabilities with another model's.

With dropout, the first loss of `dpo` is not ln 2, and completions are not sampled from the model that is trained. The
dropout of a published config.json, such as the 0.1 of GPT-2, is that of its pretraining.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.config.draft import Draft
from weft.config.model import ModelSection
from weft.config.objective_data import objective_data

KEYS = tuple(f"model.{name}" for name in ModelSection.model_fields if name.endswith("_dropout"))
OFF = "off for the objective "  # begins the origin of each key that is turned off


def turn_off_inherited_dropout(draft: Draft) -> None:
    """Sets each dropout probability that the run's files do not set to 0, if the objective asks for this."""
    objective = draft.get("objective.type")
    if not isinstance(objective, str) or objective_data(objective).inherits_dropout:
        return
    for key in KEYS:
        value, origin = draft.get(key), draft.origins.get(key, "")
        if value and origin.startswith("checkpoint "):
            draft.fill(key, 0.0, f"{OFF}{objective} ({value} in {origin.removeprefix('checkpoint ')})")
    content, origin = draft.get("model.config"), f"{draft.get('model.path')}/config.json"
    inherited = {
        name: value
        for name, value in (content or {}).items()
        if _is_dropout(name, value) and draft.node(f"model.config.{name}").origin == origin
    }
    if inherited:
        named = ", ".join(f"{name} {value}" for name, value in inherited.items())
        off = content | dict.fromkeys(inherited, 0.0)
        draft.fill("model.config", off, f"{OFF}{objective} ({named} in {origin})")


def _is_dropout(name: str, value: Any) -> bool:
    """Whether a key of config.json is a dropout probability above 0."""
    return "drop" in name and isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def inherited_dropout_notices(origins: Mapping[str, str]) -> Iterator[str]:
    """Yields a note for each dropout that is turned off, which a run prints when it starts.

    Args:
        origins: `RunConfig.origins`.
    """
    for key in (*KEYS, "model.config"):
        if (origin := origins.get(key, "")).startswith(OFF):
            keep = "set the key to keep it" if key in KEYS else "set the keys in model.config to keep it"
            yield f"{key}: dropout is {origin}; {keep}"
