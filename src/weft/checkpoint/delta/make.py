"""Base and model -> delta, streamed block by block."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.delta.delta_format import FOLDER, MANIFEST, Base, Line, Manifest, comparable, encode, manifest_text
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.load import read_json, tokenizer_folder
from weft.checkpoint.shard_files import in_threads, new_folder
from weft.checkpoint.storage import FILE_BYTES
from weft.checkpoint.tensor_file import byte_view, dtype_name
from weft.checkpoint.weights import Saved, Weights, open_weights
from weft.data.tokenizers.copy import TEMPLATES, copy_tokenizer
from weft.families.config_json import INDEX, SINGLE
from weft.formatting import first_few
from weft.observe.console import Console

# What holds weights, or is about training, in a Hugging Face folder; all other files go along.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")
_OURS = (files.MODEL, files.STATE, files.ORIGIN)


@dataclass(frozen=True)
class Made:
    """What was written: of how many tensors, how many of them unchanged, and bytes of the deltas and of the model."""

    tensors: int
    same: int
    bytes: int
    model_bytes: int


def make(
    base: str | Path,
    model: str | Path,
    out: str | Path,
    *,
    allow_pickle: bool = False,
    console: Console | None = None,
) -> Made:
    """Write how `model` differs from `base`; `apply` makes the model again, bit for bit.

    Tensors are compared by the names in the model's files. One that has more rows than the base's (a resized
    vocabulary), another floating-point dtype, or none beside it in the base can be had all the same.

    Raises:
        UserError: one of the two is no whole model, or `out` cannot be made.
    """
    out, console = Path(out), console or Console(speaks=False)
    theirs = open_weights(model, allow_pickle=allow_pickle)
    ours = open_weights(base, huggingface=theirs.huggingface, allow_pickle=allow_pickle)
    removed = sorted(set(ours.tensors) - set(theirs.tensors))
    total = sum(saved.bytes for saved in theirs.tensors.values())
    groups = _groups(theirs)
    with new_folder(out, 0) as made, console.progress(total, "comparing", unit="B") as progress:
        for weights in (ours, theirs) if ours.path != theirs.path else (ours,):
            for note in weights.notes:
                console.warning(f"{weights.path}: {note}")
        for line in told(ours, theirs, removed):
            console.line(line)
        names = [f"delta-{number + 1:05d}-of-{len(groups):05d}.bin" for number in range(len(groups))]
        write = partial(_write, made, ours, theirs)
        written = in_threads(write, names, groups, progress=progress, total=total)
        lines = [line for found in written for line in found]
        (made / FOLDER).mkdir()
        copy_beside(theirs, made / FOLDER)
        beside = {
            str(path.relative_to(made / FOLDER)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((made / FOLDER).rglob("*"))
            if path.is_file()
        }
        tensors = {name: line for name, line, _ in lines}
        manifest = Manifest(theirs.huggingface, tensors, removed, beside)
        files.write_json(made / MANIFEST, manifest_text(manifest))
    pickled.forget()
    size = sum(line.bytes for line in tensors.values())
    return Made(len(lines), sum(same for *_, same in lines), size, total)


def told(base: Weights, model: Weights, removed: list[str]) -> Iterator[str]:
    """What is not the same kind of tensor on both sides, in words."""
    new = sorted(name for name in model.tensors if name not in base.tensors)
    for names, what in ((new, "not in the base"), (removed, "in the base alone")):
        if names:
            yield f"{what}: {first_few(names, 3)}"
    for name, saved in model.tensors.items():
        if name in base.tensors and base.tensors[name].shape != saved.shape:
            yield f"{name}: {list(base.tensors[name].shape)} in the base, {list(saved.shape)} in the model"


def _groups(model: Weights) -> list[list[str]]:
    """Tensors in their order, in files of about 256 MiB of the model."""
    groups: list[list[str]] = []
    room = 0
    for name, saved in model.tensors.items():
        if not groups or saved.bytes > room:
            groups.append([])
            room = FILE_BYTES
        groups[-1].append(name)
        room -= saved.bytes
    return groups


def _write(
    made: Path, base: Weights, model: Weights, file_name: str, names: list[str], on_bytes
) -> list[tuple[str, Line, bool]]:
    with open(made / file_name, "wb") as file:
        found = [
            (name, *_one(file, file_name, base.tensors.get(name), model.tensors[name], model.file.get(name), on_bytes))
            for name in names
        ]
        file.flush()
        os.fsync(file.fileno())
    return found


def _one(
    file: BinaryIO, file_name: str, base: Saved | None, model: Saved, place: str | None, on_bytes
) -> tuple[Line, bool]:
    """Write one tensor's blocks. Returns its line, and whether it is the base's, to the bit."""
    start = file.tell()
    base_sum, model_sum, delta_sum = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    if base is not None and not comparable((base.dtype, base.shape), model.dtype, model.shape):
        base = None
    base_blocks = base.blocks(model.rows) if base is not None else iter(())
    for block, beside in zip_longest(model.blocks(model.rows) if model.bytes else (), base_blocks):
        if beside is not None:
            base_sum.update(byte_view(beside))
        if block is None:
            continue  # the base has more rows: they count for its digest
        if beside is not None:
            beside = beside.to(model.dtype)[: len(block) if block.dim() else ...]
        model_sum.update(byte_view(block))
        frame = encode(block, beside)
        for data in (len(frame).to_bytes(4, "little"), frame):
            file.write(data)
            delta_sum.update(data)
        on_bytes(block.numel() * block.element_size())
    like = None
    if base is not None:
        like = Base(dtype_name(base.dtype), list(base.shape), base_sum.hexdigest())
    line = Line(
        dtype=dtype_name(model.dtype),
        shape=list(model.shape),
        base=like,
        sha256=model_sum.hexdigest(),
        rows=model.rows,
        file=file_name,
        offset=start,
        bytes=file.tell() - start,
        delta=delta_sum.hexdigest(),
        place=None if place is None else re.sub(r"^(?:pytorch_)?(model.*)\.bin$", r"\1.safetensors", place),
    )
    same = like is not None and (like.sha256, like.dtype, like.shape) == (line.sha256, line.dtype, line.shape)
    return line, same


def copy_beside(model: Weights, into: Path) -> None:
    """The model's files that are no weights."""
    if not model.huggingface:
        for name in _OURS:
            if (model.path / name).is_file():
                content = read_json(model.path, name)
                if name == files.MODEL:  # where the training started is a path of this machine
                    content = {key: value for key, value in content.items() if key not in ("from", "load_optimizer")}
                files.write_json(into / name, content)
        tokenizer = tokenizer_folder(model.path)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, into / "tokenizer")
        return
    for path in sorted(model.path.iterdir()):
        index = path.name.endswith(".index.json") and (path.name != INDEX or (model.path / SINGLE).is_file())
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _WEIGHTS and not index:
            shutil.copyfile(path, into / path.name)
    if (model.path / TEMPLATES).is_dir():
        shutil.copytree(model.path / TEMPLATES, into / TEMPLATES)
