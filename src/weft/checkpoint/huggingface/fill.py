"""Loads a Hugging Face folder into a model on any mesh. Each rank reads only the slices of its shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.checkpoint_files import threads
from weft.checkpoint.huggingface.folder import HuggingFaceFolder
from weft.checkpoint.tensors import model_tensors, raise_mismatch
from weft.parallel import ranks
from weft.torch_private import compute_local_shape_and_global_offset


def fill(folder: HuggingFaceFolder, model: nn.Module, select: Callable[[str], bool] | None = None) -> dict[str, Any]:
    """Loads a folder's weights into a model, in place. Parameters keep their dtype and placement.

    Args:
        select: as in `weft.checkpoint.load.load`.

    Returns:
        The state of a checkpoint at step 0: `{"step": 0}`.

    Raises:
        UserError: names or shapes of the folder's tensors differ from the model's.
    """
    select = select or (lambda _: True)
    tensors = {name: tensor.detach() for name, (tensor, _) in model_tensors(model).items() if select(name)}
    problems = [f"{name} is in this model, but not in the folder" for name in tensors if name not in folder.sources]
    for name, tensor in tensors.items():
        if name in folder.sources and folder.sources[name].shape != tuple(tensor.shape):
            shape = list(folder.sources[name].shape)
            problems.append(f"{name} has shape {list(tensor.shape)} in this model, but {shape} in the folder")
    unused = "is in the folder, but not in this model"
    stored = {name for name in folder.sources if select(name)}
    raise_mismatch(folder.path, problems, set(tensors), stored, unused, "the model does not match this folder")
    for warning in folder.warnings if ranks.rank() == 0 else ():
        warnings.warn(f"{folder.path}: {warning}", stacklevel=2)
    with ThreadPoolExecutor(threads()) as pool:
        ranks.agree(lambda: list(pool.map(lambda one: fill_tensor(tensors[one], partial(folder.blocks, one)), tensors)))
    return {"step": 0}


def fill_tensor(tensor: Tensor, read: Callable[[tuple[int, ...], tuple[int, ...]], Iterable[Tensor]]) -> None:
    """Fills this rank's shard of a tensor.

    Args:
        read: `read(start, size)` yields blocks of consecutive rows of the slice that begins at index `start` and has
            shape `size`.
    """
    size, start = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        tensor = tensor.to_local()
    if 0 in size:
        return
    row = 0
    for block in read(tuple(start), tuple(size)):
        (tensor[row : row + len(block)] if block.dim() else tensor).copy_(block)
        row += len(block) if block.dim() else 0
