"""Models that an objective calls beside the trained one: those with which the run started, and teachers."""

import json
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from running import QUIET, assert_same_weights, losses, metrics, train

sys.path += [str(Path(__file__).parents[1] / name) for name in ("checkpoint", "parallel")]
from test_peft_files import base_model, randomized

SMALL = {"vocab_size": 512, "num_hidden_layers": 1}
SEQUENCES = 4  # a step's, which are the same in every step


def tokens():
    from matrix_parts import Sequences

    rows = [Sequences(length=16)[index] for index in range(SEQUENCES)]
    return tuple(torch.from_numpy(np.stack([row[key] for row in rows])) for key in ("tokens", "labels"))


def likelihood(model):
    """What a model of transformers, PEFT or Weft says of a token, in the mean over a step's."""
    given, labels = tokens()
    with torch.no_grad():
        found = model.double().eval()(given)
    logits = found if isinstance(found, torch.Tensor) else found.logits
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).mean().item()


@pytest.fixture
def write(run_yaml, tmp_path):
    def write(name, model, adapter=None, source="start", steps=3, **changes):
        sections = {
            "run": {"name": name},
            "data": {"train": {"type": "matrix_parts:Sequences", "count": SEQUENCES, "length": 16}},
            "objective": {"type": "objective_parts:Kept", "source": str(source)} if source else {"type": "sft"},
            "training": {"steps": steps, "batch_tokens": 16 * SEQUENCES, "micro_batch_size": 2, "dtype": "float64"},
        }
        for key, change in changes.items():
            sections[key] = sections.get(key, {}) | change
        sections["data"] |= {"validation": None, "sequence_length": 16}
        file = run_yaml(
            f"{name}.yaml", model=None, tokenizer=None, log=QUIET, checkpoint={"every": 1, "keep_last": 9},
            optimizer={"type": "adamw", "lr": 0.05, "weight_decay": 0.0},
            schedule={"type": "constant", "warmup_steps": 0}, **sections,
        )  # fmt: skip
        with file.open("a") as text:
            text.write(f"\nmodel: {json.dumps(model)}\n")
            text.write("" if adapter is None else f"adapter: {json.dumps(adapter)}\n")
        return file

    return write


def kept(run):
    """What the frozen model said in each step, and the trained one."""
    return [[line[name] for line in metrics(run)] for name in ("kept", "trained")]


def peft_adapter(path, base):
    """A trained adapter, and what PEFT's model with it says of the tokens."""
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)
        randomized(model, 1.0).save_pretrained(path)
    return likelihood(model)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("full", marks=pytest.mark.long),
        "hf",
        pytest.param("dora", marks=pytest.mark.long),
        pytest.param("pissa", marks=pytest.mark.long),
        "trained",
    ],
)
def test_the_reference_is_the_start_of_the_run_also_after_it_resumes(write, tmp_path, case):
    base = base_model(tmp_path / "base", "Llama", SMALL)
    expected = likelihood(base)
    model, adapter = {"from": str(tmp_path / "base")}, None
    if case == "hf":
        model = {"type": "hf", "path": str(tmp_path / "base")}
    elif case == "trained":
        plain = expected
        expected = peft_adapter(tmp_path / "peft", base_model(tmp_path / "base", "Llama", SMALL))
        assert abs(expected - plain) > 1e-3
        adapter = {"from": str(tmp_path / "peft"), "dropout": 0.2}
    elif case != "full":
        adapter = {"r": 4, "dropout": 0.2, "dora": case == "dora", "init": "pissa" if case == "pissa" else "default"}
    assert train(write("whole", model, adapter)) == 0
    run, whole = tmp_path / "runs" / "resumed", tmp_path / "runs" / "whole"
    assert train(write("resumed", model, adapter, steps=2)) == 0
    if case == "trained":  # what the run needs of its start is in its checkpoint
        shutil.rmtree(tmp_path / "peft")
        adapter = {**json.loads((run / "checkpoints" / "step-00000002" / "adapter.json").read_text())["adapter"]}
        adapter.pop("from", None)
    assert train(write("resumed", model, adapter, steps=3)) == 0
    found, trained = kept(run)
    assert found == pytest.approx([expected] * 3, rel=0, abs=1e-6)  # its rotary embedding has float32
    assert trained[0] == pytest.approx(found[0], rel=0, abs=1e-12)
    assert abs(trained[-1] - trained[0]) > 1e-4
    assert losses(run) == losses(whole)
    assert_same_weights(run, whole)


