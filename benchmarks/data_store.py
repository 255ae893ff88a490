"""Token stores of many documents: opening one, reading single documents, and the first batch, beside two peers.

    .venv/bin/python benchmarks/data_store.py [--documents 1e6,1e7,1e8] [--rounds 3] [--quick]

    weft        TokenStore, and BatchSource over it
    megatron    Megatron-Core's IndexedDataset over the same files, and GPTDataset, its indices in an empty cache folder
    modalities  EmbeddedStreamData over a .pbin of the same documents (only where `import modalities` works); it has no
                batches of its own that are like the others', so only its opening is measured

The tokens take no space on disk: zeros in a sparse file; lengths and offsets are real (20 bytes a document).
Before each measurement the files are dropped from the page cache. Every measurement is a process of its own, and peers
take turns. Memory is the process's peak over what it had after its imports. The second table is what operations on a
store of `--tokens` random tokens take, start-up included. Writes a table (.md) and all numbers (.json) into
benchmarks/results.
"""

import argparse
import datetime
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "peers"), str(HERE.parent / "src")]
from common import measured_apart, processor, write_results  # noqa: E402
from megatron_samples import gpt_dataset  # noqa: E402

READ, LENGTH, ROWS = 10_000, 2048, 32
MEAN = 500  # tokens a document
OPERATIONS = {
    "verify": [],
    "inspect": [],
    "shuffle": ["--out"],
    "split": ["--validation", "0.1", "--out", "held"],
    "filter": ["--min-tokens", "100", "--out"],
    "dedup --exact": ["--out"],
    "dedup --near": ["--out"],
    "convert --to pbin": ["--out"],
}


def make_store(folder: Path, documents: int, *, content: bool) -> None:
    """Writes a store of `documents` documents of 1 to 999 tokens."""
    import numpy as np

    from weft.data.stores.indexed import IndexedWriter

    class Sparse(IndexedWriter):
        """Writes no tokens."""

        def add(self, tokens, lengths, mask=None):
            self._lengths.write(lengths.astype("<i4").tobytes())
            self.documents += len(lengths)
            self.tokens += int(lengths.sum())

    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    writer = (IndexedWriter if content else Sparse)(folder / "tokens", np.uint16)
    for start in range(0, documents, 1 << 16):
        lengths = generator.integers(1, 2 * MEAN, min(1 << 16, documents - start))
        tokens = generator.integers(1, 32_000, int(lengths.sum()) if content else 0).astype(np.uint16)
        if content:
            tokens[np.cumsum(lengths) - 1] = 0
        writer.add(tokens, lengths)
    written = writer.finish()
    with open(folder / "tokens.bin", "ab") as file:
        file.truncate(2 * writer.tokens)
    info = {"tokenizer_digest": None, "vocab_size": 32_000, "eod_id": 0, "bytes": None}
    (folder / "store.json").write_text(json.dumps(info | {"empty_documents": writer.empty} | written))


def make_pbin(folder: Path) -> None:
    """The same documents as Modalities writes them; 36 bytes of index each."""
    import pickle

    from weft.data.stores.store import TokenStore

    store = TokenStore(folder)
    pairs = list(zip(store.offsets.tolist(), (store.lengths.astype("i8") * 2).tolist(), strict=True))
    with open(folder / "tokens.pbin", "wb") as file:
        file.write((2 * store.num_tokens).to_bytes(8, "little") + (2).to_bytes(4, "little"))
        file.seek(12 + 2 * store.num_tokens)
        file.write(pickle.dumps(pairs))


class Weft:
    def __init__(self, folder: Path):
        from weft.data.stores.store import TokenStore

        self.store = TokenStore(folder)

    def document(self, number: int):
        return self.store.document(number)

    def batch(self, samples: int):
        from weft.data.batches.loader import BatchSource
        from weft.data.sequences.windows import StoreDataset

        return BatchSource(StoreDataset(self.store, LENGTH), batch_size=ROWS, seed=1).batch(0)


class Megatron:
    def __init__(self, folder: Path):
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self.folder, self.store = folder, IndexedDataset(str(folder / "tokens"), multimodal=False, mmap=True)

    def document(self, number: int):
        return self.store[number]

    def batch(self, samples: int):
        dataset = gpt_dataset(self.store, self.folder, samples, LENGTH, 32_000)
        return [dataset[number] for number in range(ROWS)]


class Modalities:
    def __init__(self, folder: Path):
        from modalities.dataloader.create_packed_data import EmbeddedStreamData

        self.store = EmbeddedStreamData(folder / "tokens.pbin")

    def document(self, number: int):
        start, size = self.store.index_base[number]
        return self.store.data[start : start + size]


PEERS = {"weft": Weft, "megatron": Megatron, "modalities": Modalities}


