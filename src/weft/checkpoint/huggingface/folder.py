"""A Hugging Face folder, opened and checked by its headers alone: nothing pickled and no remote code is looked at."""

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
from weft.checkpoint.huggingface.quantized import Stored, unpacked
from weft.checkpoint.huggingface.slices import Held, Source, read_part
from weft.checkpoint.tensor_file import DTYPES
from weft.config.huggingface_config import model_of
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.families import families
from weft.families.config_json import CONFIG, INDEX, SINGLE, quantization, read_config
from weft.files import read_json
from weft.formatting import counted, first_few
from weft.models.decoder import Decoder
from weft.models.huggingface_weights import Transform, invert, saved_tensors, tensor_mapping

# So many wrong tensors are named; the rest is counted.
_NAMED = 10
_HEADER_LIMIT = 100 * 2**20  # what the safetensors library takes
# Masks and rotations that older versions of transformers saved beside the weights.
BUFFERS = re.compile(r"(\.attn|\.attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")
_DTYPES = {theirs: getattr(torch, ours) for ours, theirs in DTYPES.items()}
_CONVERT = (
    "weights as .bin are pickled, and a pickle can run any program while it is read, so none is loaded; look for a "
    "copy with safetensors, or, where you trust this one: weft import {path} OUT --allow-pickle"
)


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder whose tensors are those of the model that its config.json names.

    Attributes:
        config: config.json.
        section: the model that it means.
        stored: their name -> where it is.
        sources: our name -> where that is found.
        notes: what of the files is not taken as it is.
    """

    path: Path
    config: dict[str, Any]
    section: ModelSection
    stored: dict[str, Stored]
    sources: dict[str, Source]
    notes: tuple[str, ...] = ()

    def dtype(self, name: str) -> torch.dtype:
        """What one of our parameters is saved as."""
        return self.stored[self.sources[name].theirs].dtype

    def read(self, name: str, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None):
        """One of our parameters, or the rectangle of it that begins at `start` and measures `size`."""
        shape = self.sources[name].shape
        with Held() as held:
            return self._read(name, start or (0,) * len(shape), size or shape, held)

    def _read(self, name: str, start: tuple[int, ...], size: tuple[int, ...], held: Held) -> torch.Tensor:
        source = self.sources[name]
        if not source.experts:
            return self._part(source, start, size, held)
        chosen = source.experts[start[0] : start[0] + size[0]]
        if not chosen:
            return torch.empty(size, dtype=self.dtype(name))
        stack = torch.empty(size, dtype=self.dtype(name))  # filled in place: no second copy of a large stack
        for place, one in zip(stack, chosen, strict=True):
            place.copy_(self._part(one, start[1:], size[1:], held))
        return stack

    def pieces(
        self, name: str, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None
    ) -> Iterator[torch.Tensor]:
        """As `read`, one expert after another where there is a stack of them, so that it is never in memory whole."""
        shape = self.sources[name].shape
        start, size = start or (0,) * len(shape), size or shape
        if len(shape) < 3:
            yield self.read(name, start, size)
            return
        with Held() as held:
            for row in range(size[0]):
                yield self._read(name, (start[0] + row, *start[1:]), (1, *size[1:]), held)

    def _part(self, source: Source, start: tuple[int, ...], size: tuple[int, ...], held: Held) -> torch.Tensor:
        stored = self.stored[source.theirs]
        file = self.path / stored.file
        try:
            found = read_part(stored.packed or file, source, start, size, held)
            held.count(found)
            return found
        except SafetensorError as error:
            raise UserError(f"cannot be read ({error}); download it again", file) from None


def open_folder(path: str | Path, *, allow_pickle: bool = False) -> HuggingFaceFolder:
    """Open a folder and check that its files are whole, and that their tensors are the model's.

    Args:
        allow_pickle: where there is no safetensors file, take `.bin` files, by torch's restricted unpickler.

    Raises:
        UserError: no config.json, an unknown architecture, pickled weights only, half a file, tensors that do not fit.
    """
    path = Path(path)
    config, section = read_config(path), section_of(path)
    stored = unpacked(path, config, headers(path, allow_pickle=allow_pickle))
    further = _further(config, section, stored)
    sources = _match(path, section, {name: one for name, one in stored.items() if name not in further})
    packed = [name for name, one in stored.items() if one.packed is not None and name not in further]
    notes = file_notes(path)
    if packed:
        what = counted(len(packed), "tensor is", "tensors are")
        notes.append(f"{what} quantized ({quantization(config)}) and read as bfloat16")
    if further:
        what = "layers that predict further tokens (num_nextn_predict_layers)"
        notes.append(f"{counted(len(further), 'tensor is', 'tensors are')} of {what} and left out")
    folder = HuggingFaceFolder(path, config, section, stored, sources, tuple(notes))
    _check_tied(folder)
    return folder


def section_of(path: Path) -> ModelSection:
    """The model that a folder's config.json means. Raises UserError, with that file."""
    config = read_config(path)
    try:
        return model_of(config)
    except UserError as error:
        raise UserError(error.what, path / CONFIG) from None


