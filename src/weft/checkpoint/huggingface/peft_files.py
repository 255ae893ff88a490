"""Reads the files of PEFT's LoRA adapters: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from weft.checkpoint.huggingface.headers import read_header
from weft.checkpoint.huggingface.peft_layers import PeftLayer, PeftModel, peft_model
from weft.checkpoint.huggingface.slices import transformed
from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.families.peft_config import PeftConfig, in_transformers, read_peft_config
from weft.formatting import first_few
from weft.models.decoder import Decoder
from weft.models.huggingface_weights import Transform, invert
from weft.models.low_rank import LowRank

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
PREFIX = "base_model.model."
KINDS = A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_NAMED = 5  # maximum number of wrong keys that a message lists


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that was read from PEFT's files.

    Attributes:
        config: the adapter_config.json.
        layers: name of a weight of Weft's model, without `.weight` -> its change.
        weights: name of a weight of Weft's model -> the full weight that replaces it (`modules_to_save` and biases).
        digest: digest of the weights of the base model, if Weft wrote the files; otherwise None.
    """

    config: PeftConfig
    layers: dict[str, LowRank]
    weights: dict[str, torch.Tensor]
    digest: str | None


def read_peft(folder: str | Path, model: nn.Module | ModelSection | TransformersModelSection) -> PeftAdapter:
    """Reads a LoRA adapter that PEFT's `save_pretrained` wrote.

    Args:
        folder: the folder with adapter_config.json and adapter_model.safetensors.
        model: the base model, which can be quantized, or its section.

    Raises:
        UserError: a file is missing or damaged; the adapter is not of LoRA or uses an unsupported option; or a key is
            missing, does not belong to the model, or has another shape than the model and the config require.
    """
    config, path = read_peft_config(folder), Path(folder) / ADAPTER_WEIGHTS
    names, stored, keys = peft_model(model), {}, {}
    tensors, metadata = _read_tensors(path)
    for key, tensor in tensors.items():
        name = in_transformers(key.removeprefix(PREFIX)) if key.startswith(PREFIX) else key
        name = name.replace(f"{MAGNITUDE}.weight", MAGNITUDE)
        stored[name], keys[name] = tensor, key
    problems: list[str] = []
    changes: dict[str, list[LowRank]] = {}
    for stem, layer in _targets(config, names, stored).items():
        tensors = {kind: stored.pop(f"{stem}.{kind}") for kind in KINDS if f"{stem}.{kind}" in stored}
        wrong = list(_wrong(stem, layer, config, tensors))
        problems += wrong
        for weight, change in zip(layer.weights, [] if wrong else _split(layer, config, tensors), strict=False):
            changes.setdefault(weight, []).append(change)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        problems += _add_weight(weights, names, name, keys[name], tensor)
    for name, targets in names.weights.items():
        if config.saves(name.removesuffix(".weight")) and not all(one in weights for one, _ in targets):
            problems.append(f"{PREFIX}{name} (modules_to_save) is missing")
    if problems or not (changes or weights):
        found = first_few(problems, _NAMED, "; ") or "target_modules match none of its layers"
        base = f"{config.base!r}, on which it was trained" if config.base else "the model that it was trained on"
        raise UserError(f"the adapter does not fit the model: {found}; use {base}, or save the adapter again", path)
    layers = {name: _stack(name, parts, path) for name, parts in changes.items()}
    return PeftAdapter(config, layers, weights, metadata.get(digest_key(isinstance(model, Decoder | ModelSection))))


def digest_key(decoder: bool) -> str:
    """Returns the key of the base model's digest in the metadata of adapter_model.safetensors, if Weft wrote the file.

    Args:
        decoder: whether the base model is a built-in decoder; its digest differs from that of a model of type hf.
    """
    return f"weft_base_digest_{'decoder' if decoder else 'hf'}"


def _read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    if not path.is_file():
        remedy = "download the full adapter"
        if (path.parent / _PICKLED).is_file():
            remedy = f"{_PICKLED} is a pickle, which is not read: load the adapter with PEFT, and save it again"
        raise UserError(f"{path.name} is missing; {remedy}", path.parent)
    read_header(path)
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _targets(config: PeftConfig, names: PeftModel, stored: Mapping[str, torch.Tensor]) -> dict[str, PeftLayer]:
    """Returns the layers that the files must contain: the beginning of the layer's keys -> layer.

    Adapters of experts are stored for each expert, as transformers 4 has them, or for the stacked weights.
    """
    split = any(f"{name}.{A}" in stored for name, layer in names.layers.items() if layer.expert is not None)
    linear = {
        name: layer
        for name, layer in names.layers.items()
        if not layer.experts
        and (split or layer.expert is None)
        and (config.targets(name, names.head) or config.targets_parameter(f"{name}.weight"))  # a router, if the latter
    }
    return linear | (
        {} if split else stacked_keys(n for n in names.layers.values() if config.targets_parameter(n.name))
    )


