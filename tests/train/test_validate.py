"""Bits per byte in closed form: a model that gives every byte 8 bits, and each document's end 3."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from running import QUIET, metrics, train

from weft.config.mesh import MeshShape, ParallelSection
from weft.data.batches.loader import ValidationBatches
from weft.data.sequences.packed import PackedDataset
from weft.data.sequences.windows import StoreDataset
from weft.data.stores.indexed import IndexedWriter
from weft.data.stores.store import StoreInfo, TokenStore
from weft.data.stores.store_json import write_store_json
from weft.evaluation.bits import bytes_per_token
from weft.objectives.pretrain import Pretrain
from weft.parallel.passes import Passes
from weft.train.data import HeldOut
from weft.train.validate import validate

EOD, BYTES_EACH = 0, 2  # each token of text stands for two bytes
LENGTHS = np.array([5, 2, 9, 1, 30, 17, 2, 8])  # the end-of-document token among them
TEXT = int(LENGTHS.sum() - len(LENGTHS))
WORLD = SimpleNamespace(
    device=torch.device("cpu"), shape=MeshShape(), sum=lambda *values: [float(value) for value in values]
)


@pytest.fixture(params=[False, True], ids=["whole", "masked"])
def store(request, tmp_path):
    tokens = np.arange(LENGTHS.sum()) % 50 + 1
    tokens[np.cumsum(LENGTHS) - 1] = EOD
    mask = (np.arange(len(tokens)) % 3 > 0).astype(np.uint8) if request.param else None
    (tmp_path / "store").mkdir()
    writer = IndexedWriter(tmp_path / "store" / "tokens", np.dtype(np.uint16), mask=mask is not None)
    writer.add(tokens, LENGTHS, mask)
    info = StoreInfo(
        tokenizer_digest="none",
        vocab_size=51,
        eod_id=EOD,
        bytes=TEXT * BYTES_EACH,
        **writer.finish(),
    )
    write_store_json(tmp_path / "store", info.model_dump())
    return TokenStore(tmp_path / "store")


class Known(torch.nn.Module):
    """A model whose log-probabilities are known."""

    def forward(self, tokens, labels, positions=None, segments=None):
        return -torch.where(labels == EOD, 3.0, 8.0).double() * math.log(2)


def bits(dataset, store, limit=None):
    info = store.info
    each = bytes_per_token(info.tokens, info.documents, info.bytes, info.eod_id)
    batches = ValidationBatches(dataset, batch_size=3, limit=limit)
    model = Known()
    passes = Passes(model, Pretrain(), WORLD, ParallelSection())
    return validate(model, passes, [HeldOut("", batches, batches, each)], WORLD, full=True)


@pytest.mark.parametrize("way", ["end to end", "kept apart", "best fit"])
@pytest.mark.parametrize("limit", [None, 2])
def test_only_predicted_tokens_count_and_on_both_sides(store, way, limit):
    dataset = PackedDataset(store, 8) if way == "best fit" else StoreDataset(store, 8, document_attention=way[0] == "k")
    samples = [dataset[i] for i in range(len(dataset))][:limit]
    labels = np.concatenate([sample["labels"][sample["weight"] > 0] for sample in samples])
    ends = int((labels == EOD).sum())
    text = len(labels) - ends
    found = bits(dataset, store, limit)
    assert found["validation_bits_per_byte"] == pytest.approx((8 * text + 3 * ends) / (BYTES_EACH * text), abs=1e-12)
    assert found["validation_loss"] == pytest.approx(math.log(2) * (8 * text + 3 * ends) / len(labels), abs=1e-12)


@pytest.mark.parametrize("store", [False], ids=["whole"], indirect=True)
def test_whole_documents_by_best_fit_have_the_numbers_of_their_lengths(store):
    documents = int((LENGTHS > 1).sum())
    text = TEXT - documents  # all but the first of each
    expected = (8 * text + 3 * documents) / (BYTES_EACH * text)
    assert bits(PackedDataset(store, 8), store)["validation_bits_per_byte"] == pytest.approx(expected, abs=1e-12)


def test_without_bytes_there_are_no_bits():
    assert bytes_per_token(10, 2, None, EOD) is None
    assert bytes_per_token(2, 2, 0, EOD) is None


def test_a_long_validation_tells_how_far_it_is(run_yaml, monkeypatch, capsys):
    monkeypatch.setattr("weft.train.recorder.VALIDATION_LINE", -1.0)
    file = run_yaml(training={"steps": 1, "threads": 1}, schedule={"warmup_steps": 0}, log=QUIET)
    assert train(file) == 0
    told = re.findall(r"^step 1: validating, batch (\d+) of (\d+)  ETA [\d.]+m?s", capsys.readouterr().err, re.M)
    whole = int(told[0][1])
    assert [int(number) for number, _ in told] == list(range(1, whole))


def test_several_sets_are_measured_by_name_and_together(run_yaml, tmp_path, tiny_heldout, tiny_store, capsys):
    short = {"training": {"steps": 1, "threads": 1, "dtype": "float64"}, "schedule": {"warmup_steps": 0}, "log": QUIET}
    found = {}
    for name, chosen in {
        "one": str(tiny_heldout),
        "both": {"books": str(tiny_heldout), "web": str(tiny_store)},
    }.items():
        assert train(run_yaml(f"{name}.yaml", run={"name": name}, data={"validation": chosen}, **short)) == 0
        (found[name],) = metrics(tmp_path / "runs" / name)
    one, both = found["one"], found["both"]
    assert both["validation_loss/books"] == one["validation_loss"]
    assert both["validation_bits_per_byte/books"] == one["validation_bits_per_byte"]
    tokens = {
        name: (TokenStore(path).num_tokens - 1) // 64 for name, path in (("books", tiny_heldout), ("web", tiny_store))
    }
    mean = sum(both[f"validation_loss/{name}"] * count for name, count in tokens.items()) / sum(tokens.values())
    assert both["validation_loss"] == pytest.approx(mean, abs=1e-12)
    low, high = sorted(both[f"validation_bits_per_byte/{name}"] for name in tokens)
    assert low < both["validation_bits_per_byte"] < high
    assert re.search(
        r"step 1: validation loss \d\.\d+, .* bits per byte; books \d\.\d+; web \d\.\d+", capsys.readouterr().err
    )
    manifest = json.loads((tmp_path / "runs" / "both" / "manifest.json").read_text())
    assert {"validation/books", "validation/web"} < manifest["data_digests"].keys()
    assert "loss/books" in (tmp_path / "runs" / "both" / "report.html").read_text()
