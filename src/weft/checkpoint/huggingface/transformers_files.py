"""The files of a transformers model that no family here knows: read part by part, and written as it writes them.

Where the names of files and modules differ (experts are stacked in memory, say), transformers' own table of conversions
says how, both ways.
"""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from weft.checkpoint.huggingface.config_files import SPECIAL
from weft.checkpoint.huggingface.fill import fill_tensor
from weft.checkpoint.huggingface.folder import BUFFERS, file_notes, headers
from weft.checkpoint.huggingface.quantized import Stored
from weft.checkpoint.huggingface.slices import Source, read_part
from weft.checkpoint.tensor_file import Entry, main_dtype
from weft.checkpoint.tensors import model_tensors
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.families.config_json import CONFIG
from weft.formatting import first_few
from weft.models.build import build_model
from weft.parallel import ranks

_NAMED = 10


@dataclass
class _Group:
    """Tensors of files that become tensors of the model together, and the conversion; None: the one is the other."""

    converter: Any = None
    parts: list[tuple[str, str]] = field(default_factory=list)  # (pattern, name in a file)


def fill_transformers_model(model: nn.Module, section: TransformersModelSection) -> None:
    """Fill a model, sharded or not, from the safetensors of `section.path`. Every rank reads what it holds.

    Tensors that are stacked or cut on their way are put together whole on every rank, one group at a time.

    Raises:
        UserError: a file that is missing or not whole; tensors that are missing, misshaped or not the model's.
    """
    path = Path(section.path or "")
    stored = dict(headers(path))
    for note in file_notes(path) if ranks.rank() == 0 else ():
        warnings.warn(f"{path}: {note}", stacklevel=2)
    plain = build_model(section)  # a sharded one has not its class's name, by which the tables are found
    groups, wrong = _groups(plain, stored)
    shapes = {name: tuple(tensor.shape) for name, tensor in plain.state_dict().items()}
    homes: dict[str, str] = {}  # name in the model -> the first name of the group that it is made with
    for first, group in groups.items():
        blank = {name: torch.empty(stored[name].shape, device="meta") for _, name in group.parts}
        for name, tensor in _convert(plain, path, first, group, blank.__getitem__).items():
            homes[name] = first
            if name in shapes and tuple(tensor.shape) != shapes[name]:
                wrong.append(f"{name} is {list(tensor.shape)} where config.json means {list(shapes[name])}")
    buffers = dict(plain.named_buffers())  # those that are in no file are what the constructor computed
    targets: dict[str, torch.Tensor] = {}
    tied: list[list[str]] = []
    for name, (tensor, names) in model_tensors(model).items():
        found = [one for one in names if one in homes]
        if found:
            targets[found[0]] = tensor.detach()
            tied.append(found)
        elif name not in buffers:
            wrong.append(f"{name} is missing")
    if wrong:
        whose = f"its tensors are not those of the {type(plain).__name__} that config.json means"
        raise UserError(f"{whose}: {first_few(wrong, _NAMED, '; ')}", path)
    for one, *others in tied:
        for other in others:
            _check_tied(path, one, other, lambda n: _read(plain, path, homes[n], groups[homes[n]], stored)[n])
    with torch.no_grad():
        for first, group in groups.items():
            _fill_group(plain, path, first, group, stored, targets)


def _groups(model: Any, stored: dict[str, Stored]) -> tuple[dict[str, _Group], list[str]]:
    """First name in the model -> what it is made of; and what is wrong with the rest of the files' tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    groups: dict[str, _Group] = {}
    wrong = []
    for name in sorted(stored, key=dot_natural_key):
        if stored[name].dtype.itemsize < 2 and stored[name].dtype != torch.bool:
            wrong.append(f"{name} is stored as {stored[name].dtype}: quantized weights cannot be taken")
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in state:
            group = groups.setdefault(target, _Group(by_pattern.get(pattern or "")))
            group.parts.append((pattern or "", name))
        elif not BUFFERS.search(name) and not any(one.search(name) or one.search(target) for one in ignored):
            wrong.append(f"{name} is not of this model")
    return groups, wrong


def _convert(
    model: nn.Module, path: Path, first: str, group: _Group, read: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The model's tensors that a group becomes."""
    if group.converter is None:
        return {first: read(group.parts[-1][1])}
    converter = copy.deepcopy(group.converter)
    for pattern, name in group.parts:
        converter.add_tensor(first, name, pattern, read(name))
    try:
        found = converter.convert(first, model=model, config=model.config)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        what = f"{group.parts[0][1]} and {len(group.parts) - 1} more do not make {first}"
        raise UserError(f"{what} ({str(error).splitlines()[0]}); download the model again", path) from error
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in found.items()}


