"""Captures a decoder as one graph of PyTorch operators (`torch.export`), for targets that compile or run graphs.

The graph computes `(tokens, positions, *past) -> (logits, *present)`:

- `tokens` `[batch, seq]`: int64 token ids.
- `positions` `[batch, seq]`: int64, each token's position in its sequence. Positions are consecutive along `seq`.
  Sequences of different lengths are left-padded to one length; the positions of padding are negative.
- `past`: the cache of all earlier tokens, two tensors for each layer, `[batch, kv_heads, past, head_dim]`. `past` can
  be 0. The past tokens of a sequence are the last columns; columns before its first token are never seen, whatever
  numbers they contain. So a graph with a fixed `past` works, too: pass the last `past` columns of `present` to the
  next call.
- `logits` `[batch, seq, vocab]`: float32 (float64 for a model in float64).
- `present`: the cache after these tokens, `[batch, kv_heads, past + seq, head_dim]`.

The cache of latent attention consists of the latents `[batch, 1, past, kv_lora_rank]` and the rotary keys
`[batch, 1, past, qk_rope_head_dim]`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.adapter_record import read_adapter_record
from weft.checkpoint.adapter_weights import Rounding
from weft.checkpoint.huggingface.config_files import copy_tokenizer_files, read_origin, special_ids, with_stop_token
from weft.checkpoint.huggingface.import_model import parse_dtype
from weft.checkpoint.load import architecture, tokenizer_folder
from weft.checkpoint.load_model import load_model
from weft.checkpoint.shard_files import new_folder
from weft.checkpoint.tensor_file import Entry, dtype_name, write_safetensors
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.export.merge_adapter import merged_run
from weft.models.decoder import Decoder
from weft.models.initialize import initialize_buffers
from weft.models.layers.moe import Experts, MixtureOfExperts
from weft.models.layers.rope import rotary_changes_at

GRAPH = "graph.json"
_CUSTOM = ("position", "attention_implementation", "norm", "hidden_act")


class Sizes(NamedTuple):
    """The sizes of a call of a graph: sequences, new tokens of each sequence, and cached tokens of each sequence."""

    batch: int
    seq: int
    past: int


EXAMPLE = Sizes(3, 5, 4)  # at least 2 each: sizes 0 and 1 would be captured as constants


class GraphCache:
    """The cache of one call of a graph. Implements `weft.models.decoder.Cache` with plain concatenation.

    Args:
        decoder: the decoder.
        positions, past: as in the description of this module.
    """

    def __init__(self, decoder: Decoder, positions: torch.Tensor, past: Sequence[torch.Tensor]):
        self.past, self.present = past, []
        config, seq, start = decoder.config, positions.shape[1], past[0].shape[2]
        columns = torch.arange(start + seq, device=positions.device)
        query_columns = (start + torch.arange(seq, device=positions.device)).unsqueeze(1)  # [seq, 1]
        queries = positions.unsqueeze(2)  # [batch, seq, 1]
        keys = columns - query_columns + queries  # [batch, seq, keys], position of each column's token
        itself = columns == query_columns  # padding sees itself: a query without keys would give NaN
        seen = (keys >= 0) & (keys <= queries)
        full = seen if decoder.pattern is None else seen & decoder.pattern(queries, keys)
        sliding = seen if decoder.window is None else seen & (keys > queries - decoder.window)
        masks = [(mask | itself).unsqueeze(1) for mask in (full, sliding)]
        self.masks = [masks[config.slides(layer)] for layer in range(config.num_hidden_layers)]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Implements `weft.models.decoder.Cache.attend`, for a batch of sequences in place of one row."""
        k, v = torch.cat((self.past[2 * layer], k), dim=2), torch.cat((self.past[2 * layer + 1], v), dim=2)
        self.present += [k, v]
        return attention(q, k, v, self.masks[layer])


