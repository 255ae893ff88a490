"""Runs whose model generates its own training data."""

import json

import pytest
import torch
from rollout_runs import lines_of, settings, write_inputs
from running import assert_same_weights, losses, metrics, replaced, train

from weft.cli.main import main
from weft.data.batches.layout import Field, Layout
from weft.train.rollouts.rollout import Completion, Rollout, pack_documents

# The engine has the sums of weights and adapters, the trainer computes with both; with a quantized base both do.
ADAPTERS = [{"r": 4, "dora": True, "quantize": "int8"}]
MORE = [None, {"r": 4, "alpha": 8}, {"r": 4, "init": "pissa"}, {"r": 4, "dora": True, "targets": "all-linear"}]
ADAPTERS += [pytest.param(one, marks=pytest.mark.long) for one in MORE]


@pytest.fixture(autouse=True)
def _inputs(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_trivial_reward_is_learned_and_shown(run_yaml, tmp_path, capsys):
    lines = lines_of(run_yaml, tmp_path, **settings(training={"steps": 24}, samples={"every": 12}))
    rewards = [line["reward"] for line in lines]
    assert sum(rewards[-4:]) / 4 > 3 * max(rewards[:2])
    for line in lines:
        assert line["ratio"] == pytest.approx(1, abs=1e-6)
        assert line["engine_deviation"] < 1e-5
        assert line["reward_p10"] <= line["reward_p50"] <= line["reward_p90"]
        assert 1 <= line["completion_length"] <= 8
        assert 0 <= line["truncated"] <= 1
    assert [line["loss"] for line in lines] == pytest.approx([0] * 24, abs=1e-6)  # ratio 1, advantages of mean 0
    page = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert all(text in page for text in ("completion_length", "(reward ", "engine_deviation"))
    shown = (tmp_path / "runs" / "demo" / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in shown} == {1, 13}
    assert "24 prompts" in capsys.readouterr().err


def test_a_run_that_resumes_in_the_middle_of_a_rollout_is_the_uninterrupted_run(run_yaml, tmp_path):
    several = {"updates_per_rollout": 4, "minibatches": 2, "clip": 0.5}
    straight = run_yaml("a.yaml", run={"name": "straight"}, **settings(several, training={"steps": 7}))
    assert train(straight) == 0
    for steps in (3, 6, 7):
        broken = run_yaml("b.yaml", run={"name": "broken"}, **settings(several, training={"steps": steps}))
        assert train(broken) == 0
    one, other = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"
    assert losses(one) == losses(other)
    assert [line["reward"] for line in metrics(one)] == [line["reward"] for line in metrics(other)]
    assert metrics(one)[0]["ratio"] == pytest.approx(1, abs=1e-9)
    assert metrics(one)[2]["ratio"] != pytest.approx(1, abs=1e-4)  # the second update with the same completions
    assert_same_weights(one, other)


def test_a_rollout_in_a_checkpoint_needs_the_settings_that_it_was_generated_with(run_yaml, capsys):
    several = {"updates_per_rollout": 2, "minibatches": 2}
    assert train(run_yaml(**settings(several, training={"steps": 1}))) == 0
    for changed, what in (({"group": 4}, "group: "), ({"updates_per_rollout": 4}, "updates_per_rollout: ")):
        assert train(run_yaml(**settings(several | changed, training={"steps": 3})), "--accept-changes") == 2
        error = capsys.readouterr().err
        assert f"objective.{what}the checkpoint is in the middle of a rollout with" in error
        assert "Traceback" not in error
    assert train(run_yaml(**settings(several, training={"steps": 2}))) == 0


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_log_probabilities_of_the_engine_are_those_of_the_trainer(adapter, run_yaml, tmp_path):
    limited = settings(
        {"temperature": 0.7, "top_p": 0.8, "top_k": 50, "loss": "dapo", "beta": 0.1}, training={"steps": 3}
    )
    if adapter is None:
        file = run_yaml(**limited)
    else:
        assert train(run_yaml("base.yaml", run={"name": "base"}, **settings(training={"steps": 1}))) == 0
        file = replaced(run_yaml(**limited, model=None), model={"from": "runs/base"}, adapter=adapter)
    assert train(file) == 0
    lines = metrics(tmp_path / "runs" / "demo")
    assert max(line["engine_deviation"] for line in lines) < 1e-5
    assert min(line["grad_norm"] for line in lines) > 0
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert lines[-1]["kl"] > 0


@pytest.mark.long
def test_steps_with_rollouts_are_profiled(run_yaml, capsys):
    few = settings({"max_new_tokens": 2, "prompts": 2, "group": 2}, training={"steps": 8})
    assert main(["profile", str(run_yaml(**few)), "--warmup", "1", "--steps", "2"]) == 0
    assert "recorded steps" in capsys.readouterr().err


def test_documents_are_packed_with_their_values_at_each_label():
    generator = torch.Generator().manual_seed(0)
    documents = []
    for size in (5, 9, 3, 7, 4):
        ids = torch.randint(100, (size,), generator=generator).tolist()
        learned = [0, 0, *[1] * (size - 2)]
        documents.append(
            Completion(ids, learned, [-one / 100 * on for one, on in zip(ids, learned, strict=True)], False, [""], [])
        )
    rollout = Rollout.of(0, documents, torch.arange(1.0, 6.0))
    layout = Layout({"rollout_logprobs": Field(seq_dim=0, dtype="float64"), "advantage": Field(per_document=True)})
    batch = pack_documents(rollout, range(1, 5), 9, layout, padding=0, first_sample=7).batch
    assert batch.samples.tolist() == [7, 8, 9]
    found = {}
    for row in range(len(batch.tokens)):
        for segment in range(batch.documents):
            here = (batch.segments[row] == segment) & (batch.extra["advantage"][row] > 0)
            if here.any():
                value = set(batch.extra["advantage"][row][here].tolist())
                assert len(value) == 1
                labels, weight = batch.labels[row][here], batch.weight[row][here]
                assert batch.positions[row][here].tolist() == list(range(len(labels)))
                torch.testing.assert_close(batch.extra["rollout_logprobs"][row][here], -labels / 100 * weight.double())
                found[value.pop()] = [int(batch.tokens[row][here][0]), *labels.tolist()], weight.tolist()
    assert found == {
        float(n + 1): (documents[n].ids, [float(x) for x in documents[n].learned[1:]]) for n in range(1, 5)
    }
    assert batch.weight.sum() == sum(sum(documents[n].learned) for n in range(1, 5))


def test_an_update_that_is_not_finite_is_reported_with_the_prompts_of_its_rollout(run_yaml, capsys):
    several = {"updates_per_rollout": 2}
    huge = settings(several, training={"steps": 4}, optimizer={"lr": 1e30})
    assert train(run_yaml(**huge)) == 1
    said = capsys.readouterr().err
    prompts = huge["objective"]["prompts"]
    assert f"samples of this batch: 0 to {prompts - 1}" in said
    assert "step 2" in said
