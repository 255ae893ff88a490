"""The work of one rank for one micro-batch: matrix products, attention, bytes of element-wise operations, parameters.

Counts follow the code of `weft.models`: what a block computes in eager mode or compiled, after `tp`, `cp` and `ep` have
split it. A block is counted once for each kind (dense or experts, with or without a window), not once for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.config.mesh import MeshShape
from weft.config.model import ModelSection
from weft.config.model_sections import LatentAttentionSection

KEPT_LOGITS = 1 << 27  # more logits than these are computed again in backward (weft.kernels.cross_entropy)
# Bytes moved for each pair of a query and a key by attention that is not one kernel, in elements: the first product
# writes scores, softmax and dropout each read and write them, and the second product reads them. A mask has one byte.
UNFUSED_ELEMENTS = 6
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}  # bytes of an element


@dataclass(frozen=True)
class Matmul:
    """`count` products `[m, k] x [k, n]`."""

    m: int
    k: int
    n: int
    count: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass."""
        return 2.0 * self.m * self.k * self.n * self.count


@dataclass(frozen=True)
class AttentionWork:
    """Fused attention of one layer.

    Attributes:
        pairs: number of pairs of a query and a key that it sees, over all sequences of the micro-batch.
        heads: number of query heads.
        head_dim: mean of the head dimensions of keys and values.
        shape: batch, heads, key/value heads, seq and head_dim, by which a measured time is found.
    """

    pairs: float
    heads: int
    head_dim: int
    shape: tuple[int, ...]

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass: two products for each visible pair."""
        return 4.0 * self.pairs * self.heads * self.head_dim


@dataclass(frozen=True)
class Work:
    """The work of a block, an embedding or a head for one micro-batch on one rank.

    Attributes:
        matmuls: matrix products of the forward pass.
        attention: fused attention; None if there is none.
        bytes_forward: bytes that element-wise operations of the forward pass read and write.
        bytes_backward: the same for backward.
        operations: number of operations that the host starts in forward.
        parameters: number of parameters, except those of experts.
        expert_parameters: number of parameters of this rank's experts before FSDP2 shards them.
        tokens: number of tokens of the micro-batch on this rank, before `tp` shards them.
        routed: number of rows that the rank sends to experts; 0 without experts.
    """

    matmuls: tuple[Matmul, ...] = ()
    attention: AttentionWork | None = None
    bytes_forward: float = 0.0
    bytes_backward: float = 0.0
    operations: int = 0
    parameters: int = 0
    expert_parameters: int = 0
    tokens: int = 0
    routed: int = 0

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass."""
        return sum(one.flops for one in self.matmuls) + (self.attention.flops if self.attention else 0.0)


@dataclass(frozen=True)
class Stack:
    """How the software that runs a model differs from Weft's; the defaults are Weft's.

    Attributes:
        residual_bytes: bytes of an element of the residual stream; None: 4, or 8 in float64.
        fused: whether element-wise operations are fused; None: as `training.compile` says.
        keeps_logits: whether logits are kept for backward, however many there are.
        fused_attention: whether attention is one kernel; else two products, a masked softmax and dropout, which write
            the scores of all pairs to memory.
    """

    residual_bytes: int | None = None
    fused: bool | None = None
    keeps_logits: bool = False
    fused_attention: bool = True


