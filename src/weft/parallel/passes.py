"""Runs the forward and backward passes of a step's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.config.mesh import ParallelSection
from weft.data.batches.batch import Batch
from weft.models.decoder import Decoder
from weft.models.forward import forward_of
from weft.models.layers.moe import Router
from weft.observe.status import alive
from weft.parallel.embedding_noise import EmbeddingNoise
from weft.parallel.model_state import state_of
from weft.parallel.objective import Forward, Loss, Objective, Totals
from weft.parallel.ranks import error_on_all_ranks
from weft.parallel.world import World


class FrozenModel(Protocol):
    """A model that an objective calls in `prepare`, beside the trained model, and that training does not change."""

    def outputs(self, trained: Passes, inputs: Mapping[str, Any], batch: Batch, shard: Batch) -> torch.Tensor:
        """Returns the outputs for this rank's shard of a batch, on all ranks of a pipeline.

        The caller must disable gradients, and set the trained model to evaluation mode.

        Args:
            trained: the passes of the trained model.
            inputs: the model's arguments, as `Objective.inputs` returns them.
            batch: the batch on this rank's device.
            shard: this rank's shard of the batch.
        """
        ...

    def tensors(self) -> Iterable[torch.Tensor]:
        """Returns the tensors that this rank keeps for the model between steps."""
        ...


class Passes:
    """Runs micro-batches one after another, without a pipeline.

    Args:
        model: sharded model from `build_sharded_model`.
        frozen: the objective's frozen models, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        world: World,
        parallel: ParallelSection,
        frozen: Mapping[str, FrozenModel] | None = None,
    ):
        self.frozen = frozen or {}
        self.model, self.objective, self.world, self.parallel = model, objective, world, parallel
        self.normalizers = bool(getattr(objective, "normalizers", False))
        # Number of multi-token prediction layers that the objective trains.
        ahead = model.config.num_nextn_predict_layers if isinstance(model, Decoder) else 0
        self.following = ahead if getattr(objective, "mtp_loss_factor", 0.0) else 0
        self.forward = forward_of(model, normalizers=self.normalizers)
        state = state_of(model)
        self.sequence_shard = None if state is None else state.sequence_shard
        self.cuda_graphs = state is not None and state.plan.compile == "reduce-overhead" and world.device.type == "cuda"
        self.has_routers = any(isinstance(module, Router) for module in model.modules())
        # Without such layers, their loss is not one of the numbers that ranks add.
        found = tuple(getattr(objective, "scalars", ()))
        self.scalars: tuple[str, ...] = tuple(name for name in found if name != "mtp_loss" or self.following)
        self.compute = getattr(objective, "compute", None)
        self._prepare = getattr(objective, "prepare", None)
        noise = getattr(objective, "embedding_noise", 0.0)
        self.noise = EmbeddingNoise(model, noise, world, self.sequence_shard) if noise else None

    def train(
        self,
        micro_batches: Sequence[Batch],
        *,
        weight: float,
        learned_tokens: float,
        seed: Callable[[int], int],
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Accumulates gradients of the loss divided by `weight`. The last backward pass reduces them over ranks.

        Args:
            weight: weight of the global batch; must not be 0.
            learned_tokens: number of tokens with loss in the global batch; normalizes auxiliary losses of experts.
            seed: function from the index of a sample to the seed of its random numbers in this step.
            loss_scale: multiplier of the loss in backward.

        Returns:
            `Totals.vector` of the micro-batches, with the loss before division and scaling. It is the same on all ranks
            that process the same sequences.
        """
        totals = Totals(self.scalars, self.world.device)
        steps = zip(micro_batches, self.prepare_step(micro_batches), strict=True)
        for number, (micro_batch, prepared) in enumerate(steps):
            alive()
            set_last_micro_batch(self.model, number + 1 == len(micro_batches))
            batch, shard = self.shard(micro_batch, prepared)
            self.seed_micro_batch(micro_batch, seed)
            loss = totals.add(self.loss(batch, shard, learned_tokens / loss_scale))
            divided = loss / weight
            (divided if loss_scale == 1.0 else divided * loss_scale).backward()
        finish_sums(self.model)
        return self.reduce_totals(totals.vector)

    def seed_micro_batch(self, micro_batch: Batch, seed: Callable[[int], int]) -> None:
        """Must be called before each forward pass of training. Seeds the random generators for a micro-batch.

        Dropout is drawn for a micro-batch, with the seed of the micro-batch's first sample. Noise of embeddings is
        drawn for each sample.
        """
        # torch.manual_seed also prepares the generators of absent devices, which takes 0.17 ms.
        seed_all = torch.default_generator.manual_seed if self.world.device.type == "cpu" else torch.manual_seed
        seed_all(seed(int(micro_batch.samples[0])))
        if self.noise is not None:
            self.noise.begin(micro_batch, seed)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Returns `Totals.vector` of a batch, which is the same on all ranks that process the same sequences."""
        totals = Totals(self.scalars, self.world.device)
        totals.add(self.loss(*self.shard(batch, self.prepare([batch])[0]), None))
        return self.reduce_totals(totals.vector)

    def after_update(self) -> None:
        """Must be called after weights change: after an optimizer step, and after weights are loaded.

        Does nothing in this class; subclasses update copies of weights.
        """

    def after_replacement(self) -> None:
        """Must be called after weights are set outside of a step."""
        self.free_gathered()
        self.after_update()

    def free_gathered(self) -> None:
        """Frees the weights that FSDP2 keeps all-gathered. The next forward pass gathers the current weights."""
        for root in self.root_modules:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @property
    def root_modules(self) -> Sequence[nn.Module]:
        """The modules whose forward is called: the model, or its pipeline stages."""
        return (self.model,)

    def loss(self, batch: Batch, shard: Batch, learned_tokens: float | None) -> torch.Tensor | Loss:
        """Runs a forward pass, and returns the loss of this rank's shard of a batch."""
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # they may reuse the memory of earlier passes
        if self.compute is not None:
            return self.compute(lambda inputs: self.forward(self.complete(inputs, batch, shard, learned_tokens)), shard)
        outputs = self.forward(self.complete(self.objective.inputs(shard), batch, shard, learned_tokens))
        return self.objective.loss(outputs, shard)

    @torch.no_grad()
    def prepare(self, micro_batches: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
        """Returns the result of `Objective.prepare` for each micro-batch: {} if the objective has no `prepare`."""
        if self._prepare is None:
            return [{} for _ in micro_batches]
        with self.evaluating():
            return [dict(self._prepare(*self._forward_without_gradient(one))) for one in micro_batches]

    def prepare_step(self, micro_batches: Sequence[Batch]) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the result of `prepare` for each micro-batch of a training step, after `Objective.combine`."""
        if (combine := getattr(self.objective, "combine", None)) is None:
            for micro_batch in micro_batches:  # one at a time: its tensors can be large
                yield from self.prepare([micro_batch])
            return
        prepared = self.prepare(micro_batches)
        combine(prepared, self._sum_over_data)
        yield from prepared

    def inputs_of_step(
        self, micro_batches: Sequence[Batch], learned_tokens: float
    ) -> tuple[list[Batch], list[dict[str, Any]], list[Batch]]:
        """Returns the micro-batches of a step with as many sequences in each, the model's inputs, and the shards.

        Padding is copies of sequences, with loss weight 0.
        """
        size = max(len(one.tokens) for one in micro_batches)
        padded = [one.pad(size - len(one.tokens)) if len(one.tokens) < size else one for one in micro_batches]
        both = [self.shard(*each) for each in zip(padded, self.prepare_step(padded), strict=True)]
        inputs = [self.complete(self.objective.inputs(shard), batch, shard, learned_tokens) for batch, shard in both]
        return padded, inputs, [shard for _, shard in both]

    def _sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        total, axes = tensor.detach().clone(), ("dp_replicate", "dp_shard")
        for axis in (axis for axis in axes if self.world.shape.sizes[axis] > 1):
            dist.all_reduce(total, group=self.world.group(axis))
        return total

    @torch.no_grad()
    def prepare_full(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns what is cached of a batch, tensors `[batch, seq, ...]`, for complete sequences.

        This is the result of `Objective.prepare_frozen` or, if the objective does not have it, of `prepare`.
        """
        make: Any = getattr(self.objective, "prepare_frozen", self._prepare)
        with self.evaluating():
            prepared = dict(make(*self._forward_without_gradient(batch)))
        if self.sequence_shard is None:
            return prepared
        full, _ = self.shard(batch, {})
        return {name: self.sequence_shard.gather(values, full) for name, values in prepared.items()}

    def stop_preparing(self) -> None:
        """Must be called if batches already have what `prepare_full` returns. Frees the frozen models."""
        self.frozen = {}
        if not hasattr(self.objective, "prepare_frozen"):
            self._prepare = None

    def _forward_without_gradient(self, micro_batch: Batch) -> tuple[Forward, Batch]:
        """Returns the arguments of `Objective.prepare`: a function that calls a model, and this rank's shard."""
        alive()
        batch, shard = self.shard(micro_batch, {})

        def forward(inputs: Mapping[str, Any], model: str | None = None) -> torch.Tensor:
            if model is None:
                return self.outputs(self.complete(inputs, batch, shard, None), shard)
            if model not in self.frozen:
                name = type(self.objective).__name__
                raise error_on_all_ranks(
                    f"objective: {name}.prepare calls the model {model!r}, which `frozen_models` does not have; add it"
                )
            return self.frozen[model].outputs(self, inputs, batch, shard)

        return forward, shard

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which the model is in evaluation mode."""
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)

    @torch.no_grad()
    def forward_only(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Returns the model's outputs for the inputs of the objective, without gradient and dropout.

        Returns:
            A tensor `[batch, seq, ...]` of all micro-batches. With context parallelism, it has the complete sequences.
        """
        found = []
        with self.evaluating():
            for micro_batch in micro_batches:
                forward, shard = self._forward_without_gradient(micro_batch)
                outputs = forward(self.objective.inputs(shard))
                found.append(
                    outputs if self.sequence_shard is None else self.sequence_shard.gather(outputs, micro_batch)
                )
        return torch.cat(found)

    def outputs(self, inputs: dict[str, Any], shard: Batch) -> torch.Tensor:
        """Returns the model's outputs for this rank's shard of a batch. The caller must disable gradients."""
        return self.forward(inputs)

    def shard(self, batch: Batch, prepared: dict[str, torch.Tensor]) -> tuple[Batch, Batch]:
        """Returns (batch on this rank's device, this rank's shard of the batch, with `prepared` added to `extra`)."""
        batch = batch.to(self.world.device)
        if self.following:
            batch = batch.with_following(self.following)
        shard = batch if self.sequence_shard is None else self.sequence_shard.shard(batch)
        return batch, replace(shard, extra={**shard.extra, **prepared}) if prepared else shard

    def complete(
        self, inputs: Mapping[str, Any], batch: Batch, shard: Batch, learned_tokens: float | None
    ) -> dict[str, Any]:
        """Returns an objective's inputs, with the additional inputs that `cp` and auxiliary losses need.

        Args:
            learned_tokens: normalizes auxiliary losses of experts; None disables these losses (in evaluation).
        """
        inputs = dict(inputs)
        if self.sequence_shard is not None:
            inputs |= self.sequence_shard.extra_inputs(batch)
            if inputs.get("positions") is None:  # the model would count from the start of the shard
                inputs["positions"] = shard.positions
        if self.has_routers and learned_tokens is not None:
            inputs["loss_weights"] = batch.router_weights(shard) / (learned_tokens or 1.0)
        return inputs

    def reduce_totals(self, total: torch.Tensor) -> torch.Tensor:
        """Sums totals in place over the ranks that process shards of the same sequences."""
        if self.world.shape.cp > 1:
            dist.all_reduce(total, group=self.world.group("cp"))
        return total


def check_no_compute(objective: Objective) -> None:
    """Raises UserError on all ranks if an objective calls the model itself, which a schedule does."""
    if getattr(objective, "compute", None) is not None:
        raise error_on_all_ranks(
            f"objective: {type(objective).__name__}.compute calls the model, but with parallel.pp a schedule does; "
            "define `inputs` and `loss` instead (`prepare` can call the model), or set parallel.pp: 1"
        )


def set_last_micro_batch(model: nn.Module, last: bool) -> None:
    """Sets whether the next backward pass is the last of the step. Call it before each backward pass.

    The last backward pass reduces gradients. With `reduce_gradients: every`, each backward pass reduce-scatters
    gradients over `dp_shard` x `cp`, and the last one also all-reduces gradients over `dp_replicate`. FSDP2 units
    that are not sharded, or not resharded after forward, stay gathered until the last backward pass.

    Args:
        last: whether this is the last micro-batch of the step.
    """
    state = state_of(model)
    if state is not None and state.sums is not None and last:
        state.sums.begin(model.parameters())
    if state is None or not isinstance(model, FSDPModule):
        return  # a single rank
    parallel = state.plan.parallel
    model.set_requires_gradient_sync(last or state.reduces_every)
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(last)
    for module in model.modules():
        if isinstance(module, FSDPModule) and (module in state.unsharded_units or parallel.reshards is False):
            module.set_reshard_after_backward(last, recurse=False)


def finish_sums(model: nn.Module) -> None:
    """Waits until the gradients are summed over replicas. Call it after the last backward pass of a step."""
    state = state_of(model)
    if state is not None and state.sums is not None:
        state.sums.finish()
