"""The loader: start-up, memory and going on in the middle by number of samples, and tokens/s, beside two peers.

    .venv/bin/python benchmarks/data_loader.py [--samples 1e6,1e7,1e8,1e9] [--rounds 3] [--quick]

    weft        BatchSource over a token store, in the training process
    randperm    torch's DataLoader over a map-style dataset of the same memory map, with its RandomSampler
    megatron    Megatron-Core's GPTDataset over the same .bin and .idx, its indices in an empty cache folder, through
                torch's DataLoader with consecutive samples, as Megatron reads it

Start-up is measured on files of 2 bytes x samples x 2,048 tokens without content (they take no space), from the first
line after the imports to the first batch; then how long it takes to go on from the middle of the epoch in a new process
that has what the first one left on the disk. Memory is the process's peak over what it had after the imports; a process
may take `--memory` GB. Speed is measured on random tokens that are in the page cache. Every measurement is a process of
its own; peers take turns. Writes a table (.md) and all numbers (.json) into benchmarks/results.
"""

import argparse
import datetime
import json
import os
import resource
import shutil
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "peers"), str(HERE.parent / "src")]
from common import measured_apart, processor, write_results  # noqa: E402
from megatron_samples import gpt_dataset  # noqa: E402

LENGTH, ROWS = 2048, 32
DOCUMENT = 1 << 20  # tokens per document
H100_TOKENS = 1e15 * 0.4 / (6 * 1e9)  # a second, of a model of 1B parameters at 40% of an H100's peak


