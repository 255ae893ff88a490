"""`weft export --to onnx`: models that onnxruntime runs, against Transformers' models and Weft's engine."""

import json
import re
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from graph_calls import CASES, compare, export_as, pair, small

import weft
from weft.cli.main import main

pytestmark = pytest.mark.xdist_group("onnx")  # one worker imports the libraries
PAGE = Path(__file__).parents[2] / "docs/export/onnx.md"


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(tmp_path, theirs):
    theirs.save_pretrained(tmp_path / "hf")
    weft.export_model(tmp_path / "hf", tmp_path / "out", "onnx")
    check(tmp_path / "out", theirs)


def check(folder, theirs):
    """What graph.json says and what the model computes."""
    description = json.loads((folder / "graph.json").read_text())
    model = session(folder / "model.onnx")
    for said, found in ((description["inputs"], model.get_inputs()), (description["outputs"], model.get_outputs())):
        made = [(one.name, ["past + seq" if size == "seq + past" else size for size in one.shape]) for one in found]
        assert [(one["name"], one["shape"]) for one in said] == made
    names = [one["name"] for one in description["inputs"]]

    def call(*inputs):
        made = model.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
        return [torch.from_numpy(array) for array in made]

    compare(call, description, theirs)


@pytest.mark.long
def test_windows_and_caps(tmp_path):
    """Gemma 2: windows in every other layer, caps, grouped heads, tied weights."""
    run(tmp_path, small("Gemma2", "as is"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tiny_tokenizer):
    """Transformers' model, the folder in which the page's command exported it to `exported`, and what was printed."""
    folder = tmp_path_factory.mktemp("llama")
    theirs = small("Llama", "as is", vocab_size=512)
    return theirs, folder, export_as(PAGE, theirs, tiny_tokenizer, folder)


def test_onnxruntime_computes_what_transformers_computes(llama):
    theirs, folder, _ = llama
    check(folder / "exported", theirs)


@pytest.mark.export
@pytest.mark.parametrize(("family", "shape"), CASES, ids=[" ".join(case) for case in CASES])
def test_every_family(tmp_path, family, shape):
    run(tmp_path, pair(family, shape)[0])


def test_the_program_of_the_page_generates_what_weft_generates(llama, monkeypatch, capsys):
    _, folder, said = llama
    assert said.startswith("exported: ONNX model, ")
    monkeypatch.chdir(folder)
    onnx.checker.check_model(folder / "exported/model.onnx")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(compile(program, PAGE.name, "exec"), names)
    printed = capsys.readouterr().out
    for prompt in ("Once upon a time", "Ka lo"):
        expected = weft.generate(folder / "runs/run", prompt, 32, temperature=0.0, seed=0)
        assert names["generate"](prompt, 32) == expected
    assert printed.strip() != ""


def test_mistakes_are_one_line(tmp_path, hf_folder, monkeypatch, capsys):
    words = ["export", str(hf_folder), str(tmp_path / "out"), "--to", "onnx"]
    for option, said in (("bfloat16", "use float32 or float16"), ("float31", "float31")):
        assert main([*words, "--dtype", option]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    monkeypatch.setattr("weft.export.onnx.find_spec", lambda name: None if name == "onnxscript" else name)
    assert main(words) == 2
    assert capsys.readouterr().err == "--to onnx needs onnxscript; run: pip install 'weft-train[onnx]'\n"
    assert not (tmp_path / "out").exists()
