"""A trial of a decoder's parts that are the user's own: one forward and backward of a small decoder that has them.

Each part is watched in it: what it gives is compared with what it is given, and an exception is told with its name.
What raises nothing is seen by its outcome: later tokens and other documents must change nothing.
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
from weft.models.layers.attention import Attend
from weft.models.layers.custom import own_part
from weft.models.layers.mlp import MLP, intermediate_size, make_activation
from weft.models.layers.moe import Experts
from weft.models.layers.norm import make_norm

ROWS, SEQ = 2, 16
MOST_INNER = 128  # an MLP's width, and an expert's: no part but an activation sees it


@dataclass(frozen=True)
class Own:
    """One part of the user's own: its key of the config, its `module:Class`, and how a decoder makes it."""

    key: str
    type: str
    make: Callable[[], Any]

    def __str__(self) -> str:
        """`model.norm: my_parts:Norm (my_parts.py:12)`; without the place if it is an installed package's."""
        module, _, name = self.type.partition(":")
        try:
            source = find_class(module, name)
        except NotFound:
            source = None
        known = source is not None and not _installed(str(source.module.path))
        return f"{self.key}: {self.type}" + (f" ({source.place})" if known and source else "")


def own_parts(config: ModelSection) -> Iterator[Own]:
    """The user's own among a decoder's parts. (An `initialization` is asked, and checked, before anything is built.)"""
    if ":" in config.norm:
        yield Own("model.norm", config.norm, lambda: make_norm(config))
    if ":" in config.hidden_act:
        yield Own("model.hidden_act", config.hidden_act, lambda: make_activation(config.hidden_act))
    if ":" in config.position:
        yield Own("model.position", config.position, lambda: own_part(config.position, "position", config))
    chosen = config.attention_implementation
    if ":" in chosen:
        yield Own("model.attention_implementation", chosen, lambda: own_part(chosen, "attention", config))
    pattern = config.attention_pattern
    if pattern is not None and ":" in pattern.type:
        make = lambda: load_class(pattern, "attention_pattern")(**pattern.arguments)  # noqa: E731
        yield Own("model.attention_pattern", pattern.type, make)


