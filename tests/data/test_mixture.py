"""Mixtures sample by sample: shares that hold over every block, for any ranks, from any step."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from weft.data.batches.loader import BatchSource
from weft.data.batches.mixture import ConcatDataset, MixtureOrder, interleave
from weft.data.batches.samples import collate
from weft.errors import UserError
from weft.mixing import Stage, phases


class Rows:
    """Sample `i` of source `s` says both in its tokens."""

    complete = True

    def __init__(self, source: int, size: int, length: int = 4):
        self.source, self.size, self.length = source, size, length

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = np.full(self.length, index)
        tokens[0] = self.source
        same = {"labels": tokens, "weight": np.ones(self.length, np.float32), "positions": np.arange(self.length)}
        return {"tokens": tokens, **same}


def mixture(sizes, stages, limits=None, block=100, seed=3, shuffle=True):
    names = [f"source{number}" for number in range(len(sizes))]
    joined = ConcatDataset(names, [Rows(number, size) for number, size in enumerate(sizes)])
    stages = [Stage(tuple(Fraction(str(w)) for w in weights), samples) for weights, samples in stages]
    found = phases(stages, limits or [None] * len(sizes), block)
    return joined, MixtureOrder(joined, found, seed=seed, shuffle=shuffle)


def read(joined, order, samples):
    """(source, index) of samples, as a model would see them."""
    tokens = joined.read(order(np.asarray(samples)))["tokens"]
    return tokens[:, 0], tokens[:, 1]


def test_shares_are_exact_over_every_block_and_nearly_so_over_any_stretch():
    joined, order = mixture([37, 1000, 5000], [((0.1, 0.25, 0.65), None)])
    sources, _ = read(joined, order, np.arange(3000))
    counts = np.eye(3, dtype=int)[sources]
    assert (counts.reshape(30, 100, 3).sum(1) == [10, 25, 65]).all()
    running = counts.cumsum(0)
    ideal = np.arange(1, 3001)[:, None] * np.array([0.1, 0.25, 0.65])
    assert np.abs(running - ideal).max() < 2


def test_blocks_are_arranged_anew_and_by_the_seed():
    joined, order = mixture([500, 500], [((0.5, 0.5), None)])
    first, second = (read(joined, order, np.arange(start, start + 100))[0] for start in (0, 100))
    _, other = mixture([500, 500], [((0.5, 0.5), None)], seed=4)
    assert (first != second).any()
    assert (first != read(joined, other, np.arange(100))[0]).any()
    assert 20 < (first[::2] == 0).sum() < 30 or (np.diff(first) == 0).any()  # not simply in turns


def test_every_source_goes_through_epochs_of_its_own():
    sizes = [37, 230]
    joined, order = mixture(sizes, [((0.3, 0.7), None)])
    sources, indices = read(joined, order, np.arange(4000))
    for source, size in enumerate(sizes):
        stream = indices[sources == source]
        whole = len(stream) // size
        assert whole >= 2
        for epoch in range(whole):
            assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
        assert (stream[:size] != stream[size : 2 * size]).any()


def test_a_sources_stream_does_not_depend_on_its_share():
    streams = []
    for weights in ((0.3, 0.7), (0.8, 0.2)):
        joined, order = mixture([1000, 1000], [(weights, None)])
        sources, indices = read(joined, order, np.arange(1000))
        streams.append(indices[sources == 0][:200])
    assert (streams[0] == streams[1]).all()


def test_without_shuffling_sources_are_read_from_front_to_back():
    joined, order = mixture([50, 500], [((0.5, 0.5), None)], shuffle=False)
    sources, indices = read(joined, order, np.arange(300))
    assert indices[sources == 0].tolist() == [*range(50)] * 3
    assert indices[sources == 1].tolist() == [*range(150)]


def test_any_order_of_asking_gives_the_same():
    _, order = mixture([37, 230], [((0.3, 0.7), 250), ((0.5, 0.5), None)], limits=[120, None])
    whole = order(np.arange(2000))
    _, again = mixture([37, 230], [((0.3, 0.7), 250), ((0.5, 0.5), None)], limits=[120, None])
    shuffled = np.random.default_rng(0).permutation(2000)
    assert (again(shuffled) == whole[shuffled]).all()
    assert [int(again(np.array([n]))[0]) for n in (1999, 0, 777)] == whole[[1999, 0, 777]].tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_what_one_rank_gets(ranks):
    joined, order = mixture([37, 230], [((0.3, 0.7), None)])
    for step in (0, 13, 999):
        whole = BatchSource(joined, batch_size=7, order=order).batch(step)
        parts = [BatchSource(joined, batch_size=7, order=order, rank=r, ranks=ranks).batch(step) for r in range(ranks)]
        tokens, samples = (torch.cat([getattr(part, key) for part in parts]) for key in ("tokens", "samples"))
        assert torch.equal(tokens[samples >= 0], whole.tokens)


@pytest.mark.parametrize("limits", [[90, None, None], [90, 205, None], [0, 17, 5000]])
def test_limits_are_reached_and_never_passed(limits):
    sizes = [60, 100, 1000]
    joined, order = mixture(sizes, [((0.5, 0.3, 0.2), None)], limits=limits)
    sources, indices = read(joined, order, np.arange(2000))
    taken = np.bincount(sources, minlength=3)
    for source, limit in enumerate(limits):
        if limit is not None and limit < 2000:
            assert taken[source] == limit
    assert taken.sum() == 2000
    first = indices[sources == 0]
    assert np.bincount(first, minlength=60).max(initial=0) <= -(-limits[0] // 60)  # 1.5 epochs: twice at the most


def test_behind_all_limits_there_is_nothing():
    joined, order = mixture([60, 100], [((0.5, 0.5), None)], limits=[60, 200])
    sources, _ = read(joined, order, np.arange(260))
    assert np.bincount(sources).tolist() == [60, 200]
    with pytest.raises(UserError, match="exhausted"):
        order(np.array([260]))


def test_a_curriculum_switches_at_its_sample():
    joined, order = mixture([500, 500], [((1, 0), 333), ((0, 1), 41), ((0.5, 0.5), None)])
    sources, _ = read(joined, order, np.arange(1000))
    assert set(sources[:333]) == {0}
    assert set(sources[333:374]) == {1}
    assert sources[374:474].sum() == 50


def test_interleaving_puts_each_item_in_its_own_stretch():
    sources, numbers = interleave((6, 3, 0, 1), 1, 2)
    assert np.bincount(sources, minlength=4).tolist() == [6, 3, 0, 1]
    for source in range(4):
        assert numbers[sources == source].tolist() == list(range((sources == source).sum()))


def test_sources_of_unequal_length_and_empty_ones_are_reported_by_name():
    joined = ConcatDataset(["web", "books"], [Rows(0, 10), Rows(1, 10, length=8)])
    with pytest.raises(UserError, match="books has sequences of 8 tokens, but other samples have 4"):
        joined.read(np.array([0, 10]))
    with pytest.raises(UserError, match="the dataset books has no samples"):
        ConcatDataset(["web", "books"], [Rows(0, 10), Rows(1, 0)])


def test_where_a_step_reads_names_all_its_sources():
    joined = ConcatDataset(["web", "books", "code"], [Rows(0, 3), Rows(1, 4), Rows(2, 5)])
    source = BatchSource(joined, batch_size=6, seed=None)
    assert source.where(0) == (
        "samples 0 to 5 (of web, books): the first is sample 0 of web, the last sample 2 of books"
    )
    assert source.where(1).startswith("samples 6 to 11 (of books, code): the first is sample 3 of books")
    assert BatchSource(joined, batch_size=1, seed=None).where(2) == "sample 2: sample 2 of web"


def test_rows_that_do_not_tell_documents_apart_are_one_document_among_those_that_do():
    class Apart(Rows):
        def __getitem__(self, index):
            return super().__getitem__(index) | {"segments": np.array([0, 0, 1, 1])}

    joined = ConcatDataset(["a", "b"], [Rows(0, 3), Apart(1, 3)])
    batch = collate(joined, np.array([0, 4]), np.array([0, 1]), batch_size=3, real=2)
    assert batch.segments.tolist()[:2] == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert batch.weight[2].sum() == 0


def test_a_trillion_samples_from_a_hundred_sources_take_no_time():
    import time

    weights = tuple(range(1, 101))
    _, order = mixture([10**10] * 100, [(weights, None)], limits=[10**7] * 50 + [None] * 50, block=10_000)
    began = time.perf_counter()
    sources, numbers = order.locate(np.arange(10**12, 10**12 + 1000))
    assert time.perf_counter() - began < 1
    assert (numbers >= 0).all()
    assert set(sources) <= set(range(50, 100))  # the others are used up by then
