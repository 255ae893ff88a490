"""An objective with fields, pairs, scalars and further forwards gives one process's numbers on every mesh."""

import json

import numpy as np
import pytest
from compare import Run, compare
from matrix import WITHIN, Case, ranks_of, write_run
from pool import RanksFailed

PAIRS = {"type": "objective_parts:Pairs"}
PACKED = {"type": "objective_parts:Packed"}
SCALARS = ("accuracy", "chosen", "validation_accuracy", "validation_chosen")


def train(runner, name, mesh, *, micro=2, objective="Preference"):
    """Two steps of shorter rows, then one of whole pairs and a validation."""
    file = write_run(
        runner.folder,
        Case("dense", "plain", mesh),
        name=name,
        objective={"type": f"objective_parts:{objective}"},
        data={"train": PAIRS, "validation": {**PAIRS, "count": 5}, "length_warmup": {"start": 8, "steps": 2}},
        # 5 pairs a step: 10 sequences
        training={"batch_tokens": 10 * 32, "micro_batch_size": micro},
        validation={"every": 3, "micro_batch_size": 2},
    )
    runner.pool.run(file, ranks_of(mesh), fresh=True, seconds=60)
    return Run(runner.folder / name)


def scalars(run):
    lines = list(map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines()))
    return np.array([line[name] for line in lines for name in SCALARS if name in line])


@pytest.fixture(scope="module")
def one(runner):
    run = train(runner, "pairs-alone", {}, micro=5)
    # 320 tokens a step, of which 7 in 10 are learned
    assert run.metrics["learned_tokens"] == pytest.approx(0.7 * 320, rel=0.1)
    assert scalars(run).shape == (2 + 2 + 4,)
    return run


@pytest.mark.parametrize(
    ("mesh", "micro", "objective"),
    [
        ({}, 1, "Twice"),
        ({"dp_shard": 2}, 3, "Twice"),
        pytest.param({"dp_shard": 2, "cp": 2}, 3, "Twice", marks=pytest.mark.long),
        pytest.param({"cp": 2, "tp": 2, "cp_method": "all_gather"}, 2, "Preference", marks=pytest.mark.long),
        ({"pp": 2}, 2, "Preference"),
        pytest.param({"pp": 2, "cp": 2, "pp_schedule": "zbv_zero_bubble"}, 1, "Preference", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_pairs_on_a_mesh_are_those_of_one_process(runner, one, mesh, micro, objective):
    run = train(runner, "pairs-on-a-mesh", mesh, micro=micro, objective=objective)
    difference = compare(one, run)
    assert difference.largest <= WITHIN, difference.wrong()
    assert scalars(run) == pytest.approx(scalars(one), rel=0, abs=WITHIN)


def train_documents(runner, name, mesh, micro):
    """Three steps of five sequences with two items each, of which a third has both answers."""
    file = write_run(
        runner.folder,
        Case("gqa", "plain", mesh, layers=2),
        name=name,
        objective={"type": "objective_parts:Documents"},
        data={"train": PACKED, "validation": {**PACKED, "count": 5}},
        training={"batch_tokens": 5 * 32, "micro_batch_size": micro},
        validation={"every": 3, "micro_batch_size": 2},
    )
    runner.pool.run(file, ranks_of(mesh), fresh=True, seconds=60)
    return Run(runner.folder / name)


@pytest.fixture(scope="module")
def packed(runner):
    return train_documents(runner, "documents-alone", {}, 5)


@pytest.mark.parametrize(
    ("mesh", "micro"),
    [
        pytest.param({"dp_shard": 2, "cp": 2}, 2, marks=pytest.mark.long),
        ({"pp": 2, "cp": 2, "cp_method": "all_gather"}, 1),
        pytest.param({"dp_shard": 2}, 1, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_items_of_packed_documents_on_a_mesh_are_those_of_one_process(runner, packed, mesh, micro):
    run = train_documents(runner, "documents-on-a-mesh", mesh, micro)
    difference = compare(packed, run)
    assert difference.largest <= WITHIN, difference.wrong()
    assert scalars(run) == pytest.approx(scalars(packed), rel=0, abs=WITHIN)


def test_several_forwards_with_gradient_are_refused_with_a_pipeline(runner):
    with pytest.raises(RanksFailed, match=r"Twice\.compute calls the model, but with parallel\.pp a schedule does"):
        train(runner, "refused", {"pp": 2}, objective="Twice")


def test_functions_of_chunks_of_logits_are_those_of_all_logits(runner):
    """With soft-capped logits, sharded over the vocabulary, and outputs that a pipeline broadcasts."""
    runs, entropies = [], []
    for mesh, chunks in (({}, False), ({"pp": 2, "tp": 2}, True)):
        objective, name = {"type": "objective_parts:Certain", "chunks": chunks}, f"chunks-{chunks}"
        file = write_run(runner.folder, Case("gemma2", "masked", mesh, 2), steps=2, name=name, objective=objective)
        runner.pool.run(file, ranks_of(mesh), fresh=True, seconds=60)
        runs.append(Run(runner.folder / name))
        lines = map(json.loads, (runs[-1].path / "metrics.jsonl").read_text().splitlines())
        entropies.append([line["entropy"] for line in lines])
    difference = compare(*runs)
    assert difference.largest <= WITHIN, difference.wrong()
    assert entropies[0] == pytest.approx(entropies[1], rel=0, abs=WITHIN)
