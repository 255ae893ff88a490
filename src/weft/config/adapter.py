"""The section `adapter` of a run, and the layers of a model that an adapter changes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from pydantic import Field

from weft.config.model import ModelSection
from weft.config.section import Folder, Section
from weft.config.suggest import nearest
from weft.errors import UserError

# Names of an adapter's tensors. For a linear layer they are parameters of the layer, such as `q_proj.lora_a`; for
# stacked experts their names follow the name of the stacked weight, such as `experts.gate_proj_lora_a`.
# `lora_a0` and `lora_b0` are the initial values of PiSSA, whose product is subtracted from the base weight.
TENSORS = ("lora_a", "lora_b", "lora_magnitude", "lora_a0", "lora_b0")
RECORD = "adapter.json"  # only in checkpoints of adapters, which do not contain the weights of the base model
STACKED = ("gate_proj", "up_proj", "down_proj")  # the stacked weights of a layer's experts
MULTIPLE = 16  # of which the number of inputs of a quantized layer must be a multiple
ROUTERS = ("router", "gate")  # linear layers that choose experts, which no adapter changes


class AdapterSection(Section):
    """A low-rank adapter (LoRA; Hu et al., 2021): trains two small matrices A and B per layer, whose product is added
    to the layer's weight W, and freezes the model itself. The layer then multiplies by W + scale * B A.

    Frozen weights are held in `training.dtype`. A and B are float32, like all trained parameters, and are cast to
    `training.dtype` in each forward pass. Checkpoints contain only the adapter. The head of a reward model
    (`model.num_labels`) is trained as a full weight, and is part of the adapter.
    """

    type: Literal["lora"] = "lora"
    """The kind of adapter."""
    r: int = Field(16, ge=1)
    """Rank: the number of rows of A and of columns of B."""
    alpha: float = Field(32.0, gt=0)
    """Numerator of the scale, which is `alpha` / `r`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability of the inputs of A."""
    targets: Literal["auto", "all-linear"] | list[str] = "auto"
    """Layers with an adapter. `auto`: all linear layers of the blocks, which are the projections of attention
    (`q_proj`, `k_proj`, `v_proj`, `o_proj`; with latent attention `q_a_proj`, `kv_b_proj` and so on) and of the MLP
    (`gate_proj`, `up_proj`, `down_proj`), also of shared experts; `all-linear`: these, and the stacked weights of the
    experts; or a list of names, such as `[q_proj, v_proj]`. A name stands for each layer whose dotted name ends with
    it or, if it contains `*`, matches it as a pattern: `experts.up_proj`, `layers.0.*`. (Patterns of `training.freeze`
    must match the beginning of a name, too.) Embeddings, the output head and routers have no adapter.
    """
    rslora: bool = False
    """Whether the scale is `alpha` / sqrt(`r`), which keeps large ranks stable (rsLoRA; Kalajdzievski, 2023)."""
    dora: bool = False
    """Whether each row of W + scale * B A is normalized and multiplied by a trained magnitude (DoRA; Liu et al.,
    2024).
    """
    init: Literal["default", "gaussian", "pissa"] = "default"
    """Initial values. `default`: A is uniform as in `torch.nn.Linear` and B is 0; `gaussian`: A is normal with standard
    deviation 1 / `r`, and B is 0; `pissa`: B A is the part of W with its `r` largest singular values, and is
    subtracted from W (PiSSA; Meng et al., 2024).
    """
    from_: Folder | None = Field(None, alias="from")
    """Adapter with which the training starts: a run or checkpoint with an adapter, or a PEFT folder. It sets `r`,
    `alpha`, `targets`, `rslora`, `dora` and `init`; a run also sets `quantize`.
    """
    quantize: Literal["nf4", "int8"] | None = None
    """Format of the frozen weights of linear layers and experts, in groups of up to 64 weights with a common scale.
    `nf4`: 4 bits, quantiles of a normal distribution (QLoRA; Dettmers et al., 2023); `int8`: 8 bits. Products are
    computed in `training.dtype`. Default: not quantized.
    """

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


class LayerShape(NamedTuple):
    """The shape of a linear layer's weight, `[outputs, inputs]`, or of stacked experts `[experts, outputs, inputs]`."""

    outputs: int
    inputs: int
    experts: int | None = None

    @property
    def size(self) -> int:
        """The number of weights."""
        return self.outputs * self.inputs * (self.experts or 1)


def decoder_layers(model: ModelSection) -> dict[str, LayerShape]:
    """Returns the linear layers and stacked experts in the blocks of the built-in decoder: name -> shape."""
    found: dict[str, LayerShape] = {}
    for layer in range(model.num_hidden_layers):
        prefix = f"layers.{layer}"
        found |= {f"{prefix}.attention.{name}": shape for name, shape in _attention(model).items()}
        moe, hidden = model.moe, model.hidden_size
        if moe is None or not model.has_experts(layer):
            found |= _mlp(f"{prefix}.mlp", hidden, model.inner_width, model.mlp == "gated")
            continue
        inner = moe.moe_intermediate_size or model.inner_width
        for name, shape in _mlp(f"{prefix}.mlp.experts", hidden, inner, True).items():
            found[name] = shape._replace(experts=moe.num_experts)
        if moe.n_shared_experts:
            found |= _mlp(f"{prefix}.mlp.shared", hidden, inner * moe.n_shared_experts, model.mlp == "gated")
    return found


