"""Formats numbers for people: counts, amounts, bytes, durations and rates. All output of Weft uses these functions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

_AMOUNTS = ((1e12, "T", 2), (1e9, "B", 2), (1e6, "M", 1), (1e3, "k", 1))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_METRICS = {"tokens_per_second": "tokens/s", "validation_loss": "validation"}


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Returns a number with its noun, such as `1 document` or `12,345 documents`.

    Args:
        plural: the plural of the noun; default: `plural_of(noun)`.
    """
    return f"{number:,} {noun if number == 1 else plural or plural_of(noun)}"


def plural_of(noun: str) -> str:
    """Returns the plural of a regular noun: `documents`, `batches`."""
    return noun + ("es" if noun.endswith(("ch", "sh", "s", "x")) else "s")


def first_few(items: Sequence[str], most: int, between: str = ", ") -> str:
    """Returns the first `most` items of a list and the number of omitted items.

    The separator `between` is ", " (`a, b and 3 more`) or "; " (`a; b; and 3 more`).
    """
    more = f"{between.strip(', ')} and {len(items) - most:,} more" if len(items) > most else ""
    return between.join(items[:most]) + more


def amount(number: float, full: float = 1e3) -> str:
    """Returns a large number in short: `640`, `30.7k`, `134.1M`, `8.03B`. Does not shorten numbers below `full`."""
    for limit, letter, digits in _AMOUNTS:
        if number >= max(limit, full):
            return f"{number / limit:,.{digits}f}{letter}"
    return f"{number:,}"


def cell(value: Any) -> str:
    """Returns a value as the text of a table cell; None becomes `-`.

    Floats below 1,000 are rounded to four significant digits, larger floats to integers.
    """
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def tick(value: float) -> str:
    """Returns the text of an axis label: `0`, `3e-4`, `0.25`, `12.5`, `1,500`, `12k`, `3.5M`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value / 1e3:.4g}k" if size >= 1e4 else f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def byte_size(number: float, unit: str | None = None) -> str:
    """Returns a number of bytes with its unit: `640 B`, `30.7 kB`, `1.25 GB`.

    Args:
        unit: "kB" or "MB" (with one decimal), "GB" or "TB" (with two); by default, and for a number that would be
            rounded to 0, the largest unit that fits.
    """
    limit = next((limit for limit, name in _BYTES if name == unit), 1.0)
    digits = 2 if limit >= 1e9 else 1
    if unit is not None and round(number / limit, digits):
        return f"{number / limit:,.{digits}f} {unit}"
    for limit, name in _BYTES:
        if number >= limit:
            return f"{number / limit:,.4g} {name}"
    return f"{number:,.0f} B"


def progress(done: int, total: int | None, unit: str) -> str:
    """Returns the progress of work: `120`, `120/1000`, or `1.5/4.0 MB` or `0.6/1.2 kB` for the unit B."""
    if unit == "B":
        most = max(done, total or 0)
        limit, name, digits = (1e6, "MB", 1) if most >= 1e5 else (1e3, "kB", 1) if most >= 100 else (1, "B", 0)
        return f"{done / limit:,.{digits}f}{'' if total is None else f'/{total / limit:,.{digits}f}'} {name}"
    return f"{done}" if total is None else f"{done}/{total}"


def duration(seconds: float) -> str:
    """Returns a duration: `0.8s`, `45s`, `1m20s`, `2h05m`, `3d04h`."""
    if seconds < 0.95:
        return f"{max(seconds, 0):.1f}s"
    if (rounded := round(seconds)) < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    if (minutes := round(seconds / 60)) < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def timing(seconds: float) -> str:
    """Returns a measured or predicted time: `12.1 us`, `3.21 ms`, `12.5 s`."""
    if seconds < 1:
        return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} us"
    return f"{seconds:.4g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def rate(per_second: float, unit: str) -> str:
    """Returns a speed: `12.3 MB/s` (for the unit B), `2.5 s/step`, `8.1 steps/s`, `12,345 tokens/s`."""
    if unit == "B":
        return f"{byte_size(per_second, 'MB')}/s"
    if 0 < per_second < 1:
        return f"{1 / per_second:,.1f} s/{unit}"
    return f"{per_second:,.0f} {plural_of(unit)}/s" if per_second >= 10 else f"{per_second:.1f} {plural_of(unit)}/s"


def flops_rate(per_second: float) -> str:
    """Returns a rate of floating-point operations: `989.4 TFLOP/s`, `120 GFLOP/s`."""
    return f"{per_second / 1e12:,.1f} TFLOP/s" if per_second >= 1e12 else f"{per_second / 1e9:,.0f} GFLOP/s"


def metric(name: str, value: Any) -> str:
    """Returns a metric's name and value: `loss 3.412`, `lr 3.0e-04`, `12,345 tokens/s`, `MFU 41.3%`."""
    if name.endswith("_per_second") and isinstance(value, int | float):
        shown = f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
        return f"{shown} {_METRICS.get(name, name.removesuffix('_per_second') + '/s')}"
    if name == "mfu" and isinstance(value, float):
        return f"MFU {value:.1%}"
    if name.endswith("lr") and isinstance(value, float):
        shown = f"{value:.1e}"
    elif isinstance(value, float):
        shown = f"{value:.3f}" if 0.01 <= abs(value) < 1000 or value == 0 else f"{value:.3g}"
    elif isinstance(value, int) and not isinstance(value, bool):
        shown = f"{value:,}"
    else:
        shown = str(value)
    return f"{_METRICS.get(name, name).replace('_', ' ')} {shown}"


