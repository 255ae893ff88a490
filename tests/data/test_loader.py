"""The loader: a function of the step, the same order for any number of ranks, each sample once an epoch."""

import numpy as np
import pytest
import torch

from weft.data.batches.loader import BatchSource, ValidationBatches
from weft.data.permutation import Permutation
from weft.data.sequences.windows import StoreDataset
from weft.data.stores.store import TokenStore
from weft.errors import UserError


@pytest.mark.parametrize("n", [*range(1, 40), 1000, 4097])
def test_a_permutation_is_a_bijection(n):
    assert sorted(Permutation(n, 7, 0)(np.arange(n)).tolist()) == list(range(n))


def test_permutations_differ_by_key_and_spread_evenly():
    n = 100_000
    first, second = (Permutation(n, 7, epoch)(np.arange(n)) for epoch in (0, 1))
    assert (first == second).mean() < 0.001
    counts = np.bincount(first[:10_000] // 1000, minlength=100)  # the first tenth comes from everywhere
    assert ((counts - 100) ** 2 / 100).sum() < 160  # chi-square, 99 degrees of freedom: above 160 once in ten thousand


def test_a_trillion_samples_need_no_table():
    assert 0 <= int(Permutation(10**12, 1, 0)(np.array([10**12 - 1]))[0]) < 10**12


@pytest.fixture
def dataset(tiny_store):
    return StoreDataset(TokenStore(tiny_store), 16)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_what_one_rank_gets(dataset, ranks):
    whole = BatchSource(dataset, batch_size=7, seed=3).batch(11)
    parts = [BatchSource(dataset, batch_size=7, seed=3, rank=r, ranks=ranks).batch(11) for r in range(ranks)]
    assert len({part.tokens.shape for part in parts}) == 1
    samples = torch.cat([part.samples for part in parts])
    tokens, weight = torch.cat([part.tokens for part in parts]), torch.cat([part.weight for part in parts])
    assert torch.equal(tokens[samples >= 0], whole.tokens)
    assert weight[samples < 0].sum() == 0
    assert weight.sum() == whole.weight.sum()


def test_every_sample_comes_once_an_epoch_also_where_a_batch_crosses_epochs(dataset):
    source = BatchSource(dataset, batch_size=7, seed=3)
    n = source.samples_per_epoch
    seen = np.concatenate([source.order(source.samples(step)) for step in range(2 * n // 7 + 1)])
    assert sorted(seen[:n]) == sorted(seen[n : 2 * n]) == list(range(n))
    assert not np.array_equal(seen[:n], seen[n : 2 * n])


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_gives_what_asking_directly_gives(dataset, workers):
    source = BatchSource(dataset, batch_size=4, seed=1)
    for step, batch in zip(range(5, 9), source.iterate(5, 9, workers), strict=True):
        assert torch.equal(batch.tokens, source.batch(step).tokens)
        assert torch.equal(batch.samples, source.batch(step).samples)


def test_labels_are_the_next_tokens_of_the_store(dataset, tiny_store):
    tokens = TokenStore(tiny_store).tokens
    batch = BatchSource(dataset, batch_size=3, seed=None).batch(0)
    assert batch.tokens.flatten().tolist() == tokens[:48].tolist()
    assert batch.labels.flatten().tolist() == tokens[1:49].tolist()


@pytest.mark.parametrize(("rows", "ranks", "limit"), [(4, 1, None), (6, 4, None), (4, 2, 5)])
def test_validation_covers_every_sample_once(dataset, rows, ranks, limit):
    seen = []
    for rank in range(ranks):
        for batch in ValidationBatches(dataset, batch_size=rows, rank=rank, ranks=ranks, limit=limit):
            real = batch.samples >= 0
            assert bool((batch.weight.sum(1) > 0).eq(real).all())
            seen += batch.samples[real].tolist()
    assert sorted(seen) == list(range(limit or len(dataset)))


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        ([1, 2], "not a dict with .tokens."),
        ({"tokens": ["a"]}, "integers"),
        ({"tokens": [1, 2], "labels": [1]}, "labels"),
        ({"tokens": [1, 2], "mask": [1, 1]}, "'mask'"),
        ({"tokens": [1, 2], "positions": [0.0, 1.5]}, "positions must be integers, but their dtype is float64"),
        ({"tokens": [1, 2], "positions": [-1, 0]}, "every position must be 0 or more"),
        ({"tokens": [1, -2]}, "-2 is neither a token id nor -100"),
        ({"tokens": [1, 2], "labels": [-1, 2]}, "-1 is neither a token id nor -100"),
        ({"tokens": [1, 2], "weight": [1, -1]}, "every weight must be 0 or more"),
        ({"tokens": [1, 2], "weight": [1, float("nan")]}, "every weight must be 0 or more"),
        ({"tokens": [1, 2], "weight": [1, float("inf")]}, "every weight must be 0 or more, and finite"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_dataset_that_gives_no_sample_is_reported_with_its_index(sample, told, workers):
    class Mine:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return sample

    with pytest.raises(UserError, match=rf"Mine\[\d\].*{told}"):
        list(BatchSource(Mine(), batch_size=2).iterate(0, 1, workers))


def test_a_dataset_that_exits_has_not_finished_the_run():
    class Mine(list):
        def __getitem__(self, index):
            raise SystemExit(0)

    with pytest.raises(UserError, match=r"Mine\[\d\] raised SystemExit: 0"):
        list(BatchSource(Mine([1, 2]), batch_size=2).iterate(0, 1, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_of_any_dtype_and_with_gradient(dtype):
    weight = torch.tensor([0.5, 1, 2], dtype=dtype, requires_grad=True)
    sample = {"tokens": torch.tensor([5, 6, 7], dtype=torch.int32), "labels": torch.tensor([6, 7, 8]), "weight": weight}
    (batch,) = BatchSource([sample], batch_size=1).iterate(0, 1, 0)
    assert batch.weight.tolist() == [[0.5, 1, 2]]
    assert batch.tokens.tolist() == [[5, 6, 7]]


@pytest.mark.parametrize("more", [{}, {"labels": [7, -100, 3]}, {"segments": [4, 4, 9], "weight": [0.5, 1, 1]}])
def test_samples_of_different_integers_are_read_as_samples_of_equal_ones(more):
    # Samples that are alike are checked together, others one by one.
    samples = [{"tokens": [5, 6, 7]} | more, {"tokens": [1, 2, 3]} | more]
    (alike,) = BatchSource(samples, batch_size=2).iterate(0, 1, 0)
    samples[1]["tokens"] = np.array([1, 2, 3], np.uint16)
    (mixed,) = BatchSource(samples, batch_size=2).iterate(0, 1, 0)
    assert sorted(alike.tokens.tolist()) == [[1, 2, 3], [5, 6, 7]]
    for name in ("tokens", "labels", "weight", "positions", "segments"):
        one, other = getattr(alike, name), getattr(mixed, name)
        assert one is other is None or (torch.equal(one, other) and one.dtype == other.dtype), name


def test_the_label_that_everyone_leaves_out_has_no_weight():
    (batch,) = BatchSource([{"tokens": [5, 6, 7], "labels": [-100, 7, -100]}], batch_size=1).iterate(0, 1, 0)
    assert batch.labels.tolist() == [[0, 7, 0]]
    assert batch.weight.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_many_windows_at_once_are_what_they_are_one_by_one(masked, apart):
    from types import SimpleNamespace

    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 40, 60)
    total = int(lengths.sum())
    store = SimpleNamespace(
        tokens=generator.integers(0, 60_000, total).astype(np.uint16),
        loss_mask=generator.integers(0, 2, total).astype(np.uint8) if masked else None,
        offsets=np.concatenate([[0], np.cumsum(lengths[:-1])]) * 2,
        lengths=lengths,
        num_tokens=total,
        path="store",
    )
    dataset = StoreDataset(store, 16, document_attention=apart)
    chosen = generator.permutation(len(dataset))[:20]
    together = dataset.read(chosen)
    for row, index in enumerate(chosen.tolist()):
        alone = dataset[index]
        assert alone.keys() == together.keys()
        for key, part in alone.items():
            assert part.dtype == together[key].dtype
            assert np.array_equal(part, together[key][row]), key
        document = int(dataset.where(index).split()[1])
        assert store.offsets[document] // 2 <= index * 16 < store.offsets[document] // 2 + lengths[document]


def test_an_order_is_the_same_however_it_is_asked_for():
    from weft.data.batches.order import Epochs

    whole = Epochs(5000, 7)(np.arange(12_000))
    assert sorted(whole[5000:10_000]) == list(range(5000))
    assert np.array_equal(whole[:5000], Permutation(5000, 7, 0)(np.arange(5000)))
    order = Epochs(5000, 7)
    # Within a chunk, across two, across epochs, repeated, and with equal ends and others between.
    for asked in (range(2050, 2080), range(2040, 2060), range(4990, 5010), [3, 3, 4], [9, 5000, 4, 9], []):
        assert np.array_equal(order(np.array(asked, np.int64)), whole[np.array(asked, np.int64)])
    asked = np.random.default_rng(1).permutation(12_000)
    assert np.array_equal(Epochs(5000, 7)(asked), whole[asked])
    assert [Epochs(5000, 7)(np.array([n]))[0] for n in (0, 4999, 5000, 11_999)] == whole[
        [0, 4999, 5000, 11_999]
    ].tolist()
