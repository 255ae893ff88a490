"""Texts of placements, in the files of plans."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from weft.errors import UserError

PLACEMENTS = ("parameters", "inputs", "outputs")  # fields of a plan with placements


def placement_text(placement: Placement) -> str:
    """Returns `Shard(1)`, `Replicate()` or `Partial()`: the text of a placement, which is Python too."""
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else f"{type(placement).__name__}()"


def placement_of(text: str) -> Placement:
    """Returns the placement of a text of `placement_text`.

    Raises:
        UserError: the text is none of a placement.
    """
    if text in ("Replicate()", "Partial()"):
        return Replicate() if text == "Replicate()" else Partial()
    number = text.removeprefix("Shard(").removesuffix(")")
    if text != f"Shard({number})" or not number.isdigit():
        raise UserError(f"{text!r} is no placement; give Shard(dim), Replicate() or Partial()")
    return Shard(int(number))
