"""`weft.load_model`, which loads a trained model from a run directory or a checkpoint."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from weft.checkpoint.adapter_record import AdapterRecord, read_adapter_record
from weft.checkpoint.base_model import load_base, open_base
from weft.checkpoint.load import architecture, find_checkpoint, load, resolve
from weft.checkpoint.model_parts import without_prediction_layers
from weft.checkpoint.tensors import model_tensors
from weft.checkpoint.weights import SavedTensor, open_weights
from weft.config.legal_mesh import check_tensor_parallel
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.models.adapter import add_adapter, saved_with_adapter
from weft.models.decoder import Decoder
from weft.models.huggingface_weights import saved_dtype
from weft.models.initialize import on_meta
from weft.parallel.adapter import subtract_initial_product
from weft.parallel.memory.device_map import Budgets, free_budgets, place_layers
from weft.parallel.memory.free import check_memory
from weft.parallel.world import World

_LOADED: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()  # to find a loaded model's tokenizer


def checkpoint_of(model: nn.Module) -> Path | None:
    """Returns the checkpoint from which `load_model` loaded a model; None for any other model."""
    return _LOADED.get(model)


def load_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    device_map: Literal["auto"] | Budgets | None = None,
    quantize: str | None = None,
) -> nn.Module:
    """Loads a model from a checkpoint; given a run directory, from the newest checkpoint of the run.

    >>> model = weft.load_model("runs/run", dtype=torch.bfloat16)
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 512])

    Args:
        path: a run directory, a checkpoint, or a Hugging Face folder.
        device: the device of the model.
        dtype: dtype of floating-point parameters and buffers. Default: the saved dtypes.
        device_map: distributes the layers of a built-in decoder over devices, in the given order; `device` is ignored.
            A dict maps each device to a number of bytes for weights, such as `{"cuda:0": 20e9, "cpu": 60e9}`. Layers on
            "cpu" are copied to the first device when they run. "auto" uses most of the free memory of all GPUs and the
            host.
        quantize: "int8" or "int4": weights of linear layers, experts and the output head have 8 or 4 bits
            (`weft.models.quantize`). Such a model can generate and be evaluated, but not be trained or saved.

    Returns:
        A module in eval mode. It maps token ids [batch, seq] to logits [batch, seq, vocab].

    Raises:
        UserError: the path has no checkpoint, the checkpoint is damaged, `dtype` is not a torch.dtype, the model
            cannot be quantized, or the weights do not fit in the free memory of the device.
    """
    if quantize is not None and device_map is not None:
        raise UserError("a model cannot be quantized and distributed by a device map; omit quantize or device_map")
    budgets = free_budgets() if device_map == "auto" else device_map
    return _load(*_build(path, device, dtype, budgets=budgets, quantize=quantize), quantize)


def load_sharded_model(path: str | Path, world: World, dtype: torch.dtype | None = None) -> nn.Module:
    """Loads a built-in decoder, sharded over the ranks of `tp`. Every rank must call this function.

    Args:
        path, dtype: as in `load_model`.
        world: the ranks. All mesh axes except `tp` must have size 1.

    Raises:
        UserError: as `load_model`; or the model is not a built-in decoder, or the number of ranks does not divide the
            model's sizes.
    """
    return _load(*world.agree(lambda: _build(path, world.device, dtype, world)))


def check_shardable(path: str | Path, tp: int) -> None:
    """Checks that `load_sharded_model` can shard a model over `tp` ranks. Reads no weights.

    Raises:
        UserError: the path has no checkpoint, or the errors of `load_sharded_model` that concern the architecture.
    """
    checkpoint = find_checkpoint(path)
    check_tensor_parallel(_as_decoder(architecture(checkpoint), checkpoint), tp)


def _as_decoder(section: Any, checkpoint: Path) -> ModelSection:
    """Returns the section of a built-in decoder. Raises UserError for other sections."""
    if not isinstance(section, ModelSection):
        raise UserError(
            "this model is not a built-in decoder, so it cannot be distributed over ranks or devices; load it on one "
            "device",
            checkpoint,
        )
    return section


def _build(
    path: str | Path,
    device: str | torch.device,
    dtype: torch.dtype | None,
    world: World | None = None,
    budgets: Budgets | None = None,
    quantize: str | None = None,
) -> tuple[Path, nn.Module]:
    """Builds the model of a checkpoint, but does not load the weights. Returns the checkpoint's path and the model."""
    from weft.models.build import build_model
    from weft.models.quantize import check_quantize

    check_quantize(quantize)
    if not isinstance(dtype, torch.dtype | None):
        raise UserError(f"dtype: {dtype!r} is not a torch.dtype; use a dtype such as torch.bfloat16")

    checkpoint = resolve(path)
    section, record = without_prediction_layers(architecture(checkpoint)), read_adapter_record(checkpoint)
    if record is not None and quantize is not None:
        raise UserError("quantize: this is an adapter; merge it first (`weft merge`), or omit quantize", checkpoint)
    tensors = open_base(section, checkpoint if record is None else record.found_base(checkpoint)).tensors
    saved = {name: tensor.dtype for name, tensor in tensors.items()}
    dtypes = {name: saved_dtype(name, dtype, kind) for name, kind in saved.items()}
    if world is not None or budgets is not None:
        _as_decoder(section, checkpoint)
    if not isinstance(section, ModelSection):  # `_allocate` checks decoders
        size = sum(math.prod(tensor.shape) * dtypes[name].itemsize for name, tensor in tensors.items())
        check_memory(size, device, checkpoint)
    if isinstance(section, TransformersModelSection):
        from weft.models.transformers_model import materialize

        model = build_model(section)
        _cast(model, saved, dtype, unsaved=False)
        _adapt(model, record)
        materialize(model, device)
        model.set_compute_dtype(next(model.parameters()).dtype)
    elif isinstance(section, CustomModelSection):
        # A custom class may compute values in its constructor, so it is built on the device.
        with torch.device(device):
            model = build_model(section)
        model.to(device)
        _cast(model, saved, dtype)
        _adapt(model, record)
    else:
        with on_meta():
            model = Decoder(section)
        _cast(model, saved, dtype)  # before memory is allocated: float32 may need twice as much
        _adapt(model, record)
        if world is not None:
            from weft.parallel.apply import shard_for_inference

            shard_for_inference(model, world)
        _allocate(model, device, budgets, quantize, tensors, checkpoint)
    return checkpoint, model