# ---- the files


def headers(path: Path, *, allow_pickle: bool = False) -> dict[str, Stored]:
    """All tensors of a folder's files by their names. Raises UserError if a file is missing, cut short or pickled."""
    found: dict[str, Stored] = {}
    for file, expected in _files(path, allow_pickle).items():
        binary = file.endswith(pickled.SUFFIX)
        index = pickled.INDEX if binary else INDEX
        if not (path / file).is_file():
            raise UserError(f"{index} names this file and it is not here; download the rest of the model", path / file)
        header = _pickled_header(path / file) if binary else _header(path / file)
        lacking = sorted(expected - header.keys())
        if lacking:
            raise UserError(
                f"{index} says that {lacking[0]} is in here and it is not; download both again", path / file
            )
        found |= header
    return found


_KINDS = ((INDEX, SINGLE, ".safetensors"), (pickled.INDEX, pickled.SINGLE, pickled.SUFFIX))


def file_notes(path: Path) -> list[str]:
    """What is to be said of the choice among a folder's files, which is transformers' own."""
    for index, single, _ in _KINDS:
        if (path / single).is_file():
            both = (path / index).is_file()
            return [f"both {single} and {index} are here; the first is read, as transformers does"] if both else []
        if (path / index).is_file():
            break
    return []


def _files(path: Path, allow_pickle: bool) -> dict[str, set[str]]:
    """The files of a folder that hold tensors, and which tensors the index says are in each."""
    for index, single, suffix in _KINDS[: 2 if allow_pickle else 1]:
        if (path / single).is_file():
            return {single: set()}
        if (path / index).is_file():
            return _indexed(path / index, suffix)
    others = sorted(found.name for found in path.iterdir())
    shards = [name for name in others if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]
    if shards:
        raise UserError(f"{shards[0]} is one of several files, and {INDEX} is missing; download it as well", path)
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in others):
        raise UserError(_CONVERT.format(path=path), path)
    what = "the adapter of a model, not a model; merge it first" if "adapter_config.json" in others else "no weights"
    raise UserError(f"there is no {SINGLE} here: {what}", path)


def _indexed(index: Path, suffix: str) -> dict[str, set[str]]:
    """The files that an index names, and which tensors it says are in each."""
    content = read_json(index)
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise UserError("not an index of tensors: it has no weight_map; download it again", index)
    files: dict[str, set[str]] = {}
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(suffix):
            raise UserError(f"{name} is said to be in {file!r}, which is no {suffix} file of this folder", index)
        files.setdefault(file, set()).add(name)
    return dict(sorted(files.items()))


def _pickled_header(path: Path) -> dict[str, Stored]:
    """As `_header`, of a `.bin` file."""
    with open(path, "rb") as file:
        if file.read(8) == b"version ":
            raise UserError("a pointer of Git LFS, not the weights; fetch them: git lfs pull", path)
    return {name: Stored(path.name, one.dtype, tuple(one.shape)) for name, one in pickled.tensors(path).items()}


