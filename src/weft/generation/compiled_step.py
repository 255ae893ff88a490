"""Runs decoding steps of a decoder on CPUs in one compiled C function (`weft.kernels.decode_step`).

PyTorch needs some hundred operators per token, whose overhead exceeds the time to read the weights of a small model.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import UserError
from weft.generation.cache import PagedCache
from weft.kernels.attention import alibi_slopes
from weft.kernels.decode_step import ACTIVATIONS, DTYPES, MAX_ROWS, NORMS, Matrix, Model, Norm, Step, Vector, library
from weft.kernels.decode_step import Layer as LayerStruct
from weft.models.decoder import Decoder
from weft.models.layers.attention import Attention, CoreAttention
from weft.models.layers.block import Block
from weft.models.layers.dropout import Dropout
from weft.models.layers.mlp import MLP
from weft.models.layers.norm import LayerNorm, RMSNorm, RMSNorm1p
from weft.models.layers.rope import rotary_cos_sin, rotary_depends_on_length
from weft.models.quantized import QuantizedLinear, QuantizedWeight
from weft.torch_private import has_hooks

if TYPE_CHECKING:
    from weft.generation.runners import Work

MOST_TOKENS = 16  # new tokens of a sequence, up to which the compiled step computes them
_KNOWN = {Decoder, Block, Attention, CoreAttention, MLP, RMSNorm, RMSNorm1p, LayerNorm, Dropout}
_KNOWN |= {nn.Linear, nn.Embedding, nn.ModuleList, nn.ModuleDict, QuantizedLinear, QuantizedWeight}
_SIZES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def unsupported(model: Any) -> str | None:
    """Returns the reason why the compiled step cannot run a model, as a clause for a message, or None."""
    config = model.config
    first = next(model.parameters())
    if first.device.type != "cpu":
        return f"the model is on {first.device}, not on the CPU"
    if hasattr(model, "unshard") or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return "the model is sharded, or runs in several processes"
    for name, option in (("mla", config.mla), ("moe", config.moe), ("attention_pattern", config.attention_pattern)):
        if option is not None:
            return f"model.{name} is set"
    for name in ("position", "norm", "hidden_act", "attention_implementation"):
        if ":" in getattr(config, name):
            return f"model.{name} is a custom component"
    if not (model.begins and model.ends):
        return "the model is a stage of a pipeline"
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            return f"the parameter {name} is a {type(parameter).__name__}"
        if parameter.dtype not in _SIZES:
            return f"the parameter {name} is {str(parameter.dtype).removeprefix('torch.')}"
        if not parameter.is_contiguous() or parameter.device != first.device:
            return f"the parameter {name} is not contiguous in the CPU's memory"
    if len({m.weight.dtype for m in model.modules() if isinstance(m, nn.Linear | QuantizedLinear)}) > 1:
        return "the weights of the linear layers have several dtypes"
    for name, module in model.named_modules():
        if type(module) not in _KNOWN:
            return f"the module {name} is a {type(module).__name__}"
        if has_hooks(module) or "forward" in vars(module):
            return f"the module {name or 'model'} has hooks or another forward"
    return None


class CompiledDecoding:
    """Runs the compiled step (`CompiledStep`) for sequences with few new tokens, once the C function is compiled.

    Args:
        model: the decoder.
        cache: the decoder's key/value cache.
        compiled: whether to use the compiled step. None: use it if the model and the machine support it, once the
            compiler has finished, unless the environment variable WEFT_COMPILE is 0.
        wait: whether the first step waits for the compiler, so that the same code computes all steps.

    Attributes:
        reason: the reason why the compiled step is not used, as a clause for a message; None if there is no reason.

    Raises:
        UserError: `compiled` is True, but the model or the machine does not support the compiled step.
    """

    def __init__(self, model: Decoder, cache: PagedCache, compiled: bool | None, wait: bool):
        self._model, self._cache, self._wait = model, cache, wait or bool(compiled)
        self._step: CompiledStep | None = None
        self.reason: str | None = None
        off = os.environ.get("WEFT_COMPILE") == "0" if compiled is None else not compiled
        self._off = "it is turned off" if off else None
        if compiled and self._find() is None:
            raise UserError(f"compile=True: there can be no compiled decoding step: {self.reason}; use compile=None")

    def chosen(self, works: Sequence[Work]) -> list[int]:
        """Returns the indices of the `works` that the compiled step computes; none if the step is not compiled."""
        few = [i for i, w in enumerate(works) if w.end - w.start <= MOST_TOKENS and w.adapter is None]
        # With a new prompt, the model can have changed.
        if len(few) < len(works) or (self._step is None and self.reason is None):
            self._find()
        return [] if self._step is None else few

    def forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Runs the compiled step for works that `chosen` selected. Returns what `Runner.forward` returns."""
        assert self._step is not None
        return self._step.forward(works)

    def _find(self) -> CompiledStep | None:
        """Returns the compiled step, updated to the model's present parameters; None if it is not available (yet)."""
        self.reason = self._off or unsupported(self._model)
        try:
            if self.reason is not None or library(self._wait) is None:
                self._step = None
            elif self._step is None:
                self._step = CompiledStep(self._model, self._cache)
            else:
                self._step.refresh()
        except OSError as error:
            self._off = self.reason = str(error)
        return self._step


