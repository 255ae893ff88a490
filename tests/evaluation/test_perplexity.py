"""Loss, perplexity and bits per byte, against transformers' logits token by token."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from evaluation_cases import WINDOW, random_llama
from store_cases import make_store

import weft
from weft.cli.main import main
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.evaluation.evaluate import Evaluation

VOCABULARY = 90
LENGTHS = np.array([5, 2, 1, 40, 9, 1, 17, 30, 8, 3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama") / "hf"


@pytest.fixture(scope="module")
def theirs(folder):
    return random_llama(folder, VOCABULARY).double()


@pytest.fixture(scope="module")
def ours(folder, theirs):
    return weft.load_model(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, LENGTHS.sum())
    tokens[np.cumsum(LENGTHS) - 1] = 0
    tokens[0] = VOCABULARY - 1
    return make_store(tmp_path_factory.mktemp("stores") / "store", LENGTHS, tokens=tokens)


def perplexity(model, store, **settings):
    return weft.evaluate(model, store=store, **settings).all


def one_by_one(theirs, documents, length, stride):
    """Each token's loss by a forward of its own: `[(nats, token)]`; the window in which it stands, from its number."""
    found = []
    for ids in documents:
        for place in range(1, len(ids)):
            begin = max(0, math.ceil((place - length) / stride)) * stride
            assert place - begin <= length
            assert begin == 0 or place - begin > length - stride
            with torch.no_grad():
                logits = theirs(torch.from_numpy(ids[begin:place].astype(np.int64))[None]).logits[0, -1]
            found.append((-logits.log_softmax(-1)[int(ids[place])].item(), int(ids[place])))
    return found


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "joined"])
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (16, 1), (7, 3), (64, 64)])
def test_every_token_once_with_the_context_that_is_promised(theirs, ours, store, apart, length, stride):
    documents = [store.document(i) for i in range(len(LENGTHS))] if apart else [np.asarray(store.tokens)]
    expected = one_by_one(theirs, documents, length, stride)
    assert len(expected) == (LENGTHS.sum() - len(LENGTHS) if apart else LENGTHS.sum() - 1)
    nats = sum(loss for loss, _ in expected)
    text = sum(token != 0 for _, token in expected)
    each = store.info.bytes / (LENGTHS.sum() - len(LENGTHS))
    for batch_size in (1, 7):
        found = perplexity(
            ours,
            store,
            sequence_length=length,
            stride=stride,
            documents="apart" if apart else "joined",
            batch_size=batch_size,
        )
        assert found.tokens == len(expected)
        assert found.loss == pytest.approx(nats / len(expected), abs=1e-6)  # theirs rotates in float32
        assert found.perplexity == pytest.approx(math.exp(nats / len(expected)), rel=1e-5)
        assert found.bits_per_byte == pytest.approx(nats / math.log(2) / (text * each), rel=1e-6)


def test_the_batch_size_changes_nothing(ours, store):
    found = [perplexity(ours, store, sequence_length=9, stride=4, batch_size=size).nats for size in (1, 2, 7, 100)]
    assert max(found) - min(found) < 1e-9


@pytest.mark.parametrize("apart", [True, False])
def test_the_first_tokens_only(theirs, ours, store, apart):
    documents = [store.document(i) for i in range(len(LENGTHS))] if apart else [np.asarray(store.tokens)]
    expected = one_by_one(theirs, documents, 8, 8)
    for limit in (1, 30, 1000):
        found = perplexity(ours, store, sequence_length=8, documents="apart" if apart else "joined", max_tokens=limit)
        assert found.tokens == len(expected[:limit])
        assert found.nats == pytest.approx(sum(loss for loss, _ in expected[:limit]), abs=1e-5)


def test_a_loss_mask_says_what_counts(theirs, ours, store, tmp_path):
    mask = (np.arange(LENGTHS.sum()) % 3 > 0).astype(np.uint8)
    masked = make_store(tmp_path / "masked", LENGTHS, tokens=store.tokens, mask=mask)
    places = [place for end, n in zip(np.cumsum(LENGTHS), LENGTHS, strict=True) for place in range(end - n + 1, end)]
    losses = one_by_one(theirs, [store.document(i) for i in range(len(LENGTHS))], 16, 4)
    kept = [loss for (loss, _), place in zip(losses, places, strict=True) if mask[place]]
    found = perplexity(ours, masked, sequence_length=16, stride=4)
    assert found.tokens == len(kept)
    assert found.nats == pytest.approx(sum(kept), abs=1e-5)


class Successor(torch.nn.Module):
    """A model of the user's own, that takes tokens alone: each is followed by the next number, with 3/4."""

    def __init__(self):
        super().__init__()
        self.size = torch.nn.Parameter(torch.tensor(float(VOCABULARY)))

    def forward(self, tokens):
        logits = torch.full((*tokens.shape, VOCABULARY), math.log(0.25 / (VOCABULARY - 1)))
        return logits.scatter(2, ((tokens + 1) % VOCABULARY).unsqueeze(2), math.log(0.75))


def test_a_model_of_the_users_own_and_its_mode_is_left_alone(tmp_path):
    store = make_store(tmp_path / "count", [5, 4], tokens=[1, 2, 3, 4, 0, 7, 8, 9, 0])
    model = Successor()
    found = perplexity(model, store)
    assert found.nats == pytest.approx(-(5 * math.log(0.75) + 2 * math.log(0.25 / 89)), rel=1e-6)
    assert model.training


