"""How many kills the tests of file operations make."""

import os


def wanted(default: str = "24") -> int:
    """The environment variable WEFT_KILLS: a number, evenly spread over all operations, or `all` (0)."""
    given = os.environ.get("WEFT_KILLS", default)
    return 0 if given == "all" else int(given)


def spread(kills: int, most: int) -> list[int]:
    """The numbers of the operations, from 1 to `most`, at which to kill."""
    return [1 + (2 * turn + 1) * most // (2 * kills) for turn in range(kills)] if kills else [*range(1, most + 1)]
