"""Raw preferences as the data of a run: packed as pairs, learned by objectives that declare it, else refused."""

# ruff: noqa: F811 (fixtures of another file)
import json

import numpy as np
import pytest
from running import losses, metrics, train
from test_raw_data import LENGTH, cache, prepared, raw_yaml, refused, store_of  # noqa: F401

from weft.cli.main import main
from weft.config.run import RunConfig
from weft.errors import ConfigError

OBJECTIVE = """
from torch.nn.functional import logsigmoid
from weft.objectives import Field, Loss
from weft.objectives.pretrain import Pretrain

class Pairs(Pretrain):
    data = "preferences"
    scalars = ("accuracy",)

    def weight(self, batch):
        return batch.by_item(batch.learned_documents).all(-1).sum()

    def loss(self, outputs, batch):
        count = batch.by_item(batch.learned_documents).all(-1) * batch.share
        score = batch.by_item(batch.document_sums(outputs * batch.weight))
        apart = 0.01 * (score[..., 0] - score[..., 1])
        return Loss(-(logsigmoid(apart) * count).sum(), {"accuracy": (((apart > 0) * count).sum(), count.sum())})

class Inherits(Pairs):
    pass

class Labels(Pretrain):
    scalars = ("good", "score")

    def __init__(self, *, scored: bool = False):
        self.fields = (
            {"label": Field(per_document=True), "score": Field(per_document=True)}
            if scored
            else {"label": Field(per_document=True)}
        )

    def weight(self, batch):
        return batch.learned_documents.sum()

    def loss(self, outputs, batch):
        count = batch.learned_documents * batch.share
        label = batch.document_values("label")
        sums = batch.document_sums(outputs * batch.weight)
        score = batch.document_values("score") if "score" in self.fields else label
        scalars = {"good": ((label * count).sum(), count.sum()), "score": ((score * count).sum(), count.sum())}
        return Loss(((1 - 2 * label) * sums * count).sum(), scalars)
"""
ANSWERS = ["Kalo mi.", "Ren sta tu, vo shi pra el.", "Zx" * 60, "x", "Tu vo. " * 3, "El?", "x", "Sta " * 12]
RECORDS = [{"prompt": f"Vo {n}?", "chosen": a, "rejected": ANSWERS[n - 1]} for n, a in enumerate(ANSWERS)]


