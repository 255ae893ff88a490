"""A model filled from a Hugging Face folder, on any mesh: each rank reads the part that it holds."""

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
from weft.checkpoint.tensors import model_tensors
from weft.errors import UserError
from weft.formatting import first_few
from weft.parallel import ranks
from weft.torch_private import compute_local_shape_and_global_offset

_NAMED = 4


def fill(folder: HuggingFaceFolder, model: nn.Module) -> dict[str, Any]:
    """Fill a decoder in place. Parameters keep their own dtype and placement.

    Returns:
        `{"step": 0}`, as a checkpoint's state.

    Raises:
        UserError: the model is another one than the folder's.
    """
    tensors = {name: tensor.detach() for name, (tensor, _) in model_tensors(model).items()}
    wrong = [f"{name} is in this model, not in the folder" for name in tensors if name not in folder.sources]
    for name, tensor in tensors.items():
        if name in folder.sources and folder.sources[name].shape != tuple(tensor.shape):
            there = list(folder.sources[name].shape)
            wrong.append(f"{name} is {list(tensor.shape)} in this model, {there} in the folder")
    # Ranks of a pipeline have different parts: what none of them has is missing.
    answers = ranks.gather_different([wrong, sorted(tensors)])
    held = {name for _, names in answers for name in names}
    problems = [problem for theirs, _ in answers for problem in theirs]
    problems += [f"{name} is in the folder, not in this model" for name in folder.sources if name not in held]
    if problems:
        error = UserError(f"the model does not fit: {first_few(problems, _NAMED, '; ')}", folder.path)
        error.quiet = ranks.rank() != 0
        raise error
    for note in folder.notes if ranks.rank() == 0 else ():
        warnings.warn(f"{folder.path}: {note}", stacklevel=2)
    with ThreadPoolExecutor(threads()) as pool:
        list(pool.map(lambda name: fill_tensor(tensors[name], partial(folder.pieces, name)), tensors))
    return {"step": 0}


def fill_tensor(tensor: Tensor, pieces: Callable[[tuple[int, ...], tuple[int, ...]], Iterable[Tensor]]) -> None:
    """Fill what this rank holds of a tensor: `pieces(start, size)` gives the rows of that rectangle in turn."""
    size, start = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        tensor = tensor.to_local()
    if 0 in size:
        return
    row = 0
    for piece in pieces(tuple(start), tuple(size)):
        (tensor[row : row + len(piece)] if piece.dim() else tensor).copy_(piece)
        row += len(piece) if piece.dim() else 0
