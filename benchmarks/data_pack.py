"""Text to a file of tokens, end to end, by the same tokenizer on the same cores: Weft, Modalities 0.5, tokenizers.

    .venv/bin/python benchmarks/data_pack.py [--megabytes 200] [--rounds 5] [--cores 4] [--quick]

The text is real: the .py, .md and .txt files of the standard library and the installed packages, each content once, as
JSON lines. Every measurement is a fresh process, timed from its start to its end, and they take turns; the input was
read before, so that it comes from memory for all. They are:

    Weft            the command `weft data pack`, as a user runs it, with all its checks
    encode_batch    a loop as short as can be: parse lines, `encode_batch_fast` of 1,000, ids as uint16 to a file
    gigatoken       the library that Weft encodes with, without its checks: parse lines, encode 8 MB of joined text at a
                    time, ids as uint16 to a file, without ends of documents
    Modalities      its PackedDataGenerator (`modalities data pack_encoded_data` without reading the config); making
                    the index that it needs beforehand is not timed

Weft's tokens and those of `tokenizers` are compared byte by byte. Memory is measured in a round of its own that is not
timed: the sum over all processes of what each has alone and its share of what they have together (PSS), at its peak.
Writes a table (.md) and all numbers (.json) into benchmarks/results.
"""

import argparse
import datetime
import filecmp
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "peers"), str(HERE.parent / "src")]
from common import processor, write_results  # noqa: E402

NAMES = {
    "weft": "Weft, `weft data pack`",
    "weft-exact": "Weft, `weft data pack --exact`",
    "tokenizers": "tokenizers, `encode_batch_fast`",
    "gigatoken": "gigatoken, `encode_batch_padded`",
    "modalities": "Modalities 0.5, `pack_encoded_data`",
}
GOALS = {"tokenizers": 15, "gigatoken": 0.7, "modalities": 20}
VOCABULARY = 32_000


def encode_batch_fast(source: Path, folder: Path, out: Path) -> None:
    """The shortest loop around `tokenizers`."""
    import numpy as np
    import orjson
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = np.array([tokenizer.token_to_id("<|endoftext|>")], np.uint16)

    def write(batch, file):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            file.write(np.array(encoding.ids, np.uint16).data)
            file.write(end.data)
        batch.clear()

    batch: list[str] = []
    with open(source, "rb") as lines, open(out, "wb") as file:
        for line in lines:
            batch.append(orjson.loads(line)["text"])
            if len(batch) == 1000:
                write(batch, file)
        write(batch, file)


def gigatoken(source: Path, folder: Path, out: Path) -> None:
    """The shortest loop around gigatoken."""
    import gigatoken
    import numpy as np
    import orjson

    tokenizer = gigatoken.Tokenizer.from_json((folder / "tokenizer.json").read_text())

    def write(texts, file):
        data = gigatoken.BytesSource("\n".join(texts).encode())
        file.write(tokenizer.encode_batch_padded(data, pad_id=0)[0][0].astype(np.uint16).data)
        texts.clear()

    texts: list[str] = []
    size = 0
    with open(source, "rb") as lines, open(out, "wb") as file:
        for line in lines:
            texts.append(orjson.loads(line)["text"])
            size += len(texts[-1])
            if size >= 8e6:
                write(texts, file)
                size = 0
        if texts:
            write(texts, file)


def modalities(source: Path, folder: Path, out: Path, cores: int) -> None:
    """Modalities' packer with the settings of its examples."""
    from modalities.dataloader.create_packed_data import PackedDataGenerator
    from modalities.tokenization.tokenizer_wrapper import PreTrainedHFTokenizer

    PackedDataGenerator(
        source,
        tokenizer=PreTrainedHFTokenizer(str(folder)),
        eod_token="<|endoftext|>",
        number_of_processes=cores,
        jq_pattern=".text",
        processing_batch_size=10,
        raw_samples_queue_size=300,
        processed_samples_queue_size=300,
    ).run(out)


def index_for_modalities(source: Path) -> None:
    """What its packer needs beside the lines."""
    from modalities.dataloader.create_index import IndexGenerator

    source.with_suffix(".idx").unlink(missing_ok=True)
    IndexGenerator(source).create_index(source.with_suffix(".idx"))


def command(name: str, work: Path, cores: int, python: Path) -> tuple[list[str], Path]:
    """How a contender is started, and what it writes."""
    source, folder = work / "pack.jsonl", work / "pack-tokenizer"
    if name.startswith("weft"):
        out = work / "pack-weft"
        line = [
            sys.executable,
            "-m",
            "weft",
            "data",
            "pack",
            str(source),
            "--tokenizer",
            str(folder),
            "--out",
            str(out),
        ]
        return [*line, "--workers", str(cores), *(["--exact"] if name == "weft-exact" else [])], out
    out = work / {"modalities": "pack.pbin", "gigatoken": "pack-gigatoken.bin"}.get(name, "pack.bin")
    line = [str(python) if name == "modalities" else sys.executable, str(Path(__file__).resolve())]
    return [*line, "--worker", name, "--cores", str(cores), "--files", str(source), str(folder), str(out)], out


def run(line: list[str], out: Path, cores: int, memory: bool) -> dict | str:
    """Start a contender and wait for its end; or, in a word, why there is nothing."""
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    paths = [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"RAYON_NUM_THREADS": str(cores), "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    peak = 0
    began = time.perf_counter()
    with open(out.with_suffix(".log"), "w+") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, env=environment)
        while memory and process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(0.02)
        code = process.wait()
        seconds = time.perf_counter() - began
        if code:
            log.seek(0)
            said = [text for text in log.read().splitlines() if text.strip()] or ["no message"]
            return f"exit code {code}: {said[-1][:200]}"
    return {"seconds": seconds, "peak_bytes": peak}


