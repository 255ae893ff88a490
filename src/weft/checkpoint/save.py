"""Save a training run's state: never a half checkpoint taken for a whole one."""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.storage import SafetensorsWriter
from weft.checkpoint.tensors import MODEL_PREFIX, model_tensors, optimizer_state, whole_values
from weft.errors import UserError
from weft.files import partial_path, publish, remove
from weft.observe.status import LONG, doing
from weft.parallel import ranks


def save(
    run_directory: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    architecture: dict[str, Any],
    keep: files.Keep,
    others: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write `<run>/checkpoints/step-%08d` and delete the older ones that are not to be kept. Every rank calls it.

    All ranks write under another name; when every file is on the disk, with its size and SHA-256 in `checksums.json`,
    one rename makes it a checkpoint, and only then an older one goes for it; what was there beyond `keep.last` goes
    before. A checkpoint of this step that is already there is exchanged for the new one.

    Args:
        step: optimizer steps done.
        optimizer: its state is saved by parameter, tensors and numbers in any nesting. Its groups' values (lr, betas)
            are not: the run's configuration sets them.
        state: what the loop goes on from; JSON values, the same on all ranks (rank 0's are written).
        architecture: the resolved model section, for `load_model`.
        keep: which checkpoints stay.
        others: more tensors, by names of their own, of which ranks may have different ones.

    Returns:
        The checkpoint.

    Raises:
        UserError: on all ranks, if any could not write (a full disk); the older checkpoints are as they were.
    """
    folder = Path(run_directory) / files.FOLDER
    target = folder / files.checkpoint_name(step)
    partial = partial_path(target)
    task = f"saving step {step:,}"
    doing(task, "save", LONG)
    try:
        ranks.on_first(lambda: _begin(folder, partial, keep))
        tensors, aliases, description = _collect(model, optimizer)
        tensors |= others or {}
        writer = SafetensorsWriter(partial, aliases, task)
        with planning():
            state_dict_saver.save(
                tensors,
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=not ranks.distributed(),
            )
        state = {**state, "step": step}
        documents = {files.MODEL: architecture, files.OPTIMIZER: description, files.STATE: state}
        doing(task, "save", LONG)
        ranks.on_first(lambda: _finish(partial, target, documents, writer.digests))
    except (Exception, CheckpointException) as error:  # DCP's is no Exception; all ranks come here together
        ranks.on_first(lambda: remove(partial))
        raise _explained(error, target) from error
    doing(task, "save", LONG)
    ranks.on_first(lambda: files.prune(folder, keep, target))
    return target


def _begin(folder: Path, partial: Path, keep: files.Keep) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files.sweep(folder)
    files.prune(folder, keep)  # `keep.last` may have been lowered because the disk is full
    partial.mkdir()


def _collect(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any] | None]:
    """All tensors to save by name, other names of tied weights -> the name they are saved under, and the optimizer."""

    def local() -> tuple:
        tensors, aliases = {}, {}
        for name, (tensor, same) in model_tensors(model).items():
            tensors[MODEL_PREFIX + name] = tensor
            aliases |= dict.fromkeys(same[1:], name)
        if optimizer is None:
            return tensors, aliases, None
        state, description = optimizer_state(optimizer, model)
        return {**tensors, **state}, aliases, description

    collected: list = []
    ranks.everywhere(lambda: collected.append(local()))
    tensors, aliases, description = collected[0]
    # Ranks of a pipeline hold different parameters; the files describe them all.
    for other_aliases, other in ranks.gather_different([aliases, description]):
        aliases = {**other_aliases, **aliases}
        if description is not None and other is not None:
            description = {**description, "state": {**other["state"], **description["state"]}}
    return {name: whole_values(tensor) for name, tensor in tensors.items()}, aliases, description


def _finish(partial: Path, target: Path, documents: dict[str, Any], digests: dict[str, files.Digest]) -> None:
    """Rank 0: the last files, a look at all of them, and the rename."""
    digests = dict(digests)
    for name, content in documents.items():
        digests[name] = files.write_json(partial / name, content)
    files.write_checksums(partial, digests)
    if (damage := files.find_damage(partial, contents=False)) is not None:
        raise OSError(
            errno.EIO,
            f"{damage.file.name}: {damage.what} (as rank 0 sees it; the run directory must lie on storage that all "
            "machines share)",
        )
    publish(partial, target, replace=True)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Without PyTorch's warning that one process without a process group is meant to be one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def first_failure(error: BaseException) -> BaseException:
    """The failing rank's own exception inside DCP's: an OSError before all others."""
    if not isinstance(error, CheckpointException):
        return error
    failures = [failure for _, (failure, _) in sorted(error.failures.items())]
    return next((failure for failure in failures if isinstance(failure, OSError)), failures[0])


def _explained(error: BaseException, target: Path) -> BaseException:
    failure = first_failure(error)
    if isinstance(failure, UserError):
        failure.quiet = ranks.rank() != 0
    if not isinstance(failure, OSError):
        return failure

    def text() -> str:
        why = failure.strerror or str(failure)
        full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free space" if full else "mend that"
        last = files.last_whole(target.parent, contents=False)
        if last is None:
            return f"{why}; there is no whole checkpoint yet; {remedy} and start again: it begins anew"
        return f"{why}; the last whole checkpoint is {last.name}; {remedy} and start again: it goes on from there"

    explained = UserError(ranks.on_first(text), target)
    explained.quiet = ranks.rank() != 0
    return explained
