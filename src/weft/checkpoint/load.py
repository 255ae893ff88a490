"""Finds, verifies and loads checkpoints. A checkpoint can be loaded on any mesh."""

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
from weft.checkpoint.match_optimizer import MISMATCH, candidates, match_optimizer
from weft.checkpoint.save import first_failure, planning
from weft.checkpoint.storage import SafetensorsReader
from weft.checkpoint.tensors import (
    MODEL_PREFIX,
    is_projection,
    layer_number,
    model_tensors,
    raise_mismatch,
)
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.config.trust import raise_unless_trusted
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.files import read_json
from weft.models.decoder import Decoder
from weft.parallel import ranks

ADAPTER_ONLY = "this checkpoint contains only an adapter; merge it with its base model first (`weft merge`)"


def checkpoints(run_directory: str | Path) -> list[Path]:
    """Returns the paths of a run's complete checkpoints, lowest step first."""
    return files.list_checkpoints(Path(run_directory) / files.FOLDER)


def find_checkpoint(path: str | Path) -> Path:
    """Returns the newest checkpoint of a run directory, or the path itself if it is a checkpoint.

    The path of a Hugging Face folder is returned unchanged. The files of the checkpoint are not checked.

    Raises:
        UserError: the path has no checkpoint.
    """
    path = Path(path)
    if not path.exists():
        raise UserError("this path does not exist; give a run directory or a checkpoint", path)
    if not path.is_dir():
        remedy = f"import it: weft import {path} OUT" if path.suffix.lower() == ".gguf" else "give a run directory"
        raise UserError(f"this is a file; {remedy}", path)
    if is_huggingface(path):
        return path
    if files.is_leftover(path):
        raise UserError(
            "the save or deletion of this checkpoint was interrupted; give the run directory instead: "
            f"{path.parent.parent}",
            path,
        )
    if files.step_of(path) is not None or any((path / name).exists() for name in (files.CHECKSUMS, files.INDEX)):
        return path
    folder = path if path.name == files.FOLDER else path / files.FOLDER
    found = files.list_checkpoints(folder)
    if not found and (folder.is_dir() or (path / "config.yaml").exists()):
        raise UserError("this run has no checkpoint yet; train until the first checkpoint is saved", path)
    if not found:
        what = "neither a run directory (no checkpoints/), nor a checkpoint, nor a Hugging Face folder (no config.json)"
        raise UserError(f"{what}; give one of these", path)
    return found[-1]


def resolve(path: str | Path) -> Path:
    """Returns the result of `find_checkpoint`, and verifies a checkpoint of Weft.

    A single process verifies the checksums of the checkpoint. On several ranks only the file sizes are checked here,
    because `load` divides the hashing among the ranks.

    Raises:
        UserError: the path has no checkpoint, or the checkpoint is damaged. The message names the damaged file
            and the previous complete checkpoint, if there is one.
    """
    checkpoint = find_checkpoint(path)
    if is_huggingface(checkpoint):
        return checkpoint
    _raise_if_damaged(checkpoint, files.find_damage(checkpoint, contents=ranks.world_size() == 1))
    return checkpoint


def _raise_if_damaged(checkpoint: Path, damage: files.Damage | None) -> None:
    if damage is None:
        return
    previous = files.last_complete(checkpoint.parent, before=files.step_of(checkpoint))
    if (checkpoint / files.ORIGIN).exists():
        remedy = "import the model again (`weft import`)"
    elif previous is None or previous == checkpoint:
        remedy = (
            "no older checkpoint is complete; restore this file from a backup, or start over with `weft train --fresh`"
        )
    else:
        remedy = (
            f"use the previous complete checkpoint, {previous}; `weft train --from-last-good` moves the damaged "
            "checkpoint aside and resumes from the previous one"
        )
    raise UserError(f"damaged checkpoint: {damage.what}; {remedy}", damage.file)