def swapped(tokenizer, folder):
    """A copy of a tokenizer in which two tokens have exchanged their ids."""
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def refused(capsys, *expected):
    error = capsys.readouterr()
    assert "Traceback" not in error.err
    for text in expected:
        assert str(text) in error.err.strip().splitlines()[-1]
    return error.out


def test_a_teacher_has_an_architecture_of_its_own_and_is_the_same_after_a_resume(write, tmp_path, capsys):
    teacher = base_model(tmp_path / "teacher", "Qwen2", SMALL)
    expected = likelihood(teacher)
    model, run = {"preset": "llama-tiny", "vocab_size": 512}, tmp_path / "runs" / "student"
    file = write("student", model, source=tmp_path / "teacher", steps=2)
    assert train(file) == 0
    assert kept(run)[0] == pytest.approx([expected] * 2, rel=0, abs=1e-6)
    recorded = json.loads((run / "manifest.json").read_text())["frozen_models"]["kept"]
    assert recorded["path"] == str(tmp_path / "teacher")
    assert len(recorded["digest"]) == 64
    teacher.float().model.norm.weight.data.add_(0.01)
    teacher.save_pretrained(tmp_path / "teacher")
    capsys.readouterr()
    assert train(file, "training.steps=3") == 2
    refused(capsys, "objective.source: this is not the frozen model", recorded["digest"][:12], recorded["path"])
    assert train(file, "training.steps=3", "objective.source=start", "run.seed=9", "--accept-changes") == 2
    refused(capsys, "run.seed: this is not the frozen model with which the run started")


def test_mistakes_are_one_line(write, tmp_path, tiny_tokenizer, capsys):
    model = {"preset": "llama-tiny", "vocab_size": 512}
    (tmp_path / "raw.txt").write_text("Some words to pack.\n" * 20)
    raw = {"tokenizer": str(tiny_tokenizer), "data": {"train": str(tmp_path / "raw.txt")}}
    file = write("raw", model, source=tmp_path / "absent")
    text = "".join(line for line in file.read_text().splitlines(True) if not line.startswith(("data", "tokenizer")))
    file.write_text(text + f"data: {json.dumps(raw['data'] | {'sequence_length': 16})}\ntokenizer: {tiny_tokenizer}\n")
    assert train(file) == 2
    assert "packed" not in refused(capsys, f"objective.source: {tmp_path / 'absent'}: this path does not exist")

    assert train(write("built-in", model, source=None), "objective={type: distill, teacher: no/model}") == 2
    refused(capsys, "objective.teacher: no/model: there is no such run, checkpoint or folder")

    base_model(tmp_path / "small", "Llama", SMALL | {"vocab_size": 300})
    assert train(write("size", model, source=tmp_path / "small")) == 2
    refused(capsys, "objective.source", "300 ids, but the run's model has 512 (model.vocab_size)")

    base_model(tmp_path / "other", "Llama", SMALL)
    swapped(tiny_tokenizer, tmp_path / "other")
    file = write("words", model, source=tmp_path / "other")
    with file.open("a") as opened:
        opened.write(f"tokenizer: {tiny_tokenizer}\n")
    assert train(file) == 2
    refused(capsys, "objective.source", "has another tokenizer than the run", "the id of 'a' is", "give a model")

    assert train(write("name", model, objective={"called": "other"})) == 2
    refused(capsys, "objective: Kept.prepare calls the model 'other', which `frozen_models` does not have")

    start, adapter = {"from": str(tmp_path / "other")}, {"r": 2}
    assert train(write("changed", start, adapter, steps=1, source=None)) == 0
    capsys.readouterr()
    assert train(write("changed", start, adapter, steps=2), "--accept-changes") == 2
    refused(capsys, "the adapter at the start of the run, which the checkpoint does not have", "adapter.from")