def try_components(
    config: ModelSection,
    *,
    seed: int = 0,
    seq: int = SEQ,
    documents: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Make every part of the user's own as the decoder does, and train a decoder of one layer with them for a moment.

    Args:
        config: with at least one part that is `module:Class`, or nothing is done.
        seed: of the weights. PyTorch's generators are left as they were.
        seq: tokens of a row in training; at most 16 of them are tried.
        documents: attention is to be kept inside documents.
        dtype, device: of the run's computing: a part may call kernels that know no other.

    Raises:
        UserError: a part gives what the decoder cannot use, sees later tokens or other documents, or cannot be built
            without memory.
        Exception: what a part itself raised in its own file.
    """
    parts = list(own_parts(config))
    if not parts:
        return
    device = torch.device(device)
    small = _small(config)
    seq = max(2, min(seq, SEQ, config.max_position_embeddings))
    if seq in (config.num_attention_heads, config.kv_heads):  # else one layout of queries looks like another
        seq = max(2, seq - 1) if seq > 2 else 3
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
        watch = Watch(parts)
        model = watch.build(small, seed, dtype, device)
        tokens = torch.arange(ROWS * seq, device=device).mul(7).remainder(64).view(ROWS, seq)
        watch.run(lambda: model(tokens).sum().backward())
        model.eval()
        watch.outcome(model, tokens, None)
        if documents or config.sliding_window is not None or config.attention_pattern is not None:
            watch.outcome(model, tokens, (torch.arange(seq, device=device) >= seq // 2).long().expand(ROWS, seq))


def _small(config: ModelSection) -> ModelSection:
    """One layer of few parameters: what parts see, the hidden size and the heads, stays as it is."""
    inner, moe = intermediate_size(config), config.moe
    if moe is not None:
        few = min(moe.num_experts, 2)
        moe = moe.model_copy(
            update={
                "num_experts": few,
                "num_experts_per_tok": min(moe.num_experts_per_tok, few),
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": min(moe.moe_intermediate_size or inner, MOST_INNER),
                "n_shared_experts": min(moe.n_shared_experts, 1),
            }
        )
    sizes = {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": min(inner, MOST_INNER), "moe": moe}
    return config.model_copy(update=sizes | {"initializer_range": 0.5})


@dataclass
class Watch:
    """What runs now, and what each call of a part has given."""

    parts: list[Own]
    running: list[Own] = field(default_factory=list)
    given: list[tuple[Own, list[torch.Tensor]]] = field(default_factory=list)

    def run(self, act: Callable[[], Any], *running: Own) -> Any:
        """What is raised in the user's own file goes on as it is, and is shown with its way there; else one line."""
        self.running = list(running)
        try:
            return act()
        except UserError:
            raise
        except Exception as error:
            who = self.running[-1] if self.running else " or ".join(map(str, self.parts))
            said = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")[:300]
            if "meta" in said:
                raise UserError(
                    f"{who} computes in __init__ with tensors, or keeps them where they get no values: a decoder is "
                    "first built on the meta device; hold them in a buffer (register_buffer), a parameter or an "
                    f"nn.ModuleList of an nn.Module, or compute them when called ({said})"
                ) from error
            names = {part.type.partition(":")[0] for part in self.parts}
            files = {file for name in names if (file := getattr(sys.modules.get(name), "__file__", None))}
            files = {file for file in files if not _installed(file)}
            if any(frame.filename in files for frame in traceback.extract_tb(error.__traceback__)):
                raise
            raise UserError(f"{who} cannot be used: {said}") from error

    def build(self, config: ModelSection, seed: int, dtype: torch.dtype, device: torch.device) -> Decoder:
        """A decoder with the parts, made as a run's is: on the meta device, then filled."""
        torch.manual_seed(seed)
        with torch.device("meta"):
            for part in self.parts:
                self.run(part.make, part)
            model = Decoder(config)
        model.to_empty(device=device)
        initialize(model, seed)
        for parameter in model.parameters():  # buffers stay wide, as in a run
            parameter.data = parameter.data.to(dtype)
        for module in list(model.modules()):
            self._watch(module)
        return model.train()

    def _watch(self, module: nn.Module) -> None:
        """Put the watch in the places of a decoder where parts are called."""
        parts = {part.key.removeprefix("model."): part for part in self.parts}
        if isinstance(module, Decoder):
            self._put(module, "pattern", parts.get("attention_pattern"), _pairs)
            if "position" in parts and module.position is not None:
                scheme, part = module.position, parts["position"]
                if hasattr(scheme, "embed"):
                    setattr(scheme, "embed", self.around(part, scheme.embed, _alike, "embed gave"))  # noqa: B010
                scheme.register_forward_pre_hook(lambda *_: self.running.append(part))
                scheme.register_forward_hook(lambda _, given, out: self._check(part, given, out, _turned, "forward"))
        if isinstance(module, Attend):
            self._put(module, "own", parts.get("attention_implementation"), _attended)
        if isinstance(module, MLP | Experts):
            self._put(module, "activation", parts.get("hidden_act"), _alike)
        for name in ("norm", "attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            self._put(module, name, parts.get("norm"), _alike)

    def _put(self, module: nn.Module, name: str, part: Own | None, wanted: Callable) -> None:
        call = getattr(module, name, None)
        if part is not None and call is not None:
            delattr(module, name)
            setattr(module, name, self.around(part, call, wanted))

    def around(self, part: Own, call: Callable, wanted: Callable, verb: str = "gave") -> Callable:
        """A part's call, watched."""

        def watched(*given: Any) -> Any:
            self.running.append(part)
            return self._check(part, given, call(*given), wanted, verb)

        return watched

    def _check(self, part: Own, given: tuple, out: Any, wanted: Callable, verb: str) -> Any:
        self.given.append((part, wanted(part, given, out, verb)))
        self.running.pop()
        return out

    @torch.no_grad()
    def outcome(self, model: Decoder, tokens: torch.Tensor, segments: torch.Tensor | None) -> None:
        """Change some tokens, and look which part gives other numbers where it must not.

        Args:
            segments: two documents: the first one's tokens are changed. None: the second half of each row is.
        """
        half = tokens.shape[1] // 2
        changed, kept = tokens.clone(), slice(0, half) if segments is None else slice(half, None)
        changed[:, slice(half, None) if segments is None else slice(0, half)] += 13
        found = []
        for ids in (tokens, changed.remainder(64)):
            self.given.clear()
            torch.manual_seed(0)  # of its dropout, if it drops also in evaluation
            self.run(partial(model, ids, segments=segments))
            found.append(list(self.given))
        for (part, before), (_, after) in zip(*found, strict=True):
            for one, other in zip(before, after, strict=True):
                one, other = one[..., kept, :].double(), other[..., kept, :].double()
                within = max(1e-3, 16 * torch.finfo(before[0].dtype).eps) * one.abs().max()
                if ((one - other).abs() > within).any():
                    what = "keys that the mask hides" if segments is not None else "later tokens"
                    known = "a mask" if segments is not None else "no mask (None), which means causal"
                    raise UserError(
                        f"{part} looks at {what}: with {known}, its output for a token changes with them; keep to the "
                        "mask, and to what is before each query where it is None"
                    )


# ---- what each kind of part is to give: (part, what it is given, what it gave, verb) -> its tensors `[..., seq, size]`


def _alike(part: Own, given: tuple, out: Any, verb: str) -> list[torch.Tensor]:
    return [_fits(part, out, given[0].shape, verb)]


def _turned(part: Own, given: tuple, out: Any, verb: str) -> list[torch.Tensor]:
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise UserError(f"{part} forward gave {_shown(out)}, wanted two tensors, the queries and the keys")
    names = ("queries", "keys")
    return [
        _fits(part, one, x.shape, f"{verb} gave, as {name},")
        for one, x, name in zip(out, given[:2], names, strict=True)
    ]


def _attended(part: Own, given: tuple, out: Any, verb: str) -> list[torch.Tensor]:
    q, _, v, _ = given
    return [_fits(part, out, torch.Size((*q.shape[:-1], v.shape[-1])), verb)]


def _pairs(part: Own, given: tuple, out: Any, verb: str) -> list[torch.Tensor]:
    wanted = torch.broadcast_shapes(*(places.shape for places in given))
    fits = isinstance(out, torch.Tensor) and out.dtype == torch.bool and out.dim() == len(wanted)
    if not fits or any(size not in (1, whole) for size, whole in zip(out.shape, wanted, strict=True)):
        raise UserError(f"{part} gave {_shown(out)}, wanted a bool tensor of {tuple(wanted)}")
    return []


def _fits(part: Own, out: Any, wanted: torch.Size, verb: str) -> torch.Tensor:
    if not isinstance(out, torch.Tensor) or out.shape != wanted or not out.is_floating_point():
        raise UserError(f"{part} {verb} {_shown(out)}, wanted {tuple(wanted)}")
    return out.detach()


def _shown(given: Any) -> str:
    if not isinstance(given, torch.Tensor):
        return "None" if given is None else f"a {type(given).__name__}"
    dtype = "" if given.is_floating_point() else f" {str(given.dtype).removeprefix('torch.')}"
    return f"a{dtype} tensor of {tuple(given.shape)}"


def _installed(file: str) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))
