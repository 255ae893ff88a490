"""A Hugging Face folder, opened and checked by its headers. No pickle and no remote code is loaded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from weft.checkpoint.huggingface import pickled
from weft.checkpoint.huggingface.quantized import StoredTensor, dequantized
from weft.checkpoint.huggingface.slices import OpenFileCache, Source, read_slice
from weft.checkpoint.tensor_file import DTYPES
from weft.config.huggingface_config import checked_model
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.families import families
from weft.families.config_json import CONFIG, INDEX, SINGLE, quantization, read_config
from weft.files import read_json
from weft.formatting import counted, first_few
from weft.models.decoder import Decoder
from weft.models.huggingface_weights import Transform, invert, saved_tensors, tensor_mapping

_NAMED = 10  # mismatched tensors that a message lists
_HEADER_LIMIT = 100 * 2**20  # the limit of the safetensors library
# Masks and rotary frequencies that older versions of transformers saved with the weights.
BUFFERS = re.compile(r"(\.attn|\.attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")
_DTYPES = {external: getattr(torch, name) for name, external in DTYPES.items()}
_PICKLE_ONLY = (
    "weights as .bin are pickled, and loading a pickle can run any program, so none is loaded; look for a copy with "
    "safetensors, or, if you trust this one: weft import {path} OUT --allow-pickle"
)


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder whose tensors match the model of its config.json.

    Attributes:
        config: config.json.
        section: the model that config.json describes.
        stored: name in the files -> where the tensor is stored.
        sources: name in Weft's model -> how it is read from the files.
        warnings: what is not read as the files have it.
    """

    path: Path
    config: dict[str, Any]
    section: ModelSection
    stored: dict[str, StoredTensor]
    sources: dict[str, Source]
    warnings: tuple[str, ...] = ()

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which a parameter of Weft's model is stored."""
        return self.stored[self.sources[name].name].dtype

    def read(self, name: str, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None):
        """Returns a parameter of Weft's model, or the slice of shape `size` that begins at `start`."""
        size = size or self.sources[name].shape
        blocks = self.blocks(name, start, size)
        if len(size) < 3:
            return next(blocks)
        stack = torch.empty(size, dtype=self.dtype(name))  # filled in place: no second copy of a large stack
        for row, block in zip(stack, blocks, strict=True):
            row.copy_(block[0])
        return stack

    def blocks(
        self, name: str, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None
    ) -> Iterator[torch.Tensor]:
        """As `read`, but yields stacked experts one by one, so that the stack is never fully in memory."""
        yield from self._blocks(self.sources[name], start, size)

    def _blocks(
        self, source: Source, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None
    ) -> Iterator[torch.Tensor]:
        start, size = start or (0,) * len(source.shape), size or source.shape
        with OpenFileCache() as cache:
            if len(size) < 3:
                yield self._read_slice(source, start, size, cache)
                return
            for row in range(start[0], start[0] + size[0]):
                if source.experts:
                    yield self._read_slice(source.experts[row], start[1:], size[1:], cache).unsqueeze(0)
                else:
                    yield self._read_slice(source, (row, *start[1:]), (1, *size[1:]), cache)

    def _read_slice(self, source: Source, start: tuple[int, ...], size: tuple[int, ...], cache: OpenFileCache):
        stored = self.stored[source.name]
        file = self.path / stored.file
        try:
            found = read_slice(stored.quantized or file, source, start, size, cache)
        except SafetensorError as error:
            raise UserError(f"cannot be read ({error}); download it again", file) from None
        cache.count(found)
        return found


def open_folder(path: str | Path, *, allow_pickle: bool = False) -> HuggingFaceFolder:
    """Opens a folder; checks that its files are complete and that their tensors are the model's.

    Args:
        allow_pickle: if there is no safetensors file, read `.bin` files with torch's restricted unpickler.

    Raises:
        UserError: no config.json, an unknown architecture, only pickled weights, a truncated file, or tensors that do
            not match.
    """
    path = Path(path)
    config, section = read_config(path), section_of(path)
    stored = dequantized(path, config, read_headers(path, allow_pickle=allow_pickle))
    extra = _prediction_layers(config, section, stored)
    sources = _match(path, section, {name: one for name, one in stored.items() if name not in extra})
    quantized = [name for name, one in stored.items() if one.quantized is not None and name not in extra]
    warnings = file_warnings(path)
    if quantized:
        what = counted(len(quantized), "tensor is", "tensors are")
        warnings.append(f"{what} quantized ({quantization(config)}) and read as bfloat16")
    if extra:
        what = counted(len(extra), "tensor belongs", "tensors belong")
        warnings.append(f"{what} to multi-token prediction layers (num_nextn_predict_layers) and left out")
    folder = HuggingFaceFolder(path, config, section, stored, sources, tuple(warnings))
    _check_tied(folder)
    return folder


