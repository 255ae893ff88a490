"""Restores a model from a base model and a delta, block by block, and checks the digests of every tensor."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch

from weft.checkpoint.delta.delta_format import FOLDER, Manifest, TensorDelta, decode, frames, is_delta, read_manifest
from weft.checkpoint.delta.make import CHECKPOINT_FILES
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.shard_files import new_huggingface_folder, write_checkpoint
from weft.checkpoint.tensor_file import Entry, byte_view, dtype_name
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.checkpoint.weights import Weights, open_weights
from weft.errors import UserError
from weft.families.config_json import SINGLE
from weft.files import read_json
from weft.observe.console import Console


@pickled.released()
def apply(
    base: str | Path,
    delta: str | Path,
    out: str | Path,
    *,
    allow_pickle: bool = False,
    console: Console | None = None,
) -> tuple[int, int]:
    """Restores a model, bit for bit, from a base model and a delta that `weft delta make` wrote.

    Args:
        base: the base model that was given to `weft delta make`.
        out: the folder to write: a checkpoint or a Hugging Face folder, like the model that was given to `make`.
        allow_pickle: whether to read `.bin` files of the base, if it has no safetensors files.

    Returns:
        The number of tensors, and their total size in bytes.

    Raises:
        UserError: the delta was made against another base, the delta is damaged, or `out` exists or cannot be written.
            In each case, nothing is written to `out`.
    """
    delta, out, console = Path(delta), Path(out), console or Console(prints=False)
    if not is_delta(delta):
        raise UserError("this folder has no delta.json; give a folder that `weft delta make` wrote", delta)
    manifest = read_manifest(delta)
    weights = open_weights(base, huggingface=manifest.huggingface, allow_pickle=allow_pickle)
    _check_base(weights, manifest)
    prefix = "" if manifest.huggingface else MODEL_PREFIX
    entries = {
        name: Entry(
            prefix + name, getattr(torch, one.dtype), tuple(one.shape), partial(_blocks, delta, weights, name, one)
        )
        for name, one in manifest.tensors.items()
    }
    others = delta / FOLDER
    if manifest.huggingface:
        shards: dict[str, list[Entry]] = {}
        for name, one in manifest.tensors.items():
            shards.setdefault(one.place or SINGLE, []).append(entries[name])
        with new_huggingface_folder(out, shards, "adding", console) as folder:
            shutil.copytree(others, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    else:
        contents = {name: read_json(others / name) for name in CHECKPOINT_FILES if (others / name).is_file()}
        tokenizer = others / "tokenizer" if (others / "tokenizer").is_dir() else None
        write_checkpoint(out, list(entries.values()), contents, tokenizer, [], "adding", console)
    return len(entries), sum(entry.bytes for entry in entries.values())


def _check_base(base: Weights, manifest: Manifest) -> None:
    """Raises UserError if the base lacks a tensor that the delta requires, or has it with another dtype or shape."""
    for name, tensor in manifest.tensors.items():
        if tensor.base is None:
            continue
        saved = base.tensors.get(name)
        if saved is None:
            raise _wrong_base(base, f"the base has no {name}")
        found = (dtype_name(saved.dtype), list(saved.shape))
        if found != (tensor.base.dtype, tensor.base.shape):
            raise _wrong_base(
                base, f"{name} is {found[0]} {found[1]} instead of {tensor.base.dtype} {tensor.base.shape}"
            )
    lacking = [name for name in manifest.removed if name not in base.tensors]
    if lacking:
        raise _wrong_base(base, f"the base has no {lacking[0]}")


def _wrong_base(base: Weights, what: str) -> UserError:
    return UserError(
        f"the delta was not made against this base: {what}; give the base that the delta was made against", base.path
    )


def _blocks(delta: Path, base: Weights, name: str, tensor: TensorDelta) -> Iterator[torch.Tensor]:
    """Yields the blocks of a restored tensor, and then checks the digests of base, delta and result.

    Raises:
        UserError: a digest differs.
    """
    dtype, shape = getattr(torch, tensor.dtype), tuple(tensor.shape)
    base_sum, model_sum, delta_sum = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    damage = UserError(
        f"damaged delta: {name} differs from what was written; download or copy the delta again", delta / tensor.file
    )
    base_blocks = base.tensors[name].blocks(tensor.rows) if tensor.base is not None else iter(())
    with open(delta / tensor.file, "rb") as file:
        file.seek(tensor.offset)
        encoded = frames(file, tensor.offset + tensor.bytes)
        for size, base_block in zip_longest(_block_shapes(shape, tensor.rows), base_blocks):
            if base_block is not None:
                base_sum.update(byte_view(base_block))
            if size is None:
                continue  # the base has more rows than the model; the digest of the base includes them
            if base_block is not None:
                base_block = base_block.to(dtype)[: size[0] if size else ...]
            try:
                frame = next(encoded)
                block = decode(frame, base_block, dtype, size)
            except (StopIteration, ValueError):
                raise damage from None
            delta_sum.update(len(frame).to_bytes(4, "little") + frame)
            model_sum.update(byte_view(block))
            yield block
    if tensor.base is not None and base_sum.hexdigest() != tensor.base.sha256:
        raise _wrong_base(base, f"{name} of the base has other values")
    if delta_sum.hexdigest() != tensor.delta:
        raise damage
    if model_sum.hexdigest() != tensor.sha256:
        raise UserError(
            f"internal error: {name} was not restored, although base and delta are intact; report this bug",
            delta,
        )


def _block_shapes(shape: tuple[int, ...], rows: int) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
    elif 0 not in shape:
        for start in range(0, shape[0], rows):
            yield (min(rows, shape[0] - start), *shape[1:])
