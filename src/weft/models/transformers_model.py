"""Any causal language model of transformers, behind the forward that the built-in decoder has.

The class is transformers' own, with its parameters and their names; only `forward` is another, so that training,
generation and checkpoints meet what they know. Nothing is fetched, and no code of a folder is run.
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

_MIXES = "it cannot keep documents apart; set data.document_attention to false and data.packing to concatenate"

_LOOKS_AHEAD = (
    "its logits depend on later tokens, so it learns nothing by predicting them; take a model that writes text"
)


class TransformersModel(nn.Module):
    """Mixed into a class of transformers, in front of it: Weft's forward around theirs.

    Attributes:
        takes_cache: whether `forward` appends to a cache; otherwise it takes from it only which columns are padding.
        learned_positions: whether it looks positions up in a table, and so has no more of them.
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
    ) -> torch.Tensor:
        """Run the model.

        Args:
            tokens: int64 `[batch, seq]`.
            positions: `[batch, seq]`, each token's place in its document; not used by models that know none.
            segments: `[batch, seq]`, each token's document; `missing_capability` reports models that ignore it.
            cache: a `weft.generation.cache.KVCache`; transformers' own cache is kept in it.
            labels: `[batch, seq]`.

        Returns:
            Logits `[batch, seq, vocab]`; with `labels` their log-probabilities `[batch, seq]`, in nats. At least
            float32.
        """
        given = self._given(tokens, positions, segments, cache)
        if labels is not None and self.head is not None:
            # As in the decoder: the logits of all positions are never held at once.
            scale, softcap = self.head
            weight = self.get_output_embeddings().weight
            hidden = self.base_model(tokens, **given)[0].to(weight.dtype)  # some have a wide residual stream
            hidden = hidden if scale == 1.0 else hidden * scale
            return self.token_logprobs(hidden, weight, labels, softcap)
        logits = super().forward(tokens, **given).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if cache is not None:
            cache.advance(tokens.shape[1])
        if labels is None:
            return logits
        return logprobs_of_logits(logits, labels)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Choose what depends on the dtype of computing: the grouped products of experts know no float64."""
        if dtype == torch.float64 and self._can_set_experts_implementation():
            self.set_experts_implementation("eager")

    def _given(self, tokens, positions, segments, cache) -> dict[str, Any]:
        """What their forward is given beside the tokens."""
        given: dict[str, Any] = {"use_cache": cache is not None}
        if positions is not None and "position_ids" in self.takes:
            given["position_ids"] = positions
        if cache is not None:
            from transformers import DynamicCache

            if cache.length == 0 and self.takes_cache:
                cache.theirs = DynamicCache(config=self.config)
            if self.takes_cache:
                given["past_key_values"] = cache.theirs
            if cache.starts is not None:
                columns = torch.arange(cache.length + tokens.shape[1], device=tokens.device)
                given["attention_mask"] = (columns >= cache.starts.to(tokens.device).unsqueeze(1)).long()
        elif segments is not None and self.masks:
            mask = segment_mask(segments)  # bool [batch, 1, seq, seq]
            if self.config._attn_implementation == "eager":  # is added to the scores
                dtype = self.get_input_embeddings().weight.dtype
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
                    ~mask, torch.finfo(dtype).min
                )
            given["attention_mask"] = mask
        return given


def build_transformers_model(section: TransformersModelSection, *, seed: int | None = None) -> nn.Module:
    """The model of a section's config.json.

    Args:
        seed: give it its class's random initial weights, drawn in one piece on the current device; None: parameters are
            on the meta device, and buffers (rotations) hold what its constructor computes, on the CPU.

    Returns:
        A `TransformersModel` in float32.

    Raises:
        UserError: transformers is missing or too old, does not know the model, or does not take its config.json.
    """
    base, config = _theirs(section)
    # It goes by the name and module of theirs: transformers looks its tables of weights' names up by them.
    kind = type(base.__name__, (TransformersModel, base), {"__module__": base.__module__})
    options = {} if section.attn_implementation is None else {"attn_implementation": section.attn_implementation}
    if seed is not None:
        torch.manual_seed(seed)
    try:
        with contextlib.nullcontext() if seed is not None else _parameters_on_meta():
            model = kind._from_config(config, dtype=torch.float32, **options)
    except ImportError as error:
        what = f"model.attn_implementation: {_first_line(error)}; install it, or choose sdpa"
        raise UserError(what, section.path) from error
    except (ValueError, TypeError, AttributeError, ZeroDivisionError, RuntimeError) as error:  # what constructors raise
        raise UserError(
            f"model: {base.__name__}: {_first_line(error)}; mend config.json, or set the key in model.config",
            section.path,
        ) from error
    module = sys.modules[base.__module__]
    model.takes = set(inspect.signature(base.forward).parameters)
    model.takes_cache = "past_key_values" in model.takes
    # Their own masks keep windows and documents (by positions that begin anew); one given from outside replaces all.
    windows = any(hasattr(module, name) for name in ("create_sliding_window_causal_mask", "create_chunked_causal_mask"))
    model.masks = model.config._attn_implementation in ("sdpa", "eager") and not windows
    words = model.get_input_embeddings()
    model.learned_positions = any(isinstance(m, nn.Embedding) and m is not words for m in model.modules())
    model.token_logprobs = token_logprobs
    model.head = _head(base, model)
    return model


def _theirs(section: TransformersModelSection) -> tuple[type, Any]:
    """transformers' class for a config.json, and its config."""
    try:
        import transformers
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError as error:
        raise UserError(MISSING) from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise UserError(f"type: hf needs transformers 5 or newer, and {transformers.__version__} is here; update it")
    named = section.config["model_type"]
    if named not in CONFIG_MAPPING:
        if "auto_map" in section.config:
            what = "its code is files of the folder (auto_map), and none is run; there is no class for it otherwise"
        else:
            near = difflib.get_close_matches(named, CONFIG_MAPPING, 1, cutoff=0.6)
            what = f"did you mean {near[0]!r}?" if near else "a newer one may"
        message = f"transformers {transformers.__version__} has no model_type {named!r}; {what}"
        raise UserError(f"model: {message}", section.path)
    try:
        config = CONFIG_MAPPING[named].from_dict(dict(section.config))
    except Exception as error:  # whatever their checks of a config.json raise; it is told and ends the run
        raise UserError(
            f"model: transformers does not take this config.json: {_first_line(error)}", section.path
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model: transformers has no causal language model of model_type {named!r}; name one that writes text",
            section.path,
        )
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind, config


