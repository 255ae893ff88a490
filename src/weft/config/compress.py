"""`parallel.compress:` fewer bytes of gradients between copies of a model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.config.section import Section


class CompressSection(Section):
    """Copies (`dp_replicate`) tell one another factors of low rank in place of the gradients of matrices."""

    type: Literal["powersgd"] = Field("powersgd", description="power iteration with error feedback")
    rank: int = Field(4, ge=1, description="of what is told of a matrix; bytes grow with it, and so does fidelity")
    start_step: int = Field(
        1000, ge=0, description="so many steps are exact before: their gradients are large, and change quickly"
    )
