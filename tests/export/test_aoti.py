"""`weft export --to aoti`: packages that AOTInductor compiles, run from Python and from C++."""

import json
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from graph_calls import CASES, compare, greedy, small, texts

import weft
from weft.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "docs/export"
FIRST = dict(reversed(CASES))  # of each family the first shape
pytestmark = pytest.mark.export


def load(tmp_path, theirs):
    theirs.save_pretrained(tmp_path / "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # PyTorch's own calls cause some, which nobody can mend
        weft.export_model(tmp_path / "hf", tmp_path / "out", "aoti")
    description = json.loads((tmp_path / "out/graph.json").read_text())
    return torch._inductor.aoti_load_package(str(tmp_path / "out/model.pt2")), description


@pytest.mark.parametrize("family", FIRST)
def test_every_family(tmp_path, family):
    """Several lengths and batches: a dimension that lowering specializes raises nothing (pytorch/pytorch#150364)."""
    theirs = small(family, FIRST[family])
    compare(*load(tmp_path, theirs), theirs)


def test_the_example_in_cpp_generates_the_same_tokens(tmp_path):
    package, description = load(tmp_path, small("Qwen2", "as is"))
    build = ["cmake", "-S", EXAMPLE, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]
    subprocess.run([*build, "-DCMAKE_BUILD_TYPE=Release"], check=True, capture_output=True, timeout=300)
    subprocess.run(["cmake", "--build", tmp_path / "build"], check=True, capture_output=True, timeout=900)
    for length in (2, 9, 1):
        prompt = texts(length, seed=length).tolist()
        words = [tmp_path / "build/generate", tmp_path / "out/model.pt2", "12", *map(str, prompt)]
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
        assert list(map(int, done.stdout.split())) == greedy(package, description, [prompt], 12)[0]


def test_without_a_compiler(tmp_path, hf_folder, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["export", str(hf_folder), str(tmp_path / "out"), "--to", "aoti"]) == 2
    assert capsys.readouterr().err == "--to aoti needs a C++ compiler; install g++ (such as apt-get install g++)\n"
    assert not (tmp_path / "out").exists()
