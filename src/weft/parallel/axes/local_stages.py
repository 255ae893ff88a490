"""Builds the pipeline stages of a rank, and holds them in one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from weft.config.mesh import ParallelSection
from weft.config.model import ModelSection
from weft.models.decoder import Decoder
from weft.parallel.stages import embeds_at_end, stage_ranges, stages_of_rank
from weft.parallel.world import World


def build_local_stages(
    section: ModelSection, parallel: ParallelSection, world: World, sequence: int, dtype: torch.dtype
) -> dict[int, Decoder]:
    """Builds this rank's pipeline stages on the current default device. Returns stage index -> stage.

    Args:
        section: configuration of the full model.
        sequence: number of tokens per sequence, to balance the cost of attention.
        dtype: dtype of the stages' computation.
    """
    ranges = stage_ranges(section, parallel.model_copy(update={"pp": world.shape.pp}), sequence)
    stages = {}
    for number in stages_of_rank(parallel, world.axis_rank("pp"), world.shape.pp):
        stage = Decoder(section)
        stage.begins, stage.ends, stage.dtype = number == 0, number == len(ranges) - 1, dtype
        for layer in range(section.all_layers):
            if layer not in ranges[number] and not (stage.ends and layer >= section.num_hidden_layers):
                setattr(stage.layers, str(layer), None)
        removed = [] if stage.begins else ["embed_positions"]
        if not stage.begins and not (stage.ends and embeds_at_end(section)):
            removed.append("embed_tokens")
        for name in removed if stage.ends else [*removed, "norm", "lm_head", "score"]:
            setattr(stage, name, None)
        stages[number] = stage
    return stages


class Stages(Decoder):
    """A module that contains this rank's pipeline stages. Parameters have the names of the full model.

    In training, a schedule calls the stages. A call of this module is a forward pass of generation, for which all ranks
    of the pipeline pass the same arguments, and get the logits. The embedding matrix is a parameter of the first stage.
    If the last stage has a copy of the matrix (`embeds_at_end`), the copy is not a parameter of this module.

    Attributes:
        run: computes the logits; set by `PipelinePasses`.
    """

    run: Callable[..., torch.Tensor]

    def __init__(self, stages: Mapping[int, nn.Module]):
        nn.Module.__init__(self)
        decoders = [stage for stage in stages.values() if isinstance(stage, Decoder)]
        self.config, self.dtype, self.pattern = decoders[0].config, decoders[0].dtype, decoders[0].pattern
        self.stages = dict(zip(stages, decoders, strict=True))
        self.begins = any(stage.begins for stage in decoders)
        self.ends = any(stage.ends for stage in decoders)
        for name in ("embed_tokens", "embed_positions", "norm", "lm_head", "score"):
            owners = [stage for stage in decoders if stage.begins] if name == "embed_tokens" else decoders
            setattr(self, name, next((m for stage in owners if (m := getattr(stage, name)) is not None), None))
        layers: Any = zip(*(stage.layers for stage in decoders), strict=True)
        own: list[Any] = [next((layer for layer in copies if layer is not None), None) for copies in layers]
        self.layers = nn.ModuleList(own)

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.run(inputs)

    def train(self, mode: bool = True) -> Stages:
        """Sets this module and its stages to training or evaluation mode."""
        super().train(mode)
        for stage in self.stages.values():
            stage.train(mode)
        return self
