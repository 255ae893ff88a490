"""Selects parameters by patterns of their names, such as `layers.*.mlp.*` or `embed_tokens`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from weft.config.suggest import did_you_mean, nearest
from weft.errors import UserError


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern selects a parameter: the pattern matches the parameter's name, or the name of a module with it.

    Patterns have the syntax of `fnmatch`. So `layers.1` and `layers.1.*` select all parameters of that layer.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def last_match(name: str, patterns: Iterable[str]) -> str | None:
    """Returns the last of the patterns that select a parameter; None if no pattern does."""
    return next((pattern for pattern in reversed(list(patterns)) if matches(name, pattern)), None)


def raise_if_unmatched(key: str, patterns: Iterable[str], names: Collection[str]) -> None:
    """Raises UserError if a pattern selects no parameter. The message has the nearest name.

    Args:
        key: the configuration key of the patterns.
        names: the names of all parameters.
    """
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            parts = [name.split(".") for name in names]
            known = {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}  # with names of modules
            near = did_you_mean(pattern, sorted(known), cutoff=0.5) or _near_part(pattern, known)
            raise UserError(
                f"{key}: {pattern!r} matches no parameter's name{near} (`weft profile --structure` shows all names)"
            )


def _near_part(pattern: str, known: Collection[str]) -> str:
    """Returns the hint for a pattern that is similar to a part of a name only: `*lora_B*` to the part `lora_b`."""
    part = nearest(pattern.replace("*", "").strip("."), sorted({name.rpartition(".")[2] for name in known}))
    return f"; did you mean '*.{part}'?" if part else "; correct the pattern"