def memory_of(pid: int) -> int:
    """PSS of a process and those that it started."""
    import psutil

    total = 0
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    for member in family:
        try:
            total += member.memory_full_info().pss
        except psutil.Error:  # it ended meanwhile
            continue
    return total


def measure(names: list[str], args: argparse.Namespace, work: Path, found: dict) -> None:
    """All rounds; the first, which is for memory, warms the disk's cache as well."""
    for number in range(args.rounds + 1):
        for name in names:
            if name in found["failed"]:
                continue
            (work / "pack.jsonl").read_bytes()  # into the page cache
            line, out = command(name, work, args.cores, args.modalities_python)
            got = run(line, out, args.cores, memory=number == 0)
            if isinstance(got, str):
                found["failed"][name] = got
                print(f"{NAMES[name]}: FAILED: {got}", flush=True)
            elif number == 0:
                found["memory"][name] = got["peak_bytes"]
            else:
                found["runs"][name].append(got)
                print(f"round {number}: {NAMES[name]}: {found['bytes'] / 1e6 / got['seconds']:,.1f} MB/s", flush=True)
        found["rounds"] = number
        ours, theirs = work / "pack-weft" / "tokens.bin", work / "pack.bin"
        if ours.exists() and theirs.exists():
            found["same"] = filecmp.cmp(ours, theirs, shallow=False)


def table(found: dict) -> str:
    """The result as a page of Markdown."""
    speeds = {n: [found["bytes"] / 1e6 / r["seconds"] for r in runs] for n, runs in found["runs"].items() if runs}
    lines = [
        "# Packing JSON lines into tokens",
        "",
        f"{found['device']}, {found['cores']} used; {found['bytes'] / 1e6:,.0f} MB, {found['documents']:,} documents, "
        f"byte-level BPE of {VOCABULARY:,}; {found['date'][:10]}. Median (and range) of {found['rounds']} rounds, "
        "taking turns, each in a fresh process, from its start to its end.",
        "",
        "| | MB/s | seconds | Weft is faster by | peak memory (MB) |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, speed in speeds.items():
        # Of each round by itself: what disturbed the machine disturbed both.
        ratios = [a / b for a, b in zip(speeds.get("weft", []), speed, strict=False)]
        against = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})" if ratios else "-"
        seconds = statistics.median(r["seconds"] for r in found["runs"][name])
        lines.append(
            f"| {NAMES[name]} | {statistics.median(speed):,.1f} ({min(speed):,.1f} to {max(speed):,.1f}) "
            f"| {seconds:,.2f} | {'' if name == 'weft' else against} | {found['memory'].get(name, 0) / 1e6:,.0f} |"
        )
    same = {True: "are equal, byte by byte", False: "DIFFER", None: "were not compared"}[found["same"]]
    lines += ["", f"The tokens of Weft and of `tokenizers` {same}."]
    goals = ", ".join(f"{goal} times {NAMES[name]}" for name, goal in GOALS.items())
    lines += ["", f"The goal: {goals}; less than 1 GB of memory."]
    for name, why in found["failed"].items():
        lines += ["", f"Not measured: {NAMES[name]}: {why}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Packing JSON lines: Weft, tokenizers, Modalities.")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=4)
    parser.add_argument("--only", default=",".join(["weft", *GOALS]), help="some of: " + ",".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="one round of 12 MB: does it work at all?")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--modalities-python", type=Path, default=HERE.parent / ".venv-modalities/bin/python")
    parser.add_argument("--worker", choices=[*NAMES, "index"], help=argparse.SUPPRESS)
    parser.add_argument("--files", type=Path, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "index":
        index_for_modalities(args.files[0])
        return 0
    if args.worker == "modalities":
        modalities(*args.files, args.cores)
        return 0
    if args.worker:
        {"tokenizers": encode_batch_fast, "gigatoken": gigatoken}[args.worker](*args.files)
        return 0
    if args.quick:
        args.megabytes, args.rounds = 12, 1
    from corpus import make_jsonl

    work = HERE / "work"
    work.mkdir(exist_ok=True)
    source, folder = work / "pack.jsonl", work / "pack-tokenizer"
    found = make_jsonl(source, args.megabytes, (".py", ".md", ".txt"), unique=True)
    found |= {"device": processor(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    names = args.only.split(",")
    found |= {"rounds": 0, "cores": args.cores, "quick": args.quick, "same": None}
    found |= {"runs": {name: [] for name in names}, "memory": {}, "failed": {}}
    train = [sys.executable, "-m", "weft", "data", "train-tokenizer", str(source), "--vocab-size", str(VOCABULARY)]
    subprocess.run([*train, "--max-bytes", "2e7", "--overwrite", "--out", str(folder)], check=True)
    if "modalities" in names:
        line = [str(args.modalities_python), str(Path(__file__).resolve()), "--worker", "index", "--files", str(source)]
        if not args.modalities_python.exists() or subprocess.run(line).returncode:
            found["failed"]["modalities"] = "its environment is not there or not whole (make bench-data makes it)"
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        measure(names, args, work, found)
    except KeyboardInterrupt:
        print("interrupted: a table of what there is")
    for file in work.glob("pack*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    name = "data_pack-quick" if args.quick else "data_pack"
    write_results(args.out, name, table(found), found)
    return 0 if found["runs"].get("weft") else 1


if __name__ == "__main__":
    raise SystemExit(main())
