"""Supervised fine-tuning: transformers' loss and gradients, packed or not, resumed, and recalled."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from running import QUIET, assert_same_weights, losses, metrics, replaced, train, weights
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.cli.main import main

LENGTH, RECORDS, LR = 16, 6, 0.1


@cache
def record(number):
    """Ids of a record and its labels as transformers has them: -100 where nothing is learned. One has no answer."""
    chooser = np.random.default_rng([5, number])
    ids = chooser.integers(0, 64, chooser.integers(3, 9))
    labels = np.where(np.arange(len(ids)) < chooser.integers(1, len(ids)), -100, ids)
    return ids, np.full_like(ids, -100) if number == 3 else labels


def padded(number):
    ids, labels = (np.zeros(LENGTH, np.int64), np.full(LENGTH, -100))
    found, wanted = record(number)
    ids[: len(found) - 1], labels[: len(found) - 1] = found[:-1], wanted[1:]
    segments = (np.arange(LENGTH) >= len(found) - 1).astype(np.int64)
    return ids, labels, segments


class Single:
    """A record a sequence."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        ids, labels, segments = padded(index)
        return {"tokens": ids, "labels": labels, "segments": segments}


class Packed:
    """Two records a sequence, kept apart, and padding behind them."""

    def __len__(self):
        return RECORDS // 2

    def __getitem__(self, index):
        parts = [record(2 * index), record(2 * index + 1)]
        left = LENGTH - sum(len(ids) - 1 for ids, _ in parts)
        keys = {
            "tokens": [ids[:-1] for ids, _ in parts] + [np.zeros(left, np.int64)],
            "labels": [labels[1:] for _, labels in parts] + [np.full(left, -100)],
            "positions": [np.arange(len(ids) - 1) for ids, _ in parts] + [np.arange(left)],
            "segments": [np.full(len(ids) - 1, n) for n, (ids, _) in enumerate(parts)] + [np.full(left, 2)],
        }
        return {key: np.concatenate(value) for key, value in keys.items()}


class Unlearned(Single):
    """Nothing is learned."""

    def __getitem__(self, index):
        return super().__getitem__(index) | {"weight": np.zeros(LENGTH)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "llama"
    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.2, max_position_embeddings=LENGTH)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def step(run_yaml, folder, tmp_path, monkeypatch):
    """One step of plain gradient descent: `step(name, "Single", loss=...) -> run directory`."""

    def one(name, data, micro=1, sequences=RECORDS, **objective):
        (tmp_path / "plain_sgd.py").write_text(
            "import torch\n\nclass Plain(torch.optim.SGD):\n    def __init__(self, params, *, lr: float):\n"
            "        super().__init__(params, lr=lr)\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        file = run_yaml(
            f"{name}.yaml",
            run={"name": name},
            model=None,
            tokenizer=None,
            data=None,
            objective={"type": "sft", **objective},
            optimizer=None,
            schedule={"type": "constant", "warmup_steps": 0},
            training={
                "steps": 1,
                "batch_tokens": sequences * LENGTH,
                "micro_batch_size": micro,
                "dtype": "float64",
                "grad_clip": None,
            },
            log=QUIET,
        )
        replaced(
            file,
            model={"from": str(folder)},
            data={"train": {"type": f"test_sft:{data}"}, "sequence_length": LENGTH},
            optimizer={"type": "plain_sgd:Plain", "lr": LR},
        )
        assert train(file) == 0
        return tmp_path / "runs" / name

    return one


