"""`model:` the decoder's shape and components, with the keys of Hugging Face's config files."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from weft.config.model_sections import AttentionPatternSection, ExpertsSection, LatentAttentionSection, RopeScaling
from weft.config.section import Component, CustomClass, Folder, Section

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Attention = Literal["auto", "sdpa", "flex", "flash"]
Initialization = Literal["normal", "scaled", "muon_zero"]
Norm = Literal["rmsnorm", "rmsnorm1p", "layernorm"]
Position = Literal["rope", "learned", "alibi", "none"]


class ModelSize(NamedTuple):
    """The number of parameters of a model or of a layer.

    Attributes:
        parameters: number of all parameters.
        matmul: number of parameters in the matrix products of one token. Of the experts, only those that a token uses
            count. A tied output head counts, but the embedding look-up does not.
    """

    parameters: int
    matmul: int


class ModelSection(Section):
    """A decoder-only transformer built from exchangeable components.

    `preset` (llama-tiny ... llama-8b, gpt2 ...) sets defaults of the keys; keys in the file take precedence. `from`
    takes architecture and weights from another run, from one of its checkpoints, or from a Hugging Face folder.
    """

    type: Literal["decoder"] = "decoder"
    """`decoder` for the built-in decoder, `hf` for a model of Transformers, or a custom model `module:Class`."""
    preset: str | None = None
    """Name of a preset (`weft models` lists the names). The keys of the preset become the defaults."""
    from_: Folder | None = Field(None, alias="from")
    """Run, checkpoint or Hugging Face folder whose architecture and weights the model starts with."""
    load_optimizer: bool = False
    """Whether the optimizer state of the run or checkpoint in `from` is loaded too."""
    family: str = "llama"
    """Model family, which determines the names of the weights in Hugging Face files."""

    vocab_size: int | None = Field(None, ge=1)
    """Number of rows of the embedding. Default: the size of the tokenizer's vocabulary."""
    pad_vocab_to_multiple: int | None = Field(None, ge=1)
    """Multiple to which a `vocab_size` from the tokenizer is rounded up, for faster matrix products. Default: 1."""
    pad_token_id: int | None = Field(None, ge=0)
    """Row of the embedding that receives no gradient from look-ups (`padding_idx`). Default: none."""
    hidden_size: int = Field(ge=1)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(ge=1)
    """Number of layers, each with attention and an MLP."""
    num_nextn_predict_layers: int = Field(0, ge=0)
    """Number D of multi-token prediction layers (DeepSeek-V3; DeepSeek-AI, 2024, section 2.2) after the model's layers.
    Layer k predicts the token k + 1 positions ahead, with a block like that of the last layer, and with the embedding
    and the output head of the model. `objective: {type: pretrain}` and `sft` train the layers; generation does not use
    them. If the model in `from` has fewer, the others are new; a Hugging Face folder's are read if this key is set.
    """
    num_attention_heads: int = Field(ge=1)
    """Number of query heads per layer."""
    num_key_value_heads: int | None = Field(None, ge=1)
    """Number of key/value heads per layer. Default: `num_attention_heads`."""
    head_dim: int | None = Field(None, ge=1)
    """Number of dimensions of each head. Default: `hidden_size` / `num_attention_heads`."""
    intermediate_size: int | None = Field(None, ge=1)
    """Hidden size of the MLP. Default: 4 * `hidden_size`; for a gated MLP, 8/3 * `hidden_size`, rounded up to a
    multiple of 8.
    """
    max_position_embeddings: int = Field(2048, ge=1)
    """Maximum sequence length in tokens, and the number of learned position embeddings."""

    position: Position | Annotated[str, CustomClass(kind="position")] = "rope"
    """Position embedding. `rope`: rotary; `learned`: a learned table; `alibi`: attention biases by distance (Press et
    al., 2022); `none`; or a custom `module:Class`.
    """
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies. Default: none."""
    partial_rotary_factor: float = Field(1.0, gt=0, le=1)
    """Fraction of the dimensions of a head that are rotated."""
    rope_local_base_freq: float | None = Field(None, gt=0)
    """RoPE base of the layers with a sliding window; `rope_scaling` does not apply to these layers. Default: these
    layers have `rope_theta` and `rope_scaling`, like all others.
    """
    no_rope_layers: list[int] | None = None
    """For each layer, 1 or 0. Despite the name, which is Hugging Face's, 1 means that the layer has a rotary embedding,
    and 0 that it has none. Default: all layers have one.
    """
    no_rope_layer_interval: int | None = Field(None, ge=1)
    """Interval N: layers N, 2N, 3N, ... (counted from 1) have no rotary embedding. Default: all layers have one."""
    alibi_bias_max: float = Field(8.0, gt=0, le=126)
    """Maximum exponent of the ALiBi slopes. If the number of heads H is a power of two, head h (counted from 1) has the
    slope 2^-(alibi_bias_max * h / H) per token; for other H, see Press et al. (2022). Slopes below 2^-126 are not
    normal numbers in float32.
    """
    sliding_window: int | None = Field(None, ge=1, le=2**31 - 1)
    """Window size in tokens, counting the query itself. Default: no window."""
    sliding_window_pattern: int | None = Field(None, ge=1)
    """Interval N: layers N, 2N, 3N, ... (counted from 1) have no sliding window. Default: all layers have the window.
    """
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    """Attention type of each layer: with or without the sliding window. Default: derived from `sliding_window_pattern`.
    """
    attention_implementation: Attention | Annotated[str, CustomClass(kind="attention")] = "auto"
    """Attention kernels. `auto`: flex attention if it can run (on a GPU, without dropout) and the mask is not purely
    causal, otherwise `sdpa`; `sdpa`: PyTorch's `scaled_dot_product_attention`, or separate operations for options that
    it lacks, such as soft-capping; `flex`: flex attention if it can run, otherwise `sdpa`; `flash`: the package
    flash-attn, which needs a GPU and the dtype bfloat16 or float16; or a custom `module:Class`. Generation with a KV
    cache uses `sdpa`, unless this key is a custom class.
    """
    attention_pattern: AttentionPatternSection | None = None
    """Sparse attention, such as `{type: sliding, window: 256}`. Default: full causal attention."""
    norm: Norm | Annotated[str, CustomClass(kind="norm")] = "rmsnorm"
    """Normalization. `rmsnorm1p`: RMSNorm with scale 1 + weight; or a custom `module:Class`."""
    norm_bias: bool = True
    """Whether `layernorm` has a bias."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Placement of the norms of a layer. `pre`: before attention and MLP; `post`: after attention and MLP, on the
    residual branch; `both`: before and after. A final norm is always added.
    """
    use_parallel_residual: bool = False
    """Whether attention and MLP of a layer are computed in parallel: both read the layer's input, and both outputs are
    added to this input.
    """
    rms_norm_eps: float = Field(1e-5, gt=0, le=1)
    """Epsilon of all norms, including LayerNorm."""
    qk_norm: bool = False
    """Whether an RMSNorm is applied to queries and keys, before the rotary embedding."""
    qk_norm_over: Literal["head", "width"] = "head"
    """Whether `qk_norm` normalizes each head by itself (`head`), or all heads together (`width`)."""
    clip_qkv: float | None = Field(None, gt=0, le=1e6)
    """Maximum absolute value to which queries, keys and values are clamped. Default: none."""
    attention_sinks: bool = False
    """Whether each head has a learned attention sink: a logit that takes part in the softmax but has no value vector.
    """
    mla: LatentAttentionSection | None = None
    """Multi-head latent attention. Default: none."""
    mlp: Literal["gated", "plain"] = "gated"
    """MLP. `gated`: down(act(gate(x)) * up(x)), such as SwiGLU; `plain`: down(act(up(x)))."""
    moe: ExpertsSection | None = None
    """Mixture of experts in place of the MLP. Default: none."""
    hidden_act: Activation | Annotated[str, CustomClass(kind="activation")] = "silu"
    """Activation function of the MLP, or a custom `module:Class`."""
    attention_bias: bool = False
    """Whether the q, k, v and output projections have biases."""
    attention_output_bias: bool | None = None
    """Whether the output projection has a bias. Default: `attention_bias`."""
    mlp_bias: bool = False
    """Whether the MLP has biases."""
    tie_word_embeddings: bool = False
    """Whether the output head shares the embedding's matrix. False with `num_labels`."""
    num_labels: Literal[1] | None = None
    """1 replaces the output head by a head `score` with one output, for `objective: {type: reward}`. The model returns
    a score for each token, and is a model `...ForSequenceClassification` in Hugging Face's files. If the model in
    `from` has no such head, the head is new. Default: the model predicts tokens.
    """
    embedding_multiplier: float = Field(1.0, gt=0, le=1e6)
    """Number by which the embedded tokens are multiplied."""
    attention_multiplier: float | None = Field(None, gt=0, le=1e6)
    """Number by which the dot products of queries and keys are multiplied. Default: 1 / sqrt(`head_dim`)."""
    residual_multiplier: float = Field(1.0, gt=0, le=1e6)
    """Number by which the output of each residual branch is multiplied."""
    logits_scaling: float = Field(1.0, gt=0, le=1e6)
    """Number by which the output logits are divided."""
    attn_logit_softcapping: float | None = Field(None, ge=1e-3, le=1e6)
    """Cap of the attention logits: x becomes cap * tanh(x / cap). Default: none."""
    logit_softcap: float | None = Field(None, ge=1e-3, le=1e6)
    """Cap of the output logits: x becomes cap * tanh(x / cap). Default: none."""

    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability of attention weights."""
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability of each residual branch."""
    embedding_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability of embedded tokens."""

    initialization: Initialization | Annotated[str, CustomClass(kind="initialization")] = "scaled"
    """Initial weights. `normal`: normally distributed with standard deviation `initializer_range`; `scaled`: the same,
    but the standard deviation of `o_proj` (attention) and `down_proj` (MLP) is divided by sqrt(2 * layers), as in
    GPT-2; `muon_zero`: `o_proj`, `down_proj` and the output head are zero, other matrices uniform with variance 1 /
    fan_in, embeddings as in `normal`; or a custom `module:Class`.
    """
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights (see `initialization`)."""

    @model_validator(mode="before")
    @classmethod
    def _score_is_not_tied(cls, given: Any) -> Any:
        """Unties the output head, which a model with `num_labels` does not have."""
        return {**given, "tie_word_embeddings": False} if isinstance(given, dict) and given.get("num_labels") else given

    def slides(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has the sliding window."""
        if self.sliding_window is None:
            return False
        layer = self._kind(layer)
        if self.layer_types is not None:
            return self.layer_types[layer] == "sliding_attention"
        return self.sliding_window_pattern is None or (layer + 1) % self.sliding_window_pattern != 0

    def rotates(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has a rotary embedding."""
        if self.position in ("learned", "alibi", "none"):
            return False
        layer = self._kind(layer)
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return self.no_rope_layer_interval is None or (layer + 1) % self.no_rope_layer_interval != 0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts in place of an MLP."""
        return self.moe is not None and self.moe.has_experts(self._kind(layer))

    def _kind(self, layer: int) -> int:
        """Returns `layer`, or the model's last layer for a multi-token prediction layer, which has the same kind."""
        return min(layer, self.num_hidden_layers - 1)

    @property
    def all_layers(self) -> int:
        """Number of layers, with multi-token prediction layers."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def qk_head_dim(self) -> int:
        """Number of dimensions of a query or key head."""
        if self.mla is not None:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def v_head_dim(self) -> int:
        """Number of dimensions of a value head."""
        return self.qk_head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def attention_width(self) -> int:
        """Mean of the head dimensions of queries and values, times the number of query heads (for FLOPs)."""
        return self.num_attention_heads * (self.qk_head_dim + self.v_head_dim) // 2

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head."""
        return self.mla.qk_rope_head_dim if self.mla else int(self.qk_head_dim * self.partial_rotary_factor)

    @property
    def inner_width(self) -> int:
        """Hidden size of the MLP: `intermediate_size` or its default."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return 4 * self.hidden_size if self.mlp == "plain" else -(-8 * self.hidden_size // 24) * 8

    def _attention(self) -> tuple[int, int]:
        """Counts the parameters of a layer's attention. Returns the number in matrices, and the number in vectors."""
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
        """Returns the number of parameters of a layer, counted from 0, without building the layer."""
        hidden, inner = self.hidden_size, self.inner_width
        norms = (4 if self.norm_placement == "both" else 2) * self._norm
        attention, vectors = self._attention()
        if self.moe is not None and self.has_experts(layer):
            held, used, more = self.moe.parameters(hidden, inner, self.mlp_bias)
        else:
            into = 2 if self.mlp == "gated" else 1
            held = used = hidden * inner * (into + 1)
            more = inner * into + hidden if self.mlp_bias else 0
        matrices = 2 * hidden * hidden if layer >= self.num_hidden_layers else 0  # projects to the layer's input
        norms += 3 * self._norm if matrices else 0
        return ModelSize(attention + vectors + norms + held + more + matrices, attention + used + matrices)

    @property
    def _norm(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    def size(self, vocab_size: int | None = None) -> ModelSize:
        """Returns the number of parameters of the model.

        Raises:
            ValueError: the vocabulary size is set neither in the section nor by `vocab_size`.
        """
        vocabulary = self.vocab_size or vocab_size
        if vocabulary is None:
            raise ValueError("vocab_size is not set")
        layers = [self.layer_size(layer) for layer in range(self.all_layers)]
        embedding = vocabulary * self.hidden_size
        head = embedding if self.num_labels is None else self.num_labels * self.hidden_size
        others = embedding + (0 if self.tie_word_embeddings else head) + self._norm
        if self.position == "learned":
            others += self.max_position_embeddings * self.hidden_size
        heads = head * (1 + self.num_nextn_predict_layers)  # a shared matrix
        return ModelSize(sum(one.parameters for one in layers) + others, sum(one.matmul for one in layers) + heads)

    def resolved(self) -> dict[str, Any]:
        """Returns the values of all keys, including derived values such as `head_dim`.

        Model families convert these keys to a config.json (`Family.to_hf`).
        """
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
        """Number of key/value heads of a layer."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.attention_bias if self.attention_output_bias is None else self.attention_output_bias


class CustomModelSection(Component):
    """A custom model: an nn.Module that maps tokens to logits. The keys of `{type: module:Class, ...}` are the
    arguments of the class.
    """

    kind: ClassVar[str] = "model"

    from_: Folder | None = Field(None, alias="from")
    load_optimizer: bool = False
