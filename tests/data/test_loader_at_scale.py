"""A store of 10^12 tokens, simulated by files without content, opens at once and needs no memory."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

TOKENS, DOCUMENTS = 10**12, 1000

PROGRAM = """
import os, resource, sys, time
import numpy, torch
from torch.utils.data import DataLoader

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before, began = resident(), time.perf_counter()
from weft.data.batches.loader import BatchSource
from weft.data.stores.store import TokenStore
from weft.data.sequences.windows import StoreDataset

source = BatchSource(StoreDataset(TokenStore(sys.argv[1]), 2048), batch_size=64, rank=1, ranks=4, seed=3)
batch = source.batch(1_000_000)
seconds, grown = time.perf_counter() - began, resident() - before
assert batch.tokens.shape == (16, 2048)
print(seconds, grown)
"""


@pytest.fixture
def trillion(tmp_path):
    """Two terabytes of zeros that take no room."""
    folder = tmp_path / "store"
    folder.mkdir()
    try:
        with open(folder / "tokens.bin", "wb") as file:
            file.truncate(2 * TOKENS)
    except OSError:
        pytest.skip("this file system has no files of two terabytes")
    lengths = np.full(DOCUMENTS, TOKENS // DOCUMENTS, np.int32)
    offsets = np.arange(DOCUMENTS, dtype=np.int64) * (2 * TOKENS // DOCUMENTS)
    head = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + b"\x08" + np.array([DOCUMENTS, DOCUMENTS + 1], np.uint64).tobytes()
    index = head + lengths.tobytes() + offsets.tobytes() + np.arange(DOCUMENTS + 1, dtype=np.int64).tobytes()
    (folder / "tokens.idx").write_bytes(index)
    info = {
        "tokenizer_digest": "none", "vocab_size": 50_000, "eod_id": 0, "dtype": "uint16", "documents": DOCUMENTS,
        "tokens": TOKENS, "bytes": 4 * TOKENS, "bin_sha256": "unknown", "idx_sha256": hashlib.sha256(index).hexdigest(),
    }  # fmt: skip
    (folder / "store.json").write_text(json.dumps(info))
    return folder


def test_the_millionth_batch_of_a_trillion_tokens(trillion):
    best = float("inf")
    for _ in range(3):  # others may be at work on this machine: the best of up to three attempts counts
        done = subprocess.run([sys.executable, "-c", PROGRAM, trillion], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        seconds, grown = map(float, done.stdout.split())
        assert grown < 50e6
        best = min(best, seconds)
        if best < 1:
            break
    assert best < 1
