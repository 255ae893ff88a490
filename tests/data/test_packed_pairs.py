"""Preference pairs in sequences: never split, chosen before rejected, and the log-probabilities of single documents."""

import io

import numpy as np
import pytest
import torch
from store_cases import EOD, make_store

from weft.config.model import ModelSection
from weft.data.batches.samples import collate
from weft.data.sequences import packing_index as index_module
from weft.data.sequences.packed import PackedDataset
from weft.errors import UserError
from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.observe.console import Console

LENGTH = 32


def make_pairs(folder, count=60, seed=0, kind="preferences", **more):
    """A store of pairs whose token `i` has the id `i`; documents of 2 to 26 tokens, of which the end is learned."""
    chooser = np.random.default_rng(seed)
    lengths = chooser.integers(2, 27, 2 * count)
    mask = np.concatenate([np.arange(n) >= chooser.integers(0, n + 2) for n in lengths])
    return make_store(folder, lengths, mask=mask, kind=kind, **more), lengths, mask


def fates(lengths, mask):
    """For each pair: whether an answer has nothing to learn, else whether it is too long for a sequence."""
    ends = np.cumsum(lengths)
    learned = [mask[end - n + 1 : end].any() for n, end in zip(lengths.tolist(), ends, strict=True)]
    for pair in range(len(lengths) // 2):
        both = slice(2 * pair, 2 * pair + 2)
        if not all(learned[both]):
            yield "unlearnable"
        else:
            yield "long" if (lengths[both] - 1).sum() > LENGTH else "fits"


@pytest.mark.parametrize("pad", [False, True])
def test_every_pair_that_fits_is_in_one_sequence_chosen_first(tmp_path, pad):
    store, lengths, mask = make_pairs(tmp_path / "store")
    told = io.StringIO()
    dataset = PackedDataset(store, LENGTH, pad=pad, console=Console(err=told))
    expected = list(fates(lengths, mask))
    assert min(map(expected.count, ("fits", "long", "unlearnable"))) >= 5
    assert (dataset.too_long, dataset.unlearnable) == (expected.count("long"), expected.count("unlearnable"))
    left_out = f"{expected.count('long')} longer than 32 tokens left out, {dataset.unlearnable} with an answer without"
    assert f"60 preference pairs, {left_out} learned tokens left out, packed into {len(dataset)} seq" in told.getvalue()
    starts, found = np.cumsum(lengths) - lengths, []
    for number in range(len(dataset)):
        sample, documents = dataset[number], dataset.documents(number)
        assert (documents[1::2] == documents[::2] + 1).all()
        assert (documents[::2] % 2 == 0).all()
        found += (documents[::2] // 2).tolist()
        for segment, document in enumerate(documents.tolist()):
            own = sample["segments"] == segment
            inputs = np.arange(starts[document], starts[document] + lengths[document] - 1)
            assert sample["tokens"][own].tolist() == inputs.tolist()
            assert sample["labels"][own].tolist() == (inputs + 1).tolist()
            assert sample["positions"][own].tolist() == list(range(len(inputs)))
            assert sample["weight"][own].tolist() == mask[inputs + 1].tolist()
        padding = sample["segments"] == len(documents)
        assert (sample["tokens"][padding] == EOD).all()
        assert not sample["weight"][padding].any()
        assert (sample["segments"] <= len(documents)).all()
    assert sorted(found) == [number for number, fate in enumerate(expected) if fate == "fits"]
    assert len(found) == len(dataset) if pad else len(found) > len(dataset)


def test_the_index_belongs_to_the_loss_mask_and_to_whole_documents(tmp_path):
    store, lengths, mask = make_pairs(tmp_path / "a", kind="conversations")
    split = PackedDataset(store, 8)
    whole = PackedDataset(store, 8, values={"label": np.arange(len(lengths))})
    assert whole.too_long > 0
    assert split.too_long == 0
    assert len(PackedDataset(store, 8)) == len(split)
    assert {p.name for p in (store.path / "packing").glob("[!.]*")} == {"best_fit-8", "best_fit-whole-8"}
    pairs, _, _ = make_pairs(tmp_path / "b")
    assert PackedDataset(pairs, LENGTH).unlearnable
    (tmp_path / "c").mkdir()
    other = make_store(tmp_path / "c" / "store", lengths, mask=np.ones_like(mask), kind="preferences")
    (pairs.path / "packing").rename(other.path / "packing")
    assert PackedDataset(other, LENGTH).unlearnable == 0  # made again: the mask is another one


def test_blocks_of_any_size_give_the_same_index(tmp_path, monkeypatch):
    (first, _, _), (second, _, _) = (make_pairs(tmp_path / name) for name in "ab")
    PackedDataset(first, LENGTH)
    monkeypatch.setattr("weft.data.stores.indexed.BLOCK_DOCUMENTS", 6)
    monkeypatch.setattr(index_module, "BLOCK", 6)
    PackedDataset(second, LENGTH)
    both = [sorted((p.name, p.read_bytes()) for p in store.path.rglob("*best_fit*/*")) for store in (first, second)]
    assert both[0] == both[1]
    assert len(both[0]) > 5


def test_values_of_documents_are_at_their_tokens(tmp_path):
    store, lengths, _ = make_pairs(tmp_path / "store", kind="conversations")
    values = np.random.default_rng(1).random(len(lengths), np.float32)
    dataset = PackedDataset(store, LENGTH, values={"label": values, "number": np.arange(len(lengths))})
    for number in range(len(dataset)):
        sample, documents = dataset[number], dataset.documents(number)
        for segment, document in enumerate(documents.tolist()):
            own = sample["segments"] == segment
            assert (sample["label"][own] == values[document]).all()
            assert (sample["number"][own] == document).all()
        assert not sample["label"][sample["segments"] == len(documents)].any()


@pytest.mark.parametrize(
    ("lengths", "mask", "told"),
    [
        ([30, 30], 1, "no preference pair has a learned token and fits into a sequence of 32 tokens, 1 longer than 32"),
        ([3, 3], 0, r"no preference pair .*, 1 with an answer without learned tokens left out; raise"),
    ],
)
def test_stores_without_a_usable_pair_are_refused(tmp_path, lengths, mask, told):
    store = make_store(tmp_path / "store", lengths, mask=np.full(sum(lengths), mask), kind="preferences")
    with pytest.raises(UserError, match=told):
        PackedDataset(store, LENGTH)


def test_sums_of_packed_documents_are_those_of_each_document_alone(tmp_path):
    words = np.random.default_rng(0).integers(0, 101, 4000)
    store, lengths, mask = make_pairs(tmp_path / "store", count=20, tokens=None)
    words = words[: lengths.sum()]
    store = make_store(tmp_path / "words", lengths, tokens=words, mask=mask, kind="preferences")
    dataset = PackedDataset(store, LENGTH)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = build_model(ModelSection(vocab_size=101, max_position_embeddings=64, **shape)).double()
    initialize(model, seed=1)
    batch = collate(dataset, range(len(dataset)), np.arange(len(dataset)), batch_size=len(dataset), real=len(dataset))
    sums = batch.document_sums(
        model(batch.tokens, positions=batch.positions, segments=batch.segments, labels=batch.labels) * batch.weight
    )
    starts, checked = np.cumsum(lengths) - lengths, 0
    for row in range(len(dataset)):
        for column, document in enumerate(dataset.documents(row).tolist()):
            ids = torch.from_numpy(store.document(document).astype(np.int64)).unsqueeze(0)
            learned = torch.from_numpy(mask[starts[document] + 1 : starts[document] + lengths[document]].astype(float))
            alone = (model(ids[:, :-1], labels=ids[:, 1:])[0] * learned).sum()
            assert abs(sums[row, column] - alone) <= 1e-10
            checked += 1
    assert batch.by_item(batch.learned_documents).all(-1).sum() * 2 == checked


@pytest.mark.parametrize("kind", ["preferences", "conversations"])
def test_the_last_token_of_a_document_is_an_input_where_asked_for(tmp_path, kind):
    store, lengths, mask = make_pairs(tmp_path / "a", kind=kind)
    starts, found = np.cumsum(lengths) - lengths, []
    dataset = PackedDataset(store, LENGTH, last_tokens=True)
    for number in range(len(dataset)):
        sample, documents = dataset[number], dataset.documents(number)
        found += documents.tolist()
        for place, document in enumerate(documents):
            own = sample["segments"] == place
            inputs = np.arange(starts[document], starts[document] + lengths[document])
            assert sample["tokens"][own].tolist() == inputs.tolist()
            assert sample["labels"][own][:-1].tolist() == inputs[1:].tolist()
            assert sample["weight"][own].tolist() == [*mask[inputs[1:]], 0]
    sizes = lengths.reshape(-1, 2 if kind == "preferences" else 1)
    learned = np.array([mask[a + 1 : a + n].any() for a, n in zip(starts, lengths, strict=True)])
    usable = (sizes.sum(1) <= LENGTH) & learned.reshape(sizes.shape).all(1)
    assert sorted(found) == np.flatnonzero(np.repeat(usable, sizes.shape[1])).tolist()