def stacked_keys(layers: Iterable[PeftLayer]) -> dict[str, PeftLayer]:
    """Returns the stacked weights of experts: beginning of the weight's keys in PEFT's files -> the weight.

    PEFT nests the keys of the weights of one module. The keys of the last weight begin with the module's name, the keys
    of the weight before with the module's name and `.base_layer`, and so on.

    Args:
        layers: the adapted layers, in the order of the Transformers model. Linear layers are left out.
    """
    modules: dict[str, list[PeftLayer]] = {}
    for layer in layers:
        if layer.experts:
            modules.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    return {
        module + ".base_layer" * depth: layer
        for module, found in modules.items()
        for depth, layer in enumerate(reversed(found))
    }


def _wrong(stem: str, layer: PeftLayer, config: PeftConfig, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yields what is wrong with the tensors of a layer: a missing or unexpected tensor, or a wrong shape."""
    rank = config.rank_of(layer.name) * (layer.experts or 1)
    shapes: dict[str, tuple[int, ...]] = {A: (rank, layer.columns), B: (sum(layer.rows), rank)}
    if config.dora:
        shapes[MAGNITUDE] = (sum(layer.rows),)
    for kind, shape in shapes.items():
        if kind not in tensors:
            yield f"{PREFIX}{stem}.{kind} is missing"
        elif tuple(tensors[kind].shape) != shape:
            found = list(tensors[kind].shape)
            yield f"{PREFIX}{stem}.{kind} has shape {found}, but the model and the config require {list(shape)}"
        elif not tensors[kind].is_floating_point() or tensors[kind].itemsize < 2:
            yield f"{PREFIX}{stem}.{kind} has dtype {tensors[kind].dtype}, which is not supported"
    if MAGNITUDE in tensors and not config.dora:
        yield f"{PREFIX}{stem}.{MAGNITUDE} is there, but use_dora is false"


def _split(layer: PeftLayer, config: PeftConfig, tensors: Mapping[str, torch.Tensor]) -> list[LowRank]:
    """Returns the change of each of Weft's weights that a layer contains."""
    a, b, scale = tensors[A], tensors[B], config.scale_of(layer.name)
    if layer.experts:
        a = a.unflatten(0, (layer.experts, -1))
        b = b.unflatten(1, (-1, layer.experts)).permute(2, 0, 1)  # [experts, out, rank]
        parts = [torch.stack(part) for part in zip(*map(layer.split, b), strict=True)]
        return [LowRank(a, part, scale) for part in parts]
    magnitudes = layer.split(tensors[MAGNITUDE]) if config.dora else [None] * len(layer.rows)
    return [LowRank(a, part, scale, one) for part, one in zip(layer.split(b), magnitudes, strict=True)]


def _stack(name: str, parts: list[LowRank], path: Path) -> LowRank:
    """Returns the change of a weight; for experts that are stored one by one, the change of the stacked weights."""
    if len(parts) == 1 and not name.rpartition(".")[0].endswith(".experts"):
        return parts[0]
    if len(parts) == 1:
        return parts[0] if parts[0].a.dim() == 3 else LowRank(parts[0].a[None], parts[0].b[None], parts[0].scale)
    if len({(part.a.shape, part.scale) for part in parts}) > 1 or parts[0].magnitude is not None:
        raise UserError(f"{name}: experts with different ranks or scales, or with DoRA, are not supported", path)
    return LowRank(torch.stack([part.a for part in parts]), torch.stack([part.b for part in parts]), parts[0].scale)


def _add_weight(
    weights: dict[str, torch.Tensor], names: PeftModel, name: str, key: str, tensor: torch.Tensor
) -> Iterator[str]:
    """Adds a stored full weight to `weights`, converted to Weft's weights. Yields what is wrong with the key.

    Args:
        name: name of the weight in the Transformers model, for which PEFT may have inserted `base_layer`.
        key: the key in the file.
    """
    targets = names.weights.get(name.replace(".base_layer.", "."))
    if names.tied_head is not None and name.startswith(f"{names.tied_head}."):
        yield f"{key} changes the output head, which shares its weight with the embedding (tie_word_embeddings)"
    elif targets is None:
        known = any(name.endswith(f".{kind}") and name.removesuffix(f".{kind}") in names.layers for kind in KINDS)
        yield f"{key} is not in target_modules" if known else f"{key} does not belong to the model"
    else:
        transform = targets[0][1]
        blank = [torch.empty(names.shapes[one], device="meta") for one, _ in targets]
        if transform is not None and (transform.expert is not None or transform.stacked):
            yield f"{key} is a full weight of experts, which is not supported"
        elif (shape := tuple(invert(transform, blank).shape)) != tuple(tensor.shape):
            yield f"{key} has shape {list(tensor.shape)}, but the model has {list(shape)}"
        else:
            for one, transform in targets:
                shape = names.shapes[one]
                start = (0,) * len(shape)
                weights[one] = transformed(tensor, transform or Transform(), start, shape) if shape else tensor
