"""Opens and checks a Hugging Face folder, without reading the weights. No remote code is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from weft.checkpoint.huggingface.headers import file_warnings, read_headers
from weft.checkpoint.huggingface.quantized import StoredTensor, dequantized
from weft.checkpoint.huggingface.slices import OpenFileCache, Source, read_slice
from weft.config.huggingface_config import checked_model
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.families import families
from weft.families.config_json import CONFIG, quantization, read_config
from weft.formatting import counted, first_few
from weft.models.decoder import Decoder
from weft.models.huggingface_weights import Transform, invert, saved_tensors, tensor_mapping
from weft.models.initialize import on_meta

_NAMED = 10  # maximum number of mismatched tensors that a message lists
# Masks and rotary frequencies that older versions of transformers saved with the weights.
BUFFERS = re.compile(r"(\.attn|\.attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A Hugging Face folder whose tensors match the model of its config.json.

    Attributes:
        config: content of config.json.
        section: the model that config.json describes, as the `model` section of a Weft config.
        stored: name of a tensor in the files -> its file, dtype and shape.
        sources: name of a parameter in Weft's model -> the stored tensors from which it is read.
        warnings: texts about tensors that are ignored or converted.
    """

    path: Path
    config: dict[str, Any]
    section: ModelSection
    stored: dict[str, StoredTensor]
    sources: dict[str, Source]
    warnings: tuple[str, ...] = ()

    def dtype(self, name: str) -> torch.dtype:
        """Returns the stored dtype of a parameter of Weft's model."""
        return self.stored[self.sources[name].name].dtype

    def read(self, name: str, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None):
        """Returns a parameter of Weft's model, or the slice that begins at index `start` and has shape `size`."""
        size = size or self.sources[name].shape
        blocks = self.blocks(name, start, size)
        if len(size) < 3:
            return next(blocks)
        stack = torch.empty(size, dtype=self.dtype(name))  # filled in place, to avoid a second copy of all experts
        for row, block in zip(stack, blocks, strict=True):
            row.copy_(block[0])
        return stack

    def blocks(
        self, name: str, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None
    ) -> Iterator[torch.Tensor]:
        """Yields the result of `read` in blocks of rows: stacked experts one by one, other parameters as one block."""
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
            raise UserError(f"cannot be read ({error}); download the file again", file) from None
        cache.count(found)
        return found


def open_folder(
    path: str | Path, *, allow_pickle: bool = False, prediction_layers: int | None = 0
) -> HuggingFaceFolder:
    """Opens a Hugging Face folder. Checks that its files are complete and match the model of config.json.

    Args:
        allow_pickle: whether to read `.bin` files, with torch's restricted unpickler, if there is no safetensors file.
        prediction_layers: number of multi-token prediction layers to read, if config.json has as many; None: all.

    Raises:
        UserError: config.json is missing, the architecture is unknown, a file is missing or truncated, the tensors do
            not match the model, or the folder has only `.bin` files and `allow_pickle` is false.
    """
    path = Path(path)
    config, section = read_config(path), section_of(path, prediction_layers)
    stored = dequantized(path, config, read_headers(path, allow_pickle=allow_pickle))
    extra = _prediction_layers(config, section, stored)
    sources = _match(path, section, {name: one for name, one in stored.items() if name not in extra})
    quantized = [name for name, one in stored.items() if one.quantized is not None and name not in extra]
    warnings = file_warnings(path)
    if quantized:
        what = counted(len(quantized), "tensor is", "tensors are")
        warnings.append(f"{what} quantized ({quantization(config)}) and will be read as bfloat16")
    if extra:
        what = counted(len(extra), "tensor belongs", "tensors belong")
        remedy = "; set model.num_nextn_predict_layers, or use weft import --mtp, to read them"
        remedy = remedy if prediction_layers == 0 and _section(path).num_nextn_predict_layers else ""
        warnings.append(
            f"{what} to multi-token prediction layers (num_nextn_predict_layers) and will not be read{remedy}"
        )
    folder = HuggingFaceFolder(path, config, section, stored, sources, tuple(warnings))
    _check_tied(folder)
    return folder


def section_of(path: Path, prediction_layers: int | None = 0) -> ModelSection:
    """Converts a folder's config.json to a `model` section. Raises UserError if the architecture is not supported.

    Args:
        prediction_layers: as in `open_folder`.
    """
    section = _section(path)
    number = section.num_nextn_predict_layers
    number = number if prediction_layers is None else min(number, prediction_layers)
    return section.model_copy(update={"num_nextn_predict_layers": number})


def _section(path: Path) -> ModelSection:
    config = read_config(path)
    try:
        return checked_model(config)
    except UserError as error:
        raise UserError(error.what, error.where or path / CONFIG) from None


