"""Finding, verifying and loading checkpoints on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface.fill import fill
from weft.checkpoint.huggingface.folder import HuggingFaceFolder, open_folder, section_of
from weft.checkpoint.save import first_failure, planning
from weft.checkpoint.storage import SafetensorsReader
from weft.checkpoint.tensors import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    empty_state,
    model_tensors,
    optimizer_parameters,
    raise_mismatch,
)
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.files import read_json
from weft.parallel import ranks

_MISMATCH = ("the checkpoint does not fit", "; use the configuration that it was trained with")


def checkpoints(run_directory: str | Path) -> list[Path]:
    """Returns the run's checkpoints, oldest step first. Incomplete ones have other names and are not included."""
    return files.list_checkpoints(Path(run_directory) / files.FOLDER)


def resolve(path: str | Path) -> Path:
    """Returns the checkpoint that a path names: a checkpoint itself, or the newest one of a run directory.

    A Hugging Face folder is returned unchanged. A single process also checks the checksums; on several ranks only the
    file sizes are checked here, because `load` divides the hashing among them.

    Raises:
        UserError: there is no checkpoint, or it is damaged (names the file and the previous complete checkpoint).
    """
    path = Path(path)
    if not path.exists():
        raise UserError("there is no such run or checkpoint; give a run directory or a checkpoint in it", path)
    if not path.is_dir():
        raise UserError("a file is not a run; give a run directory or a checkpoint directory", path)
    if is_huggingface(path):
        return path
    if files.is_leftover(path):
        raise UserError(f"this checkpoint was never completed; give the run directory {path.parent.parent}", path)
    if files.step_of(path) is not None or any((path / name).exists() for name in (files.CHECKSUMS, files.INDEX)):
        checkpoint = path
    else:
        folder = path if path.name == files.FOLDER else path / files.FOLDER
        found = files.list_checkpoints(folder)
        if not found and (folder.is_dir() or (path / "config.yaml").exists()):
            raise UserError("this run has no checkpoint yet; train it until it has saved one", path)
        if not found:
            raise UserError("this is neither a run directory (no checkpoints/ in it) nor a checkpoint", path)
        checkpoint = found[-1]
    _raise_if_damaged(checkpoint, files.find_damage(checkpoint, contents=ranks.world_size() == 1))
    return checkpoint


def verify(checkpoint: str | Path) -> None:
    """Checks every file of a checkpoint against its size and SHA-256.

    Raises:
        UserError: names the damaged file, and the previous complete checkpoint of the same run.
    """
    _raise_if_damaged(Path(checkpoint), files.find_damage(Path(checkpoint)))


def _raise_if_damaged(checkpoint: Path, damage: files.Damage | None) -> None:
    if damage is None:
        return
    previous = files.last_complete(checkpoint.parent, before=files.step_of(checkpoint))
    if (checkpoint / files.ORIGIN).exists():
        remedy = "make it again with `weft import`"
    elif previous is None or previous == checkpoint:
        remedy = "there is no older complete checkpoint; restore the file from a copy, or start over with --fresh"
    else:
        remedy = (
            f"the previous complete checkpoint is {previous}; give that one, or `weft train --from-last-good` sets "
            "this one aside and resumes from there"
        )
    raise UserError(f"damaged checkpoint: {damage.what}; {remedy}", damage.file)


def _verify_on_all_ranks(checkpoint: Path) -> None:
    """Each rank hashes some of the files; all ranks raise if one file is damaged."""
    found = ranks.all_gather_object(files.find_damage(checkpoint, rank=ranks.rank(), world_size=ranks.world_size()))
    damage = next(filter(None, found), None)
    if damage is not None:
        ranks.run_on_first(lambda: _raise_if_damaged(checkpoint, damage))


def tokenizer_folder(checkpoint: Path) -> Path | None:
    """Returns the tokenizer folder of a path from `resolve`: the run's, the checkpoint's or the Hugging Face folder."""
    if is_huggingface(checkpoint):
        folder = checkpoint
    elif checkpoint.absolute().parent.name == files.FOLDER:
        folder = checkpoint.absolute().parent.parent / "tokenizer"
    else:
        folder = checkpoint / "tokenizer"
    return folder if (folder / "tokenizer.json").is_file() else None


def architecture(checkpoint: Path) -> ModelSection | TransformersModelSection | CustomModelSection:
    """Returns the model section of a path from `resolve`. Raises UserError if it is invalid."""
    if is_huggingface(checkpoint):
        return section_of(checkpoint)
    content = read_json(checkpoint / files.MODEL)
    try:
        # `from` is done: the weights are in the checkpoint.
        content = {key: value for key, value in content.items() if key not in ("from", "from_", "load_optimizer")}
        section = CustomModelSection if ":" in content.get("type", "") else ModelSection
        section = TransformersModelSection if content.get("type") == "hf" else section
        return section.model_validate(content)
    except (ValidationError, AttributeError, TypeError) as error:
        detail = " ".join(str(error).splitlines()[1:3]) or error
        raise UserError(f"not a model section of this version of Weft ({detail})", checkpoint / files.MODEL) from error