def _read(model, path: Path, first: str, group: _Group, stored: dict[str, Stored]) -> dict[str, torch.Tensor]:
    def whole(name: str) -> torch.Tensor:
        with safe_open(path / stored[name].file, framework="pt") as file:
            return file.get_tensor(name)

    return _convert(model, path, first, group, whole)


def _fill_group(model, path, first, group, stored, targets) -> None:
    """Copy a group's tensors into their places: of a sharded one, the rows that this rank has."""
    if group.converter is None:
        if first in targets:
            target, name = targets[first], group.parts[-1][1]
            source = Source(name, None, tuple(target.shape))
            fill_tensor(target, lambda start, size: [read_part(path / stored[name].file, source, start, size)])
        return
    for name, tensor in _read(model, path, first, group, stored).items():
        if name in targets:
            fill_tensor(
                targets[name],
                lambda start, size, t=tensor: [t[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]],
            )


def _check_tied(path: Path, one: str, other: str, read: Callable[[str], torch.Tensor]) -> None:
    if not torch.equal(read(one), read(other)):
        raise UserError(
            f"tie_word_embeddings: {one} and {other} are one matrix by config.json, and differ in the files; set "
            "model.config.tie_word_embeddings: false to keep both",
            path,
        )


# ---- the way back


def transformers_entries(
    section: TransformersModelSection, kinds: dict[str, torch.dtype], read: Callable[[str], torch.Tensor]
) -> list[Entry]:
    """The tensors of a checkpoint as transformers' `save_pretrained` would write them, read when their turn comes.

    Tensors that are made together (all of a layer, where names differ) are made once for all that follow each other.

    Args:
        kinds: dtypes of the checkpoint's tensors, by their names in the model.
        read: a checkpoint's tensor.
    """
    model = build_model(section)
    blank = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name in kinds}
    layers: dict[str, list[str]] = {}
    for name in blank:
        layer = re.match(r".*?\.\d+(?=\.)", name)
        layers.setdefault(layer[0] if layer else name, []).append(name)
    entries = []
    for names in layers.values():
        made = _saved(model, {name: blank[name] for name in names})
        if made.keys() == set(names):  # as they are
            entries += [Entry(n, kinds[n], tuple(blank[n].shape), partial(read, n)) for n in names]
            continue
        layer = _Layer(model, names, read)
        for theirs, tensor in made.items():
            entries.append(Entry(theirs, kinds[names[0]], tuple(tensor.shape), partial(layer.tensor, theirs)))
    return entries


def _saved(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


class _Layer:
    """A layer's tensors as files have them, held while a thread asks for them one after another."""

    _of_thread = threading.local()

    def __init__(self, model: nn.Module, names: list[str], read: Callable[[str], torch.Tensor]):
        self.model, self.names, self.read = model, names, read

    def tensor(self, theirs: str) -> torch.Tensor:
        owner, made = getattr(_Layer._of_thread, "held", None) or (None, {})
        if owner is not self:
            _Layer._of_thread.held, made = None, {}  # let go of the last one before the next is read
            made = _saved(self.model, {name: self.read(name) for name in self.names})
            _Layer._of_thread.held = (self, made)
        return made[theirs]


def transformers_documents(section: TransformersModelSection, entries: list[Entry]) -> dict[str, dict[str, Any]]:
    """config.json as it was but for the weights' dtype, and the special ids that it names as generation_config.json."""
    kind = main_dtype(entries)
    config = {key: value for key, value in section.config.items() if key != "torch_dtype"} | {"dtype": kind}
    special = {key: config[key] for key in SPECIAL if config.get(key) is not None}
    return {CONFIG: config} | ({"generation_config.json": special} if special else {})