# ---- tensors


def _match(path: Path, section: ModelSection, stored: dict[str, StoredTensor]) -> dict[str, Source]:
    """Returns the source of each parameter. Raises UserError if a tensor is missing, unknown or of another shape."""
    if section.num_hidden_layers > len(stored):
        what = f"num_hidden_layers is {section.num_hidden_layers:,}, but the files have only {len(stored):,} tensors"
        raise UserError(f"{what}; download the model again", path / CONFIG)
    with on_meta():
        shapes = {name: tuple(tensor.shape) for name, tensor in saved_tensors(Decoder(section)).items()}
    problems: list[str] = []
    used: set[str] = set()
    sources: dict[str, Source] = {}
    experts: dict[str, tuple[Source, ...]] = {}
    for external, targets in names_in_files(section).items():
        found = next((name for name in (external, external.partition(".")[2]) if name in stored), None)
        copied = all(name in sources for name, _ in targets)  # a further tensor, of a prediction layer
        if found is None:
            problems += [] if copied else [f"{external} is missing"]
            continue
        used.add(found)
        transform = targets[0][1]
        per_expert = transform is not None and transform.expert is not None
        blank = [torch.empty(shapes[name][per_expert:], device="meta") for name, _ in targets]
        expected = tuple(invert(transform, blank).shape)
        entry = stored[found]
        if entry.shape != expected:
            problems.append(f"{found} has shape {list(entry.shape)}, but config.json requires {list(expected)}")
        elif not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            problems.append(f"{found} is stored as {entry.dtype}: quantized weights are not supported")
        for name, transform in targets if not copied else ():
            if per_expert:
                experts[name] = (*experts.get(name, ()), Source(found, transform, shapes[name][1:]))
            else:
                sources[name] = Source(found, transform, shapes[name])
    sources |= {name: Source(found[0].name, None, shapes[name], found) for name, found in experts.items()}
    left = [name for name in stored if name not in used and not BUFFERS.search(name)]
    problems += [f"{name} does not belong to this model" for name in sorted(left) if name != _tied_head(section)]
    if problems:
        summary = f"the tensors do not match the {section.family} model of config.json"
        raise UserError(f"{summary}: {first_few(problems, _NAMED, '; ')}", path)
    return sources


def _prediction_layers(config: dict[str, Any], section: ModelSection, stored: dict[str, StoredTensor]) -> set[str]:
    """Returns the names of the tensors of multi-token prediction layers that `section` does not have."""
    if not config.get("num_nextn_predict_layers"):
        return set()
    layers = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in stored}
    return {name for name, layer in layers.items() if layer and int(layer[1]) >= section.all_layers}


def names_in_files(section: ModelSection) -> dict[str, list[tuple[str, Transform | None]]]:
    """Returns the parameters of Weft's model that each tensor in Hugging Face files contains.

    Returns:
        Name of a tensor in the files -> (name, transform) of each parameter that is read from this tensor.
    """
    found: dict[str, list[tuple[str, Transform | None]]] = {}
    for name, external, transform in tensor_mapping(section):
        found.setdefault(external, []).append((name, transform))
    return found


def _tied_head(section: ModelSection) -> str | None:
    """Returns the name under which some files also store a tied head; None if the head is not tied."""
    if not section.tie_word_embeddings:
        return None
    return next((f"{w.hf_name}.weight" for w in families()[section.family].WEIGHTS if w.name == "lm_head"), None)


def _check_tied(folder: HuggingFaceFolder) -> None:
    """Raises UserError if a tied head, or a copy for a prediction layer, is stored and differs from the parameter."""
    for external, targets in names_in_files(folder.section).items() if folder.section.num_nextn_predict_layers else ():
        shared = folder.sources[targets[0][0]]
        if external in folder.stored and not shared.experts and len(targets) == 1 and shared.name != external:
            copy = next(folder._blocks(Source(external, None, shared.shape)))
            if not torch.equal(copy, folder.read(targets[0][0])):
                raise UserError(
                    f"{external} differs from {shared.name}, but Weft's prediction layers share this tensor; set "
                    "num_nextn_predict_layers to 0",
                    folder.path / CONFIG,
                )
    head = _tied_head(folder.section)
    if head not in folder.stored:
        return
    embedding, shape = folder.sources["embed_tokens.weight"], folder.stored[head].shape
    if shape == embedding.shape:
        stored = next(folder._blocks(Source(head, None, shape)))
        if torch.equal(stored, folder.read("embed_tokens.weight")):
            return
    raise UserError(
        f"tie_word_embeddings is true, but {head} differs from {embedding.name}; set it to false to use both",
        folder.path / CONFIG,
    )
