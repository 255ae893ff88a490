"""`weft data index`: where the documents of JSON-lines files begin."""

from __future__ import annotations

import argparse

from weft.cli.data.inputs import tell_skipped
from weft.formatting import counted

HELP = "byte offsets of a JSON-lines file's documents, for random access"
GROUP = "make"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write FILE.index.npy: the byte offsets of the documents of a JSON-lines file (uint64, the last one is the "
        "file's size). Blank lines are no documents. In Python, weft.data.sources.index.JsonLines('FILE')[7] is a "
        "record."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON-lines files, folders of such, or patterns")


def run(args: argparse.Namespace) -> int:
    from weft.data.sources import find_files
    from weft.data.sources.formats.json import holds_lines
    from weft.data.sources.index import build_index, is_current
    from weft.data.sources.source_format import kind_of
    from weft.errors import UserError
    from weft.observe.console import Console

    files = find_files(args.files)
    for path in files:
        kind = kind_of(path)
        lines = kind == "jsonl" or (kind == "json" and holds_lines(str(path)))
        if not lines or not path.is_file():
            why = "packed: unpack it" if "." in kind else "not JSON lines (.jsonl, .ndjson, .jl, .json)"
            raise UserError(f"{why}; an index needs a plain JSON-lines file", path)
    console = Console()
    done = 0
    said = []
    with console.progress(sum(path.stat().st_size for path in files), "indexing", unit="B") as bar:

        def on_bytes(more: int) -> None:
            nonlocal done
            done += more
            bar.update(done)

        for path in files:
            if is_current(path):
                said.append(f"{path}: its index is up to date")
                on_bytes(path.stat().st_size)
            else:
                documents = build_index(path, on_bytes)
                said.append(f"{path}.index.npy: {counted(documents, 'document')}")
    for line in said:
        console.result(line)
    tell_skipped(console, files.left_out)
    return 0
