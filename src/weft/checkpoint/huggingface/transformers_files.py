"""Reads and writes the files of a Transformers model that is not of a built-in family.

For some models, tensors in the files and in the model differ: for example, experts are stacked in memory. Then
transformers' table of weight conversions is applied, in both directions.
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
from weft.checkpoint.huggingface.folder import BUFFERS
from weft.checkpoint.huggingface.headers import file_warnings, read_headers
from weft.checkpoint.huggingface.quantized import StoredTensor
from weft.checkpoint.huggingface.slices import Source, read_slice
from weft.checkpoint.tensor_file import Entry, main_dtype
from weft.checkpoint.tensors import model_tensors
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.families.config_json import CONFIG
from weft.formatting import first_few
from weft.models.build import build_model
from weft.parallel import ranks

_NAMED = 10  # maximum number of mismatched tensors that a message lists


def fill_transformers_model(
    model: nn.Module, section: TransformersModelSection, select: Callable[[str], bool] | None = None
) -> None:
    """Loads the safetensors files in `section.path` into a model, sharded or not. Every rank reads its shards.

    Tensors that transformers stacks or splits are read and converted in full on every rank, one group at a time.

    Args:
        select: as in `weft.checkpoint.load.load`.

    Raises:
        UserError: a file is missing or truncated, or a tensor is missing, unknown or of another shape.
    """
    path = Path(section.path or "")
    stored = read_headers(path)
    for warning in file_warnings(path) if ranks.rank() == 0 else ():
        warnings.warn(f"{path}: {warning}", stacklevel=2)
    plain = build_model(section)  # transformers finds conversions by the class name, which sharding changes
    reader = _Reader(plain, path, stored)
    problems = reader.problems
    shapes = {name: tuple(tensor.shape) for name, tensor in plain.state_dict().items()}
    owners: dict[str, str] = {}  # name in the model -> first name of its group
    for first, group in reader.groups.items():
        blank = {name: torch.empty(stored[name].shape, device="meta") for _, name in group.parts}
        for name, tensor in reader.convert(first, blank.__getitem__).items():
            owners[name] = first
            if name in shapes and tuple(tensor.shape) != shapes[name]:
                problems.append(f"{name} has shape {list(tensor.shape)}, but config.json requires {list(shapes[name])}")
    buffers = dict(plain.named_buffers())  # buffers that are in no file keep the values from the constructor
    targets: dict[str, torch.Tensor] = {}
    tied: list[list[str]] = []
    for name, (tensor, names) in model_tensors(model).items():
        found = [one for one in names if one in owners]
        if select is not None and not select(name):
            continue
        if found:
            targets[found[0]] = tensor.detach()
            tied.append(found)
        elif name not in buffers:
            problems.append(f"{name} is missing")
    if problems:
        summary = f"the tensors do not match the {type(plain).__name__} of config.json"
        raise UserError(f"{summary}: {first_few(problems, _NAMED, '; ')}", path)
    for one, *others in tied:
        for other in others:
            if not torch.equal(reader.read(owners[one])[one], reader.read(owners[other])[other]):
                raise UserError(
                    f"{one} and {other} are tied in config.json, but differ in the files; set "
                    "model.config.tie_word_embeddings: false to use both",
                    path,
                )
    with torch.no_grad():
        for first in reader.groups:
            reader.fill(first, targets)


@dataclass
class _Group:
    """Stored tensors that are converted together to one or more tensors of the model.

    Attributes:
        converter: the conversion of transformers; None: the group is one stored tensor, which is used unchanged.
        parts: (pattern, name) of each stored tensor. The pattern is the pattern of `converter` that matches the name;
            "" if there is no converter.
    """

    converter: Any = None
    parts: list[tuple[str, str]] = field(default_factory=list)


class _Reader:
    """A reader of stored tensors that converts them to the names and shapes in a Transformers model.

    Attributes:
        groups: name of a group's first tensor in the model -> the group of stored tensors.
        problems: texts about stored tensors that cannot be used.
    """

    def __init__(self, model: Any, path: Path, stored: dict[str, StoredTensor]):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        self.model, self.path, self.stored = model, path, stored
        self.groups: dict[str, _Group] = {}
        self.problems: list[str] = []
        table = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        state, prefix = model.state_dict(), model.base_model_prefix
        ignored = [BUFFERS, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
        for name in sorted(stored, key=dot_natural_key):
            if stored[name].dtype.itemsize < 2 and stored[name].dtype != torch.bool:
                self.problems.append(f"{name} is stored as {stored[name].dtype}: quantized weights are not supported")
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state:
                target, pattern = rename_source_key(name, [], [], prefix, state)
            if target in state:
                group = self.groups.setdefault(target, _Group(by_pattern.get(pattern or "")))
                group.parts.append((pattern or "", name))
            elif not any(one.search(name) or one.search(target) for one in ignored):
                self.problems.append(f"{name} does not belong to this model")

    def convert(self, first: str, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Converts a group of stored tensors to tensors of the model, and returns them by name.

        Args:
            first: name of the group's first tensor in the model (a key of `groups`).
            read: function that returns a stored tensor by its stored name.
        """
        group = self.groups[first]
        if group.converter is None:
            return {first: read(group.parts[-1][1])}
        converter = copy.deepcopy(group.converter)
        for pattern, name in group.parts:
            converter.add_tensor(first, name, pattern, read(name))
        try:
            found = converter.convert(first, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            what = f"{group.parts[0][1]} and {len(group.parts) - 1} more stored tensors cannot be converted to {first}"
            raise UserError(f"{what} ({str(error).splitlines()[0]}); download the model again", self.path) from error
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in found.items()}

    def read(self, first: str) -> dict[str, torch.Tensor]:
        """Reads a group of stored tensors, and returns the model's tensors by name. `first` is a key of `groups`."""

        def stored_tensor(name: str) -> torch.Tensor:
            with safe_open(self.path / self.stored[name].file, framework="pt") as file:
                return file.get_tensor(name)

        return self.convert(first, stored_tensor)

    def fill(self, first: str, targets: dict[str, torch.Tensor]) -> None:
        """Reads a group of stored tensors into tensors of the model.

        Args:
            first: name of the group's first tensor in the model (a key of `groups`).
            targets: name in the model -> tensor to fill. Of a DTensor, only this rank's shard is filled.
        """
        group = self.groups[first]
        if group.converter is None:
            if first in targets:
                target, name = targets[first], group.parts[-1][1]
                file, source = self.path / self.stored[name].file, Source(name, None, tuple(target.shape))
                fill_tensor(target, lambda start, size: [read_slice(file, source, start, size)])
            return
        for name, tensor in self.read(first).items():
            if name in targets:
                fill_tensor(
                    targets[name],
                    lambda start, size, t=tensor: [t[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]],
                )


