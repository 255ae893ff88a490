"""The optimizer Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024)."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, cast

import torch
from annotated_types import Ge, Gt, Lt
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.kernels.processor import multiplies_bfloat16
from weft.optim.adamw import AdamW, local

# Coefficients of the quintic Newton-Schulz iteration: five steps bring singular values to about 1, not exactly to 1.
QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(AdamW):
    """Momentum with orthogonalized updates for the matrices of hidden layers, and AdamW for all other parameters.

    AdamW also updates the embeddings and the output head. The update of a hidden layer's matrix is the
    (semi-)orthogonal matrix nearest to the matrix's momentum, times `sqrt(max(1, rows / columns))`, so that `lr` suits
    matrices of every shape.

    Args:
        lr: peak learning rate of the matrices of hidden layers. The schedule scales all learning rates by the same
            factor.
        momentum: Nesterov momentum of the matrices.
        ns_steps: number of Newton-Schulz iterations, which run in bfloat16 (float64 for float64 parameters; float32 on
            a CPU without instructions for bfloat16).
        weight_decay: decoupled weight decay. Parameters that `optimizer.no_decay` lists have none.
        embedding_lr: AdamW's learning rate for embeddings.
        head_lr: AdamW's learning rate for the output head.
        other_lr: AdamW's learning rate for norms, biases and all remaining parameters.
        betas: AdamW's decay rates of the moving averages of gradients and of squared gradients.
        eps: constant that AdamW adds to the denominator of the update.
    """

    def __init__(
        self,
        params,
        *,
        lr: Annotated[float, Gt(0)] = 0.02,
        momentum: Annotated[float, Ge(0), Lt(1)] = 0.95,
        ns_steps: Annotated[int, Ge(1)] = 5,
        weight_decay: Annotated[float, Ge(0)] = 0.0,
        embedding_lr: Annotated[float, Gt(0)] = 1e-2,
        head_lr: Annotated[float, Gt(0)] = 3e-3,
        other_lr: Annotated[float, Gt(0)] = 3e-3,
        betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95),
        eps: Annotated[float, Gt(0)] = 1e-10,
    ):
        rates = {"matrix": lr, "embedding": embedding_lr, "head": head_lr}
        groups = [{**group, "lr": rates.get(group["role"], other_lr)} for group in params]
        self.momentum, self.ns_steps = momentum, ns_steps
        super().__init__(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure=None):
        """Updates all parameters: matrices of hidden layers by Muon, the others by AdamW."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["role"] != "matrix"]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["role"] == "matrix":
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict) -> None:
        by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape[parameter.shape].append(parameter)
        for parameters in by_shape.values():
            self._step_batch(
                parameters, group
            )  # a function, so that the matrices of one shape are freed before the next

    def _step_batch(self, parameters: list[torch.Tensor], group: dict) -> None:
        """Updates matrices of one shape, which are orthogonalized as one batch: fewer, larger matrix products.

        A stacked expert weight is one matrix per expert.
        """
        shape = parameters[0].shape
        directions = torch.stack([full_matrix(self._momentum(p), p) for p in parameters]).flatten(0, -3)
        updates = orthogonalize(directions, self.ns_steps).mul_(max(1.0, shape[-2] / shape[-1]) ** 0.5)
        for parameter, update in zip(parameters, updates.view(len(parameters), *shape), strict=True):
            shard = local(parameter).mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(shard_like(update.to(parameter.dtype), parameter), alpha=-group["lr"])

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        """Updates the momentum. Returns this rank's shard of the direction."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer, gradient = local(state["momentum_buffer"]), local(cast(torch.Tensor, parameter.grad))
        buffer.lerp_(gradient, 1 - self.momentum)
        return torch.lerp(gradient, buffer, self.momentum)


def orthogonalize(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Approximates the nearest semi-orthogonal matrices by a quintic Newton-Schulz iteration.

    Args:
        matrices: `[count, rows, columns]`, float32 or float64.
        steps: number of iterations.

    Returns:
        Matrices of the same shape, with singular values between about 0.7 and 1.2. The dtype is bfloat16; it is float64
        for float64, and float32 on a CPU without instructions for bfloat16.
    """
    a, b, c = QUINTIC
    emulated = matrices.device.type == "cpu" and multiplies_bfloat16() is False
    dtype = torch.float32 if emulated else torch.bfloat16
    x = matrices if matrices.dtype == torch.float64 else matrices.to(dtype)
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def full_matrix(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns the unsharded matrix, which orthogonalization needs, on the device of the mesh.

    Args:
        shard: this rank's part of a matrix that is sharded like `parameter`.
    """
    if not isinstance(parameter, DTensor):
        return shard
    mesh, shard = parameter.device_mesh, shard.to(parameter.device_mesh.device_type)
    if mesh.size() == 1:  # the general way takes 100 us of Python
        return shard
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, parameter.placements, shape=shape, stride=stride).full_tensor()


def shard_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of `tensor`, sharded like `parameter`, on its device.

    Every rank passes the full tensor, so nothing is communicated.
    """
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.size() > 1:
        tensor = local(distribute_tensor(tensor, mesh, placements, src_data_rank=None))
    return tensor.to(parameter.device)
