"""Matches the optimizer state of a checkpoint with an optimizer, which `load` fills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.tensors import OPTIMIZER_PREFIX, empty_state, optimizer_parameters, raise_mismatch
from weft.errors import UserError
from weft.files import read_json
from weft.parallel import ranks

MISMATCH = ("the checkpoint does not fit", "; use the configuration of the run that saved the checkpoint")


def match_optimizer(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, index: dict, targets: dict[str, Tensor]
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Returns (parameter, state) for each optimized parameter.

    The tensors in the states are uninitialized. This function adds them to `targets` under their saved names, and the
    caller loads them.

    Args:
        index: the content of index.json.
        targets: saved name -> tensor to load.

    Raises:
        UserError: the checkpoint has no optimizer state, the state of another class of optimizer, or the state of
            parameters that `optimizer` does not optimize.
    """
    saved = ranks.agree(lambda: _saved_optimizer(checkpoint, type(optimizer).__name__))
    used, states = set[str](), list[tuple[Tensor, dict[str, Any]]]()
    for _, names, parameter, group in optimizer_parameters(optimizer, model):
        state: dict[str, Any] = {}
        for name in [name for name in candidates(names, index) if name in saved["state"]][:1]:
            used.add(name)
            for key, value in saved["state"][name].items():
                path = f"{OPTIMIZER_PREFIX}{name}.{key}"
                state[key] = empty_state(value, path, parameter, group, index, targets)
        states.append((parameter, state))
    unused = "has optimizer state in the checkpoint, but this run does not train it"
    raise_mismatch(checkpoint, [], used, set(saved["state"]), unused, *MISMATCH)
    return states


def _saved_optimizer(checkpoint: Path, name: str) -> dict[str, Any]:
    """Returns the description of a saved optimizer. Raises UserError if none is saved, or its class is not `name`."""
    saved = read_json(checkpoint / files.OPTIMIZER)
    if saved is None:
        raise UserError("this checkpoint has no optimizer state; load the model without an optimizer", checkpoint)
    if saved["class"] != name:
        raise UserError(
            f"this checkpoint has the optimizer state of {saved['class']}, but the run uses {name}; use the same "
            "optimizer, or start a new run from this checkpoint (model.from) without load_optimizer",
            checkpoint,
        )
    return saved


def candidates(names: list[str], index: dict) -> list[str]:
    """Returns the names under which a checkpoint can contain a tensor of the model.

    These are `names` and, if one of them is a further name of a tied weight, the name under which the weight is saved.

    Args:
        names: all names of a tensor in the model.
        index: the content of index.json.
    """
    return names + [index["tied"][name] for name in names if name in index["tied"]]