def _verify_on_all_ranks(checkpoint: Path) -> None:
    """Verifies a checkpoint on all ranks: each rank hashes some of the files. All ranks raise if a file is damaged."""
    mine = ranks.agree(lambda: files.find_damage(checkpoint, rank=ranks.rank(), world_size=ranks.world_size()))
    damage = next(filter(None, ranks.all_gather_object(mine)), None)
    ranks.agree(lambda: _raise_if_damaged(checkpoint, damage), only_first=True)


def tokenizer_folder(checkpoint: Path) -> Path | None:
    """Returns the folder with the tokenizer of a checkpoint; None if the checkpoint has no tokenizer.

    This is the run's `tokenizer` folder, the `tokenizer` folder in an imported checkpoint, or a Hugging Face folder
    itself.

    Args:
        checkpoint: a path that `resolve` returned.
    """
    if is_huggingface(checkpoint):
        folder = checkpoint
    elif checkpoint.absolute().parent.name == files.FOLDER:
        folder = checkpoint.absolute().parent.parent / "tokenizer"
    else:
        folder = checkpoint / "tokenizer"
    return folder if (folder / "tokenizer.json").is_file() else None


def architecture(checkpoint: Path) -> ModelSection | TransformersModelSection | CustomModelSection:
    """Returns the `model` section (of a config) of a checkpoint that `resolve` returned.

    Raises:
        UserError: the section is invalid, or names custom code that is not trusted (`weft.config.trust`).
    """
    if is_huggingface(checkpoint):
        return section_of(checkpoint)
    content = read_json(checkpoint / files.MODEL)
    try:
        # `from` is no longer needed: the weights are in the checkpoint.
        content = {key: value for key, value in content.items() if key not in ("from", "from_", "load_optimizer")}
        section = CustomModelSection if ":" in content.get("type", "") else ModelSection
        section = TransformersModelSection if content.get("type") == "hf" else section
        found = section.model_validate(content)
    except (ValidationError, AttributeError, TypeError) as error:
        detail = " ".join(str(error).splitlines()[1:3]) or error
        raise UserError(
            f"this model section is not valid in this version of Weft ({detail}); use the version that saved it",
            checkpoint / files.MODEL,
        ) from error
    raise_unless_trusted({"model": content}, checkpoint / files.MODEL)
    return found


def load(
    checkpoint: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    others: Callable[[dict[str, list[int]]], dict[str, Tensor]] | None = None,
    select: Callable[[str], bool] | None = None,
    fetch: Callable[[set[str]], None] | None = None,
) -> dict[str, Any]:
    """Loads a checkpoint into a model and an optimizer, in place. Every rank must call this function.

    The mesh can differ from the mesh that saved the checkpoint. The checksums are verified first. Parameters keep
    their dtype and placement. The optimizer's current state is replaced.

    Args:
        checkpoint: a path that `resolve` returned. A Hugging Face folder has no optimizer state.
        others: function that selects further tensors to load. It receives name -> shape of all saved tensors. It
            returns name -> tensor to fill, for names of tensors that were saved as `Content.others`.
        select: function that returns whether a tensor of the model, given its name, is loaded. Default: all are.
        fetch: function that provides undamaged files of tensors, given the names of those that this rank needs; every
            rank calls it. Default: all files are there, and are verified first.

    Returns:
        The saved `Content.state`, with the key `step`.

    Raises:
        UserError: a file is damaged, names or shapes differ from the model's, or the checkpoint has no state of this
            class of optimizer.
    """
    checkpoint = Path(checkpoint)
    layers = model.config.num_nextn_predict_layers if isinstance(model, Decoder) else 0
    folder = ranks.agree(lambda: _huggingface_folder(checkpoint, optimizer, select is None, layers))
    if folder is not None:
        return fill(folder, model, select)
    if fetch is None:
        _verify_on_all_ranks(checkpoint)
    index = ranks.agree(lambda: files.read_index(checkpoint))
    targets: dict[str, Tensor] = {}
    copies = _match_model(checkpoint, model, index, targets, select or (lambda _: True))
    states = match_optimizer(checkpoint, model, optimizer, index, targets) if optimizer is not None else []
    if others is not None:
        targets |= others({name: entry["shape"] for name, entry in index["tensors"].items()})
    reader = SafetensorsReader(checkpoint, index)
    if fetch is not None:
        fetch(ranks.agree(lambda: reader.needed(targets)))
    _read(reader, targets)
    with torch.no_grad():
        for tensor, source in copies:
            tensor.copy_(source)
    for parameter, state in states:
        assert optimizer is not None  # otherwise `states` is empty
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = state
    return ranks.agree(lambda: read_json(checkpoint / files.STATE))


