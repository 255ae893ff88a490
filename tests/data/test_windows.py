"""Windows of a store: loss masks, and documents kept apart, against a walk over the documents."""

import numpy as np
import pytest
from store_cases import make_store, some_lengths

from weft.data.sequences.windows import StoreDataset
from weft.errors import UserError


def walked(lengths, window, length):
    """Segments, positions and which labels are of the same document, token by token."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    here = owner[window * length : (window + 1) * length + 1]
    segments, positions, kept = [0], [0], []
    for i in range(1, length):
        same = here[i] == here[i - 1]
        segments.append(segments[-1] + (not same))
        positions.append(positions[-1] + 1 if same else 0)
    kept = [here[i] == here[i + 1] for i in range(length)]
    return segments, positions, kept


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("lengths", [some_lengths(1, 60, 90), [200], [1] * 150, [3, 0, 0, 64, 64, 65, 0, 5]])
def test_documents_are_kept_apart(tmp_path, lengths, length):
    store = make_store(tmp_path / "store", lengths, dtype=np.uint16)
    dataset = StoreDataset(store, length, document_attention=True)
    for window in range(len(dataset)):
        sample = dataset[window]
        segments, positions, kept = walked(lengths, window, length)
        assert sample["tokens"].tolist() == list(range(window * length, (window + 1) * length))
        assert sample["labels"].tolist() == list(range(window * length + 1, (window + 1) * length + 1))
        assert sample["segments"].tolist() == segments
        assert sample["positions"].tolist() == positions
        assert sample["weight"].tolist() == kept


@pytest.mark.parametrize("apart", [False, True])
def test_a_labels_weight_is_the_loss_mask_of_its_token(tmp_path, apart):
    lengths = [5, 9, 2, 16]
    mask = np.random.default_rng(0).integers(0, 2, 32)
    dataset = StoreDataset(make_store(tmp_path / "store", lengths, mask=mask), 8, document_attention=apart)
    first_tokens = np.isin(np.arange(32), [0, 5, 14, 16])
    expected = mask * ~first_tokens if apart else mask
    weight = np.concatenate([dataset[i]["weight"] for i in range(len(dataset))])
    assert weight.dtype == np.float32
    assert weight.tolist() == expected[1:25].tolist()


def test_without_masks_and_segments_all_counts_and_positions_run_through(tmp_path):
    sample = StoreDataset(make_store(tmp_path / "store", [4, 4, 4]), 8)[0]
    assert "segments" not in sample
    assert sample["weight"].tolist() == [1] * 8
    assert sample["positions"].tolist() == list(range(8))


def test_a_store_shorter_than_a_window_is_reported(tmp_path):
    with pytest.raises(UserError, match="one sequence and its last label need"):
        StoreDataset(make_store(tmp_path / "store", [8]), 8)
