"""Token stores of known content, written without text or tokenizer."""

import numpy as np

from weft.data.stores.indexed import IndexedWriter
from weft.data.stores.store import StoreInfo, TokenStore
from weft.data.stores.store_json import write_store_json

EOD = 0


def make_store(folder, lengths, *, tokens=None, mask=None, kind="text", dtype=np.int32) -> TokenStore:
    """A store of documents of these lengths; token `i` of the store has the id `i`, unless `tokens` says otherwise."""
    lengths = np.asarray(lengths)
    total = int(lengths.sum())
    tokens = np.arange(total) if tokens is None else np.asarray(tokens)
    folder.mkdir(parents=True)
    writer = IndexedWriter(folder / "tokens", np.dtype(dtype), mask=mask is not None)
    writer.add(tokens, lengths, mask)
    info = StoreInfo(
        kind=kind,
        tokenizer_digest="none",
        vocab_size=int(tokens.max(initial=0)) + 1,
        eod_id=EOD,
        bytes=total,
        **writer.finish(),
    )
    write_store_json(folder, info.model_dump())
    return TokenStore(folder)


def some_lengths(seed: int, documents: int, longest: int) -> np.ndarray:
    """Lengths of which most are short, some are 1 and some far longer than a sequence."""
    drawn = np.random.default_rng(seed).lognormal(np.log(longest / 8), 1.2, documents)
    return np.clip(drawn, 1, longest).astype(np.int64)