def by_transformers(folder, loss):
    """The loss, and the weights after a step: every record by itself."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    means, counts = [], []
    for number in range(RECORDS):
        ids, labels = (torch.from_numpy(part)[None] for part in record(number))
        if (count := int((labels[:, 1:] != -100).sum())) > 0:
            means.append(model(input_ids=ids, labels=labels).loss)
            counts.append(count)
    shares = [count / sum(counts) for count in counts] if loss == "tokens" else [1 / len(counts)] * len(counts)
    total = sum(mean * share for mean, share in zip(means, shares, strict=True))
    total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
    model.save_pretrained(folder.parent / f"after-{loss}")
    return total.item(), sum(counts)


@pytest.mark.parametrize("loss", ["tokens", "sequences"])
def test_loss_and_gradients_are_those_of_transformers_packed_or_not(step, folder, loss):
    expected, learned = by_transformers(folder, loss)
    after = weights(folder.parent / f"after-{loss}")
    runs = [
        step(f"single-{loss}", "Single", micro=4, loss=loss),
        step(f"packed-{loss}", "Packed", micro=2, sequences=RECORDS // 2, loss=loss),
    ]
    for run in runs:
        (line,) = metrics(run)
        assert line["loss"] == pytest.approx(expected, rel=1e-6)  # transformers' norms and loss are in float32
        assert line["learned_tokens"] == learned
        for name, value in weights(run).items():
            torch.testing.assert_close(value, after[name].double(), rtol=0, atol=1e-6, msg=name)
    assert losses(runs[0])[0] == pytest.approx(losses(runs[1])[0], rel=1e-12)
    assert_same_weights(*runs, within=1e-13)


@pytest.mark.parametrize("loss", ["tokens", "sequences"])
def test_without_a_learned_token_the_loss_is_zero_and_a_warning_is_given(step, folder, capsys, loss):
    run = step(f"none-{loss}", "Unlearned", loss=loss, neftune=5.0)
    assert "step 1: all tokens of the batch are masked" in capsys.readouterr().err
    assert (metrics(run)[0]["loss"], metrics(run)[0]["grad_norm"]) == (0, 0)
    before = weights(folder)
    assert all(torch.equal(value, before[name].double()) for name, value in weights(run).items())


def test_the_noise_has_its_size_and_is_for_training_only(step, folder):
    """Of an embedding of zeros what is left is the noise: uniform, alpha / sqrt(tokens of the record x hidden size)."""
    from types import SimpleNamespace

    from weft.config.mesh import MeshShape, ParallelSection
    from weft.data.batches.loader import BatchSource
    from weft.objectives.sft import SFT
    from weft.parallel.passes import Passes

    model = weft.load_model(folder).train()
    torch.nn.init.zeros_(model.embed_tokens.weight)
    passes = Passes(
        model,
        SFT(neftune=3.0),
        SimpleNamespace(device=torch.device("cpu"), shape=MeshShape()),
        ParallelSection(),
    )
    seen = []
    model.embed_tokens.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    batch = BatchSource(Packed(), batch_size=2, seed=None).batch(0)
    for seed in (3, 3, 4):
        passes.train([batch], weight=1.0, learned_tokens=1.0, seed=lambda sample, seed=seed: seed * 1000 + sample)
    model.eval()
    passes.evaluate(batch)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert not seen[3].any()
    for row in range(2):
        for segment in range(2):
            inside = seen[0][row][batch.segments[row] == segment]
            most = 3.0 / (len(inside) * 32) ** 0.5
            assert 0.95 * most < inside.abs().max() <= most
            assert inside.std() == pytest.approx(most / 3**0.5, rel=0.15)


@pytest.fixture
def fine_tuning(run_yaml, tiny_tokenizer, tmp_path):
    """A run on conversations: `fine_tuning("name", conversations, training={...}) -> run.yaml`."""

    def write(name, conversations, **changes):
        file = tmp_path / "chat.jsonl"
        file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
        store = tmp_path / "chat"
        command = ["data", "pack", file, "--tokenizer", tiny_tokenizer, "--chat-template", "plain", "--out", store]
        if not store.exists():
            assert main([str(part) for part in command]) == 0
        sections = {
            "data": {"train": str(store), "validation": None, "packing": "best_fit", "sequence_length": 64},
            "objective": {"type": "sft", "loss": "sequences"},
            "schedule": {"warmup_steps": 2},
            "checkpoint": {"every": 1000},
            "log": QUIET,
        }
        merged = {k: sections.get(k, {}) | changes.get(k, {}) for k in sections.keys() | changes.keys()}
        return run_yaml(f"{name}.yaml", run={"name": name}, **merged)

    return write


def conversations(count):
    """Questions that differ, and answers of one to five words of the corpus."""
    words = ["kalo", "mi", "rensta", "tu", "voshi", "pra", "el", "tukamil"]
    chooser = np.random.default_rng(3)
    pick = lambda size: " ".join(chooser.choice(words, size))  # noqa: E731
    return [
        [
            {"role": "user", "content": f"{words[number % 8]} {words[number // 8]}?\n"},
            {"role": "assistant", "content": pick(1 + number % 5)},
        ]
        for number in range(count)
    ]


def test_resumed_in_mid_epoch_to_the_bit(fine_tuning, tmp_path):
    short = {
        "objective": {"neftune": 5.0},
        "training": {"steps": 5, "batch_tokens": 128, "micro_batch_size": 1},
        "schedule": {"type": "constant", "warmup_steps": 0},
        "data": {"validation": str(tmp_path / "chat")},
        "validation": {"every": 2},
    }
    assert train(fine_tuning("straight", conversations(40), **short)) == 0
    broken = fine_tuning("broken", conversations(40), **short)
    assert train(broken, "training.steps=2") == 0
    assert train(broken) == 0
    straight, broken = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"
    assert losses(straight) == losses(broken)
    assert_same_weights(straight, broken)


def test_32_records_are_recalled_and_the_answers_end(fine_tuning, tmp_path):
    records = conversations(32)
    file = fine_tuning(
        "recall",
        records,
        model={"num_hidden_layers": 2},
        data={"sequence_length": 32},
        training={"steps": 100, "batch_tokens": 288, "micro_batch_size": 9},
        optimizer={"lr": 1e-2, "weight_decay": 0.0},
    )
    assert train(file) == 0
    run = tmp_path / "runs" / "recall"
    found = weft.generate(run, [question["content"] for question, _ in records], max_new_tokens=40, temperature=0)
    assert [str(text) for text in found] == [answer["content"] for _, answer in records]