class DecoderGraph(nn.Module):
    """A decoder with the inputs and outputs of a graph.

    Mixtures of experts compute all experts for each token, because the number of tokens of an expert depends on data.

    Args:
        decoder: the decoder, without adapter. It is changed: its experts compute all tokens.
    """

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder.eval().requires_grad_(False)
        for module in decoder.modules():
            if isinstance(module, MixtureOfExperts):
                module.dispatch = dispatch_to_all

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the decoder; arguments and results are as in the description of this module."""
        cache = GraphCache(self.decoder, positions, past)
        logits = self.decoder(tokens, positions.clamp(min=0), cache=cache)
        return logits, *cache.present

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the cache."""
        return self.decoder.embed_tokens.weight.dtype

    def cache_shapes(self) -> list[tuple[int, int]]:
        """Returns (heads, dimensions of a head) of each tensor of the cache, in the order of `past`."""
        config = self.decoder.config
        pair = [(config.kv_heads, config.qk_head_dim)] * 2
        if config.mla is not None:
            pair = [(1, config.mla.kv_lora_rank), (1, config.mla.qk_rope_head_dim)]
        return pair * config.num_hidden_layers

    def dynamic_shapes(self, largest: Sizes | None = None) -> Any:
        """Returns the `dynamic_shapes` of `torch.export.export`: batch, seq and past, which can be 0.

        Args:
            largest: the only batch, and the largest seq and past. Default: no limit.
        """
        batch = torch.export.Dim("batch", min=1) if largest is None else torch.export.Dim.STATIC
        seq = torch.export.Dim("seq", min=1, max=largest and largest.seq)
        past = torch.export.Dim("past", min=0, max=largest and largest.past)
        return {0: batch, 1: seq}, {0: batch, 1: seq}, ({0: batch, 2: past},) * len(self.cache_shapes())

    def inputs(self, sizes: Sizes = EXAMPLE, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Returns random tokens, their positions after a full cache, and a random cache."""
        batch, seq, past = sizes
        generator = torch.Generator().manual_seed(seed)
        vocabulary = self.decoder.config.vocab_size or 1
        tokens = torch.randint(vocabulary, (batch, seq), generator=generator)
        positions = torch.arange(past, past + seq).repeat(batch, 1)
        shapes = [(batch, heads, past, size) for heads, size in self.cache_shapes()]
        return tokens, positions, *(torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)


def dispatch_to_all(
    experts: Experts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, dropped: None = None
) -> torch.Tensor:
    """Computes `weft.models.layers.moe.dispatch` with shapes that do not depend on data: all experts run all tokens.

    Args:
        dropped: always None, because no token is dropped outside of training.
    """
    rows = x.expand(experts.num_experts, -1, -1)  # [experts, tokens, hidden]
    gate = linear_of_all(rows, experts.gate_proj, experts.gate_bias)
    up = linear_of_all(rows, experts.up_proj, experts.up_bias)
    out = linear_of_all(experts.activate(gate, up), experts.down_proj, experts.down_bias)
    shares = torch.zeros(x.shape[0], experts.num_experts, dtype=weights.dtype, device=x.device)
    return (out * shares.scatter(1, chosen, weights).T.unsqueeze(-1)).sum(0)


def linear_of_all(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Applies the linear layer of each expert to `x` `[experts, tokens, in]`; returns `[experts, tokens, out]`.

    No dimension is split or merged, which would fix its size in a graph.
    """
    out = torch.bmm(x, weight.mT)
    return out if bias is None else out + bias.unsqueeze(1)


@dataclass
class GraphSource:
    """A model to capture.

    Attributes:
        path: the checkpoint or Hugging Face folder.
        module: the decoder with the inputs and outputs of a graph.
        tokenizer: the tokenizer's folder; None: there is no tokenizer.
    """

    path: Path
    module: DecoderGraph
    tokenizer: Path | None

    @property
    def section(self) -> ModelSection:
        """The `model` section."""
        return self.module.decoder.config

    @property
    def bytes(self) -> int:
        """The size of the weights."""
        return sum(parameter.nbytes for parameter in self.module.parameters())

    def capture(self, sizes: Sizes | None = None, *, largest: Sizes | None = None) -> torch.export.ExportedProgram:
        """Captures the graph. Weights are parameters of the program.

        Args:
            sizes: sizes of the only calls that are possible. Default: batch, seq and past are dynamic.
            largest: the only batch, and the largest seq and past, for targets that plan memory. Default: no limit.

        Raises:
            UserError: `torch.export` cannot capture a custom component.
        """
        shapes = self.module.dynamic_shapes(largest) if sizes is None else None
        example = sizes or (EXAMPLE if largest is None else EXAMPLE._replace(batch=largest.batch))
        inputs = self.module.inputs(example)
        try:
            with redirect_stderr(io.StringIO()):  # it prints the graph when it fails
                program = torch.export.export(self.module, inputs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            custom = [f"{key}: {value}" for key in _CUSTOM if ":" in (value := getattr(self.section, key))]
            if not custom:
                raise
            raise UserError(
                f"torch.export cannot capture this model with {', '.join(custom)} ({type(error).__name__}: "
                f"{str(error).strip().splitlines()[0]}); use only tensor operations in the component",
                self.path / files.MODEL,
            ) from error
        for node in program.graph.nodes:
            if node.target is torch.ops.aten.exp2.default:  # of ALiBi; not an operator of Core ATen
                node.target, node.args = torch.ops.aten.pow.Scalar, (2.0, *node.args)
        program.graph.eliminate_dead_code()
        return program

    def description(self, target: str, names: Sequence[Sequence[str]] | None = None) -> dict[str, Any]:
        """Returns the content of graph.json: what a program needs to call the graph.

        Args:
            target: name of the target.
            names: names of the inputs and of the outputs; default: `input_names` and `output_names`.
        """
        config, layout = self.section, self.module.cache_shapes()
        inputs, outputs = names or (input_names(config), output_names(config))
        shapes = [["batch", "seq"], ["batch", "seq"], *(["batch", heads, "past", size] for heads, size in layout)]
        made = [["batch", "seq", config.vocab_size], *(["batch", heads, "past + seq", n] for heads, n in layout)]
        cache = [dtype_name(self.module.dtype)] * len(layout)
        logits = dtype_name(torch.promote_types(self.module.dtype, torch.float32))
        original = None if config.rope_scaling is None else config.rope_scaling.original_max_position_embeddings
        changes = original is not None and rotary_changes_at(config.rope_scaling, original + 1)
        return {
            "target": target,
            "family": config.family,
            "max_positions": config.max_position_embeddings,
            "recompute_at": original + 1 if original is not None and changes else None,
            "eos_token_ids": self._stop_tokens(),
            "inputs": _tensors(inputs, ["int64", "int64", *cache], shapes),
            "outputs": _tensors(outputs, [logits, *cache], made),
        }

    def _stop_tokens(self) -> list[int]:
        origin = read_origin(self.path)
        given = origin.get("generation_config") or origin.get("config") or special_ids(self.tokenizer, self.section)
        found = with_stop_token({"eos_token_id": given.get("eos_token_id")}, self.tokenizer)["eos_token_id"]
        return found if isinstance(found, list) else [] if found is None else [found]


def input_names(config: ModelSection) -> list[str]:
    """Returns the names of a graph's inputs, in order."""
    layers = range(config.num_hidden_layers)
    return ["tokens", "positions", *(f"past.{layer}.{kind}" for layer in layers for kind in ("key", "value"))]


def output_names(config: ModelSection) -> list[str]:
    """Returns the names of a graph's outputs, in order."""
    return ["logits", *(name.replace("past", "present") for name in input_names(config)[2:])]


def _tensors(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[list[Any]]) -> list[dict[str, Any]]:
    rows = zip(names, dtypes, shapes, strict=True)
    return [{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape in rows]


def open_graph(source: Path, target: str, dtype: str | torch.dtype | None = None) -> GraphSource:
    """Loads the model of a graph, with its adapter merged.

    Args:
        source: path of a checkpoint or of a Hugging Face folder, as `resolve` returns it.
        target: name of the target, for messages.
        dtype: dtype of the weights. Default: as saved.

    Raises:
        UserError: the model is not a built-in decoder that predicts tokens, or cannot be loaded.
    """
    kind, section = parse_dtype(dtype), architecture(source)
    if not isinstance(section, ModelSection):
        raise UserError(
            f"type: {section.type} is not supported by --to {target}, which captures built-in decoders"
            + ("; use --to hf" if section.type == "hf" else "; use torch.export on the model of weft.load_model"),
            source if section.type == "hf" else source / files.MODEL,
        )
    if section.num_labels:
        what = f"num_labels: {section.num_labels} (a reward model) is not supported by --to {target}; use --to hf"
        raise UserError(what, source)
    record, tokenizer = read_adapter_record(source), tokenizer_folder(source)
    if record is None:
        decoder = load_model(source, dtype=kind)
    else:
        if record.section.quantize is not None:
            what = f"adapter.quantize: {record.section.quantize} is not supported by --to {target}"
            raise UserError(f"{what}; merge first (`weft merge --dequantize`), and export the merged model", source)
        model, _ = merged_run(source, kind, Rounding())
        decoder, tokenizer = Decoder(section), model.tokenizer
        initialize_buffers(decoder)
        for name, tensor in decoder.state_dict(keep_vars=True).items():
            tensor.data = model.weights.tensors[name].full()
    assert isinstance(decoder, Decoder)
    kinds = {parameter.dtype for parameter in decoder.parameters()}
    if len(kinds) > 1:
        saved = ", ".join(sorted(map(dtype_name, kinds)))
        raise UserError(f"the weights have several dtypes ({saved}); choose one with --dtype", source)
    return GraphSource(source, DecoderGraph(decoder), tokenizer)


@contextmanager
def new_graph_folder(out: Path, graph: GraphSource, description: dict[str, Any]) -> Iterator[Path]:
    """Context manager that makes a folder for a graph, and yields it under a hidden name.

    If the block succeeds, graph.json and the tokenizer's files are added, and the folder is renamed to `out`.

    Args:
        description: content of graph.json.

    Raises:
        UserError: as `new_folder`.
    """
    with new_folder(out, graph.bytes) as folder:
        yield folder
        files.write_json(folder / GRAPH, description)
        if graph.tokenizer is not None:
            copy_tokenizer_files(graph.tokenizer, folder)


def write_weights(folder: Path, weights: Sequence[Any]) -> None:
    """Writes weights.safetensors, whose names are the places of the weights in the arguments of the program.

    Args:
        weights: tensors of another library, which `torch.from_dlpack` converts.
    """
    tensors = [torch.from_dlpack(one) for one in weights]
    entries = [
        Entry(f"{number:05d}", one.dtype, tuple(one.shape), lambda one=one: one) for number, one in enumerate(tensors)
    ]
    write_safetensors(folder / "weights.safetensors", entries, {})
