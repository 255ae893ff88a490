"""What a frozen model says of the documents is computed once, and is what it says in each step."""

# ruff: noqa: F811 (fixtures of another file)
import json

import numpy as np
import pytest
from running import losses, metrics, train
from test_raw_data import cache, raw_yaml  # noqa: F401

from weft.checkpoint.base_model import source_digest
from weft.checkpoint.load import architecture, find_checkpoint

ANSWERS = ["Kalo mi.", "Ren sta tu, vo shi pra el.", "Zx" * 60, "x", "Tu vo. " * 3, "El?", "y", "Sta " * 12]
RECORDS = [{"prompt": f"Vo {n}?", "chosen": a, "rejected": ANSWERS[n - 1]} for n, a in enumerate(ANSWERS)]


@pytest.fixture
def write(raw_yaml, tmp_path, cache):
    """Writes a run on preferences of 2 steps, whose frozen model is asked in each step or `once`."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))

    def write(name, *, once, steps=2, adapter=None, **parallel):
        file = raw_yaml(f"{name}.yaml", train=str(path), validation=str(path), chat_template="plain")
        sections = {
            "objective": {"type": "objective_parts:Compared", "once": once},
            "optimizer": {"type": "adamw", "lr": 0.02},
            "schedule": {"type": "constant", "warmup_steps": 0},
            "parallel": {"dp_shard": 1, **parallel},
            "checkpoint": {"every": 1, "keep_last": 9},
            "validation": {"every": 2},
            **({"adapter": adapter} if adapter else {}),
        }
        text = file.read_text().replace('"steps": 2', f'"steps": {steps}').replace("float32", "float64")
        file.write_text(text + "".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
        return file

    return write


def numbers(run):
    names = ("loss", "grad_norm", "kept", "validation_loss", "validation_kept")
    return np.array([[line.get(name, 0.0) for name in names] for line in metrics(run)])


def test_what_is_cached_is_what_the_model_says_also_of_a_trained_adapter(write, tmp_path, capsys, monkeypatch):
    runs = tmp_path / "runs"
    assert train(write("live", once=False)) == 0
    assert train(write("once", once=True)) == 0
    told = capsys.readouterr().err
    assert told.count("computing kept_logprobs of") == 1  # the validation has the same store
    np.testing.assert_allclose(numbers(runs / "once"), numbers(runs / "live"), rtol=0, atol=1e-9)
    assert np.ptp(numbers(runs / "once")[:, 1]) > 1e-3
    (file,) = (tmp_path / "cache" / "logprobs").glob("*.npy")
    assert len(np.load(file)) == 2 * len(RECORDS) - 4  # without the pairs that are too long

    monkeypatch.setattr("weft.train.frozen_sources.FrozenCopy", None)  # it is not needed again
    assert train(write("resumed", once=True, steps=1)) == 0
    assert train(write("resumed", once=True)) == 0
    assert "computing" not in capsys.readouterr().err
    assert losses(runs / "resumed") == losses(runs / "once")

    adapter = {"r": 2, "targets": "all-linear", "dropout": 0.1}
    assert train(write("first", once=False, adapter=adapter)) == 0
    more = adapter | {"from": str(runs / "first")}
    assert train(write("second", once=False, adapter=more)) == 0
    assert train(write("second-once", once=True, adapter=more)) == 0
    assert "computing" in capsys.readouterr().err
    np.testing.assert_allclose(numbers(runs / "second-once"), numbers(runs / "second"), rtol=0, atol=1e-9)
    assert abs(numbers(runs / "second") - numbers(runs / "first"))[:, 2].max() > 1e-3
    checkpoint = find_checkpoint(runs / "first")  # the same tensors with other settings are another model
    section, record = architecture(checkpoint), json.loads((checkpoint / "adapter.json").read_text())
    found = [source_digest(section, checkpoint)]
    for changed in ({}, {"from": "elsewhere"}, {"alpha": 5.0}, {"rslora": True}):
        (checkpoint / "adapter.json").write_text(json.dumps(record | {"adapter": record["adapter"] | changed}))
        found.append(source_digest(section, checkpoint))
    assert found[0] == found[1] == found[2]
    assert len(set(found)) == 3

    file.write_bytes(b"damaged")
    monkeypatch.undo()
    assert train(write("again", once=True)) == 0
    assert losses(runs / "again") == losses(runs / "once")


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("axis", "adapter"),
    [pytest.param("dp_shard", None, marks=pytest.mark.long), ("cp", {"r": 2, "targets": "all-linear"})],
    ids=str,
)
def test_ranks_compute_it_together(runner, write, tmp_path, axis, adapter):
    assert train(write("alone", once=False, adapter=adapter)) == 0
    runner.pool.run(write("ranks", once=True, adapter=adapter, **{axis: 2}), 2, fresh=True, seconds=120)
    runs = tmp_path / "runs"
    np.testing.assert_allclose(numbers(runs / "ranks"), numbers(runs / "alone"), rtol=0, atol=1e-9)