def _header(path: Path) -> dict[str, Stored]:
    """What a safetensors file says that it holds, and whether it is as long as that. Raises UserError."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        if head == b"version ":
            raise UserError("a pointer of Git LFS, not the weights; fetch them: git lfs pull", path)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or (length <= _HEADER_LIMIT and 8 + length > size):
            raise UserError(f"half a file: it ends within its header, after {size:,} bytes; download it again", path)
        text = file.read(length) if length <= _HEADER_LIMIT else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        places = sorted((int(start), int(stop), name) for name, (start, stop) in offsets.items())
        found = {
            name: Stored(path.name, _DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()
        }
    except KeyError as error:
        raise UserError(f"its header has {error}, which is not known; download the file again", path) from None
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        raise UserError("not a safetensors file; download it again", path) from None
    end = 0
    for start, stop, name in places:
        if start != end or stop - start != math.prod(found[name].shape) * found[name].dtype.itemsize:
            raise UserError(f"its header puts {name} where it cannot be; the file is damaged: download it again", path)
        end = stop
    expected = 8 + length + end
    if size < expected:
        raise UserError(f"half a file: {size:,} bytes of {expected:,}; download it again", path)
    if size > expected:
        raise UserError(f"{size:,} bytes where its header means {expected:,}; download it again", path)
    return found


# ---- the tensors


def _match(path: Path, section: ModelSection, stored: dict[str, Stored]) -> dict[str, Source]:
    """Where each of our parameters is. Raises UserError that names what is missing, misshaped or too much."""
    if section.num_hidden_layers > len(stored):
        what = f"num_hidden_layers: {section.num_hidden_layers:,}, and the files have {len(stored):,} tensors in all"
        raise UserError(f"{what}; download the model again", path / CONFIG)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in saved_tensors(Decoder(section)).items()}
    problems: list[str] = []
    used: set[str] = set()
    sources: dict[str, Source] = {}
    experts: dict[str, tuple[Source, ...]] = {}
    for theirs, ours in groups(section).items():
        found = next((name for name in (theirs, theirs.partition(".")[2]) if name in stored), None)
        if found is None:
            problems.append(f"{theirs} is missing")
            continue
        used.add(found)
        transform = ours[0][1]
        one = transform is not None and transform.expert is not None
        parts = [torch.empty(shapes[name][one:], device="meta") for name, _ in ours]
        expected = tuple(invert(transform, parts).shape)
        entry = stored[found]
        if entry.shape != expected:
            problems.append(f"{found} is {list(entry.shape)} where config.json means {list(expected)}")
        elif not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            problems.append(f"{found} is stored as {entry.dtype}: quantized weights cannot be taken")
        for name, transform in ours:
            if one:
                experts[name] = (*experts.get(name, ()), Source(found, transform, shapes[name][1:]))
            else:
                sources[name] = Source(found, transform, shapes[name])
    sources |= {name: Source(found[0].theirs, None, shapes[name], found) for name, found in experts.items()}
    left = [name for name in stored if name not in used and not BUFFERS.search(name)]
    problems += [f"{name} is not of this model" for name in sorted(left) if name != _tied_head(section)]
    if problems:
        whose = f"its tensors are not those of the {section.family} model that config.json says"
        raise UserError(f"{whose}: {first_few(problems, _NAMED, '; ')}", path)
    return sources


def _further(config: dict[str, Any], section: ModelSection, stored: dict[str, Stored]) -> set[str]:
    """Tensors of the layers after the last, which predict further tokens and are no part of the model here."""
    if not config.get("num_nextn_predict_layers"):
        return set()
    layers = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in stored}
    return {name for name, layer in layers.items() if layer and int(layer[1]) >= section.num_hidden_layers}


def groups(section: ModelSection) -> dict[str, list[tuple[str, Transform | None]]]:
    """Their names -> ours that each is put together from, in order."""
    found: dict[str, list[tuple[str, Transform | None]]] = {}
    for ours, theirs, transform in tensor_mapping(section):
        found.setdefault(theirs, []).append((ours, transform))
    return found


def _tied_head(section: ModelSection) -> str | None:
    """The name that a tied head may have in older files, beside the embedding."""
    if not section.tie_word_embeddings:
        return None
    return next((f"{w.hf_name}.weight" for w in families()[section.family].WEIGHTS if w.name == "lm_head"), None)


def _check_tied(folder: HuggingFaceFolder) -> None:
    """A tied head that was saved all the same is the embedding's matrix, or the model would not be the same one."""
    head = _tied_head(folder.section)
    if head not in folder.stored:
        return
    embedding, entry = folder.sources["embed_tokens.weight"], folder.stored[head]
    if entry.shape == embedding.shape:
        start = (0,) * len(entry.shape)
        file = entry.packed or folder.path / entry.file
        theirs = read_part(file, Source(head, None, entry.shape), start, entry.shape)
        if torch.equal(theirs, folder.read("embed_tokens.weight")):
            return
    raise UserError(
        f"tie_word_embeddings: true, but {head} differs from {embedding.theirs}; set it to false to keep both",
        folder.path / CONFIG,
    )
