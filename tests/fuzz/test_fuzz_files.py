"""Mutated token stores and checkpoints: each is refused with its name, or has exactly the content of the original."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzzing import mutate_file, mutated_tree, within
from signing import sign

import weft
from weft.cli.main import main
from weft.data.stores.operations.verify import verify
from weft.data.stores.store import TokenStore
from weft.errors import UserError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_store, tiny_tokenizer) -> Path:
    """A run directory with one checkpoint of a tiny model."""
    folder = tmp_path_factory.mktemp("fuzzed")
    config = {
        "run": {"name": "demo", "directory": str(folder)},
        "model": {"preset": "llama-tiny", "vocab_size": 512, "num_hidden_layers": 1, "hidden_size": 16},
        "tokenizer": str(tiny_tokenizer),
        "data": {"train": str(tiny_store), "sequence_length": 16},
        "training": {"steps": 1, "batch_tokens": 32, "dtype": "float32", "threads": 1},
        "log": {"trackers": []},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder / "demo"


def check_checkpoint(number: int, run: Path, place: Path, weights: dict) -> str:
    rng = random.Random(number)
    copy = place / "run"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    (step,) = (copy / "checkpoints").iterdir()
    signed = number % 2
    if signed:
        file = rng.choice([path for path in sorted(step.glob("*.json")) if path.name != "checksums.json"])
        file.write_text(json.dumps(mutated_tree(rng, json.loads(file.read_bytes()))))
        what = f"{file.name} is signed"
        sign(step)
    else:
        what = mutate_file(rng, rng.choice(sorted(path for path in step.iterdir() if path.is_file())))
    refusal = None
    try:
        with within(20):
            found = weft.load_model(copy).state_dict()
    except UserError as error:
        refusal = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    if refusal is not None:
        assert str(copy) in refusal or signed, (what, refusal)
        return "refused"
    if not signed:  # somebody who signs may change the model, but not what is run
        assert found.keys() == weights.keys(), what
        assert all(torch.equal(value, weights[name]) for name, value in found.items()), what
    return "accepted"


def check_store(number: int, store: Path, place: Path, content: list) -> str:
    rng = random.Random(number)
    copy = place / "store"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(store, copy)
    what = mutate_file(rng, rng.choice(sorted(path for path in copy.iterdir() if path.is_file())))
    refusal, problems = None, []
    try:
        with within(20):
            problems = verify(copy)
            opened = TokenStore(copy)
            found = [np.array(opened.document(number)) for number in range(opened.num_documents)]
    except UserError as error:
        refusal = str(error)
    except Exception as error:
        if problems:
            return "refused"  # `weft train` compares the sample, and `--verify` all, before it reads documents
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    if refusal is not None:
        assert str(copy) in refusal, (what, refusal)
        return "refused"
    same = len(found) == len(content) and all(np.array_equal(a, b) for a, b in zip(found, content, strict=True))
    assert same or problems, what
    return "refused" if problems else "accepted"


def check_all(check, numbers, *given) -> None:
    failed, counts = [], {"refused": 0, "accepted": 0}
    for number in numbers:
        try:
            counts[check(number, *given)] += 1
        except AssertionError as error:
            failed.append(f"{number}: {error}")
    assert not failed, "\n".join(failed[:40]) + f"\n{len(failed)} of {len(numbers)}"
    assert counts["refused"] > 0, counts
    print(counts)


@pytest.fixture
def weights(checkpoint):
    return weft.load_model(checkpoint).state_dict()


@pytest.fixture
def content(tiny_store):
    opened = TokenStore(tiny_store)
    return [np.array(opened.document(number)) for number in range(opened.num_documents)]


def test_a_sample_of_mutated_checkpoints(checkpoint, weights, tmp_path):
    check_all(check_checkpoint, range(24), checkpoint, tmp_path, weights)


def test_a_sample_of_mutated_stores(tiny_store, content, tmp_path):
    check_all(check_store, range(24), tiny_store, tmp_path, content)


@pytest.mark.fuzz
def test_500_mutated_checkpoints(checkpoint, weights, tmp_path):
    check_all(check_checkpoint, range(1000, 1500), checkpoint, tmp_path, weights)


@pytest.mark.fuzz
def test_500_mutated_stores(tiny_store, content, tmp_path):
    check_all(check_store, range(1000, 1500), tiny_store, tmp_path, content)