class CompiledStep:
    """A decoder's forward pass for few tokens, on CPUs.

    The result for a token is bitwise independent of the other tokens of the step. Weights are read where PyTorch
    stores them, so that in-place updates take effect.

    Args:
        model: a decoder for which `unsupported` returns None.
        cache: the decoder's key/value cache.

    Raises:
        OSError: the C function cannot be compiled (see `weft.kernels.decode_step.library`).
    """

    def __init__(self, model: Any, cache: PagedCache):
        loaded = library()
        assert loaded is not None
        self._library, self._model, self._cache = loaded, model, cache
        self._pointers: list[int] = []
        self._kept: list[torch.Tensor] = []  # tensors that only the structures refer to
        self._layers = (LayerStruct * model.config.num_hidden_layers)()
        self._struct, self._step = Model(), Step()
        self._blocks = -1  # blocks of the cache when its pools were looked up
        self._angles: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._workspace, self._space = torch.empty(0, dtype=torch.uint8), (0, 0)
        self.refresh()

    def refresh(self) -> None:
        """Looks up the addresses of the parameters again. An address changes if a parameter's tensor is replaced."""
        pointers = [parameter.data_ptr() for parameter in self._model.parameters()]
        if pointers != self._pointers:
            self._pointers = pointers
            _describe(self._model, self._struct, self._layers, self._kept)

    def forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Runs a forward pass of the new tokens of each sequence. Returns what `Runner.forward` returns, in float32."""
        self._find_pools()
        rows = [(work, position) for work in works for position in range(work.start, work.end)]
        kept = sum(work.returned for work in works)
        logits, done = torch.empty(kept, self._struct.head.rows), 0
        for begin in range(0, len(rows), MAX_ROWS):
            done += self._run(rows[begin : begin + MAX_ROWS], logits[done:])
        return list(logits.split([work.returned for work in works]))

    def _run(self, rows: list[tuple[Work, int]], logits: torch.Tensor) -> int:
        """Runs the C function for at most `MAX_ROWS` tokens. Returns the number of rows of `logits` that were written.

        Args:
            rows: (work, position) of each token.
            logits: `[rows, vocab]`, to which the logits of kept tokens are written.
        """
        step, positions = self._step, [position for _, position in rows]
        blocks, tables, starts = array("q"), array("q"), {}
        for work, _ in rows:
            if work.sequence not in starts:
                starts[work.sequence] = len(blocks)
                blocks.extend(work.blocks)
            tables.append(starts[work.sequence])
        arrays = {
            "tokens": array("q", [work.tokens[position] for work, position in rows]),
            "positions": array("q", positions),
            "angles": self._look_up_angles(rows, positions),
            "tables": tables,
            "kept_rows": array("q", [i for i, (work, p) in enumerate(rows) if p >= work.end - work.returned]),
            "blocks": blocks,
        }
        for name, values in arrays.items():
            setattr(step, name, values.buffer_info()[0])
        step.rows, step.kept, step.longest = len(rows), len(arrays["kept_rows"]), max(positions) + 1
        step.threads = torch.get_num_threads()
        step.logits = logits.data_ptr()
        self._reserve(step.longest, step.threads)
        self._library.decode_step(self._struct, step)
        return step.kept

    def _look_up_angles(self, rows: list[tuple[Work, int]], positions: list[int]) -> array:
        """Sets the tables of cosines and sines, and returns the index of each token's row in these tables."""
        config, step = self._model.config, self._step
        if config.position != "rope":
            return array("q", positions)
        depends = rotary_depends_on_length(config.rope_scaling)
        if depends or not self._angles or max(positions) >= len(self._angles[0][0]):
            count = max(1024, 2 * (max(positions) + 1))
            at = torch.tensor([positions]) if depends else torch.arange(count).unsqueeze(0)
            lengths = torch.tensor([[max(work.rotary, p + 1) for work, p in rows]]) if depends else None
            tables = [
                rotary_cos_sin(at, config.rotary_dim, config.rope_theta, torch.float32, config.rope_scaling, lengths)
            ]
            if config.rope_local_base_freq is not None:
                tables.append(rotary_cos_sin(at, config.rotary_dim, config.rope_local_base_freq, torch.float32))
            self._angles = [(cos[0, 0].contiguous(), sin[0, 0].contiguous()) for cos, sin in tables]
            for i, (cos, sin) in enumerate(self._angles):
                step.cos[i], step.sin[i] = cos.data_ptr(), sin.data_ptr()
        return array("q", range(len(rows)) if depends else positions)

    def _find_pools(self) -> None:
        if self._blocks == self._cache.blocks:
            return
        first: Any = self._model.layers[0]
        config, dtype = self._model.config, first.attention.q_proj.weight.dtype
        new = torch.empty(1, config.kv_heads, 0, config.qk_head_dim, dtype=dtype)
        for i, layer in enumerate(self._layers):
            keys, values = self._cache.pools(i, new, new)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._blocks = self._cache.blocks

    def _reserve(self, longest: int, threads: int) -> None:
        """Enlarges the workspace if it is too small for `longest` keys per sequence and `threads` threads."""
        most, before = self._space
        if longest > most or threads != before:
            self._space = most, _ = 2 * longest, threads
            size = self._library.workspace_bytes(self._struct, MAX_ROWS, most, threads)
            self._workspace = torch.empty(size, dtype=torch.uint8)
            self._step.workspace = self._workspace.data_ptr()


