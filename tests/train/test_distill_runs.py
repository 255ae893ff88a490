"""Distillation in whole runs: the student comes nearer to the teacher, and a resumed run makes the same updates."""

import json

import numpy as np
import pytest
from running import QUIET, assert_same_weights, losses, metrics, train

VOCABULARY, LENGTH = 32, 32


class Chain:
    """Seeded sequences of a Markov chain, whose next token is uncertain."""

    def __init__(self, *, seed: int = 0, count: int = 32):
        weights = np.exp(1.5 * np.random.default_rng(99).standard_normal((VOCABULARY, VOCABULARY)))
        self.cumulative = (weights / weights.sum(1, keepdims=True)).cumsum(1)
        self.seed, self.count = seed, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draws = np.random.default_rng([self.seed, index]).random(LENGTH + 1)
        ids = [int(draws[0] * VOCABULARY)]
        for draw in draws[1:]:
            ids.append(min(int(np.searchsorted(self.cumulative[ids[-1]], draw)), VOCABULARY - 1))
        return {"tokens": ids[:-1], "labels": ids[1:]}


def write(folder, name, *, objective, hidden=16, steps=40, data=None, vocabulary=VOCABULARY, **sections):
    model = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 2}
    content = {
        "run": {"name": name, "directory": str(folder)},
        "model": {**model, "intermediate_size": 2 * hidden, "max_position_embeddings": LENGTH},
        "data": {
            "train": {"type": "test_distill_runs:Chain", **(data or {"seed": 2})},
            "validation": {"type": "test_distill_runs:Chain", "seed": 7, "count": 64},
            "sequence_length": LENGTH,
        },
        "objective": objective,
        "optimizer": {"lr": 1e-2},
        "schedule": {"type": "cosine", "warmup_steps": 5},
        "training": {"steps": steps, "batch_tokens": 16 * LENGTH, "threads": 1, "dtype": "float32"},
        "log": QUIET,
    } | sections
    path = folder / f"{name}.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in content.items()))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the teacher: a larger model, trained on more data."""
    path = tmp_path_factory.mktemp("distill")
    data = {"seed": 1, "count": 2000}
    assert train(write(path, "teacher", objective={"type": "pretrain"}, hidden=32, steps=125, data=data)) == 0
    return path


def test_the_student_closes_more_than_half_of_its_gap_in_equal_steps(folder):
    """On few data, from which it overfits without a teacher."""
    assert train(write(folder, "plain", objective={"type": "pretrain"})) == 0
    assert train(write(folder, "distilled", objective={"type": "distill", "teacher": str(folder / "teacher")})) == 0
    teacher, plain, student = (metrics(folder / name)[-1] for name in ("teacher", "plain", "distilled"))
    gap = plain["validation_loss"] - teacher["validation_loss"]
    left = student["validation_cross_entropy"] - teacher["validation_loss"]
    assert gap > 0.3
    assert left < gap / 2
    assert student["validation_divergence"] == pytest.approx(student["validation_loss"])
    assert 0 < student["validation_divergence"] < metrics(folder / "distilled")[0]["divergence"] / 4


def test_a_resumed_run_makes_the_same_updates(folder):
    objective = {"type": "distill", "teacher": str(folder / "teacher"), "loss": "jsd", "top_k": 4, "alpha": 0.5}
    options = {"objective": objective, "adapter": {"r": 2, "dropout": 0.1}, "checkpoint": {"every": 2}}
    options["model"] = {"from": str(folder / "teacher")}
    options["schedule"] = {"type": "constant"}
    assert train(write(folder, "straight", steps=4, **options)) == 0
    path = write(folder, "resumed", steps=4, **options)
    assert train(path, "training.steps=2") == 0
    assert train(path) == 0
    assert losses(folder / "resumed") == losses(folder / "straight")
    assert_same_weights(folder / "resumed", folder / "straight")


def test_a_teacher_of_another_vocabulary_or_a_shorter_window_is_refused(folder, capsys):
    objective = {"type": "distill", "teacher": str(folder / "teacher")}
    longer = (f"data.sequence_length={2 * LENGTH}", f"model.max_position_embeddings={2 * LENGTH}")
    assert train(write(folder, "longer", objective=objective), *longer) == 2
    said = capsys.readouterr().err
    assert f"objective.teacher: {folder / 'teacher'} has 32 positions, but the run's sequences have 64 tokens" in said
    assert train(write(folder, "refused", objective=objective, vocabulary=40)) == 2
    said = capsys.readouterr().err
    assert "objective.teacher: " in said
    assert "has a vocabulary of 32 ids, but the run's model has 40" in said
    assert train(write(folder, "lacking", objective={"type": "distill"})) == 2
    assert "objective.teacher" in capsys.readouterr().err
