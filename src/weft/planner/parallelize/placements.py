"""Texts of placements, in the files of plans."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from weft.errors import UserError
from weft.planner.parallelize.axes import OverTensor

PLACEMENTS = ("parameters", "inputs", "outputs")  # fields of a plan with placements


def placement_text(placement: OverTensor) -> str:
    """Returns the text of a placement, which is Python too: `Shard(1)`, `Replicate()`, `Partial()`, or a pair."""
    if not isinstance(placement, Placement):
        return f"({', '.join(map(placement_text, placement))})"
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else f"{type(placement).__name__}()"


def placement_of(text: str) -> OverTensor:
    """Returns the placement of a text of `placement_text`.

    Raises:
        UserError: the text is none of a placement.
    """
    if text.startswith("("):
        pair = [placement_of(each) for each in text[1:-1].split(", ")]
        if len(pair) == 2:
            return pair[0], pair[1]  # type: ignore[return-value]
    if text in ("Replicate()", "Partial()"):
        return Replicate() if text == "Replicate()" else Partial()
    number = text.removeprefix("Shard(").removesuffix(")")
    if text != f"Shard({number})" or not number.isdigit():
        raise UserError(f"{text!r} is no placement; give Shard(dim), Replicate(), Partial(), or a pair of them")
    return Shard(int(number))
