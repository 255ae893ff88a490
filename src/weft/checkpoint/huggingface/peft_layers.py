"""Lists the layers that PEFT adapts in a Transformers model, and the weights of Weft's model that they contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.checkpoint.huggingface.folder import names_in_files
from weft.checkpoint.huggingface.slices import transformed
from weft.config.adapter import STACKED
from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.families.peft_config import in_transformers
from weft.models.build import build_model
from weft.models.decoder import Decoder
from weft.models.huggingface_weights import Transform, invert, saved_tensors
from weft.models.initialize import on_meta
from weft.models.layers.moe import Router


@dataclass(frozen=True)
class PeftLayer:
    """A layer of a Transformers model. Its rows are the rows of one or several weights of Weft's model.

    Attributes:
        name: name of the module in the Transformers model, or of the stacked weights of experts.
        weights: names of Weft's weights, without `.weight`, in the order of their concatenation.
        rows: number of rows of each of these weights (of one expert, if weights are stacked).
        columns: number of columns.
        groups: number of groups of rows; each group has rows of all weights (see `Transform.groups`).
        experts: number of stacked experts; 0 for a linear layer.
        expert: index of the expert, if the layer is a linear layer of one expert and Weft stacks the experts.
        transposed: whether the layer's weight is `[in, out]` (GPT-2).
    """

    name: str
    weights: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    groups: int = 1
    experts: int = 0
    expert: int | None = None
    transposed: bool = False

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Splits `[rows of the layer, ...]` into the rows of each weight."""
        if len(self.rows) == 1:
            return [tensor]
        sizes = tuple(count // self.groups for count in self.rows)
        rest = tuple(tensor.shape[1:])
        return [
            transformed(tensor, Transform(sizes=sizes, part=part, groups=self.groups), (0,) * tensor.dim(), (n, *rest))
            for part, n in enumerate(self.rows)
        ]

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the rows of the layer; the inverse of `split`."""
        sizes = tuple(count // self.groups for count in self.rows) if len(self.rows) > 1 else ()
        return invert(Transform(sizes=sizes, groups=self.groups), tensors)


@dataclass(frozen=True)
class PeftModel:
    """The names under which PEFT's files store adapters and weights of a model.

    Attributes:
        layers: name of a layer in the Transformers model -> the layer. With experts, a layer for each expert (as in
            transformers 4) and a layer for the stacked weights (as in transformers 5).
        weights: name of a weight in the Transformers model -> (name, transform) of Weft's weights that it contains.
        shapes: name of a weight of Weft's model -> its shape.
        tied_head: name of an output head that shares the weight of the embedding; None: there is none.
        head: name of the output head; None: unknown.
    """

    layers: dict[str, PeftLayer]
    weights: dict[str, list[tuple[str, Transform | None]]]
    shapes: dict[str, tuple[int, ...]]
    tied_head: str | None
    head: str | None


def peft_model(model: nn.Module | ModelSection | TransformersModelSection) -> PeftModel:
    """Returns the layers and weights of a model under the names in PEFT's files.

    Args:
        model: a model, which can be quantized, or its section.

    Raises:
        UserError: no Hugging Face family has this architecture.
    """
    if isinstance(model, Decoder):
        model = model.config
    if isinstance(model, ModelSection):
        return _of_decoder(model)
    module = build_model(model) if isinstance(model, TransformersModelSection) else model
    found: dict[str, PeftLayer] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) or hasattr(layer, "in_features"):
            sizes: Any = layer
            found[name] = PeftLayer(name, (name,), (sizes.out_features,), sizes.in_features)
    state = module.state_dict(keep_vars=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    head = getattr(module, "get_output_embeddings", lambda: None)()
    name = next((one for one, layer in module.named_modules() if head is not None and layer is head), None)
    embedding: Any = getattr(module, "get_input_embeddings", lambda: None)()
    tied = name if embedding is not None and getattr(head, "weight", None) is embedding.weight else None
    found.pop(tied or "", None)
    return PeftModel(found, {one: [(one, None)] for one in shapes}, shapes, tied, name)


def _of_decoder(section: ModelSection) -> PeftModel:
    with on_meta():
        decoder = Decoder(section)
    shapes = {name: tuple(tensor.shape) for name, tensor in saved_tensors(decoder).items()}
    linear = {f"{name}.weight" for name, module in decoder.named_modules() if isinstance(module, nn.Linear | Router)}
    stacked = {name for name in shapes if name.rpartition(".")[2] in STACKED and len(shapes[name]) == 3}
    layers, weights = {}, {}
    for external, targets in names_in_files(section).items():
        name = in_transformers(external)
        weights[name] = targets
        first, transform = targets[0][0], targets[0][1] or Transform()
        if first not in linear | stacked:
            continue
        layer = PeftLayer(
            name.removesuffix(".weight"),
            tuple(one.removesuffix(".weight") for one, _ in targets),
            tuple(shapes[one][-2] for one, _ in targets),
            shapes[first][-1],
            transform.groups,
            shapes[first][0] if transform.stacked else 0,
            transform.expert,
            transform.transposed,
        )
        layers[layer.name] = layer
        if transform.expert == 0 and first.endswith(".gate_proj"):
            prefix = layer.name.rpartition(".0.")[0]
            stem, experts = first.removesuffix("gate_proj"), shapes[first][0]
            for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                names = tuple(stem + part for part in parts)
                rows, columns = tuple(shapes[one][1] for one in names), shapes[names[0]][2]
                layers[f"{prefix}.{fused}"] = PeftLayer(f"{prefix}.{fused}", names, rows, columns, experts=experts)
    head = "lm_head"
    return PeftModel(layers, weights, shapes, head if section.tie_word_embeddings else None, head)
