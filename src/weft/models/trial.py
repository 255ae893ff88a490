"""The trial of custom components: one forward and backward pass of a small decoder that contains these components.

The trial checks the shapes and dtypes of each component's outputs, and reports exceptions with the component's name. A
second pass with changed tokens checks that later tokens and other documents do not affect any component's output.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.config.components import load_class
from weft.config.model import ModelSection
from weft.config.python_source import NotFound, find_class
from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.models.initialize import initialize
from weft.models.layers.attention import CoreAttention
from weft.models.layers.custom import custom_component
from weft.models.layers.mlp import MLP, intermediate_size, make_activation
from weft.models.layers.moe import Experts
from weft.models.layers.norm import make_norm

BATCH, SEQ = 2, 16
MAX_INTERMEDIATE_SIZE = 128  # limit for the MLP and experts: of custom components, only activations see this size


@dataclass(frozen=True)
class CustomComponent:
    """A custom component of a decoder.

    Attributes:
        key: configuration key, such as `model.norm`.
        type: value of the key, `module:Class`.
        make: instantiates the component as the decoder does.
    """

    key: str
    type: str
    make: Callable[[], Any]

    def __str__(self) -> str:
        """Returns the component's key, type, file and line, such as `model.norm: my_parts:Norm (my_parts.py:12)`.

        For classes of installed packages, file and line are left out.
        """
        module, _, name = self.type.partition(":")
        try:
            source = find_class(module, name)
        except NotFound:
            source = None
        if source is None or _installed(str(source.module.path)):
            return f"{self.key}: {self.type}"
        return f"{self.key}: {self.type} ({source.place})"


def custom_components(config: ModelSection) -> Iterator[CustomComponent]:
    """Yields the custom components of a decoder, except `initialization`, which `initialize` checks."""
    makers: dict[str, Callable[[], Any]] = {
        "norm": lambda: make_norm(config),
        "hidden_act": lambda: make_activation(config.hidden_act),
        "position": lambda: custom_component(config.position, "position", config),
        "attention_implementation": lambda: custom_component(config.attention_implementation, "attention", config),
    }
    for key, make in makers.items():
        if ":" in getattr(config, key):
            yield CustomComponent(f"model.{key}", getattr(config, key), make)
    pattern = config.attention_pattern
    if pattern is not None and ":" in pattern.type:
        make = lambda: load_class(pattern, "attention_pattern")(**pattern.arguments)  # noqa: E731
        yield CustomComponent("model.attention_pattern", pattern.type, make)


def try_components(
    config: ModelSection,
    *,
    seed: int = 0,
    seq: int = SEQ,
    documents: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Checks the custom components of a decoder by forward and backward passes of a decoder with one layer.

    Args:
        config: the `model:` section. If it has no custom components, the function returns immediately.
        seed: seed of the weights. The state of PyTorch's random generators is restored.
        seq: sequence length of training; the passes use at most 16 tokens.
        documents: whether training restricts attention to documents.
        dtype, device: dtype and device of the run's computation, because a component's kernels can be limited to them.

    Raises:
        UserError: a component returns a value that the decoder cannot use, depends on later tokens or other documents,
            or cannot be built on the meta device.
        Exception: an exception that was raised in the component's own file.
    """
    components = list(custom_components(config))
    if not components:
        return
    device = torch.device(device)
    seq = max(2, min(seq, SEQ, config.max_position_embeddings))
    if seq in (config.num_attention_heads, config.kv_heads):  # otherwise transposed queries have the same shape
        seq = max(2, seq - 1) if seq > 2 else 3
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
        trial = Trial(components)
        model = trial.build(_small(config), seed, dtype, device)
        tokens = torch.arange(BATCH * seq, device=device).mul(7).remainder(64).view(BATCH, seq)
        trial.run(lambda: model(tokens).sum().backward())
        model.eval()
        trial.check_dependence(model, tokens, None)
        if documents or config.sliding_window is not None or config.attention_pattern is not None:
            segments = (torch.arange(seq, device=device) >= seq // 2).long().expand(BATCH, seq)
            trial.check_dependence(model, tokens, segments)


def _small(config: ModelSection) -> ModelSection:
    """Returns a copy of `config` with one layer and few parameters.

    Sizes that custom components see are unchanged, except the intermediate size, which only activations see.
    """
    inner, moe = intermediate_size(config), config.moe
    if moe is not None:
        few = min(moe.num_experts, 2)
        moe = moe.model_copy(
            update={
                "num_experts": few,
                "num_experts_per_tok": min(moe.num_experts_per_tok, few),
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": min(moe.moe_intermediate_size or inner, MAX_INTERMEDIATE_SIZE),
                "n_shared_experts": min(moe.n_shared_experts, 1),
            }
        )
    inner = min(inner, MAX_INTERMEDIATE_SIZE)
    sizes = {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": inner, "moe": moe}
    return config.model_copy(update=sizes | {"initializer_range": 0.5})


@dataclass
class Trial:
    """Runs a small decoder with custom components, and checks and records the outputs of the components.

    Attributes:
        components: the custom components of the decoder.
        running: the components that are being called, innermost last.
        outputs: (component, checked outputs) of each call since `check_dependence` last cleared the list.
    """

    components: list[CustomComponent]
    running: list[CustomComponent] = field(default_factory=list)
    outputs: list[tuple[CustomComponent, list[torch.Tensor]]] = field(default_factory=list)

    def run(self, function: Callable[[], Any], *running: CustomComponent) -> Any:
        """Calls a function, and converts exceptions to UserErrors that name the component.

        An exception that passes through a component's file is raised unchanged, unless it is about the meta device.

        Args:
            function: function without arguments, which calls components.
            running: the components that `function` calls directly, instead of through a wrapper that `wrap` returned.
        """
        self.running = list(running)
        try:
            return function()
        except UserError:
            raise
        except Exception as error:
            who = self.running[-1] if self.running else " or ".join(map(str, self.components))
            text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")[:300]
            if "meta" in text:
                raise UserError(
                    f"{who} computes with tensors in __init__, or stores tensors outside of parameters and buffers; "
                    "the decoder is first built on the meta device. Store them in a buffer (register_buffer), a "
                    f"parameter or an nn.ModuleList of an nn.Module, or compute them when called ({text})"
                ) from error
            names = {component.type.partition(":")[0] for component in self.components}
            files = {file for name in names if (file := getattr(sys.modules.get(name), "__file__", None))}
            files = {file for file in files if not _installed(file)}
            if any(frame.filename in files for frame in traceback.extract_tb(error.__traceback__)):
                raise
            raise UserError(f"{who} fails in a small decoder: {text}; check its arguments and outputs") from error

    def build(self, config: ModelSection, seed: int, dtype: torch.dtype, device: torch.device) -> Decoder:
        """Builds a decoder as a training run does: on the meta device, and then allocated and initialized on `device`.

        Wraps the decoder's custom components with `wrap`.

        Args:
            dtype: dtype of the parameters; buffers keep their dtype.
        """
        torch.manual_seed(seed)
        with torch.device("meta"):
            for component in self.components:
                self.run(component.make, component)
            model = Decoder(config)
        model.to_empty(device=device)
        initialize(model, seed)
        for parameter in model.parameters():  # buffers keep their dtype, as in a run
            parameter.data = parameter.data.to(dtype)
        for module in list(model.modules()):
            self._wrap_components(module)
        return model.train()

    def _wrap_components(self, module: nn.Module) -> None:
        by_key = {component.key.removeprefix("model."): component for component in self.components}
        if isinstance(module, Decoder):
            self._wrap_attribute(module, "pattern", by_key.get("attention_pattern"), _check_pattern)
            if "position" in by_key and module.position is not None:
                position, component = module.position, by_key["position"]
                if hasattr(position, "embed"):
                    embed = self.wrap(component, position.embed, _check_same_shape, "embed returned")
                    setattr(position, "embed", embed)  # noqa: B010
                position.register_forward_pre_hook(lambda *_: self.running.append(component))
                position.register_forward_hook(
                    lambda _, inputs, out: self._check(component, inputs, out, _check_rotated, "forward returned")
                )
        if isinstance(module, CoreAttention):
            self._wrap_attribute(module, "own", by_key.get("attention_implementation"), _check_attention)
        if isinstance(module, MLP | Experts):
            self._wrap_attribute(module, "activation", by_key.get("hidden_act"), _check_same_shape)
        for name in ("norm", "attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            self._wrap_attribute(module, name, by_key.get("norm"), _check_same_shape)

    def _wrap_attribute(self, module: nn.Module, name: str, component: CustomComponent | None, check: Callable) -> None:
        call = getattr(module, name, None)
        if component is not None and call is not None:
            delattr(module, name)
            setattr(module, name, self.wrap(component, call, check))

    def wrap(self, component: CustomComponent, call: Callable, check: Callable, verb: str = "returned") -> Callable:
        """Returns a function that calls `call`, and checks and records the output.

        Args:
            component: the component that `call` belongs to.
            call: the component, or one of its methods.
            check: function that checks an output, such as `_check_same_shape`.
            verb: in the message of a failed check, the words between the component's name and the output.
        """

        def wrapped(*inputs: Any) -> Any:
            self.running.append(component)
            return self._check(component, inputs, call(*inputs), check, verb)

        return wrapped

    def _check(self, component: CustomComponent, inputs: tuple, out: Any, check: Callable, verb: str) -> Any:
        self.outputs.append((component, check(component, inputs, out, verb)))
        self.running.pop()
        return out

    @torch.no_grad()
    def check_dependence(self, model: Decoder, tokens: torch.Tensor, segments: torch.Tensor | None) -> None:
        """Checks that no component depends on later tokens or other documents.

        The model runs twice, the second time with some changed tokens.

        Args:
            model: the decoder that `build` returned.
            tokens: `[batch, seq]`.
            segments: `[batch, seq]`, index of each token's document. Each half of a sequence is a document; the tokens
                of the first document are changed. None: the tokens in the second half of each sequence are changed.

        Raises:
            UserError: a component's output changed for tokens that must not see the changed tokens.
        """
        half = tokens.shape[1] // 2
        changed, kept = tokens.clone(), slice(0, half) if segments is None else slice(half, None)
        changed[:, slice(half, None) if segments is None else slice(0, half)] += 13
        passes = []
        for ids in (tokens, changed.remainder(64)):
            self.outputs.clear()
            torch.manual_seed(0)  # for components with dropout in evaluation mode
            self.run(partial(model, ids, segments=segments))
            passes.append(list(self.outputs))
        for (component, before), (_, after) in zip(*passes, strict=True):
            for one, other in zip(before, after, strict=True):
                one, other = one[..., kept, :].double(), other[..., kept, :].double()
                tolerance = max(1e-3, 16 * torch.finfo(before[0].dtype).eps) * one.abs().max()
                if ((one - other).abs() > tolerance).any():
                    hidden = "keys that the mask hides" if segments is not None else "later tokens"
                    mask = "a mask" if segments is not None else "no mask (None), which means causal"
                    raise UserError(
                        f"{component} depends on {hidden}: with {mask}, its output for a token changes if {hidden} "
                        "change; apply the mask, and a causal mask if the mask is None"
                    )


# ---- checks of a component's output: (component, inputs, output, verb) -> checked tensors `[..., seq, size]`. `verb`
# follows the component in the message, such as "embed returned".


def _check_same_shape(component: CustomComponent, inputs: tuple, out: Any, verb: str) -> list[torch.Tensor]:
    return [_check_tensor(component, out, inputs[0].shape, verb)]


def _check_rotated(component: CustomComponent, inputs: tuple, out: Any, verb: str) -> list[torch.Tensor]:
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise UserError(f"{component} {verb} {_describe(out)}, expected two tensors, the queries and the keys")
    return [
        _check_tensor(component, rotated, x.shape, f"{verb}, as {name},")
        for rotated, x, name in zip(out, inputs[:2], ("queries", "keys"), strict=True)
    ]


def _check_attention(component: CustomComponent, inputs: tuple, out: Any, verb: str) -> list[torch.Tensor]:
    q, _, v, _ = inputs
    return [_check_tensor(component, out, torch.Size((*q.shape[:-1], v.shape[-1])), verb)]


def _check_pattern(component: CustomComponent, inputs: tuple, out: Any, verb: str) -> list[torch.Tensor]:
    expected = torch.broadcast_shapes(*(positions.shape for positions in inputs))
    is_mask = isinstance(out, torch.Tensor) and out.dtype == torch.bool and out.dim() == len(expected)
    if not is_mask or any(size not in (1, full) for size, full in zip(out.shape, expected, strict=True)):
        raise UserError(f"{component} {verb} {_describe(out)}, expected a bool tensor of {tuple(expected)}")
    return []


def _check_tensor(component: CustomComponent, out: Any, expected: torch.Size, verb: str) -> torch.Tensor:
    if not isinstance(out, torch.Tensor) or out.shape != expected or not out.is_floating_point():
        raise UserError(f"{component} {verb} {_describe(out)}, expected {tuple(expected)}")
    return out.detach()


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    dtype = "" if value.is_floating_point() else f" {str(value.dtype).removeprefix('torch.')}"
    return f"a{dtype} tensor of {tuple(value.shape)}"


def _installed(file: str) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))
