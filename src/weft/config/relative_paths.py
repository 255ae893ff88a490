"""Paths in a run's file are relative to the working directory, as on a command line; only `extends` is to its file."""

from __future__ import annotations

import os

from weft.config.tree import COMMAND_LINE, Node


def beside(node: Node, path: str) -> str:
    """What to say of a path that is not found, but would be from the folder of the file that names it; or nothing."""
    folder = os.path.dirname(node.file or "")
    if not folder or node.file == COMMAND_LINE or os.path.isabs(path) or os.path.exists(path):
        return ""
    there = os.path.normpath(os.path.join(folder, path))
    if not os.path.exists(there):
        return ""
    return f"not here; paths are relative to the working directory: run it from {folder} or write {there}"
