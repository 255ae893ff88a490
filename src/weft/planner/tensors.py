"""The tensors that a block saves for backward, counted by the operations that save them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.config.mesh import choose_cp_method
from weft.config.model import ModelSection
from weft.planner.work import Shares, allows_ring

LONG = 1024  # tokens from which a sliding window needs no mask of all tokens (weft.kernels.blocked_attention)


@dataclass(frozen=True)
class Sizes:
    """What the sizes of a block's tensors depend on.

    Attributes:
        shares: this rank's part of a micro-batch.
        state: bytes of an element of the residual stream.
        cpu: whether kernels are those of a CPU: RMS norms also save their result, and most attention its transposed
            output.
        cp_method: value of `parallel.cp_method`.
        checkpointing: value of `training.activation_checkpointing`.
    """

    shares: Shares
    state: int
    cpu: bool
    cp_method: str
    checkpointing: str

    @property
    def gathers_again(self) -> bool:
        """Whether backward gathers the inputs of layers over `tp` again, as `ModelPlan.gathers_again`."""
        return self.checkpointing == "none" and not self.shares.fused

    @property
    def layer_input(self) -> float:
        """Bytes of the input of attention or an MLP, as saved for backward."""
        return _hidden_bytes(self.shares) / (self.shares.mesh.tp if self.gathers_again else 1)


@dataclass(frozen=True)
class Saved:
    """Bytes of a block for one micro-batch.

    Attributes:
        inputs: the residual stream before the block.
        everything: all tensors saved for backward, with `inputs`.
        selective: results of matrix products, attention and communication, which mode `selective` keeps.
        unsaved: those of `selective` that backward does not read: without recomputation, they are not saved.
        transient: gradients that exist at once within the backward pass, less what it has freed by then.
    """

    inputs: float
    everything: float
    selective: float
    unsaved: float
    transient: float


def saved_tensors(sizes: Sizes, layer: int) -> Saved:
    """Returns what a layer, counted from 0, saves for backward."""
    shares, model = sizes.shares, sizes.shares.model
    residual = shares.tokens / shares.mesh.tp * model.hidden_size * sizes.state
    inner, kept, unsaved, widest = _mlp(sizes, layer)
    attention, kept_attention, unsaved_attention = _attention(sizes, layer)
    if sizes.cpu and _has_mask(shares) and model.slides(layer):  # the mask in the compute dtype
        attention += masks_bytes(shares) * shares.width
    norms = 4 if model.norm_placement == "both" else 1 if model.use_parallel_residual else 2
    everything = residual * norms * norm_tensors(sizes.shares, cpu=sizes.cpu) + attention + inner
    freed = inner - (kept - unsaved) * (sizes.checkpointing == "selective")  # by the MLP, whose backward pass is first
    transient = max(widest, _ring_gradients(sizes, layer), _scores(sizes, layer).gradients - freed)
    if sizes.gathers_again and shares.mesh.tp > 1:
        transient += _hidden_bytes(shares)
    return Saved(residual, everything, kept + kept_attention, unsaved + unsaved_attention, transient)


def norm_tensors(shares: Shares, *, cpu: bool) -> int:
    """Returns the number of hidden states that a norm saves: its input, and that of an RMS norm's weight on a CPU."""
    return 2 if cpu and shares.model.norm in ("rmsnorm", "rmsnorm1p") else 1


def masks_bytes(shares: Shares) -> float:
    """Returns the bytes of a micro-batch's mask on a CPU, one for each pair of tokens; 0 if there is no such mask.

    Only sliding windows in short sequences have one, without soft caps and sinks: `weft.kernels.blocked_attention`
    computes the others without.
    """
    return shares.tokens * shares.length * float(_has_mask(shares))


def _has_mask(shares: Shares) -> bool:
    model, window = shares.model, shares.model.sliding_window
    slides = any(map(model.slides, range(model.num_hidden_layers))) and not _caps_or_sinks(model)
    return slides and window is not None and window < shares.length < LONG


