"""Packing documents into sequences: time, memory and what is lost, for Weft's best fit by counts and for plain ways.

    .venv/bin/python benchmarks/data_best_fit.py [--documents 1e7,1e8] [--peer-documents 1e6] [--length 2048] [--quick]

Documents are lengths only, lognormal (seeded). Every measurement is a process of its own, and the plain ways get a
smaller part of the same lengths, on which Weft is measured as well. Weft makes the whole index that training reads:
from lengths in a file to an index in files, synced to the disk. Writes a table (.md) and all numbers (.json) into
benchmarks/results.
"""

import argparse
import bisect
import datetime
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "peers"), str(HERE.parent / "src")]
from common import processor, write_results  # noqa: E402

MEDIAN, SIGMA = 420, 1.1  # about what web text has


def weft(lengths, length: int, folder: Path) -> dict:
    """The index that `data.packing: best_fit` makes."""
    from weft.data.sequences.packing_index import packing_index

    store = SimpleNamespace(path=folder, info=SimpleNamespace(idx_sha256="0" * 64), lengths=lengths)
    store.num_documents = len(lengths)
    index = packing_index(store, length)
    size = sum(file.stat().st_size for file in (folder / "packing").rglob("*.bin"))
    return {"sequences": index.sequences, "index_bytes": size}


