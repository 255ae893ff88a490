"""Base + delta -> model, streamed block by block, every tensor checked by its digests."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.delta.delta_format import FOLDER, Line, Manifest, decode, frames, is_delta, read_manifest
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.load import read_json
from weft.checkpoint.new_checkpoint import write_checkpoint
from weft.checkpoint.shard_files import new_folder, write_shards
from weft.checkpoint.tensor_file import Entry, byte_view, dtype_name
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.checkpoint.weights import Weights, open_weights
from weft.errors import UserError
from weft.families.config_json import SINGLE
from weft.observe.console import Console


def apply(
    base: str | Path,
    delta: str | Path,
    out: str | Path,
    *,
    allow_pickle: bool = False,
    console: Console | None = None,
) -> tuple[int, int]:
    """Make the model that a delta was made of: a checkpoint, or a Hugging Face folder, as that was.

    Returns:
        Numbers of tensors and of their bytes.

    Raises:
        UserError: another base, a damaged delta, or `out` cannot be made. Then there is no `out`.
    """
    delta, out, console = Path(delta), Path(out), console or Console(speaks=False)
    if not is_delta(delta):
        raise UserError("there is no delta.json here; `weft delta make` writes one", delta)
    manifest = read_manifest(delta)
    weights = open_weights(base, huggingface=manifest.huggingface, allow_pickle=allow_pickle)
    _compare(weights, manifest)
    prefix = "" if manifest.huggingface else MODEL_PREFIX
    entries = {
        name: Entry(
            prefix + name,
            getattr(torch, line.dtype),
            tuple(line.shape),
            partial(_blocks, delta, weights, name, line),
        )
        for name, line in manifest.tensors.items()
    }
    if manifest.huggingface:
        _write_folder(out, entries, manifest, delta / FOLDER, console)
    else:
        beside = delta / FOLDER
        documents = {
            name: read_json(beside, name)
            for name in (files.MODEL, files.STATE, files.ORIGIN)
            if (beside / name).is_file()
        }
        tokenizer = beside / "tokenizer" if (beside / "tokenizer").is_dir() else None
        write_checkpoint(out, list(entries.values()), documents, tokenizer, [], "adding", console)
    pickled.forget()
    return len(entries), sum(entry.bytes for entry in entries.values())


def _compare(base: Weights, manifest: Manifest) -> None:
    """Before any work: the base has the tensors that the delta was made against."""
    for name, line in manifest.tensors.items():
        if line.base is None:
            continue
        saved = base.tensors.get(name)
        if saved is None:
            raise _another(base, f"it has no {name}")
        there = (dtype_name(saved.dtype), list(saved.shape))
        if there != (line.base.dtype, line.base.shape):
            raise _another(base, f"{name} is {there[0]} {there[1]}, not {line.base.dtype} {line.base.shape}")
    lacking = [name for name in manifest.removed if name not in base.tensors]
    if lacking:
        raise _another(base, f"it has no {lacking[0]}")


def _another(base: Weights, what: str) -> UserError:
    return UserError(f"this is not the base that the delta was made from: {what}; take that one", base.path)


def _blocks(delta: Path, base: Weights, name: str, line: Line) -> Iterator[torch.Tensor]:
    """The model's tensor, block by block; at its end its digests are looked at."""
    dtype, shape = getattr(torch, line.dtype), tuple(line.shape)
    base_sum, model_sum, delta_sum = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    damage = UserError(f"damaged delta: {name} is not what was written; get it again", delta / line.file)
    base_blocks = base.tensors[name].blocks(line.rows) if line.base is not None else iter(())
    with open(delta / line.file, "rb") as file:
        file.seek(line.offset)
        parts = frames(file, line.offset + line.bytes)
        for size, beside in zip_longest(_shapes(shape, line.rows), base_blocks):
            if beside is not None:
                base_sum.update(byte_view(beside))
            if size is None:
                continue  # the base has more rows: they count for its digest
            try:
                part = next(parts)
                block = decode(
                    part, None if beside is None else beside.to(dtype)[: size[0] if size else ...], dtype, size
                )
            except (StopIteration, ValueError):
                raise damage from None
            delta_sum.update(len(part).to_bytes(4, "little") + part)
            model_sum.update(byte_view(block))
            yield block
    if line.base is not None and base_sum.hexdigest() != line.base.sha256:
        raise _another(base, f"{name} differs")
    if delta_sum.hexdigest() != line.delta:
        raise damage
    if model_sum.hexdigest() != line.sha256:
        raise UserError(f"{name} did not come out as it was, of a whole base and a whole delta; report this", delta)


def _shapes(shape: tuple[int, ...], rows: int) -> Iterator[tuple[int, ...]]:
    """Of the blocks of a tensor."""
    if not shape:
        yield ()
    elif 0 not in shape:
        for start in range(0, shape[0], rows):
            yield (min(rows, shape[0] - start), *shape[1:])


def _write_folder(out: Path, entries: dict[str, Entry], manifest: Manifest, beside: Path, console: Console) -> None:
    """The model's files as they were, each with the tensors that it had."""
    places: dict[str, list[Entry]] = {}
    for name, line in manifest.tensors.items():
        places.setdefault(line.place or SINGLE, []).append(entries[name])
    needed = sum(entry.bytes for entry in entries.values())
    with new_folder(out, needed) as made, console.progress(needed, "adding", unit="B") as progress:
        shutil.copytree(beside, made, dirs_exist_ok=True)
        write_shards(made, places, progress)