def _first_line(error: BaseException) -> str:
    """What an error says, up to the end of a line; of one that announces the next line, with that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters take no memory, buffers are computed: no checkpoint holds those, and only constructors know them."""
    plain = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        plain(self, name, param)
        if param is not None and param.device.type != "meta":  # a tied one stays the same object
            setattr(self, name, nn.Parameter(param.to("meta"), requires_grad=param.requires_grad))

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = plain


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give parameters on the meta device memory on `device`, and no values; buffers keep theirs, tied ones stay so."""
    buffers = dict(model.named_buffers())
    same: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            same.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, its_name), *others in same.values():
        for module, name in others:
            setattr(module, name, getattr(first, its_name))
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


class _Hidden(nn.Module):
    """In the place of a base model: gives the same hidden states whatever it is asked."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.last_hidden_state = hidden

    def forward(self, *arguments, **named):
        return self

    def __getitem__(self, key):
        return (self.last_hidden_state,)[key]

    def __getattr__(self, name):
        return self if name in ("decoder", "model") else None


def _head(base: type, model: nn.Module) -> tuple[float, float | None] | None:
    """What a model does to its last hidden states: `softcap(factor x head(states))`, or None if it is anything else.

    Found by having its forward do it to random states and a small head, and comparing.
    """
    head, prefix = model.get_output_embeddings(), model.base_model_prefix
    own = next((name for name, child in model.named_children() if child is head), None)
    if not isinstance(head, nn.Linear) or head.bias is not None or own is None or prefix not in children_of(model):
        return None
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, head.in_features, generator=draw)
    small = nn.Linear(head.in_features, 8, bias=False, device="cpu")
    shell = object.__new__(type(model))
    shell.__dict__ = {**model.__dict__, "_modules": {**children_of(model), prefix: _Hidden(hidden), own: small}}
    with torch.no_grad():
        small.weight.copy_(torch.randn(small.weight.shape, generator=draw))
        try:
            logits = base.forward(shell, torch.zeros(1, 4, dtype=torch.long), use_cache=False).logits
        except Exception:  # it wants more of its base model than hidden states: its own way to logits is taken
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
    """Try whether a model does what training asks of it. All ranks of a sharded one call it.

    Args:
        documents: attention is to be kept inside documents.

    Returns:
        What it does not do, in words; or None.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]], device=device) % model.get_input_embeddings().num_embeddings
    positions = torch.arange(8, device=device).unsqueeze(0)
    segments, places = positions // 4, positions % 4  # two documents of four tokens
    training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            plain = model(tokens=tokens, positions=positions)
            # What an earlier token changes in later ones: the measure of what no token may change.
            own = (plain - model(tokens=_put(tokens, 0, 1), positions=positions))[:, 1:].abs().max()
            ahead = model(tokens=_put(tokens, 7, 8), positions=positions)
            if not _same(model, plain[:, :-1], ahead[:, :-1], own):
                return _LOOKS_AHEAD
            if not documents:
                return None
            try:
                second, after_others = (
                    model(tokens=t, positions=places, segments=segments)[:, 4:] for t in (tokens, _put(tokens, 0, 4))
                )
            except (RuntimeError, ValueError, TypeError, IndexError):  # it takes no mask of this form
                return _MIXES
            # To the last bit other tokens change nothing; being alone changes shapes, and so how sums are rounded.
            alone = model(tokens=tokens[:, 4:], positions=places[:, 4:])
            apart = _same(model, second, after_others, own)
            return None if apart and bool((second - alone).abs().max() <= 0.1 * alone.abs().max()) else _MIXES
    finally:
        model.train(training)
        for module in model.modules():
            if hasattr(module, "reshard"):  # sharded: its parameters are those that the optimizer has, as before
                module.reshard()


def _put(tokens: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The same tokens, but for other ones from `start` to `stop`."""
    changed = tokens.clone()
    changed[:, start:stop] = 0
    return changed


def _same(model: nn.Module, one: torch.Tensor, other: torch.Tensor, own: torch.Tensor) -> bool:
    """Equal to the bit; far closer than `own` where experts get other numbers of tokens, and sums are rounded anew."""
    if not any(parameter.dim() > 2 for parameter in model.parameters()):
        return torch.equal(one, other)
    return bool((one - other).abs().max() <= 0.3 * own)