def section_of(path: Path) -> ModelSection:
    """Returns the model section of a folder's config.json. Raises UserError with that file."""
    config = read_config(path)
    try:
        return checked_model(config)
    except UserError as error:
        raise UserError(error.what, path / CONFIG) from None


# ---- files


def read_headers(path: Path, *, allow_pickle: bool = False) -> dict[str, StoredTensor]:
    """Returns all tensors of a folder's files by name. Raises UserError if a file is missing, truncated or pickled."""
    found: dict[str, StoredTensor] = {}
    for file, expected in _tensor_files(path, allow_pickle).items():
        binary = file.endswith(pickled.SUFFIX)
        index = pickled.INDEX if binary else INDEX
        if not (path / file).is_file():
            raise UserError(f"{index} names this file, which is missing; download the rest of the model", path / file)
        with open(path / file, "rb") as opened:
            if opened.read(8) == b"version ":
                raise UserError("a pointer of Git LFS, not the weights; run git lfs pull", path / file)
        header = _read_pickled_header(path / file) if binary else _read_header(path / file)
        lacking = sorted(expected - header.keys())
        if lacking:
            raise UserError(
                f"{index} lists {lacking[0]} in this file, which lacks it; download both again", path / file
            )
        found |= header
    return found


_KINDS = ((INDEX, SINGLE, ".safetensors"), (pickled.INDEX, pickled.SINGLE, pickled.SUFFIX))


def file_warnings(path: Path) -> list[str]:
    """Returns a warning if a folder has its weights twice; the choice is that of transformers."""
    for index, single, _ in _KINDS:
        found = [name for name in (single, index) if (path / name).is_file()]
        if found:
            both = f"both {single} and {index} exist; the first is read, as transformers does"
            return [both] if len(found) > 1 else []
    return []


def _tensor_files(path: Path, allow_pickle: bool) -> dict[str, set[str]]:
    """Returns a folder's files of tensors, with the names of the tensors that the index lists in each."""
    for index, single, suffix in _KINDS[: 2 if allow_pickle else 1]:
        if (path / single).is_file():
            return {single: set()}
        if (path / index).is_file():
            return _read_index(path / index, suffix)
    others = sorted(found.name for found in path.iterdir())
    shards = [name for name in others if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]
    if shards:
        raise UserError(f"{shards[0]} is one of several files, and {INDEX} is missing; download it as well", path)
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in others):
        raise UserError(_PICKLE_ONLY.format(path=path), path)
    what = "an adapter, not a model; merge it first" if "adapter_config.json" in others else "no weights"
    raise UserError(f"there is no {SINGLE} here: {what}", path)


def _read_index(index: Path, suffix: str) -> dict[str, set[str]]:
    content = read_json(index)
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise UserError("not an index of tensors: it has no weight_map; download it again", index)
    files: dict[str, set[str]] = {}
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(suffix):
            raise UserError(f"{name} is listed in {file!r}, which is not a {suffix} file of this folder", index)
        files.setdefault(file, set()).add(name)
    return dict(sorted(files.items()))


