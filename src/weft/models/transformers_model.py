"""Causal language models of Hugging Face Transformers with the `forward` arguments of the built-in decoder.

A model's class, parameters and parameter names are those of Transformers. Only `forward` differs, so training,
generation and checkpoints work as with the decoder. Nothing is downloaded, and no code of a model folder is run.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.config.transformers_model import MISSING, TransformersModelSection
from weft.errors import UserError
from weft.kernels.cross_entropy import logprobs_of_logits, token_logprobs
from weft.kernels.document_attention import segment_mask
from weft.torch_private import children_of

_CROSSES_DOCUMENTS = (
    "its attention crosses documents; set data.document_attention to false and data.packing to concatenate"
)
_NOT_CAUSAL = (
    "its logits depend on later tokens, so it cannot be trained to predict them; choose a causal language model"
)


class TransformersModel(nn.Module):
    """A mixin for a Transformers class, which gives `forward` the arguments of the built-in decoder's `forward`.

    Attributes:
        takes: names of the arguments of the Transformers class's `forward`.
        takes_cache: whether the Transformers class uses a key/value cache.
        masks: whether the Transformers class takes a 4D mask, for attention within documents.
        learned_positions: whether the model has a learned position embedding, whose size limits the sequence length.
        head: (scale, soft-cap) of a plain linear head; None for other heads (see `_find_head`).
    """

    config: Any
    takes: set[str]
    takes_cache: bool
    masks: bool
    learned_positions: bool
    head: tuple[float, float | None] | None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        cache: Any = None,
        labels: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Runs the model.

        Args:
            tokens: int64 `[batch, seq]`.
            positions: `[batch, seq]`, each token's position in its document; ignored if the model takes no positions.
            segments: `[batch, seq]`, index of each token's document. Some models ignore it; `missing_capability`
                reports these models.
            cache: a cache that `new_cache` returned. Earlier tokens are in the cache, and `tokens` are added to it.
            labels: `[batch, seq]`, the token ids to return log-probabilities of.
            temperature: divides the logits.

        Returns:
            Logits `[batch, seq, vocab]`; with `labels`, the labels' log-probabilities `[batch, seq]`, in nats. Both are
            at least float32.
        """
        arguments = self._arguments(tokens, positions, segments, cache)
        if labels is not None and self.head is not None:  # like the decoder, without materializing all logits
            scale, softcap = self.head
            weight = self.get_output_embeddings().weight
            hidden = self.base_model(tokens, **arguments)[0].to(weight.dtype)  # the residual stream may be wider
            hidden = hidden if scale == temperature else hidden * (scale / temperature)
            return self.token_logprobs(hidden, weight, labels, None if softcap is None else softcap / temperature)
        logits = super().forward(tokens, **arguments).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if temperature == 1.0 else logits / temperature
        if labels is None:
            return logits
        return logprobs_of_logits(logits, labels)

    def new_cache(self) -> Any:
        """Returns an empty cache of the Transformers class, for `forward`."""
        from transformers.cache_utils import DynamicCache

        return DynamicCache(config=self.config)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Selects an implementation of experts that supports `dtype`: grouped products do not support float64."""
        if dtype == torch.float64 and self._can_set_experts_implementation():
            self.set_experts_implementation("eager")

    def _arguments(self, tokens, positions, segments, cache) -> dict[str, Any]:
        """Returns the arguments of the Transformers class's `forward`, except tokens."""
        arguments: dict[str, Any] = {"use_cache": cache is not None}
        if positions is not None and "position_ids" in self.takes:
            arguments["position_ids"] = positions
        if cache is not None:
            arguments["past_key_values"] = cache
        elif segments is not None and self.masks:
            mask = segment_mask(segments)  # bool [batch, 1, seq, seq]
            if self.config._attn_implementation == "eager":  # adds the mask to the scores
                dtype = self.get_input_embeddings().weight.dtype
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
                    ~mask, torch.finfo(dtype).min
                )
            arguments["attention_mask"] = mask
        return arguments


