"""`weft.load_model`: a trained model out of a run directory or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from pydantic import ValidationError
from torch import nn

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface.folder import open_folder, section_of
from weft.checkpoint.load import load, read_json, resolve
from weft.checkpoint.tensors import MODEL_PREFIX, model_tensors
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.models.huggingface_weights import saved_dtype

# Which checkpoint a loaded model is of: its tokenizer is found by that.
_LOADED: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()


def checkpoint_of(model: nn.Module) -> Path | None:
    """What `load_model` made a model of; None for any other model."""
    return _LOADED.get(model)


def load_model(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a run's newest checkpoint, or of one checkpoint, ready to be used.

    >>> model = weft.load_model("runs/run", dtype=torch.bfloat16)
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 512])

    Args:
        path: a run directory, a checkpoint, or a Hugging Face folder.
        device: where to put it.
        dtype: of its floating-point parameters and buffers; default: as they were saved.

    Returns:
        A module in evaluation mode, from token ids [batch, seq] to logits [batch, seq, vocab].

    Raises:
        UserError: no checkpoint there, or a damaged one; `dtype` is no dtype of torch.
    """
    from weft.models.build import build_model

    if not isinstance(dtype, torch.dtype | None):
        raise UserError(f"dtype: {dtype!r} is not a torch.dtype; give one, such as torch.bfloat16")

    checkpoint = resolve(path)
    section = architecture(checkpoint)
    saved = _dtypes(checkpoint)
    if isinstance(section, TransformersModelSection):
        from weft.models.transformers_model import materialize

        model = build_model(section)
        _cast(model, saved, dtype, rest=False)
        materialize(model, device)
        model.set_compute_dtype(next(model.parameters()).dtype)
    elif isinstance(section, CustomModelSection):
        # The user's class may compute values while it is built: it is built where there are any.
        with torch.device(device):
            model = build_model(section)
        model.to(device)
        _cast(model, saved, dtype)
    else:
        from weft.models.initialize import initialize_buffers

        with torch.device("meta"):
            model = build_model(section)
        _cast(model, saved, dtype)  # before there is memory: a large model in float32 takes twice as much as it needs
        tied = [names for _, names in model_tensors(model).values()]
        model.to_empty(device=device)
        for first, *others in tied:  # `to_empty` makes two of a tied weight
            for name in others:
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, model.get_parameter(first))
        initialize_buffers(model)
    load(checkpoint, model=model)
    _LOADED[model] = checkpoint
    return model.eval()


def _cast(model: nn.Module, saved: dict[str, torch.dtype], dtype: torch.dtype | None, *, rest: bool = True) -> None:
    """Give a model's tensors the dtypes that they are to have; with `rest` also those that no checkpoint holds."""
    floating = {kind for kind in saved.values() if kind.is_floating_point}
    if (dtype is not None or len(floating) == 1) and rest:
        model.to(dtype or floating.pop())
    for name, (tensor, _) in model_tensors(model).items():
        tensor.data = tensor.data.to(saved_dtype(name, dtype, saved.get(name, tensor.dtype)))


def _dtypes(checkpoint: Path) -> dict[str, torch.dtype]:
    """What each of the model's tensors was saved as."""
    if is_huggingface(checkpoint):
        folder = open_folder(checkpoint)
        return {name: folder.dtype(name) for name in folder.sources}
    return {
        name.removeprefix(MODEL_PREFIX): getattr(torch, entry["dtype"])
        for name, entry in read_json(checkpoint, files.INDEX)["tensors"].items()
        if name.startswith(MODEL_PREFIX)
    }


def architecture(checkpoint: Path) -> ModelSection | TransformersModelSection | CustomModelSection:
    """The model section that a checkpoint was trained with. Raises UserError if it is not one."""
    if is_huggingface(checkpoint):
        return section_of(checkpoint)
    content = read_json(checkpoint, files.MODEL)
    try:
        # `from` has done its work: the weights are here.
        content = {key: value for key, value in content.items() if key not in ("from", "from_", "load_optimizer")}
        kind = CustomModelSection if ":" in content.get("type", "") else ModelSection
        kind = TransformersModelSection if content.get("type") == "hf" else kind
        return kind.model_validate(content)
    except (ValidationError, AttributeError, TypeError) as error:
        lines = str(error).splitlines()
        raise UserError(
            f"no model section of this version of Weft ({' '.join(lines[1:3]) or error})", checkpoint / files.MODEL
        ) from error
