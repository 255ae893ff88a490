"""Compares a module that runs by a plan, on processes of this machine, with the module on one device."""

from __future__ import annotations

import copy
import os
import queue
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.errors import UserError
from weft.planner.parallelize.containers import batch_rows, call_of, map_tensors
from weft.planner.parallelize.dry_run import CountCollectives, Traffic, dry_run, loss_of
from weft.planner.parallelize.stage_reference import NO_MEAN, is_here, run_micro_batches, run_on_one_device
from weft.planner.parallelize.torch_private import replicated
from weft.processes import signal_name

if TYPE_CHECKING:
    from weft.planner.parallelize.plan import Plan

TOLERANCE = 1e-9  # of float64 results, relative to the largest value of a tensor
SEED = 0
POLL = 1.0  # seconds between two looks for processes that have ended


@dataclass(frozen=True)
class Verification:
    """Differences of a plan's results from those of one device, relative to the largest value, in float64.

    Attributes:
        loss: difference of the loss.
        gradients: largest difference of a gradient.
        parameters: largest difference of a parameter or buffer after a step of SGD.
        worst: name of the parameter with the largest difference of the gradient.
        counted: collectives of the first rank.
        predicted: collectives of a run without data; None if the operations depend on values of tensors.
        remark: with stages, what the plan was compared with, or why it differs.
    """

    loss: float
    gradients: float
    parameters: float
    worst: str
    counted: Traffic
    predicted: Traffic | None
    remark: str = ""

    @property
    def equal(self) -> bool:
        """Whether all differences are at most 1e-9, and the collectives are those of the prediction."""
        close = max(self.loss, self.gradients, self.parameters) <= TOLERANCE
        return close and (self.predicted is None or self.predicted.counts == self.counted.counts)

    def __str__(self) -> str:
        lines = [
            f"loss: {self.loss:.1e} from one device",
            f"gradients: {self.gradients:.1e} (largest of {self.worst})",
            f"parameters after a step: {self.parameters:.1e}",
            f"collectives: {self.counted}",
        ]
        if self.predicted is None:
            lines.append("collectives are not predicted: operations depend on values of tensors")
        elif self.predicted.counts != self.counted.counts:
            lines.append(f"predicted collectives differ: {self.predicted}")
        if self.counted.on_full_tensors:
            lines.append(f"on full tensors, on all ranks: {', '.join(self.counted.on_full_tensors)}")
        if self.remark:
            lines.append(self.remark)
        return "\n".join([*lines, "equal" if self.equal else "NOT equal"])


def verify_plan(
    plan: Plan,
    module: nn.Module | Callable[[], nn.Module],
    example_inputs: Any,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    seconds: float = 900,
) -> Verification:
    """Runs a plan on processes of this machine (gloo, float64), and compares it with the module on one device.

    The batch is reduced to two rows for each data rank. The module keeps its sizes: one that fits in memory once for
    each process is needed.

    Args:
        module: the module or a function that returns it; processes import its class by name.
        example_inputs: inputs of one call, as for `parallelize`.
        loss: outputs -> loss; by default, a weighted sum of all floating-point outputs.
        seconds: time limit.

    Raises:
        UserError: the module does not run on one device, or a process failed.
    """
    args, kwargs = fewer_rows(plan.dp * plan.micro_batches, call_of(example_inputs))
    loss, plan = loss or plan.loss, replace(plan, loss=None)
    context = torch.multiprocessing.get_context("spawn")
    answers, port = context.Queue(), _free_port()
    processes = [
        context.Process(target=_rank, args=(answers, rank, port, plan, module, args, kwargs, loss), daemon=True)
        for rank in range(-1, plan.devices)
    ]
    for process in processes:
        process.start()
    try:
        found: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while len(found) < len(processes):
            ended = [rank for rank, process in enumerate(processes, start=-1) if process.exitcode]
            try:
                rank, value = answers.get(timeout=POLL)
            except queue.Empty:
                if lost := [rank for rank in ended if rank not in found]:
                    raise UserError(_lost(lost[0], processes[lost[0] + 1].exitcode)) from None
                if time.monotonic() > end:
                    what = f"the plan did not finish in {seconds:g} seconds; give a smaller module or batch"
                    raise UserError(what) from None
                continue
            if isinstance(value, str) and rank >= 0:
                raise UserError(f"rank {rank}: {value}")
            found[rank] = value
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    return _merged(found)


def _merged(found: dict[int, Any]) -> Verification:
    """Returns the largest differences of all ranks. With stages, each rank has some of the parameters."""
    predicted = found.pop(-1)
    ranks = [found[rank] for rank in sorted(found)]
    return Verification(
        *(max(one[place] for one in ranks) for place in range(3)),
        max(ranks, key=lambda one: one[1])[3],
        ranks[0][4],
        predicted if isinstance(predicted, Traffic) else None,
        ranks[0][5],
    )