def _adapt(model: nn.Module, record: AdapterRecord | None) -> None:
    """Adds the parameters of an adapter, in the dtype of the weights, if the checkpoint is an adapter's."""
    if record is not None:
        add_adapter(model, record.section)


def _allocate(
    model: Decoder,
    device: str | torch.device,
    budgets: Budgets | None,
    quantize: str | None,
    saved: Mapping[str, SavedTensor],
    checkpoint: Path,
) -> None:
    """Allocates a decoder's tensors: on `device`, or on several devices if `budgets` is given.

    The decoder must be on the meta device. Parameters stay uninitialized; buffers are initialized.

    With `quantize`, replaces the weights by quantized weights first, if `saved` has the names and shapes of the
    model's tensors. (Otherwise `_load_quantized` quantizes the loaded weights.)

    Raises:
        UserError: the model cannot be quantized, or the weights do not fit in the free memory.
    """
    from weft.models.initialize import initialize_buffers
    from weft.models.quantize import quantize as quantize_model

    tensors = model_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, (tensor, _) in tensors.items()}
    if quantize is not None and shapes.items() <= {name: tuple(tensor.shape) for name, tensor in saved.items()}.items():
        quantize_model(model.eval(), quantize)
    if budgets is None:
        check_memory(sum(t.nbytes for t in (*model.parameters(), *model.buffers())), device, checkpoint)
        model.to_empty(device=device)
    else:
        place_layers(model, budgets)
    for first, *others in [names for _, names in tensors.values()]:  # `to_empty` splits a tied weight in two
        for name in others:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(first))
    initialize_buffers(model)


def _load(checkpoint: Path, model: nn.Module, quantize: str | None = None) -> nn.Module:
    """Fills a model with the weights of a checkpoint. If the model is sharded, every rank must call this function."""
    model.eval()
    record = read_adapter_record(checkpoint)
    if record is not None:
        load_base(model, without_prediction_layers(architecture(checkpoint)), record.found_base(checkpoint), record)
        load(checkpoint, model=model, select=saved_with_adapter(architecture(checkpoint)))
        subtract_initial_product(model, record.section)
    elif quantize is None:
        load(checkpoint, model=model)
    else:
        _load_quantized(checkpoint, model, quantize)
    _LOADED[model] = checkpoint
    return model


def _load_quantized(checkpoint: Path, model: nn.Module, quantize: str) -> None:
    """Fills a model with the weights of a checkpoint, quantized.

    If `_allocate` has quantized the model, rounds the weights while it reads them. Otherwise loads the full weights
    first, and quantizes the model afterwards.
    """
    from weft.models.quantize import fill_quantized, is_quantized, try_quantized
    from weft.models.quantize import quantize as quantize_model

    if is_quantized(model):
        weights = open_weights(checkpoint, huggingface=False)
        for warning in weights.warnings:
            warnings.warn(f"{checkpoint}: {warning}", stacklevel=4)
        fill_quantized(model, {name: tensor.blocks for name, tensor in weights.tensors.items()})
    else:
        load(checkpoint, model=model)
        quantize_model(model, quantize)
    try_quantized(model)


def _cast(model: nn.Module, saved: dict[str, torch.dtype], dtype: torch.dtype | None, *, unsaved: bool = True) -> None:
    """Casts a model's tensors to `dtype`; if None, to their saved dtypes.

    Args:
        saved: name -> dtype of each tensor in the checkpoint.
        unsaved: whether to cast tensors that are not in the checkpoint, too.
    """
    floating = {kind for kind in saved.values() if kind.is_floating_point}
    if (dtype is not None or len(floating) == 1) and unsaved:
        model.to(dtype or floating.pop())
    for name, (tensor, _) in model_tensors(model).items():
        tensor.data = tensor.data.to(saved_dtype(name, dtype, saved.get(name, tensor.dtype)))