def measured(job: dict) -> dict:
    """One measurement, in this process."""
    if job["what"] == "operation":
        return operate(Path(job["work"]), Path(job["store"]), job["name"])
    if job["what"] == "store":  # a process inherits the peak of the one that starts it: that one stays small
        make_store(Path(job["store"]), job["documents"], content=job["content"])
        if job["pbin"]:
            make_pbin(Path(job["store"]))
        return {}
    import numpy as np
    import torch

    torch.set_num_threads(1)
    if job["peer"] == "weft":  # imports are not what is measured
        import weft.data.batches.loader
        import weft.data.sequences.windows  # noqa: F401
    elif job["peer"] == "megatron":
        import megatron.core.datasets.gpt_dataset  # noqa: F401
    else:
        import modalities.dataloader.create_packed_data  # noqa: F401
    folder = Path(job["store"])
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    resource.setrlimit(resource.RLIMIT_DATA, (int(job["memory"] * 2**30),) * 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    store = PEERS[job["peer"]](folder)
    found = {"open": time.perf_counter() - began}
    numbers = np.random.default_rng(1).integers(0, job["documents"], READ).tolist()
    if job["what"] == "documents":
        began = time.perf_counter()
        total = sum(len(store.document(number)) for number in numbers)
        found |= {"document": (time.perf_counter() - began) / READ, "tokens": total}
    else:
        store.batch(job["documents"] * MEAN // LENGTH // 2)
        found["batch"] = time.perf_counter() - began
    return found | {"memory": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}


def run(**job) -> dict:
    """One measurement, in a process of its own."""
    return measured_apart(__file__, job)


def operate(work: Path, store: Path, name: str) -> dict:
    """Seconds and peak memory of an operation, from the command line."""
    verb, *options = name.split()
    arguments = [str(work / word) if word == "held" else word for word in OPERATIONS[name]]
    if "--out" in arguments:
        arguments.append(str(work / "made"))
    began = time.perf_counter()
    command = [sys.executable, "-m", "weft", "data", verb, str(store), *options, *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    found = {"seconds": time.perf_counter() - began, "memory": 1024 * used.ru_maxrss}
    for made in ("made", "held"):
        shutil.rmtree(work / made, ignore_errors=True)
        (work / made).unlink(missing_ok=True)
    return found if process.returncode == 0 else {"failed": said.splitlines()[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Stores of many documents, beside two peers.")
    parser.add_argument("--documents", default="1e6,1e7,1e8")
    parser.add_argument("--tokens", type=float, default=1e9, help="of the store that is worked on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=12, help="GB that a process may take")
    parser.add_argument("--quick", action="store_true", help="does it work at all? no figures to quote")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(measured(json.loads(args.job))))
        return 0
    sizes = [int(float(size)) for size in args.documents.split(",")]
    if args.quick:
        sizes, args.rounds, args.tokens = [10**4, 10**5], 1, 1e7
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    work = HERE / "work" / f"store-{os.getpid()}"
    found = []
    try:
        for documents in sizes:
            store = work / "sparse"
            pbin = find_spec("modalities") is not None and documents <= 10**7
            run(what="store", store=str(store), documents=documents, content=False, pbin=pbin)
            for number in range(args.rounds):
                for peer in PEERS:
                    for what in ("documents", "batch"):
                        if peer == "modalities" and (what == "batch" or not pbin):
                            continue
                        job = {"peer": peer, "documents": documents, "what": what}
                        got = run(**job, store=str(store), memory=args.memory)
                        shutil.rmtree(store / "cache", ignore_errors=True)
                        found.append({**job, "round": number, "found": got})
                        print(f"{documents:,} documents, {peer}, {what}: {got}", file=sys.stderr)
            shutil.rmtree(store)
        store = work / "real"
        run(what="store", store=str(store), documents=int(args.tokens / MEAN), content=True, pbin=False)
        for number in range(args.rounds):
            for name in OPERATIONS:
                got = run(what="operation", work=str(work), store=str(store), name=name)
                found.append({"operation": name, "round": number, "found": got})
                print(f"{name}: {got}", file=sys.stderr)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    name = "data_store-quick" if args.quick else "data_store"
    write_results(args.out, name, table(found, sizes, args), found)
    return 0


def table(found: list[dict], sizes: list[int], args) -> str:
    def median(rows: list[dict], key: str, scale: float, text: str) -> str:
        if not rows:
            return "-"
        failed = [row["found"]["failed"] for row in rows if "failed" in row["found"]]
        return failed[0] if failed else text.format(statistics.median(row["found"][key] for row in rows) * scale)

    lines = [
        "# Stores",
        "",
        f"{processor()}; {datetime.date.today()}; medians of {args.rounds} rounds; files not in the page cache. "
        f"At most {args.memory:g} GB for a process.",
        "",
        f"| documents | | open | one of {READ:,} random documents | memory | first batch | memory |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for documents in sizes:
        for peer in PEERS:
            ours = [row for row in found if row.get("documents") == documents and row["peer"] == peer]
            if not ours:
                continue
            single, batch = ([row for row in ours if row["what"] == what] for what in ("documents", "batch"))
            cells = [median(single, "open", 1e3, "{:,.1f} ms"), median(single, "document", 1e6, "{:,.0f} us")]
            cells += [median(single, "memory", 1e-6, "{:,.0f} MB"), median(batch, "batch", 1, "{:,.2f} s")]
            cells.append(median(batch, "memory", 1e-6, "{:,.0f} MB"))
            lines.append(f"| {documents:,} | {peer} | {' | '.join(cells)} |")
    lines += ["", f"Operations on {int(args.tokens):,} tokens in {int(args.tokens / MEAN):,} documents:", ""]
    lines += ["| `weft data` | seconds | million tokens/s | memory |", "| --- | ---: | ---: | ---: |"]
    for name in OPERATIONS:
        rows = [row for row in found if row.get("operation") == name]
        seconds, memory = median(rows, "seconds", 1, "{:,.1f}"), median(rows, "memory", 1e-6, "{:,.0f} MB")
        speed = "-" if not seconds[0].isdigit() else f"{args.tokens / 1e6 / float(seconds.replace(',', '')):,.0f}"
        lines.append(f"| `{name}` | {seconds} | {speed} | {memory} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    raise SystemExit(main())
