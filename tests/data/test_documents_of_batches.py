"""Sums and values of packed documents and of items, against loops over the documents."""

import numpy as np
import pytest
import torch

from weft.data.batches.batch import Batch
from weft.data.batches.given import batch_from
from weft.data.batches.layout import Field, Layout
from weft.data.batches.loader import BatchSource
from weft.data.batches.samples import collate
from weft.errors import UserError

LAYOUT = Layout({"label": Field(per_document=True)})
SEGMENTS = [[0, 0, 0, 1, 1, 2, 2, 3], [0, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0]]
LABELS = [[0.1, 0.7, -3.3, 4.0], [0.3, 1e30, 2.0, 0.0], [5.0, 0.0, 0.0, 0.0]]


def made(**more):
    """A batch whose values of documents stand at their tokens."""
    ids = np.array(SEGMENTS)
    tokens = np.random.default_rng(0).integers(0, 50, ids.shape)
    label = np.take_along_axis(np.array(LABELS, np.float32), ids, 1)
    weight = np.ones(ids.shape)
    weight[0, 3:5] = 0  # a document without learned tokens
    return batch_from({"tokens": tokens, "segments": ids, "weight": weight, "label": label} | more, LAYOUT)


def slow_sums(batch, values):
    found = torch.zeros(len(values), batch.documents, dtype=torch.float64)
    for row, ids in enumerate(batch.segments.tolist()):
        for place, document in enumerate(ids):
            found[row, document] += values[row, place].item()
    return found


def test_sums_values_and_learned_documents_are_those_of_a_loop():
    batch = made()
    values = torch.randn(batch.tokens.shape, generator=torch.manual_seed(1))
    assert batch.documents == 4
    assert torch.equal(batch.document_sums(values), slow_sums(batch, values))
    assert torch.equal(batch.document_values("label"), torch.tensor(LABELS, dtype=torch.float32).double())
    assert batch.learned_documents.tolist() == [
        [True, False, True, False],
        [False, True, True, False],
        [True] + [False] * 3,
    ]
    at_tokens = batch.at_tokens(torch.arange(12).view(3, 4))
    assert at_tokens.tolist() == [[4 * row + one for one in ids] for row, ids in enumerate(SEGMENTS)]


def test_the_gradient_of_a_documents_sum_is_its_tokens():
    batch = made()
    values = torch.zeros(batch.tokens.shape, requires_grad=True)
    factors = torch.arange(12.0).view(3, 4)
    (batch.document_sums(values) * factors).sum().backward()
    assert torch.equal(values.grad, batch.at_tokens(factors))


def test_a_sequence_without_segments_is_one_document():
    batch = batch_from({"tokens": np.arange(6).reshape(2, 3), "label": [4.0, 5.0]}, LAYOUT)
    assert (batch.documents, batch.segments) == (1, None)
    assert batch.document_sums(batch.tokens).tolist() == [[3], [12]]
    assert batch.document_values("label").tolist() == [[4], [5]]
    assert batch.at_tokens(torch.tensor([[7], [8]])).tolist() == [[7] * 3, [8] * 3]


def test_slices_and_padding_keep_the_columns():
    batch = made()
    micro = batch.pad(1).split(2)
    assert [one.documents for one in (*micro, batch.of_rank(2, 3))] == [4, 4, 4]
    found = torch.cat([one.document_sums(one.weight) for one in micro])
    assert torch.equal(found, torch.cat([batch.document_sums(batch.weight), torch.zeros(1, 4)]))
    assert not micro[1].learned_documents[1].any()
    assert torch.equal(batch.of_rank(2, 3).document_values("label"), batch.document_values("label")[2:])


def test_items_are_adjacent_documents():
    segments = np.array([[0, 0, 1, 1, 2, 2, 3, 4]])
    batch = batch_from({"tokens": segments, "segments": segments, "label": segments + 1}, LAYOUT)
    values = batch.document_values("label")
    assert batch.by_item(values).tolist() == [[[1, 2], [3, 4], [5, 0]]]
    assert batch.by_item(values, 3).tolist() == [[[1, 2, 3], [4, 5, 0]]]
    assert batch.by_item(values > 2).dtype == torch.bool


@pytest.mark.parametrize(
    ("segments", "documents"),
    [
        ([[-1, 0, 0, 7], [3, 3, 1, 1]], [[0, 1, 1, 2], [0, 0, 1, 1]]),
        ([[0, 0, 1, -1], [0, 1, 2, -1]], [[0, 0, 1, 2], [0, 1, 2, 3]]),
        ([[10**12, 10**12, 5, 5], [0, 0, 0, 0]], [[0, 0, 1, 1], [0, 0, 0, 0]]),
        ([[0, 0, 2, 2], [1, 1, 1, 4]], [[0, 0, 1, 1], [0, 0, 0, 1]]),
    ],
)
def test_runs_of_other_segments_are_counted(segments, documents):
    batch = batch_from({"tokens": np.ones((2, 4), int), "segments": segments}, Layout())
    assert batch.segments.tolist() == documents
    assert batch.documents == np.max(documents) + 1


def test_samples_of_datasets_have_values_of_documents():
    class Samples:
        def __init__(self, label):
            self.label = label

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"tokens": np.arange(4), "segments": [0, 0, 1, 1], "label": self.label}

    batch = BatchSource(Samples([2, 2, 3, 3]), batch_size=2, layout=LAYOUT).batch(0)
    assert batch.document_values("label").tolist() == [[2, 3]] * 2
    batch = BatchSource(Samples(6), batch_size=2, layout=LAYOUT).batch(0)
    assert batch.document_values("label").tolist() == [[6, 6]] * 2
    with pytest.raises(UserError, match=r"Samples\[0\].*label has several values in a document"):
        BatchSource(Samples([2, 1, 3, 3]), batch_size=1, seed=None, layout=LAYOUT).batch(0)
    with pytest.raises(UserError, match="a document has one number"):
        made(label=np.zeros((3, 8, 2)))


def test_negative_segments_of_a_batch_made_by_hand_are_refused():
    ones = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="segments must be 0 or more"):
        Batch(ones, ones, ones.float(), ones, -ones, ones[:, 0])


PAIRS = Layout(data="preferences")


def test_pairs_do_not_depend_on_the_numbers_of_documents():
    tokens = np.arange(8)[None]
    for segments in ([0, 0, 1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3, 4, 4], [0, 0, 2, 2, 5, 5, 6, 6]):
        batch = batch_from({"tokens": tokens, "segments": np.array([segments])}, PAIRS)
        assert batch.by_item(batch.learned_documents).all(-1).tolist() == [[True, True]]


def test_answers_without_their_pair_are_refused():
    class Rows:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"tokens": np.arange(4), "segments": [0, 0, 1, 1] if index < 2 else [0, 0, 0, 0]}

    with pytest.raises(UserError, match=r"sequence 1 has an answer without its pair.*segments"):
        batch_from({"tokens": np.ones((2, 4), int), "segments": [[0, 0, 1, 1], [0, 0, 0, 0]]}, PAIRS)
    assert len(collate(Rows(), [0, 1], np.arange(2), batch_size=3, real=2, layout=PAIRS).tokens) == 3
    with pytest.raises(UserError, match=r"Rows\[2\] has an answer without its pair"):
        collate(Rows(), [0, 1, 2, 3], np.arange(4), batch_size=4, real=4, layout=PAIRS)
