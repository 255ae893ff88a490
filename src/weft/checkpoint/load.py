"""Find, verify and load checkpoints, on any mesh."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface.fill import fill
from weft.checkpoint.huggingface.folder import HuggingFaceFolder, open_folder
from weft.checkpoint.save import first_failure, planning
from weft.checkpoint.storage import SafetensorsReader
from weft.checkpoint.tensors import MODEL_PREFIX, OPTIMIZER_PREFIX, blank_state, model_tensors, optimizer_parameters
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.parallel import ranks

# A mismatch names so many tensors; the rest is counted.
_NAMED = 4


def checkpoints(run_directory: str | Path) -> list[Path]:
    """The run's checkpoints, oldest step first. Half-written ones have other names and are not among them."""
    return files.listed(Path(run_directory) / files.FOLDER)


def resolve(path: str | Path) -> Path:
    """The checkpoint that a path means: a checkpoint itself, or the newest one of a run directory.

    A Hugging Face folder stands for itself.

    One process checks its contents against their checksums here; several look only at the files' sizes, because `load`
    shares the hashing among them.

    Raises:
        UserError: there is none, or it is damaged (the file and the previous whole checkpoint are named).
    """
    path = Path(path)
    if not path.exists():
        raise UserError("there is no such run or checkpoint; give a run directory or a checkpoint in it", path)
    if not path.is_dir():
        raise UserError("a file is no run; give a run directory or a checkpoint directory", path)
    if is_huggingface(path):
        return path
    if files.is_leftover(path):
        raise UserError(
            f"this is a checkpoint that was never finished; give the run directory {path.parent.parent}", path
        )
    if files.step_of(path) is not None or any((path / name).exists() for name in (files.CHECKSUMS, files.INDEX)):
        checkpoint = path
    else:
        folder = path if path.name == files.FOLDER else path / files.FOLDER
        found = files.listed(folder)
        if not found and (folder.is_dir() or (path / "config.yaml").exists()):
            raise UserError("this run has no checkpoint yet; train it until it has saved one", path)
        if not found:
            raise UserError("this is neither a run directory (no checkpoints/ in it) nor a checkpoint", path)
        checkpoint = found[-1]
    _raise_if_damaged(checkpoint, files.find_damage(checkpoint, contents=ranks.world() == 1))
    return checkpoint


def verify(checkpoint: str | Path) -> None:
    """Check every file of a checkpoint against its size and SHA-256.

    Raises:
        UserError: names the damaged file, and the previous whole checkpoint of the same run.
    """
    _raise_if_damaged(Path(checkpoint), files.find_damage(Path(checkpoint)))


def _raise_if_damaged(checkpoint: Path, damage: files.Damage | None) -> None:
    if damage is None:
        return
    previous = files.last_whole(checkpoint.parent, before=files.step_of(checkpoint))
    if (checkpoint / files.ORIGIN).exists():
        remedy = "`weft import` makes it again"
    elif previous is None or previous == checkpoint:
        remedy = "there is no older whole checkpoint; bring the file back from a copy, or start over with --fresh"
    else:
        remedy = (
            f"the previous whole checkpoint is {previous}; name that one, or `weft train --from-last-good` sets this "
            "one aside and goes on from there"
        )
    raise UserError(f"damaged checkpoint: {damage.what}; {remedy}", damage.file)


def _verify_together(checkpoint: Path) -> None:
    """Each rank hashes its share of the files; all raise if one is damaged."""
    found = ranks.gather(files.find_damage(checkpoint, part=ranks.rank(), parts=ranks.world()))
    damage = next((damage for damage in found if damage is not None), None)
    if damage is not None:
        ranks.on_first(lambda: _raise_if_damaged(checkpoint, damage))


def read_json(checkpoint: Path, name: str) -> Any:
    """One of a checkpoint's JSON files. Raises UserError if it is not there or not JSON."""
    path = checkpoint / name
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError("the file is missing; this is no whole checkpoint", path) from None
    except OSError as error:
        raise UserError(f"it cannot be read: {error.strerror}", path) from error
    except ValueError as error:
        raise UserError(f"it is not JSON ({error}); this checkpoint is damaged", path) from error


