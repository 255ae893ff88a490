"""A trial of a decoder's parts that are the user's own, before a run: each is made and called once, alone.

Later a wrong shape shows itself deep inside a block, or a sharded one, or (an attention that looks ahead) not at all.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.config.components import load_class
from weft.config.errors import UserError
from weft.config.model import ModelSection
from weft.config.source import NotFound, find_class
from weft.kernels.documents import segment_mask
from weft.models.layers.mlp import intermediate_size, make_activation
from weft.models.layers.norm import make_norm
from weft.models.layers.own import own_part

ROWS, LONGEST = 2, 128


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
        return f"{self.key}: {self.type}" + (f" ({source.place})" if known else "")


def try_parts(
    config: ModelSection,
    *,
    seed: int = 0,
    seq: int = 16,
    documents: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Make every part of the user's own as the decoder does, and compare what it gives with what is wanted.

    Args:
        config: with at least one part that is `module:Class`, or nothing is done.
        seed: of the parts' values and the inputs. PyTorch's generators are left as they were.
        seq: tokens of a row in training; at most 128 of them are tried.
        documents: attention is to be kept inside documents.
        dtype, device: of the run's computing: a part may call kernels that know no other.

    Raises:
        UserError: a part gives what the decoder cannot use, sees later tokens or other documents, or cannot be built
            without memory or sharded.
        Exception: what a part itself raised in its own file.
    """
    parts = list(own_parts(config))
    if not parts:
        return
    device = torch.device(device)
    drawn = [torch.cuda.current_device()] if device.type == "cuda" else []
    seq = max(2, min(seq, LONGEST, config.max_position_embeddings))
    if seq in (config.num_attention_heads, config.kv_heads):  # else one layout of queries looks like another
        seq = max(2, seq - 1) if seq > 2 else 3
    masked = documents or config.sliding_window is not None or config.attention_pattern is not None
    with torch.random.fork_rng(devices=drawn):
        for part in parts:
            torch.manual_seed(seed)
            made = _made(part, dtype, device)
            TRIALS[part.key](part, made, Inputs(config, seq, masked, dtype, device))


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


class Inputs:
    """Random inputs of a part, of the sizes that the decoder has."""

    def __init__(self, config: ModelSection, seq: int, masked: bool, dtype: torch.dtype, device: torch.device):
        self.config, self.seq, self.masked, self.dtype, self.device = config, seq, masked, dtype, device

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(ROWS, *shape, device="cpu").to(self.device, self.dtype)

    def positions(self, rows: int) -> torch.Tensor:
        """int64 `[rows, seq]`"""
        return torch.arange(self.seq, device=self.device).expand(rows, -1)


def _made(part: Own, dtype: torch.dtype, device: torch.device) -> Any:
    with torch.device("cpu"):
        made = _guarded(part, part.make)
    if isinstance(made, nn.Module):
        for name, parameter in made.named_parameters():
            if parameter.dim() == 0:
                raise UserError(
                    f"{part}: its parameter {name} has no dimension, and so cannot be sharded; make it of shape [1]"
                )
    _try_meta(part)
    if isinstance(made, nn.Module):
        made.to(device, torch.promote_types(dtype, torch.float32)).eval()
        for parameter in made.parameters():  # buffers stay wide, as in a run
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return made


def _try_meta(part: Own) -> None:
    """A decoder is first built without memory: what is neither parameter nor buffer then never gets a value."""
    try:
        with torch.device("meta"):
            made = part.make()
    except Exception as error:
        raise UserError(
            f"{part} cannot be made on the meta device, where a decoder is first built without values: {_said(error)}; "
            "hold what __init__ computes from tensors in a buffer (register_buffer), or compute it without tensors"
        ) from error
    whole = isinstance(made, nn.Module)
    known = {id(parameter) for parameter in made.parameters()} if whole else set()
    for module in made.modules() if whole else [made]:
        for name, value in getattr(module, "__dict__", {}).items():
            if name not in ("_parameters", "_buffers", "_modules") and _holds_meta(value, known):
                remedy = (
                    f'hold it in a buffer, self.register_buffer("{name}", ..., persistent=False), or as a parameter or '
                    "a module of its own (nn.ParameterList, nn.ModuleList)"
                    if whole
                    else "make the class an nn.Module with a buffer (register_buffer), or compute it when called"
                )
                raise UserError(
                    f"{part}: its attribute {name} is a plain tensor, or holds some, which never get values: a decoder "
                    f"is first built on the meta device; {remedy}"
                )


def _holds_meta(value: Any, known: set[int]) -> bool:
    """Whether these are tensors without values that moving the module does not reach; `known`: its parameters' ids."""
    if isinstance(value, dict):
        value = list(value.values())
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, nn.Module) and any(p.is_meta and id(p) not in known for p in one.parameters()):
            return True
        if isinstance(one, torch.Tensor) and one.is_meta:
            return True
    return False


def _try_elementwise(part: Own, made: Any, x: torch.Tensor) -> None:
    _compare(part, _guarded(part, lambda: made(x)), x.shape)


def _try_norm(part: Own, made: Any, draw: Inputs) -> None:
    _try_elementwise(part, made, draw(draw.seq, draw.config.hidden_size))


