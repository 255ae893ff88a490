"""Paths in a run's file are relative to the working directory, and the message says so where that is the mistake."""

from pathlib import Path

import pytest
from config_cases import load, make_store, problems, shows, write

TEXT = """\
model: {preset: llama-tiny, vocab_size: 512}
data: {train: store, sequence_length: 64}
training: {steps: 10}
"""


def test_a_path_that_is_right_beside_the_file():
    make_store("configs/store", 5000)
    (found,) = problems(TEXT, name="configs/run.yaml", data=True)
    assert shows(found, "configs/run.yaml:2: data.train: store: ... run Weft from configs, or write configs/store")
    load(TEXT.replace("store", "configs/store"), name="configs/run.yaml", data=True)
    (found,) = problems(None, "data.train=store", name="configs/run.yaml", data=True)
    assert "no such token store" in found  # a path from the command line has no file


def test_in_a_base_and_in_a_list():
    make_store("shared/a", 5000)
    write("data: {train: [a], sequence_length: 64}\n", "shared/base.yaml")
    text = "extends: shared/base.yaml\nmodel: {preset: llama-tiny, vocab_size: 512}\ntraining: {steps: 10}\n"
    (found,) = problems(text, data=True)
    assert shows(found, "shared/base.yaml:1: data.train[0].store: a: ... paths are relative to the working")
    assert shows(found, "run Weft from shared, or write shared/a")


def test_a_run_to_start_from():
    Path("configs/runs/old").mkdir(parents=True)
    text = TEXT.replace("{preset: llama-tiny, vocab_size: 512}", "{from: runs/old}")
    (found,) = problems(text, name="configs/run.yaml")
    assert shows(found, "configs/run.yaml:1: model.from: runs/old: ... paths are relative to the working")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("tokenizer=''", "tokenizer"),
        ("tokenizer=' '", "tokenizer"),
        ("data.train=''", "data.train"),
        ("data.validation=''", "data.validation"),
        ("data.train=['']", "data.train[0].store"),
        ("run.directory=''", "run.directory"),
        ("model={from: ''}", "model.from"),
    ],
)
def test_an_empty_path(override, key):
    assert shows(problems(TEXT, override), [f"command line: {key}: empty; set the path of a folder"])


def test_a_path_that_cannot_be_one():
    (found,) = problems(TEXT, f"data.train={'x' * 300}", data=True)
    assert "no such token store" in found or "cannot be read" in found


def test_a_store_with_more_ids_than_the_model():
    make_store("store", 5000, vocabulary=300)
    make_store("more", 5000, vocabulary=600)
    (found,) = problems(TEXT, "data.validation=more", data=True)
    assert shows(found, "data.validation: more has a vocabulary of 600 tokens, ... 512; ... set model.vocab_size: 600")
    assert load(TEXT, "data.validation=more", "model.vocab_size=600", data=True).model.vocab_size == 600
    (found,) = problems(TEXT, "data.train=[store, more]", data=True)  # the mixture's is told at the model's key
    assert shows(found, "run.yaml:1: model.vocab_size: 512 ... 600 tokens of the tokenizer of more")
