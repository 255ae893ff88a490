"""Weights in `.bin` files: taken only where a flag asks for it, and then nothing but tensors out of them."""

import gc
import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from test_huggingface import SMALL, folder, tensors, theirs, weft_command

from weft.checkpoint.huggingface.headers import read_headers


def as_bins(path, *, legacy=False):
    """A folder's safetensors files as `.bin` files of the same names, with their index."""
    from safetensors.torch import load_file

    for file in sorted(path.glob("*.safetensors")):
        name = re.sub(r"^model", "pytorch_model", file.stem) + ".bin"
        torch.save(load_file(file), path / name, _use_new_zipfile_serialization=not legacy)
        file.unlink()
    index = path / "model.safetensors.index.json"
    if index.exists():
        text = re.sub(r"model(-\d+-of-\d+)\.safetensors", r"pytorch_model\1.bin", index.read_text())
        (path / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()
    return path


CASES = {
    "one file": ("llama", "5GB", False),
    "several files": ("llama", SMALL, False),
    "transposed": ("gpt2", SMALL, False),
    "before PyTorch 1.6": ("llama", "5GB", True),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_model_as_from_safetensors(tmp_path, tiny_tokenizer, case):
    kind, shards, legacy = CASES[case]
    model = theirs(kind, torch.bfloat16)
    safe = folder(tmp_path / "safe", model, tiny_tokenizer, shards)
    bins = as_bins(folder(tmp_path / "bins", model, tiny_tokenizer, shards), legacy=legacy)
    assert weft_command("import", safe, tmp_path / "one") == 0
    assert weft_command("import", bins, tmp_path / "two", "--allow-pickle") == 0
    assert tensors(tmp_path / "two") == tensors(tmp_path / "one")
    for name in ("model.json", "index.json", "checksums.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_what_is_more_than_tensors_is_never_read(tmp_path, capsys):
    source = as_bins(folder(tmp_path / "hf", theirs()))
    file = source / "pytorch_model.bin"
    whole = file.read_bytes()
    capsys.readouterr()
    state = torch.load(file, weights_only=True)
    mark = tmp_path / "pwned"

    def saved(content, **options):
        torch.save(content, file, **options)

    damages = {
        "more than tensors": [
            lambda: saved(state | {"evil": Evil(mark)}),
            lambda: saved(state | {"evil": Evil(mark)}, _use_new_zipfile_serialization=False),
            lambda: file.write_bytes(pickle.dumps(Evil(mark))),
        ],
        "dictionary of tensors by name": [lambda: saved({"model": state}), lambda: saved(list(state.values()))],
        "cannot be read": [lambda: file.write_bytes(whole[: len(whole) // 2]), lambda: file.write_bytes(b"")],
        "a Git LFS pointer": [lambda: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")],
        "model.norm.weight is missing": [lambda: saved({k: v for k, v in state.items() if k != "model.norm.weight"})],
    }
    for message, cases in damages.items():
        for damage in cases:
            damage()
            for flags, expected in (([], "pickle can run any program"), (["--allow-pickle"], message)):
                assert weft_command("import", source, tmp_path / "out", *flags) == 2
                said = capsys.readouterr().err
                assert expected in said, said
                assert said.count("\n") == 1
    gc.collect()  # exceptions refer to the tensors until their cycles are collected
    assert str(file) not in Path("/proc/self/maps").read_text()  # no tensors of a refused file are kept
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf"]


def test_safetensors_come_first_and_a_missing_file_is_reported(tmp_path, capsys):
    source = folder(tmp_path / "hf", theirs())
    (source / "pytorch_model.bin").write_bytes(b"no pickle")
    assert weft_command("import", source, tmp_path / "out", "--allow-pickle") == 0
    bins = as_bins(folder(tmp_path / "bins", theirs(), shards=SMALL))
    names = set(json.loads((bins / "pytorch_model.bin.index.json").read_text())["weight_map"])
    assert set(read_headers(bins, allow_pickle=True)) == names
    (bins / "pytorch_model-00002-of-00004.bin").unlink()
    capsys.readouterr()
    assert weft_command("import", bins, tmp_path / "out2", "--allow-pickle") == 2
    assert "bin.index.json lists, is missing" in capsys.readouterr().err
