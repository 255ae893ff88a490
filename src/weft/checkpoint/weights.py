"""Opens the tensors of any saved model. Names, dtypes and shapes are read from headers; rows are read on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface.folder import HuggingFaceFolder, names_in_files, open_folder
from weft.checkpoint.huggingface.headers import file_warnings, read_headers
from weft.checkpoint.huggingface.pickled import open_tensors
from weft.checkpoint.load import ADAPTER_ONLY, architecture, resolve
from weft.checkpoint.saved_tensor import SavedTensor
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.models.huggingface_weights import Transform, invert


@dataclass(frozen=True)
class Weights:
    """The tensors of a saved model.

    Attributes:
        path: path of the checkpoint or Hugging Face folder, as `resolve` returned it.
        huggingface: True: names and shapes are as in Hugging Face files; False: as in Weft's model.
        tensors: name -> tensor, in the order of the model or files.
        file: tensor name -> file name, if `path` is a Hugging Face folder and `huggingface` is True; otherwise empty.
        warnings: texts about tensors that are ignored or converted.
    """

    path: Path
    huggingface: bool
    tensors: Mapping[str, SavedTensor]
    file: Mapping[str, str]
    warnings: Sequence[str] = ()


def open_weights(path: str | Path, *, huggingface: bool | None = None, allow_pickle: bool = False) -> Weights:
    """Opens the model of a run, a checkpoint, an imported folder or a Hugging Face folder. Reads only headers.

    Args:
        huggingface: use the names and shapes in Hugging Face files (True) or in Weft's model (False). Default: True for
            a Hugging Face folder, otherwise False. A conversion requires a built-in model family.
        allow_pickle: whether to read `.bin` files, if there are no safetensors files.

    Raises:
        UserError: the path has no model, a file is damaged, or the names cannot be converted.
    """
    path = resolve(path)
    in_files = is_huggingface(path)
    huggingface = in_files if huggingface is None else huggingface
    if in_files and huggingface:
        stored = read_headers(path, allow_pickle=allow_pickle)
        found = {
            name: SavedTensor(one.dtype, one.shape, _file_reader(path / one.file, name, one.shape))
            for name, one in stored.items()
        }
        return Weights(path, True, found, {name: one.file for name, one in stored.items()}, file_warnings(path))
    if in_files:
        folder = open_folder(path, allow_pickle=allow_pickle)
        return Weights(path, False, {name: _converted(folder, name) for name in folder.sources}, {}, folder.warnings)
    if (path / files.ADAPTER).is_file():
        raise UserError(ADAPTER_ONLY, path)
    tensors = dict(checkpoint_tensors(path))
    if not huggingface:
        return Weights(path, False, tensors, {})
    section = architecture(path)
    if not isinstance(section, ModelSection):
        raise UserError(
            "this model cannot be converted to Hugging Face files; use a model of the built-in decoder",
            path,
        )
    return Weights(path, True, to_huggingface(path, section, tensors), {})


def to_huggingface(path: Path, section: ModelSection, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    """Returns a model's tensors with the names and shapes in Hugging Face files.

    Raises:
        UserError: a tensor is missing.
    """
    found: dict[str, SavedTensor] = {}
    for external, sources in names_in_files(section).items():
        for name, _ in sources:
            if name not in tensors:
                raise UserError(
                    f"damaged checkpoint: {name}, required by model.json, is missing; use another checkpoint", path
                )
        saved, transform = [tensors[name] for name, _ in sources], sources[0][1]
        expert = None if transform is None else transform.expert
        shapes = [one.shape if expert is None else one.shape[1:] for one in saved]
        shape = tuple(invert(transform, [torch.empty(one, device="meta") for one in shapes]).shape)
        read = partial(_read_inverted, saved, transform, expert)
        found[external] = SavedTensor(saved[0].dtype, shape, read, reads_all=True)
    return found


def _read_inverted(
    saved: list[SavedTensor], transform: Transform | None, expert: int | None, start: int, length: int
) -> torch.Tensor:
    """Converts tensors of Weft's model to one Hugging Face tensor. Returns `length` of its rows, from row `start`.

    Args:
        saved: the tensors to convert.
        transform: the conversion from Hugging Face to Weft, which is inverted; None: the tensors are equal.
        expert: if the Hugging Face tensor belongs to one expert, the index of this expert, whose matrix is selected
            from each of the tensors; otherwise None.
    """
    tensor = invert(transform, [one.full() if expert is None else one.read(expert, 1)[0] for one in saved])
    return tensor[start : start + length] if tensor.dim() else tensor


def _file_reader(file: Path, name: str, shape: tuple[int, ...]) -> Callable[[int, int], torch.Tensor]:
    """Returns a function that reads rows of a tensor from one file.

    Each call opens and closes the file, which releases the memory of the pages read.
    """

    def read(start: int, length: int) -> torch.Tensor:
        try:
            with open_tensors(file) as found:
                return found.get_slice(name)[start : start + length] if shape else found.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"cannot be read ({error}); download or copy the file again", file) from None

    return read


def _converted(folder: HuggingFaceFolder, name: str) -> SavedTensor:
    shape = folder.sources[name].shape

    def read(start: int, length: int) -> torch.Tensor:
        if not shape:
            return folder.read(name)
        return folder.read(name, (start, *[0] * (len(shape) - 1)), (length, *shape[1:]))

    return SavedTensor(folder.dtype(name), shape, read)


def checkpoint_tensors(checkpoint: Path, prefix: str = MODEL_PREFIX) -> Iterator[tuple[str, SavedTensor]]:
    """Yields the tensors of a checkpoint whose names begin with `prefix`, by the rest of the name."""
    index = files.read_index(checkpoint)
    for name, entry in index["tensors"].items():
        if not name.startswith(prefix):
            continue
        shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
        chunks = [(checkpoint / index["files"][number], offset, size) for number, offset, size in entry["pieces"]]
        single = len(chunks) == 1
        read = _file_reader(chunks[0][0], name, shape) if single else partial(_read_chunks, name, dtype, shape, chunks)
        yield name.removeprefix(prefix), SavedTensor(dtype, shape, read)


def _read_chunks(name: str, dtype: torch.dtype, shape: tuple, chunks: list, start: int, length: int) -> torch.Tensor:
    """Reads `length` rows, beginning with row `start`, of a tensor that is stored in several chunks."""
    block = torch.empty((length, *shape[1:]), dtype=dtype)
    for file, offset, size in chunks:
        first, last = max(start, offset[0]), min(start + length, offset[0] + size[0])
        if first < last:
            rest = tuple(slice(begin, begin + count) for begin, count in zip(offset[1:], size[1:], strict=True))
            with safe_open(file, framework="pt") as found:
                rows = found.get_slice(name)[first - offset[0] : last - offset[0]]
                block[(slice(first - start, last - start), *rest)] = rows
    return block
