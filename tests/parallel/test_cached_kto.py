"""KTO with cached log-probabilities of the reference makes the updates of KTO with the reference in memory."""

# ruff: noqa: F811 (fixtures of another file)
import json

import numpy as np
import pytest
from running import metrics, train
from test_raw_data import cache, raw_yaml  # noqa: F401

ANSWERS = ["Kalo mi.", "Ren sta tu, vo shi pra el.", "x", "Tu vo. " * 3, "El?", "y", "Sta. " * 5]
RECORDS = [{"prompt": f"Vo {n}?", "completion": a, "label": n % 3 > 0} for n, a in enumerate(ANSWERS * 4)]


@pytest.fixture
def write(raw_yaml, tmp_path, cache):
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))

    def write(name, *, once, adapter=None, **parallel):
        file = raw_yaml(f"{name}.yaml", train=str(path), validation=str(path), chat_template="plain")
        sections = {
            "objective": {"type": "kto", "beta": 0.5, "cache_reference": once},
            "optimizer": {"type": "adamw", "lr": 0.02},
            "schedule": {"type": "constant", "warmup_steps": 0},
            "parallel": {"dp_shard": 1, **parallel},
            "validation": {"every": 2},
            **({"adapter": adapter} if adapter else {}),
        }
        text = file.read_text().replace('"steps": 2', '"steps": 4').replace("float32", "float64")
        file.write_text(text + "".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
        return file

    return write


def numbers(run):
    names = ("loss", "grad_norm", "kl", "reward_chosen", "validation_loss", "validation_kl")
    return np.array([[line.get(name, 0.0) for name in names] for line in metrics(run)])


@pytest.mark.xdist_group("ranks")
@pytest.mark.long
def test_the_cache_gives_the_numbers_of_the_reference(write, runner, tmp_path, capsys, monkeypatch):
    runs = tmp_path / "runs"
    assert train(write("live", once=False)) == 0
    assert train(write("once", once=True)) == 0
    assert capsys.readouterr().err.count("computing reference of") == 1  # the validation has the same store
    found = numbers(runs / "live")
    assert (found[1:3, 2] > 0).all()  # the KL divergence
    np.testing.assert_allclose(numbers(runs / "once"), found, rtol=0, atol=1e-9)
    runner.pool.run(write("ranks", once=True, cp=2), 2, fresh=True)
    np.testing.assert_allclose(numbers(runs / "ranks"), found, rtol=0, atol=1e-9)
    monkeypatch.setattr("weft.train.frozen_sources.FrozenCopy", None)  # it is not needed again
    assert train(write("again", once=True)) == 0
    np.testing.assert_allclose(numbers(runs / "again"), found, rtol=0, atol=1e-9)

    adapter = {"r": 2, "dropout": 0.1}
    assert train(write("adapter", once=False, adapter=adapter)) == 0
    assert train(write("adapter-once", once=True, adapter=adapter)) == 0
    np.testing.assert_allclose(numbers(runs / "adapter-once"), numbers(runs / "adapter"), rtol=0, atol=1e-9)