def _read_pickled_header(path: Path) -> dict[str, StoredTensor]:
    return {name: StoredTensor(path.name, one.dtype, tuple(one.shape)) for name, one in pickled.tensors(path).items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Reads a safetensors header and checks it against the file's size. Raises UserError."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or (length <= _HEADER_LIMIT and 8 + length > size):
            raise UserError(f"truncated file: it ends in its header, after {size:,} bytes; download it again", path)
        text = file.read(length) if length <= _HEADER_LIMIT else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        places = sorted((int(start), int(stop), name) for name, (start, stop) in offsets.items())
        found = {
            name: StoredTensor(path.name, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
            for name, entry in header.items()
        }
    except KeyError as error:
        raise UserError(f"its header has {error}, which is not known; download the file again", path) from None
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        raise UserError("not a safetensors file; download it again", path) from None
    end = 0
    for start, stop, name in places:
        if start != end or stop - start != math.prod(found[name].shape) * found[name].dtype.itemsize:
            raise UserError(f"its header has wrong offsets for {name}; the file is damaged: download it again", path)
        end = stop
    expected = 8 + length + end
    if size < expected:
        raise UserError(f"truncated file: {size:,} bytes of {expected:,}; download it again", path)
    if size > expected:
        raise UserError(f"{size:,} bytes where its header requires {expected:,}; download it again", path)
    return found


# ---- tensors


def _match(path: Path, section: ModelSection, stored: dict[str, StoredTensor]) -> dict[str, Source]:
    """Returns where each parameter is stored. Raises UserError for missing, misshaped or unknown tensors."""
    if section.num_hidden_layers > len(stored):
        what = f"num_hidden_layers: {section.num_hidden_layers:,}, and the files have {len(stored):,} tensors in all"
        raise UserError(f"{what}; download the model again", path / CONFIG)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in saved_tensors(Decoder(section)).items()}
    problems: list[str] = []
    used: set[str] = set()
    sources: dict[str, Source] = {}
    experts: dict[str, tuple[Source, ...]] = {}
    for external, targets in names_in_files(section).items():
        found = next((name for name in (external, external.partition(".")[2]) if name in stored), None)
        if found is None:
            problems.append(f"{external} is missing")
            continue
        used.add(found)
        transform = targets[0][1]
        per_expert = transform is not None and transform.expert is not None
        blank = [torch.empty(shapes[name][per_expert:], device="meta") for name, _ in targets]
        expected = tuple(invert(transform, blank).shape)
        entry = stored[found]
        if entry.shape != expected:
            problems.append(f"{found} is {list(entry.shape)} where config.json requires {list(expected)}")
        elif not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            problems.append(f"{found} is stored as {entry.dtype}: quantized weights are not supported")
        for name, transform in targets:
            if per_expert:
                experts[name] = (*experts.get(name, ()), Source(found, transform, shapes[name][1:]))
            else:
                sources[name] = Source(found, transform, shapes[name])
    sources |= {name: Source(found[0].name, None, shapes[name], found) for name, found in experts.items()}
    left = [name for name in stored if name not in used and not BUFFERS.search(name)]
    problems += [f"{name} is not of this model" for name in sorted(left) if name != _tied_head(section)]
    if problems:
        summary = f"the tensors do not match the {section.family} model of config.json"
        raise UserError(f"{summary}: {first_few(problems, _NAMED, '; ')}", path)
    return sources


def _prediction_layers(config: dict[str, Any], section: ModelSection, stored: dict[str, StoredTensor]) -> set[str]:
    """Returns the tensors of multi-token prediction layers, which come after the last layer and are not supported."""
    if not config.get("num_nextn_predict_layers"):
        return set()
    layers = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in stored}
    return {name for name, layer in layers.items() if layer and int(layer[1]) >= section.num_hidden_layers}


def names_in_files(section: ModelSection) -> dict[str, list[tuple[str, Transform | None]]]:
    """Returns name in Hugging Face's files -> the parameters of Weft's model that it is assembled from, in order."""
    found: dict[str, list[tuple[str, Transform | None]]] = {}
    for name, external, transform in tensor_mapping(section):
        found.setdefault(external, []).append((name, transform))
    return found


def _tied_head(section: ModelSection) -> str | None:
    """Returns the name under which older files store a tied head in addition to the embedding."""
    if not section.tie_word_embeddings:
        return None
    return next((f"{w.hf_name}.weight" for w in families()[section.family].WEIGHTS if w.name == "lm_head"), None)


def _check_tied(folder: HuggingFaceFolder) -> None:
    """Raises UserError if a tied head is stored and differs from the embedding."""
    head = _tied_head(folder.section)
    if head not in folder.stored:
        return
    embedding, shape = folder.sources["embed_tokens.weight"], folder.stored[head].shape
    if shape == embedding.shape:
        stored = next(folder._blocks(Source(head, None, shape)))
        if torch.equal(stored, folder.read("embed_tokens.weight")):
            return
    raise UserError(
        f"tie_word_embeddings: true, but {head} differs from {embedding.name}; set it to false to keep both",
        folder.path / CONFIG,
    )
