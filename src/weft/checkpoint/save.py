"""Saves the state of a training run as a checkpoint, which gets its visible name only when it is complete."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.adapter_record import record_of, saved_tensors
from weft.checkpoint.hosts import Hosts
from weft.checkpoint.storage import SafetensorsWriter
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.tensors import MODEL_PREFIX, model_tensors, optimizer_state, reduce_partial
from weft.errors import UserError
from weft.files import partial_path, publish, remove
from weft.observe.status import LONG, doing
from weft.parallel import ranks


@dataclass(frozen=True)
class Content:
    """What a checkpoint contains.

    Attributes:
        step: number of optimizer steps so far.
        optimizer: the state of each parameter is saved: tensors and numbers in any nesting. Values of parameter groups
            (lr, betas) are not saved, because the run's configuration sets them.
        state: JSON values from which the training loop resumes. The values of rank 0 are written.
        architecture: the resolved model section, which `load_model` needs.
        others: further tensors by unique names. Different ranks can pass different tensors.
    """

    step: int
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    state: dict[str, Any]
    architecture: dict[str, Any]
    others: Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """Which rank writes what. The next checkpoint has the same layout if all ranks have tensors of the same kinds.

    Attributes:
        kinds: name, dtype, shape and sharding of each tensor of this rank, and its tied weights.
        plan, index: see `SafetensorsWriter`.
    """

    kinds: list
    plan: SavePlan
    index: dict[str, Any]


@dataclass(frozen=True)
class StagedSave:
    """A checkpoint whose tensors are assigned to files of the ranks, before the first file is written.

    Attributes:
        target: path of the checkpoint.
        contents: name of each JSON file -> value.
        writer: the files of tensors of this rank.
        hosts: the hosts of a local checkpoint, each with a folder of its own. None: all ranks write into one folder.
        layout: for the next call of `stage`.
        updated: name -> tensor, of the tensors that only an update of the optimizer changes: parameters and optimizer
            state.
    """

    target: Path
    keep: files.Keep
    contents: dict[str, Any]
    writer: SafetensorsWriter
    task: str
    layout: Layout
    updated: Mapping[str, Tensor]
    hosts: Hosts | None = None

    def write(self, group: dist.ProcessGroup | None = None, workers: int | None = None, reports: bool = True) -> Path:
        """Writes all files, renames the checkpoint and deletes old checkpoints. Every rank must call it.

        All ranks write into a directory with a hidden name (of a local checkpoint: into that of their host, which also
        gets copies from other hosts). When every file is on the disk, with its size and SHA-256 in `checksums.json`,
        the directory is renamed. Checkpoints that `keep` does not select are deleted before and
        after. An existing checkpoint of this step is replaced atomically.

        Args:
            group: a process group of all ranks, for a call from a thread beside the training. Default: the default
                process group.
            workers: number of threads that write. Default: `checkpoint_files.threads`.
            reports: whether to report progress to the launcher. Beside the training this would hide that it hangs.

        Raises:
            UserError: a rank could not write, for example because the disk is full. All ranks raise the error, and the
                older checkpoints remain complete.
        """
        partial, folder = partial_path(self.target), self.target.parent
        hosts = self.hosts or Hosts.shared()

        def report(count: int = 0) -> None:
            if reports:
                doing(self.task, "save", LONG)

        def lead(action: Callable[[], None]) -> None:
            report()
            ranks.agree(lambda: action() if hosts.leads else None, group=group)

        try:
            needed = hosts.bytes(ranks.all_gather_object(self.writer.bytes, group))
            lead(lambda: _begin(folder, partial, self.keep, needed))
            workers = workers or files.threads()
            mine = ranks.agree(lambda: self.writer.write(partial, workers, report), group=group)
            saved = ranks.all_gather_object(mine, group)
            contents = {files.INDEX: self.writer.index, **self.contents}
            common = ranks.agree(lambda: _write_json(partial, contents), only_first=True, group=group)
            hosts.copy(partial, saved, common, group)
            digests = common | {name: one for rank in saved for name, one in rank.items()}
            lead(lambda: _finish(partial, digests, hosts.kept(saved) | common.keys()))
            lead(lambda: publish(partial, self.target, replace=True))
        except Exception as error:  # all ranks get here
            ranks.agree(lambda: remove(partial) if hosts.leads else None, group=group)
            raise _explain(error, self.target, group, local=self.hosts is not None) from error
        lead(lambda: files.prune(folder, self.keep, self.target))
        return self.target


def stage(
    run_directory: str | Path,
    content: Content,
    keep: files.Keep,
    hold: Callable[[Entry], Entry] | None = None,
    hosts: Hosts | None = None,
    layout: Layout | None = None,
) -> StagedSave:
    """Decides which rank writes what. Every rank must call it. The files are written by `StagedSave.write`.

    The checkpoint is `<run>/checkpoints/step-%08d`.

    Args:
        hold: function that replaces the tensor of an entry by memory for a copy. Default: tensors are read when they
            are written, so they must not change before.
        hosts: the hosts of a local checkpoint (see `StagedSave`).
        layout: the layout of an earlier checkpoint of this run. It is used again if it fits, which saves a plan and
            most communication.
    """
    step, model = content.step, content.model
    target = Path(run_directory) / files.FOLDER / files.checkpoint_name(step)
    task = f"saving step {step:,}"
    doing(task, "save", LONG)
    try:
        record = record_of(model)
        found = _collect(content, saved_tensors(model), layout)
        tensors = {name: reduce_partial(tensor) for name, tensor in found.tensors.items()}
        writer = SafetensorsWriter(found.aliases, hold)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        if layout is not None and found.same_layout:
            plan = layout.plan
            planner.set_up_planner(tensors)
            ranks.agree(lambda: writer.write_data(plan, planner))
            writer.index = layout.index
        else:
            with planning():
                state_dict_saver.save(tensors, storage_writer=writer, planner=planner, no_dist=not ranks.distributed())
        state = {**content.state, "step": step}
        values = {files.MODEL: content.architecture, files.OPTIMIZER: found.description, files.STATE: state}
        values |= {} if record is None else {files.ADAPTER: record.content(target)}
        contents = values if hold is None else copy.deepcopy(values)  # callbacks may change their state
    except (
        Exception,
        CheckpointException,
    ) as error:  # CheckpointException is not an Exception; all ranks get here
        raise _explain(error, target) from error
    layout = Layout(found.kinds, writer.plan, writer.index)
    updated = {name: found.tensors[name] for name in found.updated}
    return StagedSave(target, keep, contents, writer, task, layout, updated, hosts)


def _begin(folder: Path, partial: Path, keep: files.Keep, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(folder)
    files.prune(folder, keep)  # the user may have lowered `keep.last` because the disk was full
    partial.mkdir()
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({needed:,} bytes needed, {free:,} free)")


@dataclass(frozen=True)
class _Collected:
    """The tensors of this rank, and what the files say about those of all ranks.

    Attributes:
        tensors: name -> tensor.
        updated: names of parameters and of optimizer state.
        aliases: further name of a tied weight -> saved name.
        description: the optimizer's class and values that are not tensors (see `optimizer_state`).
        kinds: see `Layout`.
        same_layout: whether the kinds of all ranks are those of the earlier layout.
    """

    tensors: dict[str, Tensor]
    updated: list[str]
    aliases: dict[str, str]
    description: dict[str, Any] | None
    kinds: list
    same_layout: bool


def _collect(content: Content, select: Callable[[str], bool] | None, layout: Layout | None) -> _Collected:
    """Collects this rank's tensors; and, from all ranks, the names of tied weights and the values that are not tensors.

    Args:
        select: function that returns whether a tensor of the model, given its name, is saved; None: all are.
    """

    def local() -> _Collected:
        tensors: dict[str, Tensor] = {}
        aliases, description = {}, None
        for name, (tensor, same) in model_tensors(content.model).items():
            if select is not None and not select(name):
                continue
            tensors[MODEL_PREFIX + name] = tensor
            aliases |= dict.fromkeys(same[1:], name)
        updated = [name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)]
        if content.optimizer is not None:
            state, description = optimizer_state(content.optimizer, content.model)
            tensors |= state
            updated += state
        tensors |= content.others
        kinds = [aliases, *((name, *_kind(tensor)) for name, tensor in tensors.items())]
        return _Collected(tensors, updated, aliases, description, kinds, layout is not None and kinds == layout.kinds)

    found = ranks.agree(local)
    # Pipeline ranks have different parameters; the files describe the parameters of all ranks.
    aliases, description, same_layout = found.aliases, found.description, True
    for other_aliases, other, same in ranks.distinct_values([aliases, description, found.same_layout]):
        aliases, same_layout = {**other_aliases, **aliases}, same_layout and same
        if description is not None and other is not None:
            description = {**description, "state": {**other["state"], **description["state"]}}
    return replace(found, aliases=aliases, description=description, same_layout=same_layout)


def _kind(tensor: Tensor) -> tuple:
    """Returns what decides, beside a tensor's name, how ranks divide it."""
    mesh = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return tensor.dtype, tensor.shape, *mesh