def make_store(folder: Path, samples: int, *, content: bool) -> None:
    """Writes a store of `samples` windows."""
    import numpy as np

    folder.mkdir(parents=True)
    tokens = samples * LENGTH + 1
    lengths = np.full(-(-tokens // DOCUMENT), DOCUMENT, np.int32)
    lengths[-1] = tokens - (len(lengths) - 1) * DOCUMENT
    if content:
        with open(folder / "tokens.bin", "wb") as file:
            generator = np.random.default_rng(0)
            for size in lengths.tolist():
                file.write(generator.integers(0, 50_000, size).astype(np.uint16).tobytes())
    else:
        with open(folder / "tokens.bin", "wb") as file:
            file.truncate(2 * tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1].astype(np.int64) * 2)])
    counts = np.array([len(lengths), len(lengths) + 1], np.uint64)
    with open(folder / "tokens.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + np.uint64(1).tobytes() + b"\x08" + counts.tobytes())
        for part in (lengths, offsets.astype(np.int64), np.arange(len(lengths) + 1, dtype=np.int64)):
            file.write(part.tobytes())
    info = {"tokenizer_digest": "", "vocab_size": 50_000, "eod_id": 0, "dtype": "uint16", "documents": len(lengths)}
    info |= {"tokens": tokens, "bytes": 4 * tokens, "bin_sha256": "", "idx_sha256": ""}
    (folder / "store.json").write_text(json.dumps(info))


# ---- the peers: each gives an iterator of batches that begins with batch number `first`


def weft(store: Path, samples: int, first: int):
    """Batches as a function of the step."""
    from weft.data.batches.loader import BatchSource
    from weft.data.sequences.windows import StoreDataset
    from weft.data.stores.store import TokenStore

    source = BatchSource(StoreDataset(TokenStore(store), LENGTH), batch_size=ROWS, seed=1)
    return source.iterate(first, samples // ROWS)


def randperm(store: Path, samples: int, first: int):
    """What many write first; on resuming it skips indices, not data."""
    import numpy as np
    import torch
    from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

    class Windows(Dataset):
        def __init__(self):
            self.tokens = np.memmap(store / "tokens.bin", np.uint16, mode="r")

        def __len__(self):
            return samples

        def __getitem__(self, index):
            window = torch.from_numpy(self.tokens[index * LENGTH : (index + 1) * LENGTH + 1].astype(np.int64))
            return window[:-1], window[1:]

    dataset = Windows()
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(1))
    batches = islice(BatchSampler(sampler, ROWS, drop_last=True), first, None)
    return iter(DataLoader(dataset, batch_sampler=batches))


def megatron(store: Path, samples: int, first: int):
    """Its three indices (documents, samples, shuffling) are made once and kept in a cache folder."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from torch.utils.data import DataLoader

    indexed = IndexedDataset(str(store / "tokens"), multimodal=False, mmap=True)
    dataset = gpt_dataset(indexed, store, samples, LENGTH, 50_000)
    batches = (range(b * ROWS, (b + 1) * ROWS) for b in range(first, samples // ROWS))
    return iter(DataLoader(dataset, batch_sampler=batches))


PEERS = {"weft": weft, "randperm": randperm, "megatron": megatron}


def measured(job: dict) -> dict:
    """One measurement, in this process."""
    import numpy
    import torch
    from torch.utils.data import DataLoader  # noqa: F401 (imports are not what is measured)

    if job["peer"] == "megatron":
        import megatron.core.datasets.gpt_dataset  # noqa: F401
    elif job["peer"] == "weft":
        import weft.data.batches.loader
        import weft.data.sequences.windows  # noqa: F401
    assert numpy is not None
    torch.set_num_threads(1)
    if job["memory"]:
        limit = int(job["memory"] * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    batches = PEERS[job["peer"]](Path(job["store"]), job["samples"], job["first"])
    next(batches)
    started = time.perf_counter() - began
    found = {"seconds": started}
    if job["batches"]:
        for _ in range(job["batches"] // 10):
            next(batches)
        began = time.perf_counter()
        for _ in range(job["batches"]):
            next(batches)
        found["tokens_per_second"] = job["batches"] * ROWS * LENGTH / (time.perf_counter() - began)
    found["memory"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return found


def run(**job) -> dict:
    """One measurement, in a process of its own."""
    return measured_apart(__file__, job)


def main() -> int:
    parser = argparse.ArgumentParser(description="Weft's loader beside two peers.")
    parser.add_argument("--samples", default="1e6,1e7,1e8,1e9")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--memory", type=float, default=12, help="GB that a process may take")
    parser.add_argument("--quick", action="store_true", help="does it work at all? no figures to quote")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(measured(json.loads(args.job))))
        return 0
    sizes = [int(float(size)) for size in args.samples.split(",")]
    if args.quick:
        sizes, args.rounds, args.batches = [10**5, 10**6], 1, 100
    work = HERE / "work" / f"loader-{os.getpid()}"
    found = []
    try:
        for samples in sizes:
            for number in range(args.rounds):
                for peer in PEERS:
                    store = work / f"sparse-{samples}-{peer}"
                    make_store(store, samples, content=False)
                    job = {"peer": peer, "store": str(store), "samples": samples, "batches": 0, "memory": args.memory}
                    start = run(**job, first=0)
                    middle = run(**job, first=samples // ROWS // 2) if "failed" not in start else start
                    found.append({"peer": peer, "samples": samples, "round": number, "start": start, "middle": middle})
                    print(f"{samples:,} samples, {peer}: {start}, {middle}", file=sys.stderr)
                    shutil.rmtree(store)
        store, samples = work / "real", 2 * 10**5 if not args.quick else 10**4
        make_store(store, samples, content=True)
        for number in range(args.rounds):
            for peer in PEERS:
                job = {"peer": peer, "store": str(store), "samples": samples, "first": 0, "memory": 0}
                speed = run(**job, batches=args.batches)
                found.append({"peer": peer, "round": number, "speed": speed})
                print(f"{peer}: {speed}", file=sys.stderr)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    name = "data_loader-quick" if args.quick else "data_loader"
    write_results(args.out, name, table(found, sizes, args), found)
    return 0


def table(found: list[dict], sizes: list[int], args) -> str:
    def median(rows: list[dict], part: str, key: str, scale: float, text: str) -> str:
        failed = [row[part]["failed"] for row in rows if "failed" in row[part]]
        return failed[0] if failed else text.format(statistics.median(row[part][key] for row in rows) * scale)

    lines = [
        "# The loader",
        "",
        f"{processor()}, one thread; {datetime.date.today()}; medians of {args.rounds} rounds. Sequences of {LENGTH:,} "
        f"tokens, batches of {ROWS}; at most {args.memory:g} GB for a process.",
        "",
        "| samples | loader | first batch | from the middle, in a new process | memory |",
        "| ---: | --- | ---: | ---: | ---: |",
    ]
    for samples in sizes:
        for peer in PEERS:
            rows = [row for row in found if row.get("samples") == samples and row["peer"] == peer]
            cells = [median(rows, part, "seconds", 1, "{:.3f} s") for part in ("start", "middle")]
            cells.append(median(rows, "start", "memory", 1e-6, "{:,.0f} MB"))
            lines.append(f"| {samples:,} | {peer} | {' | '.join(cells)} |")
    lines += ["", "| loader | tokens/s | of what an H100 eats that trains 1B parameters |", "| --- | ---: | ---: |"]
    for peer in PEERS:
        rows = [row for row in found if "speed" in row and row["peer"] == peer]
        million = median(rows, "speed", "tokens_per_second", 1e-6, "{:,.1f} M")
        times = median(rows, "speed", "tokens_per_second", 1 / H100_TOKENS, "{:,.0f} times")
        lines.append(f"| {peer} | {million} | {times} |")
    lines += ["", f"The H100: {H100_TOKENS:,.0f} tokens/s, 40% of 1e15 FLOP/s over 6 FLOP per parameter and token.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