def _try_activation(part: Own, made: Any, draw: Inputs) -> None:
    _try_elementwise(part, made, draw(draw.seq, intermediate_size(draw.config)))


def _try_position(part: Own, made: nn.Module, draw: Inputs) -> None:
    config, seq = draw.config, draw.seq
    x = draw(seq, config.hidden_size)
    heads, kv_heads, width = config.num_attention_heads, config.kv_heads, config.qk_head_dim
    if config.mla is not None:
        kv_heads, width = 1, config.mla.qk_rope_head_dim
    q, k = draw(heads, seq, width), draw(kv_heads, seq, width)
    turns = type(made).forward is not nn.Module.forward
    for rows in (1, ROWS):
        positions = draw.positions(rows)
        if hasattr(made, "embed"):
            _compare(part, _guarded(part, lambda at=positions: made.embed(x, at)), x.shape, "embed gave")
        if turns:
            given = _guarded(part, lambda at=positions: made(q, k, at))
            if not isinstance(given, tuple | list) or len(given) != 2:
                raise UserError(f"{part} forward gave {_shown(given)}, wanted two tensors, the queries and the keys")
            _compare(part, given[0], q.shape, "forward gave, as queries,")
            _compare(part, given[1], k.shape, "forward gave, as keys,")


def _try_attention(part: Own, made: Any, draw: Inputs) -> None:
    config, seq = draw.config, draw.seq
    heads, kv_heads = config.num_attention_heads, config.kv_heads if config.mla is None else config.num_attention_heads
    q, k = draw(heads, seq, config.qk_head_dim), draw(kv_heads, seq, config.qk_head_dim)
    v = draw(kv_heads, seq, config.v_head_dim)
    one = torch.zeros(1, seq, dtype=torch.int64, device=draw.device)
    two = one.clone()
    two[:, seq // 2 :] = 1
    wanted = torch.Size((ROWS, heads, seq, config.v_head_dim))

    def attend(k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        torch.manual_seed(0)  # of its dropout, if it drops also in evaluation
        return _guarded(part, lambda: made(q, k.clone(), v.clone(), mask))

    for segments in (one, two) if draw.masked else (one,):
        seen = segment_mask(segments)
        mask = None if segments is one else seen
        first = attend(k, v, mask)
        _compare(part, first, wanted)
        for place in (seq - 1, 0):
            other_k, other_v = k.clone(), v.clone()
            other_k[:, :, place] = -k[:, :, place]
            other_v[:, :, place] += 100
            second = attend(other_k, other_v, mask)
            changed = (second - first).detach().double().abs()
            blind = ~seen[0, 0, :, place]  # queries that must not know this key
            within = max(1e-3, 16 * torch.finfo(first.dtype).eps) * second.detach().double().abs().max()
            if (changed[:, :, blind] > within).any():
                known = "a mask" if mask is not None else "no mask (None), which means causal"
                what = "later tokens" if place == seq - 1 else "keys that the mask hides"
                raise UserError(
                    f"{part} looks at {what}: with {known}, its output for a token changes with their keys and values; "
                    "keep to the mask, and to what is before each query where it is None"
                )


def _try_pattern(part: Own, made: Any, draw: Inputs) -> None:
    places = draw.positions(ROWS)
    given = _guarded(part, lambda: made(places.unsqueeze(2), places.unsqueeze(1)))
    wanted = (ROWS, draw.seq, draw.seq)
    fits = isinstance(given, torch.Tensor) and given.dtype == torch.bool and given.dim() == 3
    if not fits or any(size not in (1, full) for size, full in zip(given.shape, wanted, strict=True)):
        raise UserError(f"{part} gave {_shown(given)}, wanted a bool tensor of {wanted}")


TRIALS = {
    "model.norm": _try_norm,
    "model.hidden_act": _try_activation,
    "model.position": _try_position,
    "model.attention_implementation": _try_attention,
    "model.attention_pattern": _try_pattern,
}


def _guarded(part: Own, act: Callable[[], Any]) -> Any:
    """What a part raises in the user's own file goes on as it is, and is shown with its way there; else one line."""
    try:
        return act()
    except UserError:
        raise
    except Exception as error:
        file = _file(part.type.partition(":")[0])
        if file and not _installed(file) and any(f.filename == file for f in traceback.extract_tb(error.__traceback__)):
            raise
        raise UserError(f"{part} cannot be used: {_said(error)}") from error


def _compare(part: Own, given: Any, wanted: torch.Size, verb: str = "gave") -> None:
    if not isinstance(given, torch.Tensor) or given.shape != wanted or not given.is_floating_point():
        raise UserError(f"{part} {verb} {_shown(given)}, wanted {tuple(wanted)}")


def _shown(given: Any) -> str:
    if not isinstance(given, torch.Tensor):
        return "None" if given is None else f"a {type(given).__name__}"
    dtype = "" if given.is_floating_point() else f" {str(given.dtype).removeprefix('torch.')}"
    return f"a{dtype} tensor of {tuple(given.shape)}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")[:300]


def _file(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def _installed(file: str) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))
