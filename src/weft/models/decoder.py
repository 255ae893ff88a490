"""The built-in decoder-only transformer; every built-in family is a configuration of this model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.config.components import load_class
from weft.config.model import ModelSection
from weft.kernels.attention import alibi_slopes
from weft.kernels.cross_entropy import cap, token_logprobs
from weft.kernels.map_logits import LogitsFunction, map_logits
from weft.kernels.masks import attention_mask
from weft.models.layers.block import Block, Cache, PredictionLayer
from weft.models.layers.custom import custom_component
from weft.models.layers.dropout import Dropout
from weft.models.layers.norm import make_norm
from weft.models.layers.position import rotary_embeddings

HiddenFunction = Callable[[torch.Tensor], torch.Tensor]


class Decoder(nn.Module):
    """The built-in decoder: maps token ids to logits, to the log-probabilities of labels, or to scores.

    Args:
        config: the `model:` section; `vocab_size` must be set. Parameters are created on the current device, which can
            be "meta". They are uninitialized until `weft.models.initialize` or a checkpoint fills them.
    """

    def __init__(self, config: ModelSection):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size is not set; set it, for example to the tokenizer's vocabulary size")
        self.config = config
        hidden_size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden_size, config.pad_token_id)
        learned = config.position == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, hidden_size) if learned else None
        self.position = custom_component(config.position, "position", config) if ":" in config.position else None
        self.embedding_dropout = Dropout(config.embedding_dropout)
        kinds = [Block] * config.num_hidden_layers + [PredictionLayer] * config.num_nextn_predict_layers
        self.layers = nn.ModuleList(kind(config, layer) for layer, kind in enumerate(kinds))
        self.norm = make_norm(config)
        slides = any(config.slides(layer) for layer in range(config.num_hidden_layers))
        self.window = config.sliding_window if slides else None
        pattern = config.attention_pattern
        self.pattern = pattern and load_class(pattern, "attention_pattern")(**pattern.arguments)
        # Replaced by compiled, sharded or quantized versions.
        self.token_logprobs: Callable[..., torch.Tensor] = token_logprobs
        self.map_logits: Callable[..., torch.Tensor] = map_logits
        self.logits: Callable[..., torch.Tensor] = F.linear
        self.select = select
        self.run_head: Callable[..., Any] = operator.call
        self.gather_tokens: Callable[[torch.Tensor], torch.Tensor] = unchanged
        self.residual_dtype: torch.dtype | None = None  # of the first layer's input; None: that of the embeddings
        # Of hidden states, by the number of the state; `parallel/` adds them for objectives that need them.
        self.projections = nn.ModuleDict()
        self.heads = slice(None)  # the attention heads that this rank computes; set by `parallel/`
        # Set for pipeline stages: whether this stage has the embedding and the head, and the dtype of its computation.
        # Layers that belong to other stages are None.
        self.begins, self.ends = True, True
        self.dtype: torch.dtype | None = None
        has_head = not (config.tie_word_embeddings or config.num_labels)
        self.lm_head = nn.Linear(hidden_size, config.vocab_size, bias=False) if has_head else None
        self.score = nn.Linear(hidden_size, config.num_labels, bias=False) if config.num_labels else None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        cache: Cache | None = None,
        labels: torch.Tensor | None = None,
        loss_weights: torch.Tensor | None = None,
        logits_to_keep: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        logits_function: LogitsFunction | None = None,
        temperature: float = 1.0,
        next_tokens: torch.Tensor | None = None,
        next_labels: torch.Tensor | None = None,
        hidden_functions: Mapping[int, HiddenFunction] | None = None,
    ) -> torch.Tensor:
        """Runs the model.

        Args:
            tokens: int64 `[batch, seq]`; in a pipeline stage without the embedding, the previous stage's output.
            positions: `[batch, seq]`, each token's position in its document; default: consecutive positions along the
                sequence, starting after the cached tokens.
            segments: `[batch, seq]`, index of each token's document; attention stays within documents. Must be None
                with a cache.
            cache: earlier keys and values of the sequences that `tokens` continue. Requires `positions`; `batch` must
                be 1, because the tokens of all sequences are concatenated into one row.
            labels: `[batch, seq]`, the token ids to return log-probabilities of.
            loss_weights: `[batch]`, each sequence's weight in the step's loss, which scales the sequence's auxiliary
                losses in training; or `[batch, seq]`, the same divided among the sequence's tokens: experts count no
                tokens of weight 0, such as padding. None: no auxiliary losses.
            logits_to_keep: indices `[kept]` along `seq`. If given, only the logits of these tokens are returned,
                `[batch, kept, vocab]`.
            lengths: `[batch]`, lengths of the full sequences if `tokens` are shards of sequences (context parallelism);
                with a cache `[1, seq]`, the length of each token's sequence.
            logits_function: function of chunks of logits, as in `weft.kernels.map_logits`. If given, its values are
                returned, `[batch, seq]` or `[batch, seq, values]`.
            temperature: divides the logits, after their soft-cap.
            next_tokens: for each multi-token prediction layer k, counted from 1, the k-th token after each token,
                `[batch, seq, layers]`. If given, the layers run; requires `labels` and `next_labels`.
            next_labels: the label of each of `next_tokens`, `[batch, seq, layers]`.
            hidden_functions: number of a hidden state -> function of it, `[batch, seq, hidden]` -> `[batch, seq,
                values]`. State 0 is the input of the first layer, N the output of layer N (counted from 1), and the
                last is after the final norm, as in Transformers; negative numbers count from the last. If
                `projections` has the number, the function gets the projected state. The values are appended to the
                outputs, in the order of the states: `[batch, seq, outputs + values]`.

        Returns:
            Logits `[batch, seq, vocab]`; with `labels`, the labels' log-probabilities `[batch, seq]`, in nats, computed
            without materializing all logits. With `next_labels`, log-probabilities of `labels` and of `next_labels`,
            `[batch, seq, 1 + layers]`, or `[batch, seq, 2 + layers]` if `labels` have normalizers, too
            (`weft.models.forward.return_normalizers`). With `num_labels: 1` in the configuration, scores
            `[batch, seq]`. All are at least float32. In a pipeline stage without the head, the residual stream
            `[batch, seq, hidden]`.
        """
        x, arguments = self._layer_inputs(tokens, positions, segments, cache, loss_weights, lengths)
        values: list[torch.Tensor] = []
        x = self._run_layers(x, arguments, self._observer(hidden_functions, values) if hidden_functions else None)
        if not self.ends:
            return x
        out = self.outputs(x, labels, logits_to_keep, logits_function, temperature)
        if next_tokens is not None and next_labels is not None:
            out = self._with_predictions(out, x, arguments, next_tokens, next_labels)
        return torch.cat((out.unsqueeze(-1) if out.dim() == 2 else out, *values), -1) if values else out

    def residual_stream(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        cache: Cache | None = None,
        loss_weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the embedding and the layers. Returns the residual stream before the final norm `[batch, seq, hidden]`.

        The arguments are as in `forward`.
        """
        return self._run_layers(*self._layer_inputs(tokens, positions, segments, cache, loss_weights, lengths))

    def _layer_inputs(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        segments: torch.Tensor | None,
        cache: Cache | None,
        loss_weights: torch.Tensor | None,
        lengths: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[tuple]]:
        """Returns the residual stream before the first layer, and the other arguments of each layer."""
        config, seq = self.config, tokens.shape[1]
        if positions is None:
            positions = torch.arange(seq, device=tokens.device).unsqueeze(0)
        x = self.embed(tokens, positions) if self.begins else tokens  # [batch, seq, hidden]
        dtype = self.dtype or x.dtype
        rotary = rotary_embeddings(config, self.position, positions, dtype, lengths)
        masks = (None, None)  # a cache makes its own masks
        if cache is None:
            masks = self.masks(tokens if self.begins else positions, positions, segments, dtype)
        kinds = [(config.slides(layer), config.rotates(layer)) for layer in range(config.all_layers)]
        if self.residual_dtype is not None:
            x = x.to(self.residual_dtype)
        return x, [(rotary[s] if rotates else None, masks[s], cache, loss_weights) for s, rotates in kinds]

    def _run_layers(
        self, x: torch.Tensor, arguments: list[tuple], observe: Callable[[int, torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Runs the layers, without multi-token prediction layers. Calls `observe` with the number of each state."""
        for number, layer in enumerate(self.layers):
            if layer is not None and number < self.config.num_hidden_layers:
                if observe is not None:
                    observe(number, x)
                x = layer(x, *arguments[number])
        if observe is not None:
            observe(self.config.num_hidden_layers, self.norm(x))
        return x

    def _observer(
        self, functions: Mapping[int, HiddenFunction], values: list[torch.Tensor]
    ) -> Callable[[int, torch.Tensor], None]:
        """Returns a function that appends to `values` what `functions` return for a hidden state."""
        states = self.config.num_hidden_layers + 1

        def observe(number: int, state: torch.Tensor) -> None:
            chosen = [function for given, function in functions.items() if given % states == number]
            if chosen and str(number) in self.projections:
                projection: Any = self.projections[str(number)]
                state = projection(state.to(projection.weight.dtype))
            found = [function(self.gather_tokens(state)) for function in chosen]
            values.extend(one for one in found if one.shape[-1])

        return observe

    def _with_predictions(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        arguments: list[tuple],
        next_tokens: torch.Tensor,
        next_labels: torch.Tensor,
    ) -> torch.Tensor:
        """Runs the multi-token prediction layers, and appends the log-probabilities of `next_labels` to `out`.

        Args:
            out: outputs of the model, `[batch, seq]` or `[batch, seq, values]`.
            x: the residual stream before the final norm, `[batch, seq, hidden]`.
            arguments: what `_layer_inputs` returned.
        """
        hidden, columns = self.norm(x), [out.unsqueeze(-1) if out.dim() == 2 else out]
        for ahead in range(next_tokens.shape[-1]):
            number = self.config.num_hidden_layers + ahead
            embedded = self.embed_ids(next_tokens[..., ahead])
            hidden = self.layers[number](hidden, *arguments[number], embedded=embedded)
            found = self._head(hidden, next_labels[..., ahead])
            columns.append((found if found.dim() == 2 else found[..., 0]).unsqueeze(-1))  # without normalizers
        return torch.cat(columns, -1)

    def embed_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeds token ids `[batch, seq]` to `[batch, seq, hidden]`, without positions."""
        x, multiplier = self.embed_tokens(tokens), self.config.embedding_multiplier
        if multiplier == 1.0:
            return x
        return x * torch.tensor(multiplier, dtype=x.dtype)  # rounded to the embedding's dtype first, as in Gemma

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embeds token ids and positions, both `[batch, seq]`, to `[batch, seq, hidden]`."""
        x = self.embed_ids(tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if (embed := getattr(self.position, "embed", None)) is not None:
            x = embed(x, positions).to(x.dtype)
        return self.embedding_dropout(x)

    def outputs(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None,
        logits_to_keep: torch.Tensor | None = None,
        logits_function: LogitsFunction | None = None,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Applies the final norm and the head to `x` `[batch, seq, hidden]`.

        The other arguments and the result are as in `forward`.
        """
        if self.score is not None:
            scores = self.score(self.norm(x).to(self.score.weight.dtype)).squeeze(-1)
            return scores.to(torch.promote_types(scores.dtype, torch.float32))
        x = self.norm(x if logits_to_keep is None else self.select(x, logits_to_keep))
        return self._head(x, labels, logits_to_keep, logits_function, temperature)

    def _head(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None,
        logits_to_keep: torch.Tensor | None = None,
        logits_function: LogitsFunction | None = None,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Applies the output head to normalized hidden states `[batch, seq, hidden]`. As `outputs`."""

        def compute(x: torch.Tensor) -> torch.Tensor:
            head = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
            x = x.to(head.dtype)
            softcap, divisor = self.config.logit_softcap, self.config.logits_scaling * temperature
            if divisor != 1.0:
                x = x / divisor
            if softcap is not None:  # cap(logits / T, softcap / T) is cap(logits, softcap) / T
                softcap = softcap / temperature
            if logits_function is not None:
                return self.map_logits(x, head, logits_function, softcap)
            if labels is not None:
                return self.token_logprobs(x, head, labels, softcap)
            logits = self.logits(x, head)
            logits = logits if logits_to_keep is None else logits[:, : len(logits_to_keep)]
            return cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)

        return self.run_head(compute, x)

    def masks(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Any, Any]:
        """Returns the `mask` argument of layers with full attention, and the one of layers with a sliding window.

        Args:
            tokens: `[batch, seq]`; only the shape and the device are used.
            positions, segments: as in `forward`. Only the replacement of this method for context parallelism uses the
                positions.
            dtype: dtype of the queries.
        """
        config, window = self.config, self.window
        slopes = None
        if config.position == "alibi":
            slopes = alibi_slopes(config.num_attention_heads, config.alibi_bias_max, tokens.device)[self.heads]
        mask = partial(
            attention_mask,
            tokens,
            segments,
            dtype=dtype,
            head_dim=config.qk_head_dim,
            dropout=config.attention_dropout if self.training else 0.0,
            softcap=config.attn_logit_softcapping is not None,
            sinks=config.attention_sinks,
            slopes=slopes,
            implementation=config.attention_implementation,
        )
        full = mask(sparse=self.pattern)
        return full, full if window is None else mask(sparse=window)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """Returns `x`, `[batch, seq, ...]`."""
    return x


def select(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Selects tokens along `seq`: `x` `[batch, seq, hidden]`, indices `tokens` `[kept]` -> `[batch, kept, hidden]`."""
    return x[:, tokens]
