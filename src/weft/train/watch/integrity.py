"""Defines `Integrity`, which finds numbers that a fault of a host changed: replicas that differ, gradients that do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weft.checkpoint.tensors import model_tensors, plain_name
from weft.config.watch_rules import EXACT
from weft.formatting import first_few
from weft.parallel.local_parameters import local
from weft.parallel.ranks import all_gather_object, error_on_all_ranks
from weft.torch_private import is_traceable_wrapper_subclass
from weft.train.watch.guard import Finding

if TYPE_CHECKING:
    from weft.train.loop import Loop

KIND = "corruption"
SMALL = 1024  # elements up to which integer buffers are counters, not codes of quantized weights
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Key = tuple[str, tuple[tuple[str, int], ...]]


class Integrity:
    """Compares numbers that must be equal bit by bit, every few steps.

    - The parameters and buffers that ranks have in common (`watch.parameter_check_every`), after an update.
    - The gradients of a step, computed twice (`watch.replay_every`), before the update.

    Only sums of bit patterns are compared, as integers: a changed bit changes the sum. All ranks find the same.

    Attributes:
        checked: number of updates after which the parameters were last known to be equal.
        replayed: what the repetition of the current step found; None if it found nothing, or was not due.
    """

    def __init__(self, loop: Loop):
        self.loop, self.section, self.world = loop, loop.config.watch, loop.world
        self.checked, self.replayed = 0, None
        # (name, (rank, index of the tensor on this rank) of each replica) of the tensors that several ranks have.
        self._replicas: list[tuple[str, list[tuple[int, int]]]] = []
        self._tensors = 0  # of the rank with most

    def begin(self, step: int) -> None:
        """Begins a session after `step` updates. Every rank must call it.

        Raises:
            UserError: steps are to be repeated, but their gradients need not be equal.
        """
        self.checked = step
        if self.section.replay_every is not None and self.loop.config.training.determinism != "exact":
            raise error_on_all_ranks(f"watch.replay_every: {EXACT}")
        if self.section.parameter_check_every is not None:
            keys = all_gather_object([key for key, _ in keyed_tensors(self.loop.model)])
            self._tensors, self._replicas = max(map(len, keys)), _replicas(keys)
            if not self._replicas:
                self.loop.job.console.warning(
                    "watch.parameter_check_every: no two ranks have a parameter in common, so nothing is compared"
                )

    # ---- parameters

    def check_parameters(self, step: int) -> Finding | None:
        """Compares the parameters of replicas after `step` updates, if that or a checkpoint is due.

        Returns:
            The finding because of which the run must end or return to a checkpoint; None otherwise.
        """
        every, loop = self.section.parameter_check_every, self.loop
        if not self._replicas or not (loop.due(step, every) or loop.due(step, loop.length.checkpoint_every)):
            return None
        different = self._differences()
        if not different:
            self.checked = step
            return None
        # The lowest rank of the majority has the value that counts as right. Two replicas have no majority.
        names = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in different]
        several = "replicas of parameters differ" if len(different) > 1 else "replicas of a parameter differ"
        text = f"{several}: {first_few(names, 4, '; ')} (they were equal after step {self.checked:,})"
        values = {"tensors": dict(different[:100]), "equal_step": self.checked}
        finding = self._finding(text, values)
        loop.recorder.found(finding, step - 1, loop.guard.data_step(step - 1))
        return finding if finding.ends_step else None

    @torch.no_grad()
    def _differences(self) -> list[tuple[str, list[int]]]:
        """Returns (name, ranks that differ from most replicas) for each tensor whose replicas differ."""
        sums = [bit_sum(tensor).to(self.world.device) for _, tensor in keyed_tensors(self.loop.model)]
        own = torch.zeros(self._tensors, dtype=torch.int64, device=self.world.device)
        if sums:
            own[: len(sums)] = torch.stack(sums)
        gathered = [torch.empty_like(own) for _ in range(self.world.ranks)]
        dist.all_gather(gathered, own)
        found = torch.stack(gathered).tolist()
        different = []
        for name, places in self._replicas:
            by_value = defaultdict(list)
            for rank, number in places:
                by_value[found[rank][number]].append(rank)
            if len(by_value) > 1:
                right = max(by_value.values(), key=len)
                all_tied = len(right) == min(map(len, by_value.values()))
                wrong = [rank for rank, _ in places if all_tied or rank not in right]
                different.append((name, wrong))
        return different

    # ---- repeated gradients

    def replay(self, compute: Callable[[], torch.Tensor], step: int) -> torch.Tensor:
        """Calls `compute`, which adds the gradients of the step after `step` updates; twice, if a repetition is due.

        The second call begins as the first one did: without gradients, and with equal buffers (such as the counts of
        routers). `compute` seeds the random generators itself. Sets `replayed`.

        Returns:
            The result of `compute`: the sums of the loss and of scalars on this rank.
        """
        self.replayed, every = None, self.section.replay_every
        if every is None or (step + 1) % every:
            return compute()
        loop = self.loop
        names = [plain_name(name) for name, p in loop.model.named_parameters() if p.requires_grad]
        saved = [(buffer, buffer.clone()) for buffer in _changing_buffers(loop.passes.root_modules)]
        totals, sums = [], []
        for again in (False, True):
            if again:
                loop.optimizer.zero_grad()
                with torch.no_grad():
                    for buffer, before in saved:
                        buffer.copy_(before)
            totals.append(compute())
            sums.append(_gradient_sums(loop.parameters))
        different = [name for name, *pair in zip(names, *sums, strict=True) if pair[0] != pair[1]]
        losses = bit_sum(totals[0]).item() != bit_sum(totals[1]).item()
        answers = all_gather_object((losses, different))
        if any(losses or names for losses, names in answers):
            self.replayed = self._unequal(answers)
        return totals[1]

    def _unequal(self, answers: Sequence[tuple[bool, list[str]]]) -> Finding:
        """Returns the finding of a repetition.

        Args:
            answers: of each rank, whether its loss differs, and whose gradients differ.
        """
        ranks = [rank for rank, (losses, _) in enumerate(answers) if losses]
        names = list(dict.fromkeys(name for _, found in answers for name in found))
        where = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else ""
        what = f"the gradient of {first_few(names, 4, ', ')}" if names else ""
        text = f"the same step, computed twice, differs in {' and '.join(filter(None, (where, what)))}"
        return self._finding(text, {"ranks": ranks, "gradients": names[:100], "equal_step": self.loop.state.step})

    def _finding(self, text: str, values: dict[str, Any]) -> Finding:
        return Finding(KIND, self.loop.guard.allowed(self.section.corruption), text, values)


def keyed_tensors(model: torch.nn.Module) -> list[tuple[Key, torch.Tensor]]:
    """Returns (key, local tensor) of the parameters and saved buffers of this rank.

    The key is the name, and the rank's coordinates on the mesh axes over which the tensor is sharded. Ranks that have a
    tensor with the same key have replicas of it.
    """
    found = []
    for name, (tensor, _) in model_tensors(model).items():
        shards: list[tuple[str, int]] = []
        if isinstance(tensor, DTensor):
            axes = tensor.device_mesh.mesh_dim_names or tuple(map(str, range(tensor.device_mesh.ndim)))
            for number, (axis, placement) in enumerate(zip(axes, tensor.placements, strict=True)):
                if not placement.is_replicate():
                    shards.append((axis, tensor.device_mesh.get_local_rank(number)))
        found.append(((name, tuple(shards)), local(tensor)))
    return found


def _replicas(keys: Sequence[Sequence[Key]]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Returns (name, (rank, index of the tensor on this rank) of each replica) of the tensors that several ranks have.

    Args:
        keys: the keys of each rank, in the order of `keyed_tensors`.
    """
    found = defaultdict(list)
    for rank, own in enumerate(keys):
        for number, key in enumerate(own):
            found[key].append((rank, number))
    return [(name, places) for (name, _), places in found.items() if len(places) > 1]


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the bit patterns of a tensor's elements as an int64 scalar, modulo 2^64."""
    if is_traceable_wrapper_subclass(tensor):  # such as a quantized weight
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return torch.stack([bit_sum(one) for one in inner]).sum()
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().view(_INTEGERS[plain.element_size()]).sum(dtype=torch.int64)


@torch.no_grad()
def _gradient_sums(parameters: Sequence[torch.nn.Parameter]) -> list[int]:
    """Returns `bit_sum` of the gradient of each parameter on this rank; 0 without gradient."""
    zero = torch.zeros((), dtype=torch.int64)
    sums = [zero if p.grad is None else bit_sum(local(p.grad)) for p in parameters]
    return torch.stack([one.to(sums[-1].device) for one in sums]).tolist() if sums else []


def _changing_buffers(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Returns the buffers that a forward pass may change: all but the codes of quantized weights."""
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    return [buffer for buffer in buffers.values() if buffer.is_floating_point() or buffer.numel() <= SMALL]