def tokenizer_folder(checkpoint: Path) -> Path | None:
    """The tokenizer that belongs to what `resolve` gave: its run's, its own, or that of a Hugging Face folder."""
    if is_huggingface(checkpoint):
        folder = checkpoint
    elif checkpoint.absolute().parent.name == files.FOLDER:
        folder = checkpoint.absolute().parent.parent / "tokenizer"
    else:
        folder = checkpoint / "tokenizer"
    return folder if (folder / "tokenizer.json").is_file() else None


def load(
    checkpoint: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    others: Callable[[dict[str, list[int]]], dict[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Fill a model, and an optimizer, in place from a checkpoint of any mesh. Every rank calls it.

    The files are checked against their checksums first. Parameters keep their own dtype and placement; the optimizer's
    state is made anew as it was saved, whether or not the optimizer has stepped before.

    Args:
        checkpoint: a checkpoint directory, as from `resolve`; or a Hugging Face folder, which has no optimizer.
        others: given the names of all saved tensors -> shapes, says which of `save`'s `others` are to be filled.

    Returns:
        What `save` was given as `state`, and `step`.

    Raises:
        UserError: a damaged file; or names or shapes that do not match the model's, or another optimizer's state.
    """
    checkpoint = Path(checkpoint)
    if is_huggingface(checkpoint):
        if optimizer is not None:
            raise UserError("a Hugging Face folder has no optimizer's state; load the model alone", checkpoint)
        opened: list[HuggingFaceFolder] = []
        ranks.everywhere(lambda: opened.append(open_folder(checkpoint)))
        return fill(opened[0], model)
    _verify_together(checkpoint)
    index = read_json(checkpoint, files.INDEX)
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
        assert optimizer is not None  # or it had no states to match
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = state
    return read_json(checkpoint, files.STATE)


def _match_model(
    checkpoint: Path, model: nn.Module, index: dict, targets: dict[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Put the model's tensors into `targets` under their names in the file.

    Returns:
        (tensor, the target to copy it from): the second of two tensors that were one, tied, when they were saved.
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
    _raise_mismatch(checkpoint, problems, used, saved, "is in the checkpoint, not in this model")
    return copies


def _match_optimizer(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, index: dict, targets: dict[str, Tensor]
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Each optimized parameter's saved state, its tensors empty and in `targets`; no state where none was saved."""
    saved = read_json(checkpoint, files.OPTIMIZER)
    if saved is None:
        raise UserError("this checkpoint was saved without an optimizer's state; load the model alone", checkpoint)
    ours = type(optimizer).__name__
    if saved["class"] != ours:
        raise UserError(
            f"this checkpoint has {saved['class']}'s state and the run uses {ours}; set the optimizer back, or start a "
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
                state[key] = blank_state(value, path, parameter, group, index, targets)
        states.append((parameter, state))
    why = "has optimizer state in the checkpoint, but this run does not train it"
    _raise_mismatch(checkpoint, [], used, set(saved["state"]), why)
    return states


def _candidates(names: list[str], index: dict) -> list[str]:
    """Where to look for a tensor of these names: a weight tied when it was saved lies under its first name."""
    return names + [index["tied"][name] for name in names if name in index["tied"]]


def _raise_mismatch(checkpoint: Path, problems: list[str], used: set[str], saved: set[str], why: str) -> None:
    """Raise on all ranks what is wrong on any; ranks of a pipeline use different parts of what was saved.

    Args:
        problems: what is wrong with this rank's tensors.
        used, saved: names that this rank uses, and all there are; one that none uses `why` is said of.
    """
    answers = ranks.gather_different([problems, sorted(used)])
    everything = [problem for theirs, _ in answers for problem in theirs]
    left = saved.difference(*(names for _, names in answers))
    everything += [f"{name} {why}" for name in sorted(left)]
    if everything:
        more = f"; and {len(everything) - _NAMED} more" if len(everything) > _NAMED else ""
        error = UserError(
            f"the checkpoint does not fit: {'; '.join(everything[:_NAMED])}{more}; use the configuration that it was "
            "trained with",
            checkpoint,
        )
        error.quiet = ranks.rank() != 0
        raise error