def load(
    checkpoint: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    others: Callable[[dict[str, list[int]]], dict[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Loads a checkpoint of any mesh into a model and an optimizer, in place. Every rank must call it.

    The checksums are verified first. Parameters keep their dtype and placement. The saved state replaces that of the
    optimizer.

    Args:
        checkpoint: a path from `resolve`. A Hugging Face folder has no optimizer state.
        others: receives the names -> shapes of all saved tensors; returns which of `save`'s `others` to fill.

    Returns:
        The `state` that `save` was given, and `step`.

    Raises:
        UserError: a damaged file, names or shapes that differ from the model's, or another optimizer's state.
    """
    checkpoint = Path(checkpoint)
    if is_huggingface(checkpoint):
        if optimizer is not None:
            raise UserError("a Hugging Face folder has no optimizer's state; load the model only", checkpoint)
        opened: list[HuggingFaceFolder] = []
        ranks.run_on_all(lambda: opened.append(open_folder(checkpoint)))
        return fill(opened[0], model)
    _verify_on_all_ranks(checkpoint)
    index = read_json(checkpoint / files.INDEX)
    targets: dict[str, Tensor] = {}
    copies = _match_model(checkpoint, model, index, targets)
    states = _match_optimizer(checkpoint, model, optimizer, index, targets) if optimizer is not None else []
    if others is not None:
        targets |= others({name: entry["shape"] for name, entry in index["tensors"].items()})
    try:
        with planning():
            state_dict_loader.load(
                targets,
                storage_reader=SafetensorsReader(checkpoint, index),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=not ranks.distributed(),
            )
    except CheckpointException as error:
        raise first_failure(error) from error
    with torch.no_grad():
        for tensor, source in copies:
            tensor.copy_(source)
    for parameter, state in states:
        assert optimizer is not None  # without one there are no states
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = state
    return read_json(checkpoint / files.STATE)


def _match_model(
    checkpoint: Path, model: nn.Module, index: dict, targets: dict[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Adds the model's tensors to `targets` under their saved names.

    Returns:
        (tensor, target to copy it from) for the second of two tensors that were tied when they were saved.
    """
    saved = {name.removeprefix(MODEL_PREFIX) for name in index["tensors"] if name.startswith(MODEL_PREFIX)}
    problems: list[str] = []
    used: set[str] = set()
    copies: list[tuple[Tensor, Tensor]] = []
    for name, (tensor, names) in model_tensors(model).items():
        source = next((name for name in _candidates(names, index) if name in saved), None)
        if source is None:
            problems.append(f"{name} is in this model, not in the checkpoint")
            continue
        used.add(source)
        key = MODEL_PREFIX + source
        shape = index["tensors"][key]["shape"]
        if list(tensor.shape) != shape:
            problems.append(f"{name} is {list(tensor.shape)} in this model, {shape} in the checkpoint")
        elif key in targets:
            copies.append((tensor, targets[key]))
        else:
            targets[key] = tensor.detach()  # the same storage; autograd forbids filling it from several threads
    raise_mismatch(checkpoint, problems, used, saved, "is in the checkpoint, not in this model", *_MISMATCH)
    return copies


def _match_optimizer(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, index: dict, targets: dict[str, Tensor]
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Returns each optimized parameter with its saved state, whose empty tensors are added to `targets`."""
    saved = read_json(checkpoint / files.OPTIMIZER)
    if saved is None:
        raise UserError("this checkpoint was saved without an optimizer's state; load the model only", checkpoint)
    name = type(optimizer).__name__
    if saved["class"] != name:
        raise UserError(
            f"this checkpoint has {saved['class']}'s state and the run uses {name}; set the optimizer back, or start a "
            "new run from it (model.from) without load_optimizer",
            checkpoint,
        )
    used: set[str] = set()
    states: list[tuple[Tensor, dict[str, Any]]] = []
    for _, names, parameter, group in optimizer_parameters(optimizer, model):
        state: dict[str, Any] = {}
        for name in [name for name in _candidates(names, index) if name in saved["state"]][:1]:
            used.add(name)
            for key, value in saved["state"][name].items():
                path = f"{OPTIMIZER_PREFIX}{name}.{key}"
                state[key] = empty_state(value, path, parameter, group, index, targets)
        states.append((parameter, state))
    unused = "has optimizer state in the checkpoint, but this run does not train it"
    raise_mismatch(checkpoint, [], used, set(saved["state"]), unused, *_MISMATCH)
    return states


def _candidates(names: list[str], index: dict) -> list[str]:
    """Returns the saved names to look for: a weight that was tied when saved is stored under its first name."""
    return names + [index["tied"][name] for name in names if name in index["tied"]]
