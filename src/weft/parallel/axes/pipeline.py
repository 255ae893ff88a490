"""Pipeline parallelism by PyTorch's own schedules: each rank has some of the layers, and passes on what they give.

GPipe (Huang et al., 2019), 1F1B and interleaved 1F1B (Narayanan et al., 2021), zero-bubble schedules (Qi et al., 2023),
DualPipeV (DeepSeek-AI, 2024). A stage is a whole decoder without the layers of the others, so names stay what they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from weft.config.mesh import SEVERAL_STAGES, ParallelSection
from weft.config.model import ModelSection
from weft.data.batches.batch import Batch
from weft.models.decoder import Decoder
from weft.observe.status import alive
from weft.parallel.local_parameters import local
from weft.parallel.objective import Objective, Totals
from weft.parallel.passes import Passes
from weft.parallel.ranks import mistake
from weft.parallel.stages import rank_of_stage, stage_ranges, stages_of_rank
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


def split(
    section: ModelSection, parallel: ParallelSection, world: World, sequence: int, dtype: torch.dtype
) -> dict[int, Decoder]:
    """This rank's stages by their numbers, on the current device.

    Args:
        sequence: tokens per row, of which the cost of attention depends.
        dtype: of computing.
    """
    ranges = stage_ranges(section, parallel.model_copy(update={"pp": world.shape.pp}), sequence)
    stages = {}
    for number in stages_of_rank(parallel, world.place("pp"), world.shape.pp):
        stage = Decoder(section)
        stage.begins, stage.ends, stage.dtype = number == 0, number == len(ranges) - 1, dtype
        for layer in range(section.num_hidden_layers):
            if layer not in ranges[number]:
                setattr(stage.layers, str(layer), None)
        elsewhere = [] if stage.begins else ["embed_positions"]
        if not stage.begins and not (stage.ends and section.tie_word_embeddings):
            elsewhere.append("embed_tokens")
        for name in elsewhere if stage.ends else [*elsewhere, "norm", "lm_head"]:
            setattr(stage, name, None)
        stages[number] = stage
    return stages


class Stages(Decoder):
    """What a rank has of a model, under the whole model's names. It cannot be called: its stages are, by a schedule.

    A tied head's matrix is the first stage's; the last one's copy of it is not seen here.
    """

    def __init__(self, stages: Mapping[int, nn.Module]):
        nn.Module.__init__(self)
        own = [stage for stage in stages.values() if isinstance(stage, Decoder)]
        self.config, self.dtype = own[0].config, own[0].dtype
        self.stages = dict(zip(stages, own, strict=True))
        self.begins, self.ends = any(stage.begins for stage in own), any(stage.ends for stage in own)
        for name in ("embed_tokens", "embed_positions", "norm", "lm_head"):
            of = [stage for stage in own if stage.begins] if name == "embed_tokens" else own
            setattr(self, name, next((part for stage in of if (part := getattr(stage, name)) is not None), None))
        places: Any = zip(*(stage.layers for stage in own), strict=True)
        layers: list[Any] = [next((layer for layer in place if layer is not None), None) for place in places]
        self.layers = nn.ModuleList(layers)

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        raise RuntimeError("a part of a pipeline is run by its schedule")

    def train(self, mode: bool = True) -> Stages:
        """As `nn.Module.train`, for the stages too."""
        super().train(mode)
        for stage in self.stages.values():
            stage.train(mode)
        return self


class PipelinePasses(Passes):
    """A step's micro-batches through all stages, in the order of a schedule."""

    model: Stages

    def __init__(self, model: Stages, objective: Objective, world: World, parallel: ParallelSection):
        super().__init__(model, objective, world, parallel)
        if self.compute is not None:
            raise mistake(
                f"objective: {type(objective).__name__}.compute calls the model, and with parallel.pp a schedule does; "
                "give the objective `inputs` and `loss` (`prepare` may call the model), or set parallel.pp: 1"
            )
        self.stages, self.group, self.ranks = model.stages, world.group("pp"), world.shape.pp
        self.count = self.ranks * len(self.stages)
        self.hidden_dtype = torch.promote_types(model.dtype or torch.float32, torch.float32)
        self.schedules: dict[tuple, Any] = {}
        self.tied = TiedHead(model, world, parallel)
        for stage in self.stages.values():
            stage.register_forward_pre_hook(self._give_the_rest, with_kwargs=True)

    def train(
        self,
        micro_batches: Sequence[Batch],
        *,
        weight: float,
        learned: float,
        seed: Callable[[Batch], None],
        factor: float = 1.0,
    ) -> torch.Tensor:
        """As `Passes.train`. Ranks of one pipeline call it with the same rows."""
        self.totals = Totals(self.scalars, self.world.device)
        size = max(len(micro_batch.tokens) for micro_batch in micro_batches)
        self.micro_batches = [filled(micro_batch, size) for micro_batch in micro_batches]
        prepared = self.prepare(self.micro_batches)
        self.seed, self.weight, self.factor = seed, weight, factor
        self.given = [
            self._given(*self.place(*both), learned / factor) for both in zip(self.micro_batches, prepared, strict=True)
        ]
        schedule = self._schedule(len(micro_batches), size)
        rows = torch.arange(len(micro_batches)).repeat_interleave(size)  # which micro-batch each row is of
        tokens = [torch.cat([inputs["tokens"] for inputs, _ in self.given])] if self.model.begins else []
        schedule.step(*tokens, number=rows, target=rows if self.model.ends else None, return_outputs=False)
        self.tied.add_gradients()
        self.given = []
        return self.of_rows(self.totals.vector)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """As `Passes.evaluate`: one stage after the other."""
        totals = Totals(self.scalars, self.world.device)
        batch, own = self.place(batch, self.prepare([batch])[0])
        outputs = self._walk(self.complete(self.objective.inputs(own), batch, own, None), own)
        if self.model.ends:
            totals.add(self.objective.loss(outputs, own))
        return self.of_rows(totals.vector)

    def look(self, inputs: dict[str, Any], own: Batch) -> torch.Tensor:
        """As `Passes.look`: the last stage sends its outputs to the others."""
        found, dtype = self._walk(inputs, own), self.hidden_dtype
        if inputs.get("labels") is not None:
            shape = own.tokens.shape
        else:
            shape = (*own.tokens.shape, self.model.config.vocab_size or 0)
        outputs = found.to(dtype) if self.model.ends else torch.empty(shape, dtype=dtype, device=self.world.device)
        dist.broadcast(outputs.contiguous(), group=self.group, group_src=self.tied.last)
        return outputs

    def _given(self, batch: Batch, own: Batch, learned: float) -> tuple[dict[str, Any], Batch]:
        return self.complete(self.objective.inputs(own), batch, own, learned), own

    def _walk(self, inputs: dict[str, Any], own: Batch) -> torch.Tensor:
        """A batch through the stages, one after the other; the outputs on the rank of the last one."""
        self.given, self.seed = [(inputs, own)], None
        number, x = torch.zeros(1, dtype=torch.int64), inputs["tokens"]
        for place in range(self.count):
            holder, before = (rank_of_stage(self.parallel, n, self.ranks) for n in (place, place - 1))
            if place and holder != before and self.group.rank() in (holder, before):
                if self.group.rank() == before:
                    dist.send(x.contiguous(), group=self.group, group_dst=holder)
                else:
                    x = self._hidden(len(own.tokens), own.tokens.shape[1], self.world.device)
                    dist.recv(x, group=self.group, group_src=before)
            if place in self.stages:
                x = self.stages[place](x, number=number)
        return x

    def of_rows(self, total: torch.Tensor) -> torch.Tensor:
        """What the last stage has found, on all ranks."""
        dist.all_reduce(total, group=self.group)
        return super().of_rows(total)

    @property
    def roots(self) -> Sequence[nn.Module]:
        """The modules that are called."""
        return tuple(self.stages.values())

    def updated(self) -> None:
        """Weights have changed: by an update, or because they were filled in."""
        self.tied.copy_weights()

    def _give_the_rest(self, stage: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """What a stage needs beside a schedule's tensors is found by the micro-batch's number."""
        which = int(named["number"][0])
        inputs, _ = self.given[which]
        if self.seed is not None:
            alive()
            self.seed(self.micro_batches[which])
        return given, {key: value for key, value in inputs.items() if key != "tokens"}

    def _schedule(self, count: int, size: int) -> Any:
        """The schedule of so many micro-batches of so many rows."""
        tokens = self.given[0][1].tokens
        key = (count, size, tokens.shape[1])
        if key not in self.schedules:
            hidden = self._hidden(size, tokens.shape[1], "meta").requires_grad_()
            out = torch.empty(tokens.shape, dtype=hidden.dtype, device="meta", requires_grad=True)
            ids = torch.empty(tokens.shape, dtype=tokens.dtype, device="meta")
            stages = [
                PipelineStage(
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
            several = name in SEVERAL_STAGES
            logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.WARNING)  # not: which it is
            self.schedules[key] = get_schedule_class(SCHEDULES[name])(
                stages if several else stages[0], count, loss_fn=self._loss, scale_grads=False
            )
        return self.schedules[key]

    def _loss(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self.totals.add(self.objective.loss(outputs, self.given[int(target[0])][1]))
        divided = loss / self.weight
        return divided if self.factor == 1.0 else divided * self.factor

    def _hidden(self, rows: int, tokens: int, device: torch.device | str) -> torch.Tensor:
        """Room for what goes from stage to stage: the residual stream, of which a tensor rank has its slice."""
        config = self.model.config
        dtype = self.hidden_dtype
        return torch.empty(rows, tokens // self.world.shape.tp, config.hidden_size, dtype=dtype, device=device)


class TiedHead:
    """Keeps the last stage's copy of a tied embedding what the first stage's matrix is.

    The copy's gradient goes to the first stage, which alone has the matrix in its optimizer and in checkpoints.
    """

    def __init__(self, model: Stages, world: World, parallel: ParallelSection):
        self.group, self.copy, self.owner = world.group("pp"), None, None
        ranks = world.shape.pp
        self.first, self.last = 0, rank_of_stage(parallel, ranks * len(model.stages) - 1, ranks)
        if model.config.tie_word_embeddings:
            if model.embed_tokens is not None:
                self.owner = model.embed_tokens
            for stage in model.stages.values():
                if stage.ends and not stage.begins:
                    self.copy = stage.embed_tokens

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Move the copy's gradient to the matrix."""
        of_owner = None if self.owner is None else self.owner.weight.grad
        if self.copy is not None and self.copy.weight.grad is not None:
            grad = local(self.copy.weight.grad)
            self.copy.weight.grad = None
            if self.owner is None:
                dist.send(grad.contiguous(), group=self.group, group_dst=self.first)
            elif of_owner is not None:
                local(of_owner).add_(grad)
        elif of_owner is not None and self.last != self.first:
            mine = local(of_owner)
            grad = torch.empty_like(mine, memory_format=torch.contiguous_format)
            dist.recv(grad, group=self.group, group_src=self.last)
            mine.add_(grad)

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Make the copy what the matrix is."""
        if self.copy is not None and self.owner is not None:
            local(self.copy.weight).copy_(local(self.owner.weight))
        elif self.copy is not None:
            mine = local(self.copy.weight)
            weight = torch.empty_like(mine, memory_format=torch.contiguous_format)
            dist.recv(weight, group=self.group, group_src=self.first)
            mine.copy_(weight)
        elif self.owner is not None and self.last != self.first:
            dist.send(local(self.owner.weight).contiguous(), group=self.group, group_dst=self.last)


def filled(batch: Batch, rows: int) -> Batch:
    """A batch of so many rows: those that are missing are copies of the first that count for nothing."""
    missing = rows - len(batch.tokens)
    return batch.pad(missing) if missing else batch