def _caps_or_sinks(model: ModelSection) -> bool:
    return model.attention_sinks or model.attn_logit_softcapping is not None


def _is_blocked(sizes: Sizes, layer: int) -> bool:
    """Returns whether a CPU computes a layer's attention in blocks of queries (weft.kernels.blocked_attention)."""
    shares, model = sizes.shares, sizes.shares.model
    window = model.sliding_window if model.slides(layer) else None
    long = window is not None and window < shares.length >= LONG
    return sizes.cpu and not _gathers(sizes, layer) and (long or _caps_or_sinks(model))


def _exchanges_heads(sizes: Sizes) -> bool:
    """Returns whether context parallel attention uses all-to-alls."""
    mesh = sizes.shares.mesh
    return mesh.cp > 1 and choose_cp_method(sizes.shares.model, sizes.cp_method, mesh.cp, mesh.tp) == "all_to_all"


def _is_ring(sizes: Sizes, layer: int) -> bool:
    """Returns whether a layer has ring attention, which needs a mask that is purely causal (`parallel.cp_method`)."""
    shares, model = sizes.shares, sizes.shares.model
    window = model.sliding_window if model.slides(layer) else None
    windowed = window is not None and window < shares.length
    return shares.mesh.cp > 1 and sizes.cp_method == "ring" and allows_ring(model) and not windowed


def _gathers(sizes: Sizes, layer: int) -> bool:
    """Returns whether a layer all-gathers keys and values over `cp`."""
    return sizes.shares.mesh.cp > 1 and not _exchanges_heads(sizes) and not _is_ring(sizes, layer)


class _Scores(NamedTuple):
    """Bytes of attention that materializes all scores: saved scores, their gradients, repeated keys and values."""

    saved: float = 0.0
    gradients: float = 0.0
    repeated: float = 0.0


def _scores(sizes: Sizes, layer: int) -> _Scores:
    """Returns what a layer's attention needs for all scores.

    Only CPUs have all scores, for soft caps and sinks with all-gathered keys (`weft.kernels.attention._unfused`).
    """
    shares, model = sizes.shares, sizes.shares.model
    if not (sizes.cpu and _gathers(sizes, layer) and _caps_or_sinks(model)):
        return _Scores()
    heads, width, wide = shares.heads[0], shares.width, max(4, shares.width)
    pairs, narrow = float(shares.tokens * shares.length * heads), width * (width < wide)
    capped = width * (model.attn_logit_softcapping is not None)  # the result of tanh
    repeated = shares.tokens * shares.mesh.cp * heads * (model.qk_head_dim + model.v_head_dim) * width
    # The result of softmax, and its cast; the cast is freed before the gradients before and after softmax exist.
    return _Scores(pairs * (wide + narrow + capped), pairs * (2 * wide - narrow), repeated)


def _ring_gradients(sizes: Sizes, layer: int) -> float:
    """Returns the bytes of gradients that exist at once in a step of ring attention's backward pass; 0 without it."""
    shares, model = sizes.shares, sizes.shares.model
    if not _is_ring(sizes, layer):
        return 0.0
    (heads, groups), dim, width = shares.heads, max(model.qk_head_dim, model.v_head_dim), shares.width
    # Sums in float32; gradients of the step, its inputs with repeated heads, and half of them for the causal halves.
    queries, keys = 4 + 6.5 * width, 2 * (4 + 2 * width)
    return shares.tokens * dim * (heads * queries + (heads if model.mla else groups) * keys)