def pieces(lengths, length: int) -> tuple[list[int], int]:
    """What the plain ways place: the rests of all documents; and how many full sequences long documents give."""
    import numpy as np

    inputs = np.maximum(np.asarray(lengths, np.int64) - 1, 0)
    rests = inputs % length
    return rests[rests > 0].tolist(), int((inputs // length).sum())


def best_fit_sorted_list(lengths, length: int, folder: Path) -> dict:
    """Longest first, each into the fullest sequence with room, found by bisection in a sorted list of spaces."""
    rests, full = pieces(lengths, length)
    spaces: list[tuple[int, int]] = []
    sequences: list[list[int]] = []
    for document in sorted(range(len(rests)), key=rests.__getitem__, reverse=True):
        size = rests[document]
        at = bisect.bisect_left(spaces, (size, 0))
        if at < len(spaces):
            space, sequence = spaces.pop(at)
        else:
            space, sequence = length, len(sequences)
            sequences.append([])
        sequences[sequence].append(document)
        if space > size:
            bisect.insort(spaces, (space - size, sequence))
    return {"sequences": full + len(sequences)}


def first_fit_tree(lengths, length: int, folder: Path) -> dict:
    """In the documents' order, each into the first sequence with room, found in a tree of the largest spaces."""
    rests, full = pieces(lengths, length)
    leaves = 1 << max(1, (len(rests) - 1).bit_length())
    tree = [length] * (2 * leaves)
    sequences: list[list[int]] = []
    for document, size in enumerate(rests):
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < size:
                node += 1
        sequence = node - leaves
        if sequence == len(sequences):
            sequences.append([])
        sequences[sequence].append(document)
        tree[node] -= size
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return {"sequences": full + len(sequences)}


def next_fit(lengths, length: int, folder: Path) -> dict:
    """In the documents' order, a new sequence whenever the next does not fit: what a streaming packer does."""
    rests, full = pieces(lengths, length)
    sequences: list[list[int]] = [[]]
    space = length
    for document, size in enumerate(rests):
        if size > space:
            sequences.append([])
            space = length
        sequences[-1].append(document)
        space -= size
    return {"sequences": full + len(sequences)}


def concatenate(lengths, length: int, folder: Path) -> dict:
    """End to end, cut into windows: no padding, but documents are cut where a window ends."""
    import numpy as np

    ends = np.cumsum(np.asarray(lengths, np.int64))
    first = (ends - lengths) // length
    short = np.asarray(lengths) - 1 <= length
    return {"sequences": int(ends[-1] - 1) // length, "cut": float((((ends - 1) // length > first) & short).sum())}


WAYS = {
    "weft": ("Weft, best fit by counts", weft),
    "best_fit": ("best fit, sorted list in Python", best_fit_sorted_list),
    "first_fit": ("first fit, tree in Python", first_fit_tree),
    "next_fit": ("next fit (a new sequence when full)", next_fit),
    "concatenate": ("concatenate and cut", concatenate),
}


def work(asked: dict) -> None:
    """One measurement; the result is the last line on stdout."""
    import numpy as np

    lengths = np.load(asked["lengths"], mmap_mode="r")[: asked["documents"]]
    folder = Path(asked["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    found = WAYS[asked["way"]][1](lengths, asked["length"], folder)
    found["seconds"] = time.perf_counter() - began
    found["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["interpreter_bytes"] = 1024 * before
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found))


def make_lengths(path: Path, documents: int) -> None:
    """A block at a time, so that any number fits into memory."""
    import numpy as np

    generator = np.random.default_rng(0)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(documents,))
    for start in range(0, documents, 1 << 22):
        drawn = generator.lognormal(np.log(MEDIAN), SIGMA, min(1 << 22, documents - start))
        out[start : start + len(drawn)] = np.clip(drawn, 1, 10**6)
    out.flush()


def measure(args: argparse.Namespace) -> dict:
    """All cells, each in a process of its own."""
    import numpy as np

    folder = HERE / "work" / "best_fit"
    folder.mkdir(parents=True, exist_ok=True)
    lengths, counts = folder / "lengths.npy", [args.peer_documents, *args.documents]
    make_lengths(lengths, max(counts))
    cells = []
    for documents in counts:
        given = np.load(lengths, mmap_mode="r")[:documents]
        inputs = int(given.sum(dtype=np.int64)) - documents  # lengths are at least 1
        for way in WAYS if documents == args.peer_documents else ("weft",):
            asked = {"way": way, "documents": documents, "length": args.length}
            where = {"lengths": str(lengths), "folder": str(folder / "out")}
            for _ in range(args.rounds):
                done = subprocess.run(
                    [sys.executable, __file__, "--work", json.dumps(asked | where)],
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    sys.exit(done.stderr)
                cells.append(asked | json.loads(done.stdout.splitlines()[-1]) | {"inputs": inputs})
                print(f"{documents:>13,} {WAYS[way][0]}: {cells[-1]['seconds']:.2f} s", flush=True)
    lengths.unlink()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": processor(),
        "length": args.length,
        "rounds": args.rounds,
        "cells": cells,
    }


def table(found: dict) -> str:
    """The result as a page of Markdown."""
    lines = [
        "# Packing documents into sequences",
        "",
        f"{found['device']}, one thread; {found['date'][:10]}. Sequences of {found['length']:,}; document lengths "
        f"lognormal, median {MEDIAN}, sigma {SIGMA}. Best of {found['rounds']}; memory is the process's peak.",
        "",
        "| | documents | seconds | documents/s | memory (MiB) | sequences | padding | short documents cut |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    best: dict[tuple, dict] = {}
    for cell in found["cells"]:
        key = cell["documents"], cell["way"]
        if key not in best or cell["seconds"] < best[key]["seconds"]:
            best[key] = cell
    for (documents, way), cell in best.items():
        padding = "0.00%"
        if way != "concatenate":
            padding = f"{1 - cell['inputs'] / (cell['sequences'] * found['length']):.2%}"
        lines.append(
            f"| {WAYS[way][0]} | {documents:,} | {cell['seconds']:.2f} | {documents / cell['seconds']:,.0f} "
            f"| {cell['peak_bytes'] / 2**20:,.0f} | {cell['sequences']:,} | {padding} "
            f"| {cell.get('cut', 0) / documents:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Packing documents into sequences.")
    parser.add_argument("--documents", default="1e7,1e8")
    parser.add_argument("--peer-documents", type=float, default=1e6)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small numbers: does it work at all?")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return 0
    args.documents = [int(float(n)) for n in args.documents.split(",")]
    args.peer_documents = int(args.peer_documents)
    if args.quick:
        args.documents, args.peer_documents, args.rounds = [1_000_000], 50_000, 1
    found = measure(args)
    name = "data_best_fit" + ("-quick" if args.quick else "")
    write_results(args.out, name, table(found), found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
