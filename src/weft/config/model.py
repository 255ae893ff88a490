"""`model:` the decoder's shape and parts, in the words of Hugging Face's config files."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from weft.config.moe import ExpertsSection, LatentAttentionSection
from weft.config.section import Component, Folder, Own, Section

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Initialization = Literal["normal", "scaled", "muon_zero"]


class AttentionPatternSection(Component):
    """Sparse attention: which of the keys before it a query looks at. Built in: files of `weft/kernels/patterns/`.

    Within each document, which a pattern is counted from the start of; a query always sees itself. On a GPU blocks that
    nobody looks at are skipped (flex attention); on a CPU it is a mask. A class of one's own is called with the places
    of queries and keys.
    """

    kind: ClassVar[str] = "attention_pattern"


class RopeScaling(Section):
    """Rotations stretched to more positions than a model was first trained for, as Hugging Face's `rope_scaling`."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] = Field(
        description="linear: all alike; dynamic: a larger base, the longer the sequence; llama3: only the slow ones; "
        "yarn: the slow ones, and attention sharpened; longrope: each by a factor of its own, of two sets by length"
    )
    factor: float = Field(gt=0, description="how many times as many positions")
    original_max_position_embeddings: int | None = Field(
        None, ge=1, description="positions before that; needed by all but linear"
    )
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: below so many turns, a rotation is slowed in full")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: above so many turns, it is left alone")
    beta_fast: float = Field(32.0, gt=0, description="yarn: above so many turns, a rotation is left alone")
    beta_slow: float = Field(1.0, gt=0, description="yarn: below so many turns, it is slowed in full")
    attention_factor: float | None = Field(
        None,
        gt=0,
        description="yarn, longrope: factor of the rotated queries and keys; default: 1 + log(factor) / 10, and "
        "sqrt(1 + log(factor) / log(original_max_position_embeddings))",
    )
    mscale: float | None = Field(None, description="yarn: with mscale_all_dim, another attention_factor, as DeepSeek's")
    mscale_all_dim: float | None = Field(None, description="yarn: see mscale")
    truncate: bool = Field(True, description="yarn: round the range of rotations between the two")
    short_factor: list[float] | None = Field(
        None, description="longrope: what each rotation is slowed by in sequences of up to the original positions"
    )
    long_factor: list[float] | None = Field(None, description="longrope: the same in longer ones")

    def unfit(self, rotary_dim: int) -> str | None:
        """What cannot be of heads that have so many rotated numbers; None if all is well."""
        if self.rope_type != "linear" and self.original_max_position_embeddings is None:
            return f"{self.rope_type} needs original_max_position_embeddings, the positions before the stretching"
        if self.rope_type == "dynamic" and rotary_dim < 4:
            return "dynamic needs at least 4 rotated numbers a head"
        if self.rope_type == "longrope":
            for key in ("short_factor", "long_factor"):
                factors = getattr(self, key) or []
                if len(factors) != rotary_dim // 2 or not all(factor > 0 for factor in factors):
                    return f"{key} has {len(factors)} numbers; longrope needs {rotary_dim // 2}, all above 0"
            if self.original_max_position_embeddings == 1:
                return "longrope needs original_max_position_embeddings above 1"
        return None


class ModelSize(NamedTuple):
    """Numbers of a model's parameters.

    Attributes:
        matmul: those that a token is multiplied with: a look-up is none, a tied head is one, and of a mixture of
            experts only those count that a token goes through.
    """

    parameters: int
    matmul: int


