"""Tensor parallelism (Shoeybi et al., 2019) with sequence parallelism (Korthikanti et al., 2022).

The model's sharding table (`weft.models.sharding`) defines which parameters are sharded over `tp` and which are
replicated. Parameters are DTensors, but while a layer runs, this rank's local tensors replace them, so the model's code
computes with plain tensors. Between attention and MLP layers, each rank has a shard of the sequence. Inside of these
layers, each rank has the full sequence and computes a partial output. In both cases, each rank computes only a part of
the gradient of a replicated parameter, so its local gradient is always partial.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from weft.errors import UserError
from weft.models.adapter import quantized_weights
from weft.models.decoder import Decoder
from weft.models.layers.attention import Attention, CoreAttention
from weft.models.layers.latent import LatentAttention
from weft.models.layers.lora import Lora, has_quantized_weight
from weft.models.layers.moe import Experts, MixtureOfExperts
from weft.models.layers.norm import RMSNorm
from weft.models.sharding import ShardingRule, decoder_sharding, find_rule
from weft.parallel import collectives
from weft.parallel.axes.custom_model import CustomModelCheck
from weft.parallel.axes.vocabulary import ShardedVocabulary
from weft.parallel.local_parameters import distribute_parameters, local
from weft.parallel.memory.gathered_input import with_gathered
from weft.parallel.model_state import ModelState
from weft.parallel.randomness import WeightsDropout, draw_full_sequence
from weft.parallel.ranks import error_on_all_ranks
from weft.torch_private import overlap_tensor_parallel

SEQUENCE = 1  # the sequence dimension of `[batch, seq, hidden]`


def shard_over_tp(model: nn.Module, state: ModelState) -> nn.Module:
    """Shards a model over `tp` by its sharding table, and wraps its modules with the necessary collectives.

    Assumes plain parameters. A custom model's parameters must be initialized, because `CustomModelCheck` runs the
    model. Replaces parameters with DTensors on the axis `tp`, except for scalars and for experts that are sharded over
    `ep`. Between attention and MLP layers each rank has a shard of each sequence.

    Raises:
        UserError: the number of `tp` ranks does not divide the number of blocks in a row of a quantized weight.
    """
    tp, world = state.world.tp_mesh, state.world
    if tp is None:
        return model
    if state.plan.parallel.async_tp:
        world.agree(lambda: overlap(tp.get_group()))
    _check_quantized_blocks(model, tp.size())
    if isinstance(model, Decoder):
        shard_decoder(model, decoder_sharding(model.config, tp.size()), state)
        return model
    check = CustomModelCheck(model, state)
    shard_modules(model, check.table, state)
    if "head" in check.table.values():
        state.wrap(model, "tp: divide the gradient by the number of ranks", partial(_partial_gradient, tp.size()))
    else:
        state.wrap(model, "tp: all-gather the sequence of the output", partial(_full_output, tp.get_group()))
    check.compare()
    return model


def placement(table: dict[str, ShardingRule], name: str, parameter: nn.Parameter) -> Placement:
    """Returns a parameter's placement on `tp` by the rules of `table`. Scalars are replicated.

    Args:
        name: full name of the parameter in the model.
    """
    rule = find_rule(table, name)
    return Shard(rule) if isinstance(rule, int) and parameter.ndim else Replicate()


def overlap(group: dist.ProcessGroup) -> None:
    """Makes Inductor split collectives and adjacent matrix products into chunks that overlap (async TP).

    Raises:
        UserError: if the GPUs cannot access each other's memory.
    """
    try:
        overlap_tensor_parallel(group.group_name)
    except RuntimeError as error:
        raise UserError(
            f"parallel.async_tp: these GPUs cannot access each other's memory ({error}); remove the key"
        ) from error


def _check_quantized_blocks(model: nn.Module, ranks: int) -> None:
    """Raises UserError if `ranks` shards of a quantized weight would split its blocks, which have one scale each."""
    for name, (_, scale, _) in quantized_weights(model).items():
        if scale.shape[-1] % ranks:
            raise error_on_all_ranks(
                f"adapter.quantize: parallel.tp {ranks} would split the blocks of {name}, which has "
                f"{scale.shape[-1]} blocks per row; use a tp that divides this number"
            )


def shard_modules(model: nn.Module, table: dict[str, ShardingRule], state: ModelState, *, again: bool = False) -> None:
    """Replaces parameters with DTensors by the rules of `table`, and wraps the modules that have a rule.

    Args:
        again: whether backward gathers the inputs of layers again (`with_gathered`).
    """
    tp, left_to_ep = state.world.tp_mesh, Experts if state.world.ep_mesh is not None else ()
    assert tp is not None

    def placements(module: nn.Module, name: str, parameter: nn.Parameter) -> list[Placement] | None:
        # FSDP2 does not shard scalars: `replicate_scalars` replicates them over all ranks.
        left = isinstance(module, left_to_ep) or not parameter.ndim
        return None if left else [placement(table, name, parameter)]

    distribute_parameters(model, tp, placements)
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if find_rule(table, f"{path}.{name}".lstrip(".")) == "added":
                state.scales[module, name] = 1 / tp.size()
        kind = find_rule(table, path) if path else None
        if isinstance(kind, str) and kind in _WRAPPERS:
            wrapper, label = _WRAPPERS[kind]
            options = {"again": True} if again and wrapper is _part else {}
            state.wrap(module, f"tp: {label}", partial(wrapper, module, tp.get_group(), **options))


def shard_decoder(model: Decoder, table: dict[str, ShardingRule], state: ModelState) -> None:
    """Shards the decoder by `table`, and makes its modules compute with this rank's heads, tokens and vocabulary."""
    shard_modules(model, table, state, again=state.plan.gathers_again)
    tp = state.world.tp_mesh
    assert tp is not None
    group, rank, ranks = tp.get_group(), tp.get_local_rank(), tp.size()
    for module in model.modules():
        if isinstance(module, CoreAttention):
            each = module.num_heads // ranks
            state.fill(module, "heads", f"tp: heads / {ranks}", slice(rank * each, (rank + 1) * each))
            module.weights_dropout = WeightsDropout(module)
        elif isinstance(module, LatentAttention):
            state.fill(module, "heads", f"tp: heads / {ranks}", module.heads // ranks)
        elif isinstance(getattr(module, "lora", None), Lora) and isinstance(module, nn.Linear):
            _shard_adapter(module, group)
        elif isinstance(module, Attention) and module.kv_heads % ranks:
            head = rank * module.kv_heads // ranks
            rows = slice(head * module.head_dim, (head + 1) * module.head_dim)
            for linear in (module.k_proj, module.v_proj):
                state.wrap(linear, "tp: rows of one head of a replicated matrix", partial(_rows, linear, rows))
    each = model.config.num_attention_heads // ranks
    model.heads = slice(rank * each, (rank + 1) * each)
    draw_full_sequence([model.embedding_dropout], lambda tokens: local_positions(tokens, group))
    state.fill(model, "token_logprobs", "tp: sharded vocabulary", _of_sharded_head(model.token_logprobs, group))
    state.fill(model, "map_logits", "tp: all-gather chunks of logits", _of_sharded_head(model.map_logits, group))
    state.fill(model, "logits", "tp: all-gather the vocabulary", _logits(group))
    state.fill(model, "select", "tp: all-gather the sequence, shard the selected tokens", _select(group))
    gather_tokens = partial(collectives.all_gather, dim=SEQUENCE, group=group, replicated=True)
    state.fill(model, "gather_tokens", "tp: all-gather the sequence", gather_tokens)


def _shard_adapter(linear: Any, group: dist.ProcessGroup) -> None:
    """Makes the adapter of a linear layer work with a shard of the layer's inputs, if its inputs are sharded."""
    lora, width = linear.lora, linear.in_features
    each = local(linear.lora_a).shape[1]
    if each < width:
        lora.dropout.full_features = width, slice(group.rank() * each, (group.rank() + 1) * each)
        lora.sum_inputs = partial(collectives.all_reduce, group=group)


def local_positions(tokens: int, group: dist.ProcessGroup) -> tuple[int, torch.Tensor]:
    """Returns (length of the full sequence, positions of this rank's tokens in it).

    Args:
        tokens: number of this rank's tokens.
    """
    return tokens * group.size(), torch.arange(tokens) + tokens * group.rank()


# Wrappers of forward methods. The closures use only what torch.compile can trace.


def _part(module: nn.Module, group: dist.ProcessGroup, forward: Callable, *, again: bool = False) -> Callable:
    """Wraps the forward of a module with the rule 'part': all-gathers the input, reduce-scatters the partial output.

    With `again`, backward gathers the input again.

    In a mixture of experts, every rank computes the same auxiliary loss. So the wrapper divides the weight of the
    auxiliary loss by the number of ranks.
    """
    has_auxiliary_loss, ranks = isinstance(module, MixtureOfExperts), group.size()

    def call(x, *arguments, **named):
        if has_auxiliary_loss:
            arguments = tuple(weights if weights is None else weights / ranks for weights in arguments)
        if again and torch.is_grad_enabled():
            out = with_gathered(lambda full: forward(full, *arguments, **named), x, SEQUENCE, group)
        else:
            out = forward(collectives.all_gather(x, SEQUENCE, group), *arguments, **named)
        return collectives.reduce_scatter(out, SEQUENCE, group)

    return call


def _embedding(module: nn.Module, group: dist.ProcessGroup, forward: Callable) -> Callable:
    """Wraps an embedding's forward: looks up ids in this rank's rows (zeros for other ids), and reduce-scatters."""
    assert isinstance(module, nn.Embedding)
    rows = module.num_embeddings // group.size()
    first = group.rank() * rows
    padding = module.padding_idx
    padding = padding - first if padding is not None and padding // rows == group.rank() else None

    def call(ids):
        local_ids = ids - first
        elsewhere = (local_ids < 0) | (local_ids >= module.weight.shape[0])
        found = F.embedding(local_ids.masked_fill(elsewhere, 0), module.weight, padding)
        out = collectives.reduce_scatter(found.masked_fill(elsewhere.unsqueeze(-1), 0), SEQUENCE, group)
        # Compiled code returns a wrong gradient for a collective's output that was not awaited before (PyTorch 2.13).
        return out.clone() if out.requires_grad else out

    return call


def _sequence_shard(module: nn.Module, group: dist.ProcessGroup, forward: Callable) -> Callable:
    def call(positions):
        return forward(positions.chunk(group.size(), -1)[group.rank()])  # `[seq]` or `[batch, seq]`

    return call


def _rows(module: nn.Linear, rows: slice, forward: Callable) -> Callable:
    """Wraps a replicated linear layer's forward: computes only the output features `rows`."""
    if hasattr(module, "lora") or has_quantized_weight(module):
        return partial(forward, rows=rows)

    def call(x):
        if hasattr(module, "weight_fake_quantizer"):
            return forward(x)[..., rows]
        return F.linear(x, module.weight[rows], None if module.bias is None else module.bias[rows])

    return call


def _norm(module: nn.Module, group: dist.ProcessGroup, forward: Callable) -> Callable:
    """Wraps an RMS norm's forward: computes the norm of vectors whose last dimension is sharded over `group`."""
    assert isinstance(module, RMSNorm)

    def call(x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = collectives.all_reduce(wide.square().sum(-1, keepdim=True), group)
        mean = total / (wide.shape[-1] * group.size())
        return (wide * torch.rsqrt(mean + module.eps) * module.scale(wide.dtype)).to(module.weight.dtype)

    return call


def _of_sharded_head(function: Callable, group: dist.ProcessGroup) -> Callable:
    """Wraps `token_logprobs` or `map_logits`: all-gathers `hidden` along the sequence. All ranks return all values."""

    def call(hidden, weight, *arguments, **options):
        vocabulary = ShardedVocabulary(group.rank() * len(weight), group.size() * len(weight), group)
        hidden = collectives.all_gather(hidden, SEQUENCE, group)
        return function(hidden, weight, *arguments, vocabulary=vocabulary, **options)

    return call


def _logits(group: dist.ProcessGroup) -> Callable:
    def call(hidden, weight):
        shard = F.linear(collectives.all_gather(hidden, SEQUENCE, group), weight)
        return collectives.all_gather(shard, -1, group, replicated=True)

    return call


def _select(group: dist.ProcessGroup) -> Callable:
    """Returns a function from (`hidden`, indices of tokens in full sequences) to this rank's share of these tokens.

    It all-gathers `hidden`, selects the tokens, pads them to a multiple of the number of ranks, and returns one shard.
    """

    def call(hidden, tokens):
        kept = collectives.all_gather(hidden, SEQUENCE, group)[:, tokens]
        kept = F.pad(kept, (0, 0, 0, -kept.shape[1] % group.size()))
        return kept.chunk(group.size(), SEQUENCE)[group.rank()]

    return call


def _head(module: nn.Module, group: dist.ProcessGroup, forward: Callable) -> Callable:
    """Wraps the forward of an output head: returns full logits on every rank of `tp`.

    After the head, all ranks compute the same values. `_partial_gradient` divides the gradient of the model's output by
    the number of ranks, so that parameters after the head get partial gradients like all replicated parameters. This
    function undoes the division: it multiplies the gradient of the logits by the number of ranks.
    """

    def call(x):
        logits = forward(collectives.all_gather(x, SEQUENCE, group))
        return collectives.all_gather(collectives.scale_gradient(logits, group.size()), -1, group, replicated=True)

    return call


def _partial_gradient(ranks: int, forward: Callable) -> Callable:
    @wraps(forward)
    def call(*arguments, **named):
        return collectives.scale_gradient(forward(*arguments, **named), 1 / ranks)

    return call


def _full_output(group: dist.ProcessGroup, forward: Callable) -> Callable:
    @wraps(forward)
    def call(*arguments, **named):
        return collectives.all_gather(forward(*arguments, **named), SEQUENCE, group, replicated=True)

    return call


# Kind in the table -> wrapper (module, group, forward) and its label in `weft profile --structure`.
_WRAPPERS: dict[str, tuple[Callable[[nn.Module, dist.ProcessGroup, Callable], Callable], str]] = {
    "part": (_part, "all-gather the sequence, reduce-scatter the output"),
    "embedding": (_embedding, "look up in the sharded vocabulary, reduce-scatter"),
    "positions": (_sequence_shard, "this rank's shard of the sequence"),
    "head": (_head, "all-gather the sequence, all-gather the logits"),
    "norm": (_norm, "all-reduce the mean square"),
    "scores": (lambda _, *arguments: _full_output(*arguments), "all-gather the sequence of the scores"),
}