def _attention(model: ModelSection) -> dict[str, LayerShape]:
    hidden, heads, mla = model.hidden_size, model.num_attention_heads, model.mla
    if mla is None:
        queries, keys = heads * model.qk_head_dim, model.kv_heads * model.qk_head_dim
        into = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        return {name: LayerShape(size, hidden) for name, size in into.items()} | {"o_proj": LayerShape(hidden, queries)}
    found = {"q_proj": LayerShape(heads * model.qk_head_dim, hidden)}
    if mla.q_lora_rank is not None:
        found = {
            "q_a_proj": LayerShape(mla.q_lora_rank, hidden),
            "q_b_proj": LayerShape(heads * model.qk_head_dim, mla.q_lora_rank),
        }
    return found | {
        "kv_a_proj": LayerShape(mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        "kv_b_proj": LayerShape(heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "o_proj": LayerShape(hidden, heads * mla.v_head_dim),
    }


def _mlp(prefix: str, hidden: int, inner: int, gated: bool) -> dict[str, LayerShape]:
    found = {f"{prefix}.gate_proj": LayerShape(inner, hidden)} if gated else {}
    return found | {f"{prefix}.up_proj": LayerShape(inner, hidden), f"{prefix}.down_proj": LayerShape(hidden, inner)}


def is_stacked(name: str) -> bool:
    """Whether a layer's name is the name of a stacked weight of experts, such as `layers.0.mlp.experts.up_proj`."""
    parts = name.split(".")
    return parts[-1] in STACKED and parts[-2:-1] == ["experts"]


def adapted_layers(adapter: AdapterSection, layers: Collection[str], stacked: Collection[str]) -> list[str]:
    """Returns the names of the layers with an adapter, in the order of `layers`.

    Args:
        layers: names of all linear layers and stacked experts in the blocks of the model.
        stacked: the names in `layers` that are stacked experts.

    Raises:
        UserError: a name in `targets` matches no layer, or the adapter's options do not work for stacked experts.
    """
    targets = adapter.targets
    if targets == "auto":
        chosen = [name for name in layers if name not in stacked]
    elif targets == "all-linear":
        chosen = list(layers)
    else:
        for target in targets:
            if not any(names_layer(name, target) for name in layers):
                raise UserError(f"adapter.targets: {unknown_target(target, layers)}")
        chosen = [name for name in layers if any(names_layer(name, target) for target in targets)]
    if not chosen:
        raise UserError("adapter.targets: the model has no linear layers (nn.Linear) in its blocks; remove the adapter")
    for key, chosen_value in (("dora", adapter.dora), ("dropout", adapter.dropout)):
        if chosen_value and any(name in stacked for name in chosen):
            raise UserError(
                f"adapter.{key}: stacked experts do not support {key}; remove the key, or leave the experts out of "
                "adapter.targets"
            )
    return chosen


def unquantizable(name: str, inputs: int) -> str | None:
    """Returns why a layer with this number of inputs cannot be quantized; None if it can."""
    if inputs % MULTIPLE == 0:
        return None
    return f"{name} has {inputs} inputs, which is not a multiple of {MULTIPLE}; remove the key"


def names_layer(name: str, target: str) -> bool:
    """Whether an item of `adapter.targets` stands for the layer `name`."""
    return name == target or name.endswith(f".{target}") or ("*" in target and fnmatchcase(name, target))


def unknown_target(target: str, layers: Collection[str]) -> str:
    """Returns the message for an item of `adapter.targets` that matches no layer."""
    leaf = target.rpartition(".")[2]
    if leaf in ("lm_head", "embed_tokens", "router"):
        what = {"lm_head": "the output head", "embed_tokens": "the embedding", "router": "the router"}[leaf]
        return f"{target!r}: {what} cannot have an adapter; remove this name"
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    near = nearest(target, layers if "." in target else leaves)
    hint = f"did you mean {near!r}?" if near else f"the layers are called {', '.join(leaves)}"
    return f"{target!r} matches no layer; {hint}"


def layer_of(tensor: str) -> tuple[str, str] | None:
    """Splits the name of an adapter's tensor into the name of the layer and one of `TENSORS`; None for other names.

    `layers.0.attention.q_proj.lora_a` has the layer `layers.0.attention.q_proj`, and
    `layers.0.mlp.experts.up_proj_lora_a` the layer `layers.0.mlp.experts.up_proj`.
    """
    for kind in TENSORS:
        for separator in (".", "_"):
            if tensor.endswith(f"{separator}{kind}"):
                return tensor.removesuffix(f"{separator}{kind}"), kind
    return None


def trained_heads(model: object) -> tuple[str, ...]:
    """Returns the names of the weights that are trained in full beside an adapter: the head of a reward model.

    Args:
        model: the section `model`.
    """
    return ("score.weight",) if isinstance(model, ModelSection) and model.num_labels else ()


def adapter_parameters(adapter: AdapterSection, layers: Mapping[str, LayerShape], chosen: Sequence[str]) -> int:
    """Returns the number of trained parameters of an adapter on the layers `chosen`."""
    total = 0
    for name in chosen:
        shape = layers[name]
        total += (shape.experts or 1) * adapter.r * (shape.inputs + shape.outputs)
        total += shape.outputs if adapter.dora else 0
    return total
