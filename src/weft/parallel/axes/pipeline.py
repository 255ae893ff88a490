"""Pipeline parallelism with PyTorch's schedules: each rank has some of the layers.

The schedules are GPipe (Huang et al., 2019), 1F1B and interleaved 1F1B (Narayanan et al., 2021), zero-bubble schedules
(Qi et al., 2023), and DualPipeV (DeepSeek-AI, 2024). A stage is a decoder without the layers of the other stages, so
parameter names do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from weft.config.mesh import SEVERAL_STAGES, ParallelSection
from weft.data.batches.batch import Batch
from weft.models.forward import return_normalizers
from weft.observe.status import alive
from weft.parallel.axes.local_stages import Stages
from weft.parallel.axes.torch_private import Stage
from weft.parallel.local_parameters import local
from weft.parallel.model_state import state_of
from weft.parallel.objective import Objective, Totals
from weft.parallel.passes import FrozenModel, Passes, check_no_compute
from weft.parallel.stages import embeds_at_end, rank_of_stage
from weft.parallel.world import World

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


class PipelinePasses(Passes):
    """Runs a step's micro-batches through all pipeline stages, in the order of a schedule."""

    model: Stages

    def __init__(
        self,
        model: Stages,
        objective: Objective,
        world: World,
        parallel: ParallelSection,
        frozen: Mapping[str, FrozenModel] | None = None,
    ):
        super().__init__(model, objective, world, parallel, frozen)
        check_no_compute(objective)
        self.stages, self.group, self.ranks = model.stages, world.group("pp"), world.shape.pp
        self.count = self.ranks * len(self.stages)
        self.output_dtype = torch.promote_types(model.dtype or torch.float32, torch.float32)
        sends_compute = parallel.pp_residual == "compute" and model.dtype is not None
        self.hidden_dtype: Any = model.dtype if sends_compute else self.output_dtype
        self.schedules: dict[tuple, Any] = {}
        self.tied_head, model.run = TiedHead(model, world, parallel), self.logits
        for stage in self.stages.values():
            stage.register_forward_pre_hook(self._add_inputs, with_kwargs=True)
            if not stage.ends:
                stage.register_forward_hook(lambda _, __, hidden: hidden.to(self.hidden_dtype))
            if self.normalizers:
                return_normalizers(stage)

    def train(
        self,
        micro_batches: Sequence[Batch],
        *,
        weight: float,
        learned_tokens: float,
        seed: Callable[[int], int],
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Runs forward and backward of the micro-batches in the schedule's order, and reduces gradients at the end.

        All ranks of a pipeline must pass the same micro-batches. Arguments and result are described in `Passes.train`.
        """
        self.totals = Totals(self.scalars, self.world.device)
        # First, because an objective's `prepare` runs the stages, which sets `inputs` and `seed`.
        self.micro_batches, inputs, shards = self.inputs_of_step(micro_batches, learned_tokens / loss_scale)
        self.inputs = list(zip(inputs, shards, strict=True))
        self.seed, self.weight, self.loss_scale = seed, weight, loss_scale
        size = len(self.micro_batches[0].tokens)
        schedule = self._schedule(len(micro_batches), size)
        numbers = torch.arange(len(micro_batches)).repeat_interleave(size)  # the micro-batch of each sequence
        tokens = [torch.cat([inputs["tokens"] for inputs, _ in self.inputs])] if self.model.begins else []
        schedule.step(*tokens, number=numbers, target=numbers if self.model.ends else None, return_outputs=False)
        self.tied_head.reduce_gradient()
        self.inputs = []
        return self.reduce_totals(self.totals.vector)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Returns `Totals.vector` of a batch. Runs the stages one after another."""
        totals = Totals(self.scalars, self.world.device)
        batch, shard = self.shard(batch, self.prepare([batch])[0])
        outputs = self._run_stages(self.complete(self.objective.inputs(shard), batch, shard, None), shard)
        if self.model.ends:
            totals.add(self.objective.loss(outputs, shard))
        return self.reduce_totals(totals.vector)

    def outputs(self, inputs: dict[str, Any], shard: Batch) -> torch.Tensor:
        """Returns the model's outputs for this rank's shard of a batch, on all ranks of the pipeline."""
        found, dtype = self._run_stages(inputs, shard), self.output_dtype
        if inputs.get("labels") is not None or self.model.config.num_labels:
            shape = (*shard.tokens.shape, *self._columns(inputs))
        else:  # the shape of one token's outputs, from the logits of no tokens
            function, size = inputs.get("logits_function"), self.model.config.vocab_size or 0
            none = torch.empty(0, size, dtype=dtype, device=self.world.device)
            shape = (*shard.tokens.shape, *(none if function is None else function(none, slice(0, 0))).shape[1:])
        return self._broadcast(found, shape)

    def logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the logits of the tokens `logits_to_keep` of full sequences, on all ranks of the pipeline."""
        shape = (len(inputs["tokens"]), len(inputs["logits_to_keep"]), self.model.config.vocab_size or 0)
        return self._broadcast(self._run_stages(inputs), shape)

    def _broadcast(self, found: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns what the last stage found, of this shape and in `output_dtype`, on all ranks."""
        dtype, device = self.output_dtype, self.world.device
        outputs = found.to(dtype) if self.model.ends else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(outputs.contiguous(), group=self.group, group_src=self.tied_head.last)
        return outputs

    def _run_stages(self, inputs: dict[str, Any], shard: Any = None) -> torch.Tensor:
        """Runs a batch through all stages. The result is the model's outputs only on the rank of the last stage."""
        self.inputs, self.seed = [(inputs, shard)], None
        number, x = torch.zeros(1, dtype=torch.int64), inputs["tokens"]
        for stage in range(self.count):
            rank, previous = (rank_of_stage(self.parallel, n, self.ranks) for n in (stage, stage - 1))
            if stage and rank != previous and self.group.rank() in (rank, previous):
                if self.group.rank() == previous:
                    dist.send(x.contiguous(), group=self.group, group_dst=rank)
                else:
                    x = self._empty_hidden(*inputs["tokens"].shape, self.world.device)
                    dist.recv(x, group=self.group, group_src=previous)
            if stage in self.stages:
                x = self.stages[stage](x, number=number)
        return x

    def reduce_totals(self, total: torch.Tensor) -> torch.Tensor:
        """Sums totals in place over `cp` and the stages. The totals of all stages but the last are 0."""
        dist.all_reduce(total, group=self.group)
        return super().reduce_totals(total)

    @property
    def root_modules(self) -> Sequence[nn.Module]:
        """The pipeline stages of this rank."""
        return tuple(self.stages.values())

    def after_update(self) -> None:
        """Must be called after weights change. Updates the last stage's copy of tied embeddings."""
        self.tied_head.copy_weight()

    def _add_inputs(self, stage: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook of a stage: completes the arguments. In training, seeds the random generators first.

        The schedule passes the tokens or the residual stream (in `given`) and the index of the micro-batch (in
        `named`). The hook replaces the index with the other inputs of that micro-batch, such as positions.
        """
        number = int(named["number"][0])
        inputs, _ = self.inputs[number]
        if self.seed is not None:
            alive()
            self.seed_micro_batch(self.micro_batches[number], self.seed)
        return given, {key: value for key, value in inputs.items() if key != "tokens"}

    def _schedule(self, count: int, size: int) -> Any:
        """Returns the schedule for `count` micro-batches of `size` sequences."""
        tokens = self.inputs[0][1].tokens
        columns = self._columns(self.inputs[0][0])
        key = (count, size, tokens.shape[1])
        if key not in self.schedules:
            hidden = self._empty_hidden(size, tokens.shape[1], "meta").requires_grad_()
            out = torch.empty((*tokens.shape, *columns), dtype=self.output_dtype, device="meta", requires_grad=True)
            ids = torch.empty(tokens.shape, dtype=tokens.dtype, device="meta")
            stages = [
                Stage(
                    stage,
                    number,
                    self.count,
                    self.world.device,
                    input_args=ids if stage.begins else hidden,
                    output_args=out if stage.ends else hidden,
                    group=self.group,
                )
                for number, stage in self.stages.items()
            ]
            name = self.parallel.pp_schedule
            logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.WARNING)  # it logs its name
            self.schedules[key] = get_schedule_class(SCHEDULES[name])(
                stages if name in SEVERAL_STAGES else stages[0], count, loss_fn=self._loss, scale_grads=False
            )
        return self.schedules[key]

    def _loss(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self.totals.add(self.objective.loss(outputs, self.inputs[int(target[0])][1]))
        divided = loss / self.weight
        return divided if self.loss_scale == 1.0 else divided * self.loss_scale

    def _columns(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the shape of the outputs for one token, if the last stage is called with labels."""
        following = inputs.get("next_labels")
        if following is None:
            return (2,) if self.normalizers else ()
        return (1 + self.normalizers + following.shape[-1],)

    def _empty_hidden(self, sequences: int, tokens: int, device: torch.device | str) -> torch.Tensor:
        """Returns an uninitialized residual stream, `[sequences, tokens / tp, hidden]`."""
        shape = (sequences, tokens // self.world.shape.tp, self.model.config.hidden_size)
        return torch.empty(shape, dtype=self.hidden_dtype, device=device)


def passes_of(
    model: nn.Module,
    objective: Objective,
    world: World,
    parallel: ParallelSection,
    frozen: Mapping[str, FrozenModel] | None = None,
) -> Passes:
    """Returns `PipelinePasses` for the stages of a pipeline, and `Passes` for any other sharded model.

    A model that runs otherwise has its own class in its state.
    """
    state = state_of(model)
    if state is not None and state.passes is not None:
        return state.passes(model, objective, world, parallel, frozen)
    if isinstance(model, Stages):
        return PipelinePasses(model, objective, world, parallel, frozen)
    return Passes(model, objective, world, parallel, frozen)


class TiedHead:
    """Keeps the last stage's copy of the embedding equal to the embedding of the first stage (`embeds_at_end`).

    The first stage has the embedding matrix, and the last stage has a copy. The copy's gradient is added to the
    matrix's gradient. Only the matrix, not the copy, is in the optimizer and in checkpoints.
    """

    def __init__(self, model: Stages, world: World, parallel: ParallelSection):
        self.group, self.copy, self.owner = world.group("pp"), None, None
        ranks = world.shape.pp
        self.first, self.last = 0, rank_of_stage(parallel, ranks * len(model.stages) - 1, ranks)
        if embeds_at_end(model.config):
            self.owner = model.embed_tokens
            for stage in model.stages.values():
                if stage.ends and not stage.begins:
                    self.copy = stage.embed_tokens

    @torch.no_grad()
    def reduce_gradient(self) -> None:
        """Adds the gradient of the last stage's copy to the gradient of the matrix, and clears the copy's gradient."""
        owner_grad = None if self.owner is None else self.owner.weight.grad
        if self.copy is not None and self.copy.weight.grad is not None:
            grad = local(self.copy.weight.grad)
            self.copy.weight.grad = None
            if self.owner is None:
                dist.send(grad.contiguous(), group=self.group, group_dst=self.first)
            elif owner_grad is not None:
                local(owner_grad).add_(grad)
        elif owner_grad is not None and self.last != self.first:
            local(owner_grad).add_(self._receive(owner_grad, self.last))

    @torch.no_grad()
    def copy_weight(self) -> None:
        """Copies the values of the matrix to the last stage's copy."""
        if self.copy is not None and self.owner is not None:
            local(self.copy.weight).copy_(local(self.owner.weight))
        elif self.copy is not None:
            local(self.copy.weight).copy_(self._receive(self.copy.weight, self.first))
        elif self.owner is not None and self.last != self.first:
            dist.send(local(self.owner.weight).contiguous(), group=self.group, group_dst=self.last)

    def _receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        received = torch.empty_like(local(like), memory_format=torch.contiguous_format)
        dist.recv(received, group=self.group, group_src=source)
        return received