def test_bytes_are_those_of_the_text_in_utf_8(tmp_path, tiny_tokenizer):
    texts = ["grüße 北京 👋 weft", "", "naïve", "カタカナ" * 30]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["data", "pack", tmp_path / "texts.jsonl", "--tokenizer", tiny_tokenizer, "--out", tmp_path / "store"]
    assert main([str(word) for word in command]) == 0
    random_llama(tmp_path / "hf", 512)
    shutil.copy(tiny_tokenizer / "tokenizer.json", tmp_path / "hf")
    model = weft.load_model(tmp_path / "hf")
    found = perplexity(model, tmp_path / "store", documents="joined", tokenizer=tmp_path / "hf")
    size = sum(len(text.encode()) for text in texts)
    tokens = TokenStore(tmp_path / "store").num_tokens - len(texts)  # of text; its first is not predicted
    assert found.bytes == pytest.approx(size * (tokens - 1) / tokens, rel=1e-12)
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / found.bytes, rel=1e-12)


def told(capsys, *words) -> str:
    assert main(["evaluate", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def test_what_cannot_be_measured_is_reported_in_one_line(tmp_path, folder, theirs, ours, store, tiny_tokenizer, capsys):
    empty = make_store(tmp_path / "empty", [])
    ones = make_store(tmp_path / "ones", [1, 1])
    wide = make_store(tmp_path / "wide", [VOCABULARY + 1])
    for broken, what in ((empty, "no token"), (ones, "no token"), (wide, "90")):
        with pytest.raises(UserError, match=what):
            perplexity(ours, broken)
    for settings, what in (
        ({"stride": 17}, "1 to 16"),
        ({"stride": 0}, "1 to 16"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sequence_length": 0}, "sequence_length"),
    ):
        with pytest.raises(UserError, match=what):
            perplexity(ours, store, **{"sequence_length": 16} | settings)
    with pytest.raises(UserError, match="no such token store"):
        perplexity(ours, tmp_path / "gone")
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    shutil.copy(tiny_tokenizer / "tokenizer.json", own)
    assert "another tokenizer" in told(capsys, own, "--store", store.path)
    assert "set --store to a token store" in told(capsys, folder)
    with pytest.raises(UserError, match="set `store` to a token store"):
        weft.evaluate(folder)
    with pytest.raises(UserError, match="no token store; set `store`"):
        _ = Evaluation(folder, tasks={"x": {}}).loss
    with pytest.raises(UserError, match="num_fewshot has an effect only with tasks"):
        weft.evaluate(folder, store=store, num_fewshot=0)
    assert "limit has an effect only with tasks" in told(capsys, folder, "--store", store.path, "--limit", 3)
    assert "stride has an effect only with store" in told(capsys, folder, "--tasks", "x", "--stride", 3)
    assert "no file can be written" in told(capsys, folder, "--store", store.path, "--json", tmp_path)
    assert "gone: this path does not exist" in told(capsys, tmp_path / "gone")
    assert "--device nonsense: " in told(capsys, folder, "--store", store.path, "--device", "nonsense")


def test_weights_that_are_no_numbers(tmp_path, folder, theirs, store):
    model = weft.load_model(folder)
    model.norm.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match=r"not finite.*`dtype` float32"):
        perplexity(model, store, sequence_length=16)


def test_longer_windows_than_the_model_knows_are_a_warning(folder, theirs, store, capsys):
    words = ["evaluate", folder, "--store", store.path, "--sequence-length", WINDOW + 1]
    assert main([str(word) for word in words]) == 0
    assert f"max_position_embeddings is {WINDOW}" in capsys.readouterr().err


def test_a_runs_own_validation(tmp_path, run_yaml, tiny_store, capsys):
    """By best fit, as in training, each document stands by itself: the same numbers as the run's last validation."""
    path = run_yaml(training={"steps": 6}, data={"packing": "best_fit"})
    assert main(["train", str(path)]) == 0
    run, out = tmp_path / "runs" / "demo", tmp_path / "scores.json"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if "validation_loss" in line)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", str(out), "--batch-size", "3"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["sequence_length"] == 64
    assert found["documents"] == "apart"
    (one,) = found["stores"]
    assert one["loss"] == pytest.approx(last["validation_loss"], abs=2e-5)
    assert one["bits_per_byte"] == pytest.approx(last["validation_bits_per_byte"], abs=2e-5)
    assert f"{one['loss']:.4f}" in shown
    assert "bits per byte" in shown

    # Two stores, and both together; a checkpoint stands for its run.
    words = ["evaluate", run / "checkpoints" / "step-00000006", "--store", tiny_store, "--store", one["store"]]
    assert main([str(word) for word in [*words, "--max-tokens", "500", "--json", out]]) == 0
    found = json.loads(out.read_text())
    assert found["all"]["tokens"] == 1000
    assert found["all"]["loss"] == pytest.approx(sum(store["loss"] for store in found["stores"]) / 2)

    # Validation data that moved, and none at all.
    saved = (run / "config.yaml").read_text()
    capsys.readouterr()
    own = '{"type": "boom:DS", "path": "gone"}'
    gone = "gone of this run does not exist"
    for now, what in (('"gone"', gone), ("null", "no validation data"), (own, "custom dataset; set --store to")):
        (run / "config.yaml").write_text(saved.replace(f'validation: "{one["store"]}"', f"validation: {now}"))
        assert what in told(capsys, run)
