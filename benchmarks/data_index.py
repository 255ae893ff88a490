"""Making the index of a JSON-lines file, and reading documents by it: Weft and Modalities 0.5.

    .venv/bin/python benchmarks/data_index.py [--megabytes 400] [--rounds 5] [--quick]

Every measurement is a process of its own, and they take turns. The time is that of making the index alone, without
either's start-up; the file was read once before, so that it comes from memory for both. Modalities parses every line as
JSON on the way, Weft does not: `weft data pack` says what is broken when it reads it. Writes a table (.md) and all
numbers (.json) into benchmarks/results.
"""

import argparse
import datetime
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "peers"), str(HERE.parent / "src")]
from common import processor, write_results  # noqa: E402

READS = 20_000
NAMES = {"weft": "Weft", "modalities": "Modalities"}


def weft(path: Path) -> dict:
    """`weft data index`, and reading by it."""
    from weft.data.sources.index import JsonLines, build_index, index_path

    for name in (index_path(path), Path(f"{path}.index.json")):
        name.unlink(missing_ok=True)
    began = time.perf_counter()
    documents = build_index(path)
    made = time.perf_counter()
    records = JsonLines(path)
    opened = time.perf_counter()
    order = random.Random(0).choices(range(documents), k=READS)
    seen = sum(len(records.raw(i)) for i in order)
    done = time.perf_counter()
    return result(documents, index_path(path).stat().st_size, seen, began, made, opened, done)


def modalities(path: Path) -> dict:
    """`modalities data create_raw_index`, and reading by it."""
    from modalities.dataloader.create_index import IndexGenerator
    from modalities.dataloader.large_file_lines_reader import LargeFileLinesReader

    index = path.with_suffix(".idx")
    began = time.perf_counter()
    IndexGenerator(path).create_index(index)
    made = time.perf_counter()
    records = LargeFileLinesReader(path, index, encoding=None)
    opened = time.perf_counter()
    order = random.Random(0).choices(range(len(records)), k=READS)
    seen = sum(len(records[i]) for i in order)
    done = time.perf_counter()
    return result(len(records), index.stat().st_size, seen, began, made, opened, done)


def result(documents: int, size: int, seen: int, began: float, made: float, opened: float, done: float) -> dict:
    return {
        "documents": documents,
        "index_bytes": size,
        "bytes_read": seen,
        "index_seconds": made - began,
        "open_seconds": opened - made,
        "read_microseconds": (done - opened) / READS * 1e6,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def run(worker: str, path: Path, python: Path) -> dict | str:
    """What a worker found in a process of its own; or, in a word, why there is nothing."""
    if not python.exists():
        return "its environment is not there (make bench-data makes it)"
    command = [str(python), str(Path(__file__).resolve()), "--worker", worker, "--file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        return f"exit code {done.returncode}: {lines[-1][:200]}"
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict) -> str:
    """The result as a page of Markdown."""
    lines = [
        "# Indexing JSON lines",
        "",
        f"{found['device']}; {found['bytes'] / 1e6:,.0f} MB, {found['documents']:,} documents; {found['date'][:10]}. "
        f"Median (and range) of {found['rounds']} rounds, taking turns, each in a fresh process, one thread at work.",
        "",
        "| | MB/s | x | opening (ms) | a document (µs) | index (bytes a document) | peak memory (MB) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    speeds = {n: [found["bytes"] / 1e6 / r["index_seconds"] for r in runs] for n, runs in found["runs"].items() if runs}
    for name, speed in speeds.items():
        runs = found["runs"][name]

        def of(key: str, runs=runs) -> float:
            return statistics.median(r[key] for r in runs)

        median = statistics.median(speed)
        against = median / statistics.median(speeds["modalities"]) if "modalities" in speeds else 0
        lines.append(
            f"| {NAMES[name]} | {median:,.0f} ({min(speed):,.0f} to {max(speed):,.0f}) | {against:.1f} "
            f"| {of('open_seconds') * 1e3:,.1f} | {of('read_microseconds'):,.1f} "
            f"| {of('index_bytes') / of('documents'):,.1f} | {of('peak_bytes') / 1e6:,.0f} |"
        )
    lines += ["", "Modalities parses each line as JSON while it indexes; Weft does not."]
    for name, why in found["failed"].items():
        lines += ["", f"Not measured: {NAMES[name]}: {why}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Indexing JSON lines: Weft and Modalities.")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 20 MB: does it work at all?")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--modalities-python", type=Path, default=HERE.parent / ".venv-modalities/bin/python")
    parser.add_argument("--worker", choices=list(NAMES), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps({"weft": weft, "modalities": modalities}[args.worker](args.file)))
        return 0
    if args.quick:
        args.megabytes, args.rounds = 20, 1
    from corpus import make_jsonl

    work = HERE / "work"
    work.mkdir(exist_ok=True)
    path = work / "index.jsonl"
    found = make_jsonl(path, args.megabytes)
    found |= {"device": processor(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    found |= {"rounds": args.rounds, "quick": args.quick, "runs": {name: [] for name in NAMES}, "failed": {}}
    pythons = {"weft": Path(sys.executable), "modalities": args.modalities_python}
    for number in range(args.rounds):
        path.read_bytes()  # into the page cache
        for name in NAMES:
            if name in found["failed"]:
                continue
            got = run(name, path, pythons[name])
            if isinstance(got, str):
                found["failed"][name] = got
                print(f"round {number + 1}: {NAMES[name]}: FAILED: {got}", flush=True)
            else:
                found["runs"][name].append(got)
                speed = found["bytes"] / 1e6 / got["index_seconds"]
                print(f"round {number + 1}: {NAMES[name]}: {speed:,.0f} MB/s", flush=True)
    for file in work.glob("index*"):
        os.unlink(file)
    name = "data_index-quick" if args.quick else "data_index"
    write_results(args.out, name, table(found), found)
    return 0 if found["runs"]["weft"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