def build_transformers_model(section: TransformersModelSection, *, seed: int | None = None) -> nn.Module:
    """Builds the model of a section's config.json: a `TransformersModel` in float32.

    Args:
        section: the `model:` section of type hf.
        seed: seed of the random initial weights, which the class draws unsharded on the current device. None:
            parameters are on the meta device, and the constructor computes buffers (rotary frequencies) on the CPU.

    Raises:
        UserError: Transformers is missing or too old, or does not support the model or its config.json.
    """
    base, config = _transformers_class(section)
    # The class keeps its name and module, by which Transformers looks up conversions of weight names.
    kind = type(base.__name__, (TransformersModel, base), {"__module__": base.__module__})
    options = {} if section.attn_implementation is None else {"attn_implementation": section.attn_implementation}
    if seed is not None:
        torch.manual_seed(seed)
    try:
        with contextlib.nullcontext() if seed is not None else _parameters_on_meta():
            model = kind._from_config(config, dtype=torch.float32, **options)
    except ImportError as error:
        what = f"model.attn_implementation: {_first_line(error)}; install the package, or set the key to sdpa"
        raise UserError(what, section.path) from error
    except (ValueError, TypeError, AttributeError, ZeroDivisionError, RuntimeError) as error:  # raised by constructors
        raise UserError(
            f"model: {base.__name__}: {_first_line(error)}; fix config.json, or set the key in model.config",
            section.path,
        ) from error
    module = sys.modules[base.__module__]
    model.takes = set(inspect.signature(base.forward).parameters)
    model.takes_cache = "past_key_values" in model.takes
    # A 4D mask would replace a model's sliding windows. Such a model's own masks restart where positions restart.
    windows = any(hasattr(module, name) for name in ("create_sliding_window_causal_mask", "create_chunked_causal_mask"))
    model.masks = model.config._attn_implementation in ("sdpa", "eager") and not windows
    embedding = model.get_input_embeddings()
    model.learned_positions = any(isinstance(m, nn.Embedding) and m is not embedding for m in model.modules())
    model.token_logprobs = token_logprobs
    model.head = _find_head(base, model)
    return model


def _transformers_class(section: TransformersModelSection) -> tuple[type, Any]:
    """Returns the Transformers class of a section's config.json, and its config object."""
    try:
        # Not from the package itself, of which the type checker would read all models.
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError as error:
        raise UserError(MISSING) from error
    version = sys.modules["transformers"].__version__
    if int(version.partition(".")[0]) < 5:
        raise UserError(f"type: hf needs transformers 5 or newer, found {version}; update transformers")
    model_type = section.config["model_type"]
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in section.config:
            hint = "Weft does not run code in the model's folder (auto_map); choose a model that transformers has"
        else:
            near = difflib.get_close_matches(model_type, CONFIG_MAPPING, 1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else "a newer version of transformers may have it"
        what = f"model: transformers {version} has no model_type {model_type!r}; {hint}"
        raise UserError(what, section.path)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(dict(section.config))
    except Exception as error:  # transformers' validation raises many types
        raise UserError(f"model: transformers rejects this config.json: {_first_line(error)}", section.path) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = f"model: transformers has no causal language model of model_type {model_type!r}; choose another model"
        raise UserError(what, section.path)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind, config


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, and the second line if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A context manager: parameters that are created in the `with` block are on the meta device.

    Buffers are created on the usual device, because constructors compute buffers and checkpoints do not contain them.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and param.device.type != "meta":  # this check keeps tied parameters tied
            setattr(self, name, nn.Parameter(param.to("meta"), requires_grad=param.requires_grad))

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Allocates uninitialized parameters on `device`. Buffers keep their values, and tied parameters stay tied."""
    buffers = dict(model.named_buffers())
    uses: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            uses.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, first_name), *others in uses.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


class _FixedHiddenStates(nn.Module):
    """Replaces a model's base model (all layers except the head); always returns the same hidden states."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.last_hidden_state = hidden

    def forward(self, *arguments, **named):
        return self

    def __getitem__(self, key):
        return (self.last_hidden_state,)[key]

    def __getattr__(self, name):
        return self if name in ("decoder", "model") else None


def _find_head(base: type, model: nn.Module) -> tuple[float, float | None] | None:
    """Returns (scale, soft-cap) if the logits are `softcap(scale x head(hidden states))`, else None.

    The values are determined by running the class's `forward` with random hidden states and a small head.
    """
    head, prefix = model.get_output_embeddings(), model.base_model_prefix
    head_name = next((name for name, child in model.named_children() if child is head), None)
    plain_linear = isinstance(head, nn.Linear) and head.bias is None
    if not plain_linear or head_name is None or prefix not in children_of(model):
        return None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, head.in_features, generator=generator)
    small = nn.Linear(head.in_features, 8, bias=False, device="cpu")
    replaced = {**children_of(model), prefix: _FixedHiddenStates(hidden), head_name: small}
    shell = object.__new__(type(model))
    shell.__dict__ = {**model.__dict__, "_modules": replaced}
    with torch.no_grad():
        small.weight.copy_(torch.randn(small.weight.shape, generator=generator))
        try:
            logits = base.forward(shell, torch.zeros(1, 4, dtype=torch.long), use_cache=False).logits
        except Exception:  # `forward` needs more than hidden states
            return None
        plain = F.linear(hidden, small.weight)
        softcap = getattr(model.config, "final_logit_softcapping", None)
        for scale, cap in ((1.0, None), ((logits / plain).median().item(), None), (1.0, softcap)):
            expected = plain * scale
            if cap is not None:
                expected = cap * torch.tanh(expected / cap)
            if logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-5, atol=1e-5):
                return scale, cap
    return None