class ModelSection(Section):
    """A decoder-only transformer built from exchangeable parts.

    `preset` (llama-tiny ... llama-8b, gpt2 ...) fills all keys; keys beside it override. `from` takes shape and weights
    from another run, one checkpoint of it, or a Hugging Face folder.
    """

    type: Literal["decoder"] = Field("decoder", description="the built-in decoder; or module:Class of your own")
    preset: str | None = Field(None, description="a family with sizes; the other keys override it")
    from_: Folder | None = Field(
        None, alias="from", description="a run, checkpoint or Hugging Face folder whose shape and weights to start from"
    )
    load_optimizer: bool = Field(False, description="with `from`: take over the optimizer's state as well")
    family: str = Field("llama", description="whose weight names it has in Hugging Face's files")

    vocab_size: int | None = Field(None, ge=1, description="rows of the embedding; default: the tokenizer's")
    pad_vocab_to_multiple: int | None = Field(
        None,
        ge=1,
        description="round the tokenizer's vocab_size up to a multiple, as matrix products like; default: no",
    )
    pad_token_id: int | None = Field(
        None,
        ge=0,
        description="a row of the embedding that look-ups give no gradient, as the `padding_idx` of transformers' "
        "models; default: none",
    )
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    num_hidden_layers: int = Field(ge=1, description="blocks of attention and MLP")
    num_attention_heads: int = Field(ge=1, description="query heads of each block")
    num_key_value_heads: int | None = Field(None, ge=1, description="default: num_attention_heads")
    head_dim: int | None = Field(None, ge=1, description="default: hidden_size / num_attention_heads")
    intermediate_size: int | None = Field(
        None, ge=1, description="width of the MLP; default: 8/3 (gated) or 4 x hidden_size"
    )
    max_position_embeddings: int = Field(2048, ge=1, description="longest sequence; the table's size if learned")

    position: Literal["rope", "learned", "alibi", "none"] | Annotated[str, Own(kind="position")] = Field(
        "rope",
        description="rotations of queries and keys, a learned table, penalties on distance (Press et al., 2022), none; "
        "or module:Class of your own",
    )
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotations' wavelengths")
    rope_scaling: RopeScaling | None = Field(None, description="stretched rotations, as Llama 3.1's; default: none")
    partial_rotary_factor: float = Field(1.0, gt=0, le=1, description="the share of each head that is rotated")
    rope_local_base_freq: float | None = Field(
        None,
        gt=0,
        description="rope_theta of the layers with a sliding window, which are not stretched; default: as all",
    )
    no_rope_layers: list[int] | None = Field(
        None,
        description="one number a layer, as Hugging Face has it: 1 rotates, 0 has no positions; default: all rotate",
    )
    no_rope_layer_interval: int | None = Field(
        None, ge=1, description="every so-manieth layer has no positions; default: none"
    )
    alibi_bias_max: float = Field(
        8.0, gt=0, description="alibi: heads are penalized by 2 ** -(alibi_bias_max x 1/heads, 2/heads ... 1) a token"
    )
    sliding_window: int | None = Field(
        None, ge=1, description="a token sees so many tokens, itself with them; default: all before it"
    )
    sliding_window_pattern: int | None = Field(
        None, ge=1, description="every so-manieth layer sees all the same; default: none does"
    )
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = Field(
        None, description="which layers have the sliding window, one by one; default: as sliding_window_pattern says"
    )
    attention_implementation: Literal["auto", "sdpa", "flex", "flash"] | Annotated[str, Own(kind="attention")] = Field(
        "auto",
        description="auto: PyTorch's fastest for the device and the mask; sdpa: no flex attention; flex: where it "
        "can be (GPUs); flash: the package flash-attn (GPUs, 16 bits); or module:Class of your own. Beside a cache of "
        "keys the first four are all sdpa",
    )
    attention_pattern: AttentionPatternSection | None = Field(
        None, description="sparse attention, as {type: sliding, window: 256}; default: all before it"
    )
    norm: Literal["rmsnorm", "rmsnorm1p", "layernorm"] | Annotated[str, Own(kind="norm")] = Field(
        "rmsnorm", description="what normalizes; rmsnorm1p multiplies by 1 + weight; or module:Class of your own"
    )
    norm_bias: bool = Field(True, description="layernorm has a bias")
    norm_placement: Literal["pre", "post", "both"] = Field(
        "pre", description="before each part of a block, after it (inside the residual), or both; and one at the end"
    )
    use_parallel_residual: bool = Field(False, description="attention and MLP read the same input, and are added")
    rms_norm_eps: float = Field(1e-5, gt=0, description="epsilon of every norm, LayerNorm's too")
    qk_norm: bool = Field(False, description="RMS-normalize queries and keys, before RoPE")
    qk_norm_over: Literal["head", "width"] = Field("head", description="each head by itself, or all of them together")
    clip_qkv: float | None = Field(
        None, gt=0, description="queries, keys and values are clamped to it; none by default"
    )
    attention_sinks: bool = Field(
        False, description="each head may look at nothing: a learned score that takes part in the softmax"
    )
    mla: LatentAttentionSection | None = Field(None, description="multi-head latent attention; default: none")
    mlp: Literal["gated", "plain"] = Field(
        "gated", description="gated: act(gate(x)) * up(x), as SwiGLU; plain: act(up(x))"
    )
    moe: ExpertsSection | None = Field(None, description="a mixture of experts in place of the MLP; default: none")
    hidden_act: Activation | Annotated[str, Own(kind="activation")] = Field(
        "silu", description="the MLP's nonlinearity; or module:Class of your own"
    )
    attention_bias: bool = Field(False, description="biases on the q, k, v and output projections")
    attention_output_bias: bool | None = Field(None, description="the output projection's; default: attention_bias")
    mlp_bias: bool = Field(False, description="biases in the MLP")
    tie_word_embeddings: bool = Field(False, description="the output head is the embedding's matrix")
    embedding_multiplier: float = Field(1.0, gt=0, description="embedded tokens are multiplied by it")
    attention_multiplier: float | None = Field(
        None, gt=0, description="attention's scores are; default: 1 / sqrt(head_dim)"
    )
    residual_multiplier: float = Field(1.0, gt=0, description="what each part of a block adds is")
    logits_scaling: float = Field(1.0, gt=0, description="logits are divided by it")
    attn_logit_softcapping: float | None = Field(
        None, gt=0, description="attention's scores = cap * tanh(scores / cap); none by default"
    )
    logit_softcap: float | None = Field(None, gt=0, description="logits = cap * tanh(logits / cap); none by default")

    attention_dropout: float = Field(0.0, ge=0, lt=1, description="on attention's weights")
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="on what each block adds to the residual stream")
    embedding_dropout: float = Field(0.0, ge=0, lt=1, description="on the embedded tokens")

    initialization: Initialization | Annotated[str, Own(kind="initialization")] = Field(
        "scaled",
        description="normal: N(0, initializer_range); scaled: that, output projections divided by sqrt(2 x layers), as "
        "GPT-2; muon_zero: hidden matrices uniform with variance 1/fan_in, output projections and head zero; or "
        "module:Class of your own",
    )
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of initial weights")

    def slides(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has the sliding window."""
        if self.sliding_window is None:
            return False
        if self.layer_types is not None:
            return self.layer_types[layer] == "sliding_attention"
        return self.sliding_window_pattern is None or (layer + 1) % self.sliding_window_pattern != 0

    def rotates(self, layer: int) -> bool:
        """Whether a layer, counted from 0, turns queries and keys by their positions."""
        if self.position in ("learned", "alibi", "none"):
            return False
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return self.no_rope_layer_interval is None or (layer + 1) % self.no_rope_layer_interval != 0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts in place of an MLP."""
        return self.moe is not None and self.moe.has_experts(layer)

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a head's query."""
        if self.mla is not None:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def v_head_dim(self) -> int:
        """Numbers of a head's value."""
        return self.qk_head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def attention_width(self) -> int:
        """Numbers that attention's scores and sums are made of, all heads together: for counting operations."""
        return self.num_attention_heads * (self.qk_head_dim + self.v_head_dim) // 2

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return self.mla.qk_rope_head_dim if self.mla else int(self.qk_head_dim * self.partial_rotary_factor)

    @property
    def inner_width(self) -> int:
        """The MLP's width: as set; else 4 times the residual stream's, 8/3 for a gated one, up to a multiple of 8."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return 4 * self.hidden_size if self.mlp == "plain" else -(-8 * self.hidden_size // 24) * 8

    def _attention(self) -> tuple[int, int]:
        """Parameters of a layer's attention: in matrices, and in vectors."""
        heads, groups, head = self.num_attention_heads, self.kv_heads, self.qk_head_dim
        vectors = (heads if self.attention_sinks else 0) + (self.hidden_size if self.output_bias else 0)
        if self.mla is not None:
            matrices, more = self.mla.parameters(self.hidden_size, heads, self.attention_bias)
            return matrices, vectors + more
        if self.attention_bias:
            vectors += head * (heads + 2 * groups)
        if self.qk_norm:
            vectors += 2 * head if self.qk_norm_over == "head" else head * (heads + groups)
        return self.hidden_size * head * (2 * heads + 2 * groups), vectors

    def layer_size(self, layer: int) -> ModelSize:
        """The size of one layer, counted from 0, by formula: no model is built."""
        hidden, inner = self.hidden_size, self.inner_width
        norms = (4 if self.norm_placement == "both" else 2) * self._norm
        attention, vectors = self._attention()
        if self.moe is not None and self.has_experts(layer):
            held, used, more = self.moe.parameters(hidden, inner, self.mlp_bias)
        else:
            into = 2 if self.mlp == "gated" else 1
            held = used = hidden * inner * (into + 1)
            more = inner * into + hidden if self.mlp_bias else 0
        return ModelSize(attention + vectors + norms + held + more, attention + used)

    @property
    def _norm(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    def size(self, vocab_size: int | None = None) -> ModelSize:
        """The whole model's. `vocab_size` is used if the section has none. Raises ValueError if neither has one."""
        vocabulary = self.vocab_size or vocab_size
        if vocabulary is None:
            raise ValueError("vocab_size is not known")
        layers = [self.layer_size(layer) for layer in range(self.num_hidden_layers)]
        embedding = vocabulary * self.hidden_size
        others = embedding * (1 if self.tie_word_embeddings else 2) + self._norm
        if self.position == "learned":
            others += self.max_position_embeddings * self.hidden_size
        return ModelSize(sum(one.parameters for one in layers) + others, sum(one.matmul for one in layers) + embedding)

    def resolved(self) -> dict[str, Any]:
        """All keys, those too that follow from others: what a family writes a config.json from."""
        layers = range(self.num_hidden_layers)
        keys = self.model_dump() | {
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.qk_head_dim,
            "intermediate_size": self.inner_width,
            "attention_multiplier": self.attention_multiplier or self.qk_head_dim**-0.5,
            "attention_output_bias": self.output_bias,
            "layer_types": ["sliding_attention" if self.slides(layer) else "full_attention" for layer in layers],
            "no_rope_layers": [int(self.rotates(layer)) for layer in layers],
        }
        if self.moe is not None:
            keys["moe"]["moe_intermediate_size"] = self.moe.moe_intermediate_size or self.inner_width
        return keys

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.attention_bias if self.attention_output_bias is None else self.attention_output_bias


class CustomModelSection(Component):
    """A model of the user's own: `{type: module:Class, ...its arguments}`, an nn.Module from tokens to logits.

    `from` and `load_optimizer` mean what they mean for the built-in decoder.
    """

    kind: ClassVar[str] = "model"

    from_: Folder | None = Field(None, alias="from")
    load_optimizer: bool = False