def percent(part: float, total: float) -> str:
    """Returns `part` as a percentage of `total`, such as `12.34%`; `0.00%` if both are 0."""
    return f"{100 * part / (total or 1):.2f}%"


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings to one mapping with dotted keys.

    Args:
        prefix: dotted key of `tree` itself, with which all returned keys begin.
    """
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}.{key}" if prefix else key).items()}


_SECRET = re.compile(r"(^|[._-])(api[_-]?key|access[_-]?key|token|secret|password|passwd|credentials?|webhook)$", re.I)
_PUBLIC = re.compile(r"(^|[.-])(run\.(name|directory)|model\.preset|type)$")
SECRET_LENGTH = 6  # a shorter value of a variable such as MY_TOKEN is no secret
_LOGIN = re.compile(r"(://[^/@:\s]*):[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Whether the name of an option, key or environment variable says that its value is a secret."""
    return _SECRET.search(name) is not None


def secrets_of_environment() -> dict[str, str]:
    """Returns the secrets in environment variables: value -> name of the first such variable."""
    return {value: name for name, value in reversed(list(os.environ.items())) if is_secret(name)}


def secret_variable(key: str, value: Any, secrets: Mapping[str, str]) -> str | None:
    """Returns the name of the environment variable whose secret a value equals; None if the value is no secret.

    Names of runs, presets and types of components are no secrets, because folders and reports contain them.

    Args:
        key: dotted key of the value in a config.
        secrets: result of `secrets_of_environment`, which takes longer than the rest.
    """
    if not isinstance(value, str) or len(value) < SECRET_LENGTH or _PUBLIC.search(key):
        return None
    return secrets.get(value)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with `***` in place of secrets.

    Secrets are the values of options and keys such as `--api-key` and `password=`, values that equal the secret of an
    environment variable, and passwords in URLs.
    """
    shown: list[str] = []
    secrets = secrets_of_environment()
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        before = words[number - 1] if number else ""
        if before.startswith("--") and "=" not in before and is_secret(before):
            word = "***"
        elif equals and value and (is_secret(name) or secret_variable(name, value, secrets)):
            word = f"{name}=***"
        elif secret_variable(before, word, secrets):
            word = "***"
        shown.append(_LOGIN.sub(r"\1:***@", word))
    return shown


def masked(tree: Any, name: str = "", secrets: Mapping[str, str] | None = None) -> Any:
    """Returns plain data with `***` in place of secrets.

    Secrets are texts whose key is that of a secret, values that equal the secret of an environment variable, and
    passwords in URLs.

    Args:
        name: dotted key of `tree` itself.
        secrets: result of `secrets_of_environment`; default: found here.
    """
    secrets = secrets_of_environment() if secrets is None else secrets
    if isinstance(tree, dict):
        return {key: masked(value, f"{name}.{key}" if name else str(key), secrets) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked(value, name, secrets) for value in tree]
    if not isinstance(tree, str):
        return tree
    return "***" if is_secret(name) or secret_variable(name, tree, secrets) else _LOGIN.sub(r"\1:***@", tree)
