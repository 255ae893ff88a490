"""Makes a delta, which contains the differences between a model and a base model, block by block."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.delta.delta_format import (
    FOLDER,
    MANIFEST,
    BaseTensor,
    Manifest,
    TensorDelta,
    encode,
    manifest_content,
)
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.load import tokenizer_folder
from weft.checkpoint.shard_files import OnBytes, new_folder, run_in_threads
from weft.checkpoint.storage import FILE_BYTES
from weft.checkpoint.tensor_file import Entry, byte_view, dtype_name, split_by_size
from weft.checkpoint.weights import SavedTensor, Weights, open_weights
from weft.data.tokenizers.copy import TEMPLATES, copy_tokenizer
from weft.families.config_json import INDEX, SINGLE
from weft.files import read_json
from weft.formatting import first_few
from weft.observe.console import Console

# Weights and training state in a Hugging Face folder; all other files are copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")
CHECKPOINT_FILES = (files.MODEL, files.STATE, files.ORIGIN)


@dataclass(frozen=True)
class DeltaSize:
    """The size of a delta that was written.

    Attributes:
        tensors: number of tensors of the model.
        same: number of tensors that are equal in the model and the base.
        bytes: total size of the compressed differences.
        model_bytes: total size of the model's tensors.
    """

    tensors: int
    same: int
    bytes: int
    model_bytes: int


@pickled.released()
def make(
    base: str | Path,
    model: str | Path,
    out: str | Path,
    *,
    allow_pickle: bool = False,
    console: Console | None = None,
) -> DeltaSize:
    """Writes a delta: the differences between `model` and `base`.

    From the base and the delta, `apply` restores the model bit for bit.

    Tensors are matched by their names in the model's files. A tensor of the model can differ from the base's tensor in
    the number of rows (a resized vocabulary) and in the floating-point dtype. It can also be missing in the base.

    Args:
        out: the folder to write.
        allow_pickle: whether to read `.bin` files of a model that has no safetensors files.

    Raises:
        UserError: the base or the model is incomplete, or `out` cannot be written.
    """
    out, console = Path(out), console or Console(prints=False)
    target = open_weights(model, allow_pickle=allow_pickle)
    start = open_weights(base, huggingface=target.huggingface, allow_pickle=allow_pickle)
    removed = sorted(set(start.tensors) - set(target.tensors))
    entries = [Entry(name, saved.dtype, saved.shape, saved.blocks) for name, saved in target.tensors.items()]
    groups = split_by_size(entries, FILE_BYTES)
    total = sum(entry.bytes for entry in entries)
    with new_folder(out, 0) as folder, console.progress(total, "comparing", unit="B") as progress:
        for weights in (start, target) if start.path != target.path else (start,):
            for warning in weights.warnings:
                console.warning(f"{weights.path}: {warning}")
        for line in _differences(start, target, removed):
            console.line(line)

        def write(name: str, group: list[Entry], on_bytes: OnBytes) -> list[tuple[str, TensorDelta]]:
            with open(folder / name, "wb") as file:
                found = [
                    (entry.name, _write_tensor(file, name, entry.name, start, target, on_bytes)) for entry in group
                ]
                file.flush()
                os.fsync(file.fileno())
            return found

        names = [f"delta-{number + 1:05d}-of-{len(groups):05d}.bin" for number in range(len(groups))]
        written = run_in_threads(write, names, groups, progress=progress, total=total)
        tensors = {name: delta for deltas in written for name, delta in deltas}
        (folder / FOLDER).mkdir()
        copy_other_files(target, folder / FOLDER)
        others = {
            str(path.relative_to(folder / FOLDER)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((folder / FOLDER).rglob("*"))
            if path.is_file()
        }
        manifest = Manifest(target.huggingface, tensors, removed, others)
        files.write_json(folder / MANIFEST, manifest_content(manifest))
    same = sum(d.base == BaseTensor(d.dtype, d.shape, d.sha256) for d in tensors.values())
    return DeltaSize(len(tensors), same, sum(delta.bytes for delta in tensors.values()), total)


def _differences(base: Weights, model: Weights, removed: list[str]) -> Iterator[str]:
    """Yields lines of text about tensors whose names or shapes differ between base and model."""
    new = sorted(name for name in model.tensors if name not in base.tensors)
    for names, what in ((new, "not in the base"), (removed, "only in the base")):
        if names:
            yield f"{what}: {first_few(names, 3)}"
    for name, saved in model.tensors.items():
        if name in base.tensors and base.tensors[name].shape != saved.shape:
            yield f"{name}: {list(base.tensors[name].shape)} in the base, {list(saved.shape)} in the model"


def _comparable(base: SavedTensor, model: SavedTensor) -> bool:
    """Whether two tensors can be subtracted: they may differ only in the number of rows and in the floating dtype."""
    if len(base.shape) != len(model.shape) or base.shape[1:] != model.shape[1:]:
        return False
    return base.dtype == model.dtype or (base.dtype.is_floating_point and model.dtype.is_floating_point)


def _write_tensor(
    file: BinaryIO, file_name: str, name: str, start: Weights, target: Weights, on_bytes: OnBytes
) -> TensorDelta:
    """Writes the blocks of one tensor's differences to `file`. Returns the tensor's entry in delta.json.

    Args:
        file_name: name of `file` in the delta.
        name: name of the tensor.
        start: the base.
        target: the model.
        on_bytes: called with the number of bytes of each block of the model.
    """
    base, model, offset = start.tensors.get(name), target.tensors[name], file.tell()
    if base is not None and not _comparable(base, model):
        base = None
    base_sum, model_sum, delta_sum = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    base_blocks = base.blocks(model.rows) if base is not None else iter(())
    for block, base_block in zip_longest(model.blocks() if model.bytes else (), base_blocks):
        if base_block is not None:
            base_sum.update(byte_view(base_block))
        if block is None:
            continue  # the base has more rows than the model; the digest of the base includes them
        if base_block is not None:
            base_block = base_block.to(model.dtype)[: len(block) if block.dim() else ...]
        model_sum.update(byte_view(block))
        frame = encode(block, base_block)
        for data in (len(frame).to_bytes(4, "little"), frame):
            file.write(data)
            delta_sum.update(data)
        on_bytes(block.nbytes)
    place = target.file.get(name)
    return TensorDelta(
        dtype=dtype_name(model.dtype),
        shape=list(model.shape),
        base=None if base is None else BaseTensor(dtype_name(base.dtype), list(base.shape), base_sum.hexdigest()),
        sha256=model_sum.hexdigest(),
        rows=model.rows,
        file=file_name,
        offset=offset,
        bytes=file.tell() - offset,
        delta=delta_sum.hexdigest(),
        place=None if place is None else re.sub(r"^(?:pytorch_)?(model.*)\.bin$", r"\1.safetensors", place),
    )


def copy_other_files(model: Weights, folder: Path) -> None:
    """Copies a model's files other than weights, such as config and tokenizer, into a folder."""
    if not model.huggingface:
        for name in CHECKPOINT_FILES:
            if (model.path / name).is_file():
                content = read_json(model.path / name)
                if name == files.MODEL:  # `from` is a path on this machine
                    content = {key: value for key, value in content.items() if key not in ("from", "load_optimizer")}
                files.write_json(folder / name, content)
        tokenizer = tokenizer_folder(model.path)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder / "tokenizer")
        return
    for path in sorted(model.path.iterdir()):
        index = path.name.endswith(".index.json") and (path.name != INDEX or (model.path / SINGLE).is_file())
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _WEIGHTS and not index:
            shutil.copyfile(path, folder / path.name)
    if (model.path / TEMPLATES).is_dir():
        shutil.copytree(model.path / TEMPLATES, folder / TEMPLATES)