@dataclass(frozen=True)
class Shares:
    """What one rank has of a micro-batch.

    Attributes:
        model: the decoder.
        sequences: number of sequences in the micro-batch.
        length: number of tokens per sequence.
        mesh: the mesh.
        width: bytes of an element in the compute dtype.
        residual: bytes of an element of the residual stream.
        fused: whether element-wise operations are fused.
        keeps_logits, fused_attention: as in `Stack`.
    """

    model: ModelSection
    sequences: int
    length: int
    mesh: MeshShape = field(default_factory=MeshShape)
    width: int = 2
    residual: int = 4
    fused: bool = False
    keeps_logits: bool = False
    fused_attention: bool = True

    @property
    def tokens(self) -> int:
        """Number of tokens on one rank, before `tp` shards them."""
        return self.sequences * self.length // self.mesh.cp

    @property
    def heads(self) -> tuple[int, int]:
        """Numbers of query heads and of key/value heads on one rank."""
        return max(1, self.model.num_attention_heads // self.mesh.tp), max(1, self.model.kv_heads // self.mesh.tp)


def block_kinds(model: ModelSection) -> list[tuple[bool, bool]]:
    """Returns the kind of each layer: whether it has experts, and whether it has a sliding window."""
    return [(model.has_experts(layer), model.slides(layer)) for layer in range(model.all_layers)]


def allows_ring(model: ModelSection) -> bool:
    """Returns whether ring attention supports a model's layers without a window; other layers all-gather keys."""
    scores = model.attention_sinks or model.attn_logit_softcapping or model.position == "alibi"
    return not (scores or model.attention_dropout or model.attention_pattern)


def block_work(shares: Shares, layer: int) -> Work:
    """Returns the work of a layer, counted from 0."""
    model, mesh, tokens = shares.model, shares.mesh, shares.tokens
    projections, split = _projections(shares)
    matmuls, moved, operations, routed, experts = list(projections), 0.0, 14, 0, 0
    others = model.layer_size(layer).parameters
    if model.moe is not None and model.has_experts(layer):
        more, inner, routed, experts = _experts(shares)
        matmuls += more
        moved += inner
        operations += 25
        each = 3 * model.hidden_size * (model.moe.moe_intermediate_size or model.inner_width)
        others -= each * model.moe.num_experts
        split += each * model.moe.n_shared_experts
    else:
        into, inner = 2 if model.mlp == "gated" else 1, max(1, model.inner_width // mesh.tp)
        matmuls += [Matmul(tokens, model.hidden_size, inner, into), Matmul(tokens, inner, model.hidden_size)]
        moved += _activation(shares, tokens, inner)
        operations += 4
        split += model.hidden_size * model.inner_width * (into + 1)
    if layer >= model.num_hidden_layers:  # a multi-token prediction layer projects two vectors to its input
        matmuls.append(Matmul(tokens, 2 * model.hidden_size, model.hidden_size))
    moved += _residual(shares, layer) + _around_attention(shares)
    attention = _attention(shares, layer) if shares.fused_attention else None
    if attention is None:
        products, scores = _unfused_attention(shares)
        matmuls += products
        moved += scores
    return Work(
        matmuls=tuple(matmuls),
        attention=attention,
        bytes_forward=moved,
        bytes_backward=2 * moved,
        operations=operations * (1 if shares.fused else 2),
        parameters=others - split + split // mesh.tp,
        expert_parameters=experts,
        tokens=tokens,
        routed=routed,
    )


def embedding_work(shares: Shares, vocabulary: int) -> Work:
    """Returns the work of the embedding."""
    model, tokens = shares.model, shares.tokens
    moved = tokens / shares.mesh.tp * model.hidden_size * (shares.width + shares.residual)
    parameters = vocabulary * model.hidden_size // shares.mesh.tp
    if model.position == "learned":
        parameters += model.max_position_embeddings * model.hidden_size
    gradient = parameters * shares.width  # zeros, to which the rows' gradients are added
    return Work(
        bytes_forward=moved, bytes_backward=2 * moved + gradient, operations=4, parameters=parameters, tokens=tokens
    )


def head_work(shares: Shares, vocabulary: int) -> Work:
    """Returns the work of the final norm, the output head and the loss, once for each token that is predicted ahead."""
    model, tokens, heads = shares.model, shares.tokens, 1 + shares.model.num_nextn_predict_layers
    rows = 1 if model.num_labels else max(1, vocabulary // shares.mesh.tp)
    passes = 2 if shares.fused else 4  # over float32 logits: cast, log-sum-exp, softmax, gradient
    moved = tokens * rows * heads * (shares.width + 4.0 * (passes - 1))
    norm = tokens / shares.mesh.tp * model.hidden_size * (3 * shares.residual + shares.width)
    return Work(
        matmuls=(Matmul(tokens, model.hidden_size, rows, heads),),
        bytes_forward=moved + norm,
        bytes_backward=moved + 2 * norm,
        operations=20,
        parameters=0 if model.tie_word_embeddings else rows * model.hidden_size,
        tokens=tokens,
    )


def recomputes_head(shares: Shares, work: Work) -> bool:
    """Whether backward computes the logits again, because they are too many to keep."""
    return not shares.keeps_logits and work.matmuls[0].m * work.matmuls[0].n > KEPT_LOGITS


def _projections(shares: Shares) -> tuple[list[Matmul], int]:
    """Returns attention's projections on one rank, and the number of their parameters that `tp` shards."""
    model, tokens, hidden, tp = shares.model, shares.tokens, shares.model.hidden_size, shares.mesh.tp
    heads, groups = shares.heads
    if model.mla is not None:
        return _latent_projections(model.mla, tokens, hidden, heads, tp)
    head = model.qk_head_dim
    found = [Matmul(tokens, hidden, heads * head), Matmul(tokens, hidden, groups * head, 2)]
    found.append(Matmul(tokens, heads * head, hidden))
    kv = model.kv_heads if model.kv_heads % tp == 0 else 0
    return found, hidden * head * (2 * model.num_attention_heads + 2 * kv)


def _latent_projections(
    mla: LatentAttentionSection, tokens: int, hidden: int, heads: int, tp: int
) -> tuple[list[Matmul], int]:
    query, up = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.qk_nope_head_dim + mla.v_head_dim
    found = [
        Matmul(tokens, hidden, mla.kv_lora_rank + mla.qk_rope_head_dim),
        Matmul(tokens, mla.kv_lora_rank, heads * up),
        Matmul(tokens, heads * mla.v_head_dim, hidden),
    ]
    split = [found[1], found[2]]
    if mla.q_lora_rank:
        found += [Matmul(tokens, hidden, mla.q_lora_rank), Matmul(tokens, mla.q_lora_rank, heads * query)]
    else:
        found.append(Matmul(tokens, hidden, heads * query))
    split.append(found[-1])
    return found, sum(one.k * one.n for one in split) * tp


def _experts(shares: Shares) -> tuple[list[Matmul], float, int, int]:
    """Returns the experts' products, the bytes they move, the rows sent to experts, and the experts' parameters.

    Assumes balanced experts. The products are those of this rank's experts.
    """
    model, mesh, tokens, hidden = shares.model, shares.mesh, shares.tokens, shares.model.hidden_size
    moe = model.moe
    assert moe is not None
    inner = max(1, (moe.moe_intermediate_size or model.inner_width) // mesh.tp)
    local, rows = moe.num_experts // mesh.ep, tokens * moe.num_experts_per_tok
    each = max(1, rows // local)
    matmuls = [Matmul(tokens, hidden, moe.num_experts), Matmul(each, hidden, inner, 2 * local)]
    matmuls.append(Matmul(each, inner, hidden, local))
    moved = _activation(shares, rows, inner)
    moved += 2 * 2 * rows * hidden * shares.width + tokens * hidden * shares.width  # permute there and back, and add
    if moe.n_shared_experts:
        wide = inner * moe.n_shared_experts
        matmuls += [Matmul(tokens, hidden, wide, 2), Matmul(tokens, wide, hidden)]
        moved += _activation(shares, tokens, wide)
    return matmuls, moved, round(tokens * moe.ranks_per_token(mesh.ep)), 3 * hidden * inner * local


def _activation(shares: Shares, rows: int, inner: int) -> float:
    """Returns the bytes of the activation function, and of the product with the gate's output."""
    gated = shares.model.mlp == "gated" or shares.model.moe is not None
    passes = (3 if shares.fused else 5) if gated else 2
    return float(passes * rows * inner * shares.width)


def _residual(shares: Shares, layer: int) -> float:
    """Returns the bytes of a layer's norms, casts and additions to the residual stream."""
    model, wide, narrow = shares.model, shares.residual, shares.width
    norms = 4 if model.norm_placement == "both" else 2
    norms += 3 if layer >= model.num_hidden_layers else 0
    each = wide + narrow if shares.fused or wide == narrow else 3 * wide + narrow  # read, write; and a cast
    adds = 2 * (2 * wide + narrow)
    return shares.tokens / shares.mesh.tp * model.hidden_size * (norms * each + adds)


def _around_attention(shares: Shares) -> float:
    """Returns the bytes of rotary embedding and norms of queries and keys, and of the transposition of the output."""
    model = shares.model
    heads, groups = shares.heads
    rotated = model.rotary_dim if model.position == "rope" else 0
    normed = model.qk_head_dim if model.qk_norm else 0
    each = 2 if shares.fused else 6  # reads and writes of an element: products with cos and sin, a sum, concatenation
    sizes = (heads + groups) * (rotated * each + 2 * normed) + 2 * heads * model.v_head_dim
    return float(shares.tokens * sizes * shares.width)


def _attention(shares: Shares, layer: int) -> AttentionWork:
    model, length = shares.model, shares.length
    heads, groups = shares.heads
    seen = length / 2
    if model.slides(layer) and model.sliding_window is not None and model.sliding_window < length:
        window = model.sliding_window
        seen = window - window * window / (2 * length)
    exchanges = shares.mesh.cp  # every rank has 1 / cp of the pairs, whatever the method
    head_dim = (model.qk_head_dim + model.v_head_dim) // 2
    shape = (shares.sequences, heads, groups, length, model.qk_head_dim)
    return AttentionWork(shares.sequences * length * seen / exchanges, heads, head_dim, shape)


def _unfused_attention(shares: Shares) -> tuple[list[Matmul], float]:
    """Returns the two products over all pairs, also those that the mask hides, and the bytes of the scores."""
    model, length, heads = shares.model, shares.length, shares.heads[0]
    count, queries = shares.sequences * heads, length // shares.mesh.cp
    products = [Matmul(queries, model.qk_head_dim, length, count), Matmul(queries, length, model.v_head_dim, count)]
    return products, float(count * queries * length * (UNFUSED_ELEMENTS * shares.width + 1))