# ---- writing


def transformers_entries(
    section: TransformersModelSection, kinds: dict[str, torch.dtype], read: Callable[[str], torch.Tensor]
) -> list[Entry]:
    """Returns a checkpoint's tensors with the names and shapes that transformers' `save_pretrained` writes.

    The tensors are read on demand. If a layer needs a conversion, all tensors of the layer are converted together when
    the first of them is read, and cached for the following reads.

    Args:
        kinds: name in the model -> dtype in which the tensor is written.
        read: function that returns a tensor of the checkpoint by its name in the model.
    """
    model = build_model(section)
    blank = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name in kinds}
    layers: dict[str, list[str]] = {}
    for name in blank:
        layer = re.match(r".*?\.\d+(?=\.)", name)
        layers.setdefault(layer[0] if layer else name, []).append(name)
    entries = []
    for names in layers.values():
        converted = _revert(model, {name: blank[name] for name in names})
        if converted.keys() == set(names):  # no conversion
            entries += [Entry(n, kinds[n], tuple(blank[n].shape), partial(read, n)) for n in names]
            continue
        layer = _Layer(model, names, read)
        for name, tensor in converted.items():
            entries.append(Entry(name, kinds[names[0]], tuple(tensor.shape), partial(layer.tensor, name)))
    return entries


def _revert(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts tensors of the model to the names and shapes in Hugging Face files."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


class _Layer:
    """Converts a layer's tensors to the names and shapes in files. Each thread caches the last converted layer."""

    _of_thread = threading.local()

    def __init__(self, model: nn.Module, names: list[str], read: Callable[[str], torch.Tensor]):
        self.model, self.names, self.read = model, names, read

    def tensor(self, name: str) -> torch.Tensor:
        owner, converted = getattr(_Layer._of_thread, "cache", None) or (None, {})
        if owner is not self:
            _Layer._of_thread.cache, converted = None, {}  # free the previous layer before the next is read
            converted = _revert(self.model, {name: self.read(name) for name in self.names})
            _Layer._of_thread.cache = (self, converted)
        return converted[name]


def transformers_config_files(section: TransformersModelSection, entries: list[Entry]) -> dict[str, dict[str, Any]]:
    """Returns the contents of config.json and, if the config has special token ids, generation_config.json, by name."""
    kind = main_dtype(entries)
    config = {key: value for key, value in section.config.items() if key != "torch_dtype"} | {"dtype": kind}
    special = {key: config[key] for key in SPECIAL if config.get(key) is not None}
    return {CONFIG: config} | ({"generation_config.json": special} if special else {})
