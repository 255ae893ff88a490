"""Length warm-up: stages, and batches cut into shorter rows."""

import numpy as np
import pytest
import torch
from store_cases import make_store, some_lengths

from weft.data.batches.samples import collate
from weft.data.sequences.length_warmup import LengthWarmup
from weft.data.sequences.packed import PackedDataset
from weft.data.sequences.windows import StoreDataset


@pytest.mark.parametrize(
    ("full", "start", "stages"),
    [(1024, 128, [128, 256, 512, 1024]), (1000, 125, [125, 250, 500, 1000]), (4, 1, [1, 2, 4])],
)
def test_stages_double_from_start_to_the_full_length(full, start, stages):
    assert LengthWarmup(full, start, 10).stages == stages


def test_the_length_follows_the_line_from_below():
    warmup = LengthWarmup(2048, 64, 1000)
    lengths = [warmup.length(step) for step in range(1100)]
    line = [64 + (2048 - 64) * min(step, 1000) / 1000 for step in range(1100)]
    assert lengths[0] == 64
    assert lengths == sorted(lengths)
    assert all(length <= aimed < 2 * length or length == 2048 for length, aimed in zip(lengths, line, strict=True))
    assert lengths.index(2048) == 1000
    assert LengthWarmup(2048, 64, 0).length(0) == 2048


@pytest.fixture(params=["windows", "apart", "packed"])
def batch(request, tmp_path):
    store = make_store(tmp_path / "store", some_lengths(2, 40, 40))
    if request.param == "packed":
        dataset = PackedDataset(store, 32)
    else:
        dataset = StoreDataset(store, 32, document_attention=request.param == "apart")
    return collate(dataset, [0, 3, 1, 2], np.array([9, 8, 7, 6]), batch_size=5, real=4)


@pytest.mark.parametrize("length", [1, 4, 16, 32])
def test_cutting_keeps_tokens_labels_weights_and_their_order(batch, length):
    short = batch.split_sequences(length)
    each = 32 // length
    assert short.tokens.shape == (5 * each, length)
    for part in ("tokens", "labels", "weight"):
        assert torch.equal(getattr(short, part).flatten(), getattr(batch, part).flatten())
    assert short.samples.tolist() == np.repeat([9, 8, 7, 6, -1], each).tolist()


@pytest.mark.parametrize("length", [1, 4, 16, 32])
def test_positions_begin_anew_with_every_row_and_every_document(batch, length):
    short = batch.split_sequences(length)
    for row, positions in enumerate(short.positions.tolist()):
        segments = [0] * length if short.segments is None else short.segments[row].tolist()
        expected = []
        for i in range(length):
            expected.append(expected[-1] + 1 if i and segments[i] == segments[i - 1] else 0)
        assert positions == expected


def test_rows_that_do_not_come_out_even_are_refused(batch):
    with pytest.raises(ValueError, match=r"32 tokens .* split into sequences of 5"):
        batch.split_sequences(5)
