"""The base model of an adapter: its weights, which an adapter's checkpoint does not contain, and their digest."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.adapter_record import AdapterRecord, read_adapter_record
from weft.checkpoint.huggingface.transformers_files import fill_transformers_model
from weft.checkpoint.load import load, resolve
from weft.checkpoint.model_parts import new_parts
from weft.checkpoint.weights import SavedTensor, Weights, checkpoint_tensors, open_weights
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.files import cache_folder, file_stamps, locked, recall, remember
from weft.models.adapter import is_adapter, quantized_weights
from weft.models.layers.blockwise import quantize_blocks
from weft.parallel import ranks
from weft.parallel.local_parameters import local, shard_part
from weft.parallel.model_state import BaseModel
from weft.parallel.ranks import error_on_all_ranks

DIGESTS = "digests-1"  # folder in the user's cache; another number if the digests of the same weights differ
_ENDS = ("", "_scale")  # of the names of a quantized weight's tensors

AnyModelSection = ModelSection | TransformersModelSection | CustomModelSection


def load_base(
    model: nn.Module, section: AnyModelSection, base: Path, expected: AdapterRecord | None = None
) -> BaseModel:
    """Loads the base model's weights into a model with an adapter, sharded or not. Every rank must call this function.

    The head of a reward model is loaded only if the base model is a reward model, too.

    Args:
        section: the model's section.
        base: the base model; a path that `resolve` returned.
        expected: the record of the adapter's checkpoint, if the adapter was trained before.

    Returns:
        The base model, with the digest of its weights.

    Raises:
        UserError: the weights do not fit the model, or are not those with which the adapter was trained.
    """
    ranks.agree(lambda: check_base(base))
    digest = check_digest(section, base, None if expected is None else expected.base, collective=True)
    quantized = quantized_weights(model)
    left = {f"{name}{end}" for names in ranks.all_gather_object(list(quantized)) for name in names for end in _ENDS}
    old, lacks = ranks.agree(lambda: new_parts(section, base))
    in_base = old or (lambda _: True)  # not the head of a reward model

    def select(name: str) -> bool:
        return not is_adapter(name) and name not in left and in_base(name)

    if isinstance(section, TransformersModelSection) and is_huggingface(base):
        source = section.model_copy(update={"path": str(base)})
        ranks.agree(lambda: fill_transformers_model(model, source, select))
    else:
        load(base, model=model, select=select)
    ranks.agree(lambda: _fill_quantized(quantized, open_base(section, base)))
    return BaseModel(base, digest, lacks)


def check_base(base: Path) -> None:
    """Raises UserError if the path of a base model is the path of an adapter."""
    if (base / files.ADAPTER).is_file():
        raise UserError("this is an adapter itself; merge it first (`weft merge`), and use the merged model", base)


@torch.no_grad()
def _fill_quantized(targets: Mapping[str, tuple[torch.Tensor, torch.Tensor, str]], base: Weights) -> None:
    """Quantizes weights of the base model while it reads them, and fills this rank's shards of codes and scales.

    Args:
        targets: name of a weight -> codes, scales, and the format.
    """
    if missing := [name for name in targets if name not in base.tensors]:
        what = f"adapter.quantize: the files have no tensor {missing[0]}; remove the key"
        raise UserError(what, base.path)

    def fill_one(name: str) -> None:
        *pair, how = targets[name]
        shards = [_shard(tensor) for tensor in pair]
        same = shards[0].rows == shards[1].rows
        for chosen in [(0, 1)] if same else [(0,), (1,)]:  # a shard of the codes can have other rows than the scales'
            rows = shards[chosen[0]].rows
            for first in range(rows.start, rows.stop, count := base.tensors[name].rows):
                block = base.tensors[name].read(first, min(count, rows.stop - first))
                found = quantize_blocks(block.to(shards[0].local.device), how)
                for number in chosen:
                    shard, place = shards[number], slice(first - rows.start, first - rows.start + len(block))
                    shard.local[place].copy_(found[number][(slice(None), *shard.rest)])

    with ThreadPoolExecutor(files.threads()) as pool:
        list(pool.map(fill_one, targets))


class _Shard(NamedTuple):
    """This rank's shard of a tensor: the tensor in memory, and its rows and its places in the other dimensions."""

    local: torch.Tensor
    rows: range
    rest: tuple[slice, ...]


def _shard(tensor: torch.Tensor) -> _Shard:
    part = shard_part(tensor)
    rows = range(part.start[0], part.start[0] + part.size[0]) if all(part.size) else range(0)
    return _Shard(local(tensor), rows, part.slices[1:])