def _vector(tensor: torch.Tensor | None) -> Vector:
    return Vector() if tensor is None else Vector(tensor.data_ptr(), DTYPES[_SIZES[tensor.dtype]])


def _norm(norm: Any) -> Norm:
    return Norm() if norm is None else Norm(_vector(norm.weight), _vector(getattr(norm, "bias", None)))


def _matrix(linear: Any) -> Matrix:
    if linear is None:
        return Matrix()
    weight = linear.weight
    rows, columns = weight.shape
    if isinstance(weight, QuantizedWeight):
        values, scale = weight.values.data_ptr(), weight.scale.data_ptr()
        return Matrix(values, scale, rows, columns, DTYPES[f"int{weight.bits}"], _vector(linear.bias))
    return Matrix(weight.data_ptr(), None, rows, columns, DTYPES[_SIZES[weight.dtype]], _vector(linear.bias))


def _describe(model: Any, struct: Model, layers: Any, kept: list[torch.Tensor]) -> None:
    """Fills the C structures that describe a decoder, except the addresses of the cache.

    Args:
        struct: the structure of the decoder.
        layers: the structures of the decoder's layers.
        kept: list to which this function adds the tensors that only the structures point to. The caller must keep this
            list, so that the tensors are not freed.
    """
    config = model.config
    blocks: Any = model.layers[: config.num_hidden_layers]
    for i, block in enumerate(blocks):
        layer, attention, mlp = layers[i], block.attention, block.mlp
        for name in ("q", "k", "v", "o"):
            setattr(layer, name, _matrix(getattr(attention, f"{name}_proj")))
        for name in ("gate", "up", "down"):
            setattr(layer, name, _matrix(getattr(mlp, f"{name}_proj")))
        for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            setattr(layer, name, _norm(getattr(block, name)))
        layer.q_norm = _norm(attention.q_norm).weight
        layer.k_norm = _norm(attention.k_norm).weight
        layer.sinks = _vector(attention.attend.sinks)
        layer.window = config.sliding_window if config.slides(i) else 0
        local = config.slides(i) and config.rope_local_base_freq is not None
        layer.rotary = -1 if not config.rotates(i) else int(local)
    first = blocks[0].attention.q_proj
    struct.layers, struct.hidden, struct.inner = len(blocks), config.hidden_size, config.inner_width
    struct.heads, struct.kv_heads, struct.head_dim = config.num_attention_heads, config.kv_heads, config.qk_head_dim
    struct.rotary_dim = config.rotary_dim
    struct.cache_dtype = DTYPES[_SIZES[first.weight.dtype]]
    struct.norm_kind, struct.activation = NORMS.index(config.norm), ACTIVATIONS.index(config.hidden_act)
    struct.parallel = int(config.use_parallel_residual)
    struct.norm_all_heads = int(config.qk_norm and config.qk_norm_over == "width")
    struct.eps, struct.clip = config.rms_norm_eps, config.clip_qkv or 0.0
    struct.embedding_multiplier, struct.residual_multiplier = config.embedding_multiplier, config.residual_multiplier
    struct.logits_scaling, struct.logit_softcap = config.logits_scaling, config.logit_softcap or 0.0
    struct.score_scale = (
        config.qk_head_dim**-0.5 if config.attention_multiplier is None else config.attention_multiplier
    )
    struct.score_softcap = config.attn_logit_softcapping or 0.0
    struct.embedding = _vector(model.embed_tokens.weight)
    struct.positions = _vector(None if model.embed_positions is None else model.embed_positions.weight)
    if config.position == "alibi":
        kept[:] = [alibi_slopes(config.num_attention_heads, config.alibi_bias_max, torch.device("cpu"))]
        struct.slopes = _vector(kept[0])
    struct.norm = _norm(model.norm)
    tied = nn.Linear(1, 1, bias=False, device="meta")
    if model.lm_head is None:
        tied.weight = model.embed_tokens.weight
    struct.head = _matrix(model.lm_head or tied)
    struct.layer = ctypes.cast(layers, type(struct.layer))