@torch.no_grad()
def missing_capability(model: nn.Module, *, documents: bool) -> str | None:
    """Checks that a model is causal and, with `documents`, that attention stays within documents.

    All ranks must call this function if the model is sharded.

    Returns:
        A message that says which check failed and what to do; None if the checks passed.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]], device=device) % model.get_input_embeddings().num_embeddings
    positions = torch.arange(8, device=device).unsqueeze(0)
    segments, restarted = positions // 4, positions % 4  # two documents of four tokens
    training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            plain = model(tokens=tokens, positions=positions)
            # The effect of the first token on later tokens, as a scale for differences.
            effect = (plain - model(tokens=_zeroed(tokens, 0, 1), positions=positions))[:, 1:].abs().max()
            changed = model(tokens=_zeroed(tokens, 7, 8), positions=positions)
            if not _unchanged(model, plain[:, :-1], changed[:, :-1], effect):
                return _NOT_CAUSAL
            if not documents:
                return None
            try:
                second, after_change = (
                    model(tokens=ids, positions=restarted, segments=segments)[:, 4:]
                    for ids in (tokens, _zeroed(tokens, 0, 4))
                )
            except (RuntimeError, ValueError, TypeError, IndexError):  # the model does not take a mask of this form
                return _CROSSES_DOCUMENTS
            # Other documents must not change any bit. Alone, a document has other shapes: sums round differently.
            single = model(tokens=tokens[:, 4:], positions=restarted[:, 4:])
            separate = _unchanged(model, second, after_change, effect)
            close = bool((second - single).abs().max() <= 0.1 * single.abs().max())
            return None if separate and close else _CROSSES_DOCUMENTS
    finally:
        model.train(training)
        for module in model.modules():
            if hasattr(module, "reshard"):  # FSDP: restores the sharded parameters that the optimizer has
                module.reshard()


def _zeroed(tokens: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns a copy of `tokens` `[batch, seq]` with 0 at the positions from `start` to `stop` (exclusive)."""
    changed = tokens.clone()
    changed[:, start:stop] = 0
    return changed


def _unchanged(model: nn.Module, one: torch.Tensor, other: torch.Tensor, effect: torch.Tensor) -> bool:
    """Whether two outputs are bitwise equal; if the model has experts, whether the outputs are close.

    The rounding of an expert's output depends on the number of tokens that are routed to the expert.

    Args:
        model: the model that computed the outputs.
        one, other: the outputs.
        effect: largest change of the outputs if one input token changes; a scale for the tolerance.
    """
    if not any(parameter.dim() > 2 for parameter in model.parameters()):
        return torch.equal(one, other)
    return bool((one - other).abs().max() <= 0.3 * effect)