@pytest.fixture
def pairs(tmp_path, cache, monkeypatch):
    """A file of preferences, of which two have equal answers, beside objectives that learn from them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pair_objectives.py").write_text(OBJECTIVE)
    path = tmp_path / "pairs.jsonl"
    equal = {"prompt": "Vo?", "chosen": "Tu.", "rejected": "Tu."}
    path.write_text("".join(json.dumps(record) + "\n" for record in [*RECORDS, equal, equal]))
    return path


LEARNS = "objective.type=pair_objectives:Pairs"


def test_a_run_learns_from_raw_preferences_whatever_the_micro_batches(raw_yaml, pairs, tmp_path, capsys):
    for name, micro in (("one", 1), ("four", 4)):
        overrides = [
            LEARNS,
            f"run.name={name}",
            f"training.micro_batch_size={micro}",
            "training.dtype=float64",
        ]
        assert train(raw_yaml(train=str(pairs), chat_template="plain", validation=str(pairs)), *overrides) == 0
        told = capsys.readouterr().err
        assert f"data.train: {pairs}: records: preferences (chosen, rejected); template: " in told
        assert "dropped 2 of 10 preference pairs: the chosen and the rejected answer are equal" in told
        assert (
            "dropped 2 of 10 preference pairs: longer than 96 tokens; raise data.sequence_length, or set data." in told
        )
    runs = [tmp_path / "runs" / name for name in ("one", "four")]
    np.testing.assert_allclose(losses(runs[0]), losses(runs[1]), rtol=0, atol=1e-10)
    first, last = metrics(runs[0])[0], metrics(runs[0])[-1]
    assert 0 < first["loss"] < 2
    assert 0 <= last["validation_accuracy"] <= 1
    manifest = json.loads((runs[0] / "manifest.json").read_text())
    assert sum(manifest["data_left_out"]["train"].values()) == 4


def test_overlong_pairs_are_truncated_to_the_sequence(raw_yaml, pairs):
    config = prepared(raw_yaml(train=str(pairs), chat_template="plain", overlong="truncate"), LEARNS)
    store = store_of(config)
    totals = np.asarray(store.lengths).reshape(-1, 2).sum(1)
    assert (store.info.kind, config.data.packing) == ("preferences", "best_fit")
    assert totals.max() == LENGTH
    assert store.info.notes == {f"truncated to {LENGTH} tokens": 2}


def test_preferences_and_other_data_are_refused_for_the_other_objectives(raw_yaml, pairs, tmp_path, tiny_store):
    found = refused(raw_yaml(train=str(pairs), chat_template="plain"), "objective.type=sft")
    assert f"data.train: {pairs}: records of preferences" in found
    assert "set an objective that learns from pairs" in found
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "a", "completion": "b"}\n')
    for objective in ("Pairs", "Inherits"):
        found = refused(raw_yaml(train=str(chats)), f"objective.type=pair_objectives:{objective}")
        assert (
            "conversations in the layout pairs (prompt, completion), but the run's objective learns from pref" in found
        )
    (tmp_path / "a.txt").write_text("Vo.")
    assert "plain text, but the run's objective learns from" in refused(raw_yaml(train=str(tmp_path / "a.txt")), LEARNS)
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(raw_yaml(train=str(tiny_store)), [LEARNS])
    (problem,) = map(str, caught.value.problems)
    assert "is a store of texts, but the objective pair_objectives:Pairs learns from preference pairs; use" in problem


def test_stores_of_pairs_are_checked_early(raw_yaml, pairs, tmp_path, hf_folder, capsys):
    command = ["data", "pack", pairs, "--tokenizer", hf_folder, "--out", tmp_path / "store", "--chat-template", "plain"]
    assert main(list(map(str, command))) == 0
    store = str(tmp_path / "store")

    def problems(*overrides, **data):
        with pytest.raises(ConfigError) as caught:
            RunConfig.load(raw_yaml(train=store, **data), list(overrides))
        return list(map(str, caught.value.problems))

    (found,) = problems("objective.type=sft")
    assert "data.train: " in found
    assert "is a store of preference pairs, but the objective sft learns from text" in found
    (found,) = problems(LEARNS, packing="concatenate")
    assert "data.packing: concatenate would split preference pairs; set best_fit or pad" in found
    (found,) = problems(LEARNS, length_warmup={"start": 48, "steps": 2})
    assert "data.length_warmup: a warm-up splits documents, but the objective pair_objectives:Pairs needs" in found
    config = RunConfig.load(raw_yaml(train=store), [LEARNS])
    assert (config.data.packing, config.data.document_attention) == ("best_fit", True)
    assert train(raw_yaml(train=store), LEARNS, "training.steps=1") == 0
    assert "longer than 96 tokens left out, packed into" in capsys.readouterr().err
    assert train(raw_yaml(train=str(pairs), chat_template="plain", packing="concatenate"), LEARNS) == 2
    assert "data.packing: concatenate would split preference pairs; set best_fit or pad" in capsys.readouterr().err


LABELED = [{"prompt": f"Vo {n}?", "completion": a, "label": n % 4 > 0, "score": n / 8} for n, a in enumerate(ANSWERS)]


def labels(tmp_path, records=LABELED):
    path = tmp_path / "labeled.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("scored", [False, True])
def test_a_run_learns_from_raw_records_with_labels(raw_yaml, pairs, tmp_path, scored):
    file = raw_yaml(train=str(labels(tmp_path)), chat_template="plain")
    overrides = ["objective.type=pair_objectives:Labels", f"objective.scored={scored}".lower(), "training.steps=1"]
    assert train(file, *overrides, "training.batch_tokens=384", "run.name=labels") == 0
    (line,) = metrics(tmp_path / "runs" / "labels")
    # all but the longest answer are in the batch
    kept = [record for record in LABELED if "Zx" not in record["completion"]]
    assert line["good"] == pytest.approx(np.mean([record["label"] for record in kept]), abs=1e-6)
    score = np.mean([record["score"] for record in kept])
    assert line["score"] == pytest.approx(score if scored else line["good"], abs=1e-6)


def test_data_without_the_labels_of_an_objective_are_refused_by_name(raw_yaml, pairs, tmp_path, hf_folder, capsys):
    learns = "objective.type=pair_objectives:Labels"
    bare = [{key: record[key] for key in ("prompt", "completion")} for record in LABELED]
    found = refused(raw_yaml(train=str(labels(tmp_path, bare))), learns)
    assert "the first records have no number 'label' (their keys: 'prompt', 'completion')" in found
    (tmp_path / "a.txt").write_text("Vo.")
    assert "the number 'label' of each answer; use con" in refused(raw_yaml(train=str(tmp_path / "a.txt")), learns)
    assert "name its key with data.fields.label" in found
    renamed = [{**record, "good": record["label"], "label": None} for record in LABELED]
    raw = {"train": str(labels(tmp_path, renamed)), "fields": {"label": "good"}, "overlong": "truncate"}
    assert store_of(prepared(raw_yaml(**raw), learns)).fields["label"].tolist() == [0, 1, 1, 1, 0, 1, 1, 1]
    store = str(tmp_path / "store")
    command = ["data", "pack", str(labels(tmp_path)), "--tokenizer", str(hf_folder), "--out", store, "--conversations"]
    assert main(command) == 0
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(raw_yaml(train=store), [learns])
    (problem,) = map(str, caught.value.problems)
    assert (
        "has no field 'label' of its documents, which the objective pair_objectives:Labels needs; pack rec" in problem
    )
    assert main([*command, "--overwrite", "--document-fields", "label"]) == 0
    RunConfig.load(raw_yaml(train=store), [learns])
    with pytest.raises(ConfigError, match=r"no field 'score'"):
        RunConfig.load(raw_yaml(train=store), [learns, "objective.scored=true"])
    with pytest.raises(ConfigError, match="concatenate would split documents, of which pair_objectives:Labels needs"):
        RunConfig.load(raw_yaml(train=store, packing="concatenate"), [learns])
    capsys.readouterr()
    assert train(raw_yaml(train=store), "objective.type=sft", "training.steps=1", "run.name=other") == 0
    assert "store: the objective sft does not use the field 'label' of the documents" in capsys.readouterr().err
    assert train(raw_yaml(train=str(labels(tmp_path))), "objective.type=sft", "training.steps=1") == 0
    assert "; the label of the records (true or false) is not used: all answers" in capsys.readouterr().err