def _write_json(partial: Path, contents: dict[str, Any]) -> dict[str, files.Digest]:
    """Writes the JSON files, given their values by name. Returns their digests. Only rank 0 calls it."""
    return {name: files.write_json(partial / name, content) for name, content in contents.items()}


def _finish(partial: Path, digests: dict[str, files.Digest], kept: set[str]) -> None:
    """Writes the digests of all files, and checks the sizes of the files `kept`. The first rank of a host calls it."""
    files.write_checksums(partial, digests)
    if (damage := files.find_damage(partial, contents=False, only=kept)) is not None:
        raise OSError(
            errno.EIO,
            f"{damage.file.name}: {damage.what} (on rank 0; put the run directory on storage that all hosts share)",
        )


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Context manager that silences DCP's warning that, without a process group, it assumes a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def first_failure(error: BaseException) -> BaseException:
    """Returns the cause of a failed save or load.

    For a CheckpointException: the first OSError of any rank or, without an OSError, the exception of the first failed
    rank. Any other exception is returned unchanged.
    """
    if not isinstance(error, CheckpointException):
        return error
    failures = [failure for _, (failure, _) in sorted(error.failures.items())]
    return next((failure for failure in failures if isinstance(failure, OSError)), failures[0])


def _explain(
    error: BaseException, target: Path, group: dist.ProcessGroup | None = None, *, local: bool = False
) -> BaseException:
    failure = first_failure(error)
    if isinstance(failure, UserError):
        failure.quiet = ranks.rank() != 0
    if not isinstance(failure, OSError):
        return failure

    def text() -> str:
        remedy = "free space" if failure.errno in (errno.ENOSPC, errno.EDQUOT) else "fix the cause"
        if local:
            remedy += ", set checkpoint.local.directory, or remove checkpoint.local"
            return (
                f"{failure.strerror or failure}; {remedy}; the same command resumes from the last complete checkpoint"
            )
        last = files.last_complete(target.parent, contents=False)
        state = f"the last complete checkpoint is {last.name}" if last else "no checkpoint is complete yet"
        outcome = "training resumes from there" if last else "training begins at step 0"
        return f"{failure.strerror or failure}; {state}; {remedy} and run the same command again: {outcome}"

    explained = UserError(ranks.agree(text, only_first=True, group=group), target)
    explained.quiet = ranks.rank() != 0
    return explained