def check_digest(section: AnyModelSection, base: Path, expected: BaseModel | None, *, collective: bool = False) -> str:
    """Returns the digest of a base model's weights (`weights_digest`).

    Args:
        section: the model's section.
        base: the base model.
        expected: the base model that an adapter was trained on; None: unknown.
        collective: whether every rank calls this function.

    Raises:
        UserError: the digests differ.
    """
    digest = weights_digest(section, base, collective=collective)
    if expected is not None and digest != expected.digest:
        what = (
            f"{base}: these are not the weights that the adapter was trained on (digest {digest[:12]}, not "
            f"{expected.digest[:12]}); use {expected.path} as it was then"
        )
        raise error_on_all_ranks(what) if collective else UserError(what)
    return digest


def base_path(section: AnyModelSection) -> Path:
    """Returns the path of the model that an adapter run adapts: `model.from`, or `model.path` of type hf.

    Raises:
        UserError: the path has no model.
    """
    source = section.from_ or getattr(section, "path", None)
    if source is None:
        raise UserError("adapter: an adapter needs a trained model; set model.from")
    return resolve(source)


def open_base(section: AnyModelSection, base: Path) -> Weights:
    """Opens the weights of a base model: with the names of Weft's model, or for type hf with the names in its files."""
    return open_weights(base, huggingface=isinstance(section, TransformersModelSection) and is_huggingface(base))


def weights_digest(section: AnyModelSection, base: Path, *, collective: bool = False) -> str:
    """Returns a SHA-256 of a model's weights: names, dtypes, shapes and values, in hexadecimal.

    For the built-in decoder, the digest does not depend on the files that contain the weights. The digest is remembered
    in the user's cache, and computed again if a file in `base` has changed.

    Args:
        section: the model's section.
        base: a checkpoint or Hugging Face folder.
        collective: whether every rank calls this function; each rank then hashes some of the tensors. Otherwise, this
            process hashes all tensors.
    """
    agree = ranks.agree if collective else lambda action: action()
    content = section.model_dump_json(exclude={"from_", "path"}, by_alias=True)
    name = f"{os.path.realpath(base)} {hashlib.sha256(content.encode()).hexdigest()}"
    place = cache_folder() / DIGESTS / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
    with ExitStack() as lock:
        if not collective:  # of several processes that need the same digest, one computes it
            with suppress(OSError):
                place.parent.mkdir(parents=True, exist_ok=True)
                lock.enter_context(locked(place.with_suffix(".lock")))
        began = time.time()
        stamps = {name: agree(lambda: file_stamps(sorted(path for path in base.iterdir() if path.is_file())))}
        known = recall(place, stamps).get(name)
        known_to_all = {known} if not collective else set(ranks.all_gather_object(known))
        if known is not None and len(known_to_all) == 1:
            return known
        tensors = agree(lambda: open_base(section, base).tensors)
        own = sorted(tensors)[ranks.rank() :: ranks.world_size()] if collective else sorted(tensors)
        lines = agree(lambda: _tensor_digests(tensors, own))
        for found in ranks.all_gather_object(lines) if collective else ():
            lines |= found
        text = "\n".join(f"{tensor} {lines[tensor]}" for tensor in sorted(lines))
        digest = hashlib.sha256(text.encode()).hexdigest()
        remember(place, stamps, {name: digest}, began)
        return digest


def source_digest(section: AnyModelSection, checkpoint: Path) -> str:
    """Returns the digest of a model: of all its weights, or of an adapter and its base model. Every rank must call it.

    Args:
        section: the model's section.
        checkpoint: a checkpoint, which can have an adapter, or a Hugging Face folder.
    """
    record = ranks.agree(lambda: read_adapter_record(checkpoint))
    if record is None:
        return weights_digest(section, checkpoint, collective=True)
    tensors = ranks.agree(lambda: dict(checkpoint_tensors(checkpoint)))
    lines = ranks.agree(lambda: _tensor_digests(tensors, list(tensors)))
    settings = record.section.model_dump_json(exclude={"from_"})  # such as alpha, which scales the adapter
    text = "\n".join([record.base.digest, settings, *(f"{name} {lines[name]}" for name in sorted(lines))])
    return hashlib.sha256(text.encode()).hexdigest()


def _tensor_digests(tensors: Mapping[str, SavedTensor], names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(files.threads()) as pool:
        return dict(zip(names, pool.map(lambda name: _tensor_digest(tensors[name]), names), strict=True))


def _tensor_digest(tensor: SavedTensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for block in tensor.blocks():
        found.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