def _lost(rank: int, code: int | None) -> str:
    """Returns a message for a process that ended without an answer."""
    what = "the dry run" if rank < 0 else f"rank {rank}"
    ended = f"was killed by {signal_name(-code)}" if code is not None and code < 0 else f"exited with code {code}"
    return f"{what} {ended}; if memory ran out, give a smaller module or batch"


def _rank(answers: Any, rank: int, port: int, *case: Any) -> None:
    """Runs one rank of a case, or the dry run (rank -1), and puts its answer into a queue; a text is a failure."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        if rank < 0:
            answers.put((rank, _dry(*case)))
            return
        ranks = case[0].devices
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
        answers.put((rank, _compare(*case)))
    except Exception as error:  # reported by the process that started this one
        answers.put((rank, f"{type(error).__name__}: {' '.join(str(error).split())}"))
        return
    answers.close()
    answers.join_thread()
    with suppress(RuntimeError):  # the process that started this one kills the ranks when it has all answers
        torch.distributed.barrier()


def _compare(plan: Plan, module: Any, args: Any, kwargs: Any, loss: Any) -> tuple[float, float, float, str, Any, str]:
    reference = module_in_float64(module)
    model = plan.apply(copy.deepcopy(reference), loss=loss)
    mode = CountCollectives()
    before = len(replicated)
    torch.manual_seed(SEED)
    given = map_tensors(torch.clone, (args, kwargs))
    with mode:
        out = model(*given[0], **given[1])
        value = out if plan.stages else loss_of(out, loss)
        value.backward()
    mode.traffic.on_full_tensors = list(dict.fromkeys(name for name, _ in replicated[before:]))
    expected, remark = run_on_one_device(plan, reference, args, kwargs, loss)
    loss_difference, gradients = _differences(expected, value.item(), reference, model)
    worst = max(gradients, key=lambda name: gradients[name], default="none")
    if plan.stages and not remark and max(loss_difference, gradients.get(worst, 0.0)) > TOLERANCE:
        again = copy.deepcopy(reference)
        single = run_micro_batches(plan, again, args, kwargs, loss)
        of_loss, of_gradients = _differences(single, value.item(), again, model)
        if max(of_loss, *of_gradients.values()) <= TOLERANCE:
            remark = NO_MEAN
    for one in (reference, model):
        torch.optim.SGD(one.parameters(), lr=0.01).step()
    pairs = [*zip(reference.parameters(), model.parameters(), strict=True)]
    pairs += [*zip(reference.buffers(), model.buffers(), strict=True)]
    parameters = max((_difference(one, other) for one, other in pairs if is_here(other)), default=0.0)
    return loss_difference, gradients.get(worst, 0.0), parameters, worst, mode.traffic, remark


def _differences(
    expected: float, loss: float, reference: nn.Module, model: nn.Module
) -> tuple[float, dict[str, float]]:
    """Returns the differences of the loss and, by name, of the gradients of this rank's parameters."""
    gradients: dict[str, float] = {}
    for (name, parameter), other in zip(reference.named_parameters(), model.parameters(), strict=True):
        if is_here(other) and (parameter.grad is not None or other.grad is not None):
            gradients[name] = _difference(parameter.grad, other.grad)
    return abs(expected - loss) / max(abs(expected), 1e-300), gradients


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Returns the largest difference of two tensors, relative to the largest value; infinite if one is missing.

    Values below 1e-6 count as such, because gradients that are 0 on one device can be rounding errors.
    """
    if one is None or other is None:
        return float("inf")
    with torch.no_grad():
        full = other.full_tensor() if isinstance(other, DTensor) else other
        largest = max(one.abs().max().item(), 1e-6) if one.numel() else 1.0
        return (one.double() - full.double()).abs().max().item() / largest if one.numel() else 0.0


def module_in_float64(module: Any) -> nn.Module:
    """Returns the module in float64, with random values for parameters on the meta device."""
    torch.manual_seed(SEED)
    made = copy.deepcopy(module) if isinstance(module, nn.Module) else module()
    if any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers())):
        made = made.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*made.parameters(), *made.buffers()):
                tensor.normal_(std=0.02) if tensor.is_floating_point() else tensor.zero_()
    return made.double()


def _dry(plan: Plan, module: Any, args: Any, kwargs: Any, loss: Any) -> Traffic | str:
    try:
        return dry_run(plan, module_in_float64(module), args, kwargs, loss)
    except (RuntimeError, NotImplementedError, UserError) as error:
        return str(error)


def fewer_rows(dp: int, call: Any) -> Any:
    """Returns a call with two rows for each data rank, where there are more, and with tensors of float64."""
    rows = batch_rows(call) or 0
    kept = 2 * dp if rows % dp == 0 and rows > 2 * dp else rows

    def reduce(value: torch.Tensor) -> torch.Tensor:
        value = value.detach()
        if value.is_meta:
            value = torch.zeros(value.shape, dtype=value.dtype)
        value = value[:kept] if value.dim() and value.shape[0] == rows else value
        return value.double() if value.is_floating_point() else value.clone()

    return map_tensors(reduce, call)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
