"""Packed documents: nothing lost, nothing twice, nothing torn without need; and the losses of single documents."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from store_cases import EOD, make_store, some_lengths

from weft.config.model import ModelSection
from weft.data.batches.samples import collate
from weft.data.sequences import packing_index as index_module
from weft.data.sequences.packed import PackedDataset
from weft.errors import UserError
from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.objectives.pretrain import Pretrain
from weft.observe.console import Console

LENGTHS = {
    "mixed": (some_lengths(0, 300, 200), 32),
    "short": (some_lengths(1, 200, 20), 64),
    "at the edges": ([1, 2, 32, 33, 34, 64, 65, 66, 1, 97, 98, 31], 32),
    "with empty ones": ([0, 5, 0, 1, 9, 0], 8),
    "sequences of one": ([1, 2, 3, 4], 1),
    "only long": ([4096, 1025], 16),
}


@pytest.fixture(params=LENGTHS)
def packed(request, tmp_path):
    lengths, length = LENGTHS[request.param]
    return np.asarray(lengths), PackedDataset(make_store(tmp_path / "store", lengths), length)


def samples(dataset):
    return [dataset[i] for i in range(len(dataset))]


def test_every_token_but_each_documents_first_is_learned_once(packed):
    lengths, dataset = packed
    learned = np.concatenate([s["labels"][s["weight"] > 0] for s in samples(dataset)])
    starts = np.cumsum(lengths) - lengths
    assert sorted(learned) == sorted(set(range(lengths.sum())) - set(starts[lengths > 0].tolist()))
    assert sum(s["weight"].sum() for s in samples(dataset)) == np.maximum(lengths - 1, 0).sum() == dataset.inputs
    assert dataset.unlearnable == (lengths < 2).sum()


def test_samples_are_runs_of_documents_with_positions_of_their_own(packed):
    lengths, dataset = packed
    owner = np.repeat(np.arange(len(lengths)), lengths)
    place = np.concatenate([np.arange(n) for n in lengths])
    for sample in samples(dataset):
        assert {part.shape for part in sample.values()} == {(dataset.length,)}
        real = sample["weight"] > 0
        filled = int(real.sum())
        assert real[:filled].all()
        tokens, segments, positions = (sample[k][:filled] for k in ("tokens", "segments", "positions"))
        assert (sample["labels"][:filled] == tokens + 1).all()  # in the store, token i has the id i
        assert (owner[tokens] == owner[sample["labels"][:filled]]).all()
        for segment in range(segments[-1] + 1):
            own = tokens[segments == segment]
            assert (np.diff(own) == 1).all()
            assert len(set(owner[own])) == 1
            assert positions[segments == segment].tolist() == list(range(len(own)))
            # A document that fits is whole; a long one's pieces begin at full lengths and are full, but for the rest.
            begins, inputs = place[own[0]], lengths[owner[own[0]]] - 1
            assert begins % dataset.length == 0
            assert len(own) == min(dataset.length, inputs - begins)
        padding = slice(filled, None)
        assert (sample["tokens"][padding] == EOD).all()
        assert (sample["segments"][padding] == segments[-1] + 1).all()
        assert sample["positions"][padding].tolist() == list(range(dataset.length - filled))


def test_efficiency_is_the_share_that_is_no_padding(packed):
    _, dataset = packed
    real = np.mean([sample["weight"] > 0 for sample in samples(dataset)])
    assert dataset.efficiency == pytest.approx(real, abs=1e-12)


def test_what_was_packed_is_printed(tmp_path):
    told = io.StringIO()
    dataset = PackedDataset(make_store(tmp_path / "store", [1, 9, 5, 17]), 8, console=Console(err=told))
    assert dataset.describe() in told.getvalue()
    assert dataset.describe().endswith(
        "store: 4 documents, 1 of one token left out, packed into 4 sequences of 8, 12.50% padding"
    )


def test_many_documents_leave_little_padding(tmp_path):
    dataset = PackedDataset(make_store(tmp_path / "store", some_lengths(5, 3000, 4000)), 512)
    assert dataset.efficiency > 0.99


def test_loss_masks_are_those_of_the_labels(tmp_path):
    lengths = some_lengths(4, 50, 60)
    mask = np.random.default_rng(0).integers(0, 2, lengths.sum())
    dataset = PackedDataset(make_store(tmp_path / "store", lengths, mask=mask, kind="conversations"), 32)
    for sample in samples(dataset):
        filled = np.flatnonzero(sample["tokens"] + 1 == sample["labels"])
        assert sample["weight"][filled].tolist() == mask[sample["labels"][filled]].tolist()
    mask[np.cumsum(lengths) - lengths] = 0
    assert sum(s["weight"].sum() for s in samples(dataset)) == mask.sum()


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_index_is_made_once_and_is_the_same_however_it_is_read(tmp_path, monkeypatch):
    lengths = some_lengths(6, 200, 100)
    first, second = (make_store(tmp_path / name, lengths) for name in "ab")
    PackedDataset(first, 32)
    monkeypatch.setattr(index_module, "BLOCK", 7)
    PackedDataset(second, 32)
    assert content(first.path / "packing") == content(second.path / "packing")
    monkeypatch.setattr(index_module, "best_fit_decreasing", None)  # not needed any more
    assert len(PackedDataset(first, 32)) == len(PackedDataset(second, 32))


@pytest.mark.parametrize("harm", ["cut short", "no index.json", "another store's", "killed while it was made"])
def test_a_damaged_index_is_made_again(tmp_path, harm):
    store = make_store(tmp_path / "store", some_lengths(7, 100, 100))
    expected = [sample["tokens"].tolist() for sample in samples(PackedDataset(store, 32))]
    folder = store.path / "packing" / "best_fit-32"
    whole = content(folder)
    if harm == "cut short":
        os.truncate(folder / "order.bin", 8)
    elif harm == "no index.json":
        (folder / "index.json").unlink()
    elif harm == "another store's":
        shutil.rmtree(folder)
        PackedDataset(other := make_store(tmp_path / "other", [100, 50]), 32)
        shutil.copytree(other.path / "packing" / "best_fit-32", folder)
    else:
        folder.rename(folder.with_name(f".{folder.name}.0123.partial"))
    assert [sample["tokens"].tolist() for sample in samples(PackedDataset(store, 32))] == expected
    assert content(folder) == whole
    assert {p.name for p in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}


def test_a_store_that_cannot_be_written_to_has_its_index_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("WEFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = make_store(tmp_path / "store", some_lengths(8, 50, 50))
    make = Path.mkdir

    def mkdir(path, *args, **kwargs):
        if store.path in path.parents:
            raise PermissionError(13, "Permission denied")
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    dataset = PackedDataset(store, 32)
    assert sum(s["weight"].sum() for s in samples(dataset)) == dataset.inputs
    assert not (store.path / "packing").exists()
    assert len(list((tmp_path / "cache").rglob("index.json"))) == 1


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    store = make_store(tmp_path / "store", some_lengths(9, 50, 50))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(UserError, match="No space left"):
        PackedDataset(store, 32)
    assert {p.name for p in (store.path / "packing").iterdir()} == {".best_fit-32.lock"}


PROGRAM = """
import hashlib, sys
from weft.data.sequences.packing_index import packing_index
from weft.data.stores.store import TokenStore
index = packing_index(TokenStore(sys.argv[1]), 32)
print(index.sequences, hashlib.sha256(index.order.tobytes()).hexdigest())
"""


def start(store):
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(store)], stdout=subprocess.PIPE, text=True)


def test_several_processes_that_ask_at_once_get_one_index(tmp_path):
    store = make_store(tmp_path / "store", some_lengths(10, 20_000, 60)).path
    asking = [start(store) for _ in range(3)]
    answers = {process.communicate(timeout=60)[0] for process in asking}
    assert all(process.returncode == 0 for process in asking)
    assert len(answers) == 1
    assert {p.name for p in (store / "packing").iterdir()} == {"best_fit-32", ".best_fit-32.lock"}


def test_a_store_without_anything_to_pack_is_reported(tmp_path):
    with pytest.raises(UserError, match="nothing to learn"):
        PackedDataset(make_store(tmp_path / "store", [1, 1, 1]), 8)


SHAPES = {
    "llama, grouped heads": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 64,
    },
    "gpt2": {
        "family": "gpt2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 64, "position": "learned", "norm": "layernorm",
        "mlp": "plain", "hidden_act": "gelu_tanh", "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_are_those_of_one_document_at_a_time(tmp_path, shape):
    lengths = np.clip(some_lengths(11, 40, 60), 1, 65)
    words = np.random.default_rng(0).integers(0, 101, lengths.sum())
    store = make_store(tmp_path / "store", lengths, tokens=words)
    dataset, objective = PackedDataset(store, 64), Pretrain()
    assert len(dataset) < 20  # several documents in a row
    model = build_model(ModelSection(vocab_size=101, **SHAPES[shape])).double()
    initialize(model, seed=1)

    def learn(loss):
        model.zero_grad()
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    batch = collate(dataset, range(len(dataset)), np.arange(len(dataset)), batch_size=len(dataset), real=len(dataset))
    batch.weight = batch.weight.double()
    together = objective.loss(model(**objective.inputs(batch)), batch)
    alone = torch.zeros((), dtype=torch.float64)
    for number in range(store.num_documents):
        ids = torch.from_numpy(store.document(number).astype(np.int64)).unsqueeze(0)
        if ids.shape[1] > 1:
            alone = alone - model(ids[:, :-1], labels=ids[:, 1:]).sum()
    assert abs(together - alone) <= 1e-12 * alone
    ours, theirs = learn(together), learn(alone)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= 1e-12 * max(1.0, gradient.abs().max().item()), name