def _attention(sizes: Sizes, layer: int) -> tuple[float, float, float]:
    """Returns the bytes that attention saves with its projections, `selective` and `unsaved`."""
    shares, model = sizes.shares, sizes.shares.model
    tokens, width, cp = shares.tokens, shares.width, shares.mesh.cp
    heads, groups = shares.heads
    keys = tokens * (heads if model.mla is not None else groups) * (model.qk_head_dim + model.v_head_dim) * width
    held = tokens * heads * model.qk_head_dim * width + keys
    scores = _scores(sizes, layer)
    fused = not scores.saved and not _is_blocked(sizes, layer)
    out, statistics = tokens * heads * model.v_head_dim * width, 4 * tokens * heads * fused
    total = sizes.layer_input + held + out + statistics + scores.saved
    if sizes.cpu and model.position == "rope" and fused:
        total += out
    if model.qk_norm:
        total += tokens * (heads + groups) * model.qk_head_dim * 4 * (2 if sizes.cpu else 1)
    if model.mla is not None:
        total += tokens * (model.mla.kv_lora_rank + (model.mla.q_lora_rank or 0)) * (width + 4)
    kept, unsaved = held + out + statistics + _product_bytes(shares), _product_bytes(shares)
    if model.position == "rope":  # queries and keys before the rotary embedding; MLA rotates a small part of its keys
        unsaved += tokens * (heads + (0 if model.mla else groups)) * model.qk_head_dim * width
    if _exchanges_heads(sizes):
        kept += held + out  # before the all-to-all, and after it
        unsaved += held + out
    elif _gathers(sizes, layer):  # all keys and values, as received and as attention reads them
        total += (scores.repeated or keys * cp) - keys
        kept, unsaved = kept + keys * cp, unsaved + keys * cp + out * (scores.saved > 0)
    return total, kept, unsaved


def _hidden_bytes(shares: Shares) -> float:
    """Returns the bytes of a hidden state of all tokens, in the compute dtype."""
    return shares.tokens * shares.model.hidden_size * float(shares.width)


def _product_bytes(shares: Shares) -> float:
    """Returns the bytes of the last product of attention or an MLP; with `tp`, of this rank's shard of the sum."""
    return _hidden_bytes(shares) / shares.mesh.tp


def _mlp(sizes: Sizes, layer: int) -> tuple[float, float, float, float]:
    """Returns the bytes that an MLP or experts save, `selective`, `unsaved` and `transient`."""
    shares, model = sizes.shares, sizes.shares.model
    tokens, width, mesh = shares.tokens, shares.width, shares.mesh
    if model.moe is None or not model.has_experts(layer):
        inner, into = max(1, model.inner_width // mesh.tp) * tokens * width, 2 if model.mlp == "gated" else 1
        product = _product_bytes(shares)
        return sizes.layer_input + 2 * into * inner, into * inner + product, product, into * inner
    moe = model.moe
    rows, each = tokens * moe.num_experts_per_tok, max(1, (moe.moe_intermediate_size or model.inner_width) // mesh.tp)
    inner, wide = each * rows * width, rows * model.hidden_size * width
    router = tokens * (model.hidden_size * 4 + moe.num_experts * 8)
    # Gate, up, the activation and the product; operations that are not fused save three more with a limit.
    saved = 4 if moe.swiglu_limit is None or shares.fused else 7
    total = router + 2 * wide + saved * inner + 16 * rows
    kept, unsaved = 2 * inner + wide, wide  # of the experts' outputs, `total` has the permutation
    # First the gradients of outputs multiplied by the router's weights; later the outputs are freed.
    transient = max((3 if mesh.ep > 1 else 2) * wide, 2 * inner - wide)
    if moe.expert_bias:
        total += rows * moe.num_experts / mesh.ep * width  # which expert a row belongs to
        kept += 2 * inner + wide  # products that choose each row's biases; only sums with them are saved
        unsaved += 4 * inner + wide
    if mesh.ep > 1:  # a token is sent once to each rank with one of its experts, and a row comes back
        sent = 2 * wide * moe.ranks_per_token(mesh.ep) / moe.num_experts_per_tok
        kept, unsaved = kept + sent, unsaved + sent
    if moe.n_shared_experts:
        total += sizes.layer_input + tokens * 4 * each * moe.n_shared_experts * width
        kept += tokens * 2 * each * moe.n_shared_experts * width + _product_bytes(shares)
        unsaved += _product_bytes(shares)
    return total, kept, unsaved, transient
