"""The features of this host's processor. Choices that change rounding follow them, not a measurement."""

from __future__ import annotations

from functools import cache
from pathlib import Path

INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # products of bfloat16 on x86 (the first two) and on ARM


def cpuinfo(*keys: str) -> list[str]:
    """Returns the different lines of /proc/cpuinfo that begin with one of `keys`, sorted; none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(keys)})


@cache
def vendor() -> str | None:
    """Returns the processor's maker as Linux reports it; None on other systems."""
    return next((line.partition(":")[2].strip() for line in cpuinfo("vendor_id")), None)


@cache
def features() -> frozenset[str]:
    """Returns the names of the processor's instruction sets as Linux reports them; none on other systems."""
    return frozenset(word for line in cpuinfo("flags", "Features") for word in line.partition(":")[2].split())


def multiplies_bfloat16() -> bool | None:
    """Whether the processor has instructions for products of bfloat16; None if it is not known.

    Without them PyTorch emulates the products: on an AMD EPYC (Zen 3) they take 6 to 60 times as long as float32's.
    """
    return not features().isdisjoint(INSTRUCTIONS) if features() else None
