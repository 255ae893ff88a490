"""Stages of PyTorch's pipeline schedules, which work on PyTorch 2.11 as on later versions.

Like the files that run a plan of `weft.parallelize`, which also need it, this file imports only PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, _backward

# Private names and their uses. Without them: use `PipelineStage`, as PyTorch 2.13, which lacks `_validate_fwd_outputs`.
NAMES = {
    "torch.distributed.pipelining:PipelineStage._get_init_p2p_neighbors_ops": "V-shaped schedules of PyTorch 2.11 on "
    "gloo, where a rank with two adjacent stages would send to itself",
    "torch.distributed.pipelining:PipelineStage._prepare_forward_infra": "stages of PyTorch 2.11 that receive tensors "
    "without gradient",
    "torch.distributed.pipelining._backward:construct_reverse_graph": "split backward passes of PyTorch 2.11, which "
    "are wrong where a parameter's gradient comes from several results",
    "torch.distributed.pipelining._backward:get_param_groups": "see construct_reverse_graph",
}


class OldStage(PipelineStage):
    """A stage of PyTorch 2.11, with what later versions mended."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # The neighbor can be on the same rank, and gloo cannot send from a rank to itself.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # PyTorch 2.11 makes all received tensors require gradients, which tensors of integers cannot.
        trains, self.has_backward = self.has_backward, False
        prepared = super()._prepare_forward_infra(*args, **kwargs)
        self.has_backward = trains
        for number in self.args_recv_info if trains and not self.is_first else ():
            for info, meta in self._received(number):
                info.buffer.requires_grad_(meta.requires_grad)
        return prepared

    def _received(self, number: int) -> Iterable[tuple[Any, Any]]:
        return zip(self.args_recv_info[number], getattr(self, "inputs_meta"), strict=True)  # noqa: B009

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        # Later versions only check if TORCH_DISTRIBUTED_DEBUG=DETAIL, and never the outputs of the last stage.
        pass

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Takes the inputs of a micro-batch from the previous stage, which is on the same rank."""
        outputs = [prev_stage_outputs] if isinstance(prev_stage_outputs, torch.Tensor) else prev_stage_outputs
        for (info, meta), tensor in zip(self._received(mb_index), outputs, strict=True):
            info.buffer = tensor.detach().requires_grad_(meta.requires_grad)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        """Runs a backward pass, or a part of one. Returns the gradients of the received tensors, and parameter groups.

        PyTorch 2.11 sends no gradient back that is None, but the previous stage waits for it.
        """
        if backward_type == "full":
            gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        else:
            if isinstance(self.submod, FSDPModule):  # the schedule reduces gradients at the end
                self.submod.set_is_last_backward(False)
                self.submod.set_reshard_after_backward(False)
                self.submod.set_requires_gradient_sync(False)
            if backward_type == "weight":
                _backward_weight(bwd_kwargs["param_groups"])
                return (), None
            outputs, given = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            parameters = [one for one in self.submod.parameters() if one.requires_grad]
            gradients, groups = _backward_input(outputs, given, bwd_kwargs["input_values"], parameters)
        if self.is_first:
            return gradients, groups
        both = zip(gradients, bwd_kwargs["input_values"], strict=True)
        return tuple(torch.zeros_like(value) if one is None else one for one, value in both), groups


def _backward_input(
    outputs: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor] | None,
    inputs: Sequence[Any],
    parameters: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor | None], list[dict[str, Any]]]:
    """Computes the gradients of a stage's inputs. Returns these, and groups of parameters for `_backward_weight`.

    As `stage_backward_input` of PyTorch 2.13. That of PyTorch 2.11 raises if an input has no gradient, or an output
    needs none; and it loses the nodes of custom functions, which only other nodes keep alive there.

    Args:
        given: gradients of the outputs; None: all are 1.
    """
    graded = [number for number, one in enumerate(outputs) if one.requires_grad]
    used = [outputs[number] for number in graded]
    edges = [get_gradient_edge(one) for one in used]
    leaves = {number: one for number, one in enumerate(inputs) if isinstance(one, torch.Tensor) and one.requires_grad}
    gradients: list[torch.Tensor | None] = [None] * len(inputs)
    begin = [torch.ones_like(one) for one in used] if given is None else [given[number] for number in graded]
    if not used or not leaves:  # there is nothing to send back early
        torch.autograd.backward(used, begin)
        return gradients, []
    nodes = {get_gradient_edge(one).node: one for one in parameters}
    graph = _backward.construct_reverse_graph([edge.node for edge in edges])
    groups: Any = _backward.get_param_groups([get_gradient_edge(one).node for one in leaves.values()], [*nodes], graph)
    handles = []
    for group in groups:
        group["edges"], group["intermediates"] = edges, list(group["intermediates"])
        group["parameters"] = [(node, nodes[node]) for node in group["params"]]
        group["grads"] = [()] * len(group["intermediates"])
        for place, node in enumerate(group["intermediates"]):

            def hook(grads: Any, found: list[Any] = group["grads"], place: int = place) -> None:
                found[place] = grads

            handles.append(node.register_prehook(hook))
    found = torch.autograd.grad(used, list(leaves.values()), begin, retain_graph=True, allow_unused=True)
    for number, gradient in zip(leaves, found, strict=True):
        gradients[number] = gradient
    for handle in handles:
        handle.remove()
    for one in outputs:
        one.detach_()  # frees what only the outputs keep
    return gradients, groups


def _backward_weight(groups: list[dict[str, Any]]) -> None:
    """Adds the gradients of parameters that `_backward_input` left out.

    As `stage_backward_weight` of PyTorch 2.13. That of PyTorch 2.11 adds the gradients of several results of a
    function, and counts twice what comes from a node that is behind another of its group.
    """
    for group in groups:
        nodes, grads = group.pop("intermediates"), group.pop("grads")
        edges, given, handles = [], [], []
        for node, found in zip(nodes, grads, strict=True):
            for place, gradient in enumerate(found):
                if gradient is not None:
                    edges.append(GradientEdge(node, place))
                    given.append(gradient)
            if len(nodes) > 1:  # not what else arrives from other nodes of the group
                handles.append(node.register_prehook(lambda _, found=found: found))
        parameters = group.pop("parameters")
        targets = [GradientEdge(node, 0) for node, _ in parameters]
        summed = torch.autograd.grad(edges, targets, given, allow_unused=True) if edges else [None] * len(targets)
        for (_, parameter), gradient in zip(parameters, summed, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for handle in handles:
            handle.remove()


# Only PyTorch 2.11 has the method.
Stage: type[PipelineStage] = OldStage if hasattr(PipelineStage, "get_outputs_meta") else PipelineStage
