"""Samples with further fields and of several sequences, through every way in which a batch is divided."""

import numpy as np
import pytest
import torch

from weft.data.batches.layout import Field, Layout
from weft.data.batches.loader import BatchSource, ValidationBatches
from weft.data.batches.mixture import ConcatDataset
from weft.data.batches.samples import read_samples
from weft.errors import UserError

LAYOUT = Layout({"logprob": Field(seq_dim=0), "reward": Field(dtype="float64"), "image": Field(dtype="uint8")}, 3)
SEQ = 8


class Groups:
    """Samples whose every number says which sample, sequence and token it is of."""

    def __init__(self, count=7, start=0):
        self.count, self.start = count, start

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        sequence = 100 * (self.start + index) + 10 * np.arange(3)
        tokens = sequence[:, None] + np.arange(SEQ)
        image = np.broadcast_to((self.start + index) * 3 + np.arange(3)[:, None, None], (3, 2, 2))
        return {"tokens": tokens, "logprob": tokens / 8, "reward": sequence.tolist(), "image": image}


def fits(batch):
    """Whether every field is that of its row."""
    sequence = batch.tokens[:, :1] // 10 * 10
    number = sequence[:, 0] // 100 * 3 + sequence[:, 0] % 100 // 10
    return (
        bool((batch.extra["logprob"] == batch.tokens / 8).all())
        and bool((batch.extra["reward"] == sequence[:, 0]).all())
        and bool((batch.extra["image"] == number[:, None, None]).all())
        and bool((batch.by_sample(sequence[:, 0]) // 100 == batch.by_sample(sequence[:, 0])[:, :1] // 100).all())
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_a_sample_is_one_ranks_whatever_the_number_of_ranks(ranks):
    source = {"batch_size": 7, "ranks": ranks, "seed": 3, "layout": LAYOUT}
    parts = [BatchSource(Groups(), rank=rank, **source).batch(1) for rank in range(ranks)]
    assert all(fits(part) for part in parts)
    real = [part.samples >= 0 for part in parts]
    taken = torch.cat([part.tokens[:, 0][mask] for part, mask in zip(parts, real, strict=True)])
    whole = BatchSource(Groups(), **{**source, "ranks": 1}).batch(1)
    assert taken.tolist() == whole.tokens[:, 0].tolist()
    for part, mask in zip(parts, real, strict=True):
        assert (part.weight.sum(1) > 0).tolist() == mask.tolist()
        assert part.sequence_weight.tolist() == mask.double().tolist()


def test_micro_batches_padding_and_short_rows_keep_samples_together():
    batch = BatchSource(Groups(), batch_size=5, layout=LAYOUT).batch(0)
    assert batch.split(15)[0] is batch
    pieces = batch.split(6)
    assert [len(piece.tokens) for piece in pieces] == [6, 6, 3]
    assert all(fits(piece) for piece in pieces)
    padded = pieces[-1].pad(3)
    assert fits(padded)
    assert padded.samples.tolist()[3:] == [-1] * 3
    assert padded.weight[3:].sum() == 0
    short = batch.split_sequences(4)
    assert short.tokens.shape == (30, 4)
    assert fits(short)
    first = short.by_sample(short.tokens)[:2]  # the front and the rear of the first sample
    sample = batch.tokens[:3]
    assert first.tolist() == [sample[:, :4].tolist(), sample[:, 4:].tolist()]
    assert short.positions.tolist() == [[0, 1, 2, 3]] * 30
    assert short.samples.tolist() == batch.samples[::3].repeat_interleave(6).tolist()


def test_validation_and_mixtures_read_the_same_samples():
    joined = ConcatDataset(["a", "b"], [Groups(3), Groups(4, start=3)], LAYOUT)
    found = list(ValidationBatches(joined, batch_size=4, rank=1, ranks=2, layout=LAYOUT))
    assert all(fits(batch) for batch in found)
    assert [batch.by_sample(batch.samples)[:, 0].tolist() for batch in found] == [[2, 3], [6, -1]]


def test_fields_travel_to_workers_and_devices():
    source = BatchSource(Groups(), batch_size=4, layout=LAYOUT)
    (read,) = source.iterate(0, 1, workers=1)
    assert fits(read.to(torch.device("cpu")))
    assert read.extra["image"].dtype == torch.uint8


class Given:
    def __init__(self, sample, **attributes):
        self.sample = sample
        self.__dict__ |= attributes

    def __getitem__(self, index):
        return self.sample


TOKENS = np.arange(6).reshape(3, 2)


@pytest.mark.parametrize(
    ("sample", "layout", "told"),
    [
        ({"tokens": [1, 2]}, Layout(sequences=3), "tokens must be integers of shape [3, seq]"),
        ({"tokens": TOKENS}, Layout(), "tokens must be integers of shape [seq]"),
        ({"tokens": [1, 2], "a": 0.5}, Layout({"a": Field(dtype="int64")}), "a must be int64, but is float64"),
        ({"tokens": TOKENS, "a": 1}, Layout({"a": Field()}, 3), "a has shape (); its first dimension must be"),
        ({"tokens": TOKENS, "a": TOKENS[:, :1]}, Layout({"a": Field(seq_dim=0)}, 3), "dimension 1 must have 2 tokens"),
        ({"tokens": [1, 2], "b": 1, "a": 1}, Layout({"a": Field()}), "unknown key 'b'"),
        ({"tokens": [1, 2], "labels": [2, 9]}, Layout(vocab_size=9), "Given[5] has the id 9 in its labels; ids must"),
        (
            {"tokens": [1, 2], "positions": [0, 16]},
            Layout(max_position_embeddings=16),
            "Given[5] has the position 16 in its positions; positions must be 0 to 15",
        ),
        ({"tokens": [1, -2]}, Layout(), "-2 is neither a token id"),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_samples_number(sample, layout, told):
    with pytest.raises(UserError) as error:
        read_samples(Given(sample), np.array([5]), layout)
    assert told in str(error.value)
    assert "Given[5]" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "labels", "size", "told"),
    [
        (6, 6, None, None),
        (6, 6, 7, None),
        (7, 6, 7, r"Given\[7\] has the id 7 in its tokens; ids must be 0 to 6 \(model.vocab_size is 7\)"),
        (6, -1, None, r"Given\[7\] has the id -1 in its labels; ids must be 0 or more"),
        (6, -100, 7, None),
    ],
)
def test_ids_of_complete_samples_are_checked_too(tokens, labels, size, told):
    parts = {key: np.zeros((2, 3), np.int64) for key in ("tokens", "labels", "positions")}
    parts["weight"] = np.ones((2, 3), np.float32)
    parts["tokens"][1, 2], parts["labels"][1, 0] = tokens, labels
    many = Given(None, complete=True, read=lambda indices: parts)
    if told is not None:
        with pytest.raises(UserError, match=told):
            read_samples(many, np.array([5, 7]), Layout(vocab_size=size))
        return
    found = read_samples(many, np.array([5, 7]), Layout(vocab_size=size))
    assert found["labels"][1, 0] == max(0, labels)
    assert found["weight"][1, 0] == (labels >= 0)
