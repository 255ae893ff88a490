"""`weft data index`: indexes JSON-lines files for random access."""

from __future__ import annotations

import argparse

from weft.cli.data.inputs import report_skipped
from weft.formatting import counted

HELP = "index the documents of JSON-lines files for random access"
GROUP = "make"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes FILE.index.npy: the byte offsets of the documents of a JSON-lines file (uint64; the last offset is "
        "the size of the file). Blank lines are not documents. In Python, weft.data.sources.index.JsonLines('FILE')[7] "
        "returns a record."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON-lines files, folders of these, or patterns")


def run(args: argparse.Namespace) -> int:
    from weft.data.sources import find_files
    from weft.data.sources.formats.json import is_json_lines
    from weft.data.sources.index import build_index, is_current
    from weft.data.sources.source_format import detect_format
    from weft.errors import UserError
    from weft.observe.console import Console

    files = find_files(args.files)
    for path in files:
        form, compression = detect_format(path)
        lines = form == "jsonl" or (form == "json" and is_json_lines(str(path)))
        if compression or not lines or not path.is_file():
            why = "compressed: decompress it" if compression else "not JSON lines (.jsonl, .ndjson, .jl, .json)"
            raise UserError(f"{why}; an index needs a plain JSON-lines file", path)
    console = Console()
    done = 0
    results = []
    with console.progress(sum(path.stat().st_size for path in files), "indexing", unit="B") as bar:

        def on_bytes(more: int) -> None:
            nonlocal done
            done += more
            bar.update(done)

        for path in files:
            if is_current(path):
                results.append(f"{path}: the index is up to date")
                on_bytes(path.stat().st_size)
            else:
                results.append(f"{path}.index.npy: {counted(build_index(path, on_bytes), 'document')}")
    for line in results:
        console.result(line)
    report_skipped(console, files.skipped)
    return 0