def _read(reader: SafetensorsReader, targets: dict[str, Tensor]) -> None:
    """Fills the tensors `targets` from the files of a checkpoint. An error of any rank is raised on all."""
    try:
        with planning():
            state_dict_loader.load(
                targets,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=not ranks.distributed(),
            )
    except CheckpointException as error:
        failure = first_failure(error)
        if isinstance(failure, UserError):
            failure.quiet = ranks.rank() != 0
        raise failure from error


def _huggingface_folder(
    checkpoint: Path, optimizer: torch.optim.Optimizer | None, everything: bool, layers: int
) -> HuggingFaceFolder | None:
    """Opens a Hugging Face folder; returns None for a checkpoint in Weft's format. Raises UserError as `load`.

    Args:
        everything: whether all tensors of the model will be loaded, which a checkpoint of an adapter does not have.
        layers: number of multi-token prediction layers to read, if the folder has as many.
    """
    if not is_huggingface(checkpoint):
        if everything and (checkpoint / files.ADAPTER).is_file():
            raise UserError(ADAPTER_ONLY, checkpoint)
        return None
    if optimizer is not None:
        raise UserError("a Hugging Face folder has no optimizer state; load the model without an optimizer", checkpoint)
    return open_folder(checkpoint, prediction_layers=layers)


def _match_model(
    checkpoint: Path, model: nn.Module, index: dict, targets: dict[str, Tensor], select: Callable[[str], bool]
) -> list[tuple[Tensor, Tensor]]:
    """Adds the model's tensors that `select` selects to `targets` (saved name -> tensor to load).

    Returns:
        Pairs (tensor, source): after loading, `source` must be copied to `tensor`. One pair for each tensor that was
        tied to `source` when the checkpoint was saved and is a separate tensor in this model.
    """
    saved = {name.removeprefix(MODEL_PREFIX) for name in index["tensors"] if name.startswith(MODEL_PREFIX)}
    problems: list[str] = []
    used: set[str] = set()
    copies: list[tuple[Tensor, Tensor]] = []
    for name, (tensor, names) in model_tensors(model).items():
        if not select(name):
            continue
        source = next((name for name in candidates(names, index) if name in saved), None)
        if source is None:
            problems.append(f"{name} is in this model, but not in the checkpoint")
            continue
        used.add(source)
        key = MODEL_PREFIX + source
        shape = index["tensors"][key]["shape"]
        if list(tensor.shape) != shape:
            problems.append(f"{name} has shape {list(tensor.shape)} in this model, but {shape} in the checkpoint")
        elif key in targets:
            copies.append((tensor, targets[key]))
        else:
            targets[key] = tensor.detach()  # the same storage; autograd forbids filling it from several threads
    saved = {name for name in saved if select(name) and not _is_extra(name, checkpoint, model)}
    raise_mismatch(checkpoint, problems, used, saved, "is in the checkpoint, but not in this model", *MISMATCH)
    return copies


def _is_extra(name: str, checkpoint: Path, model: nn.Module) -> bool:
    """Whether a saved tensor is one of training only that the model does not have.

    These are projections of hidden states, and multi-token prediction layers.
    """
    if not isinstance(model, Decoder) or is_projection(name):
        return isinstance(model, Decoder)
    if (layer := layer_number(name)) < model.config.all_layers:
        return False
    saved = architecture(checkpoint)
    return isinstance(saved, ModelSection) and model.config.num_hidden_layers == saved.num_hidden_layers <= layer
