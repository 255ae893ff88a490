"""Entries of the cache that depend on the documents, and on how they are packed."""

from types import SimpleNamespace

import numpy as np
from store_cases import make_store

from weft.data.sequences.packed import PackedDataset
from weft.data.sequences.windows import StoreDataset
from weft.train.cache_entries import entry_path


def test_an_entry_belongs_to_samples_and_to_what_was_asked(tmp_path):
    data = SimpleNamespace(packing="best_fit", document_attention=True)
    one, other, mask = (
        make_store(tmp_path / "one", [6, 4]),
        make_store(tmp_path / "other", [4, 6]),
        np.ones(10, np.uint8),
    )
    learned = make_store(tmp_path / "learned", [3, 2, 3, 2], mask=mask)
    pairs = make_store(tmp_path / "pairs", [3, 2, 3, 2], mask=mask, kind="preferences")
    assert one.info.digest == other.info.digest
    assert learned.info.digest == pairs.info.digest

    def entry(dataset, *content, **changes):
        config = SimpleNamespace(data=SimpleNamespace(**(vars(data) | changes)))
        return entry_path("prepared", config, dataset, list(content))

    entries = [
        entry(PackedDataset(one, 8)),
        entry(PackedDataset(other, 8)),
        entry(PackedDataset(one, 9)),
        entry(PackedDataset(one, 8), "asked"),
        entry(PackedDataset(one, 8, pad=True), packing="pad"),
        entry(PackedDataset(one, 8, values={"label": np.ones(2, np.float32)})),
        entry(PackedDataset(one, 8, last_tokens=True)),
        entry(PackedDataset(learned, 8)),
        entry(PackedDataset(pairs, 8)),
        entry(StoreDataset(one, 8), packing="concatenate"),
        entry(StoreDataset(one, 8, document_attention=False), packing="concatenate", document_attention=False),
    ]
    assert len(set(entries)) == len(entries)
    again = make_store(tmp_path / "again", [6, 4])
    assert entry(PackedDataset(again, 8)) == entries[0]
