"""Tensor parallelism (Shoeybi et al., 2019) with sequence parallelism (Korthikanti et al., 2022), by a model's table.

Parameters are DTensors: cut over `tp`, or whole on each of its ranks. Inside a layer's forward the rank's own part
stands in their place, so the model's plain code computes with it. One rule gives all gradients: between parts a rank
has its slice of the sequence and inside a part a summand of the output, so what a whole parameter gets on one rank is
always one summand of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.models.layers.attention import Attention, CoreAttention
from weft.models.layers.latent import LatentAttention
from weft.models.layers.moe import Experts, MixtureOfExperts
from weft.models.layers.norm import RMSNorm
from weft.models.sharding import ShardingRule, decoder_sharding, find_rule
from weft.parallel.axes.custom_model import CustomTrial
from weft.parallel.collectives import gather, gather_copies, scale_gradient, scatter_sum, sum_parts
from weft.parallel.local_parameters import distribute_parameters
from weft.parallel.model_state import ModelState
from weft.parallel.randomness import WeightsDropout, share_row
from weft.torch_private import overlap_tensor_parallel

SEQUENCE = 1  # the dimension of `[batch, seq, width]` that is sliced between parts


def shard_over_tp(model: nn.Module, state: ModelState) -> nn.Module:
    """Shard matrices over `tp` by the model's table, and have its parts communicate accordingly.

    Assumes plain parameters, of a model that is not the decoder with their values. Leaves DTensors on the axis `tp`,
    but for experts that are sharded over `ep`, and between the parts of a layer a slice of each sequence on every rank.
    """
    tp, world = state.world.tensor, state.world
    if tp is None:
        return model
    if state.plan.parallel.async_tp:
        world.agree(lambda: overlap(tp.get_group()))
    if isinstance(model, Decoder):
        share_decoder(model, decoder_sharding(model.config, tp.size()), state)
        return model
    trial = CustomTrial(model, state)
    share_parts(model, trial.table, state)
    if "head" in trial.table.values():
        state.wrap(model, "tp: gradient / ranks", partial(_partial_gradient, tp.size()))
    else:
        state.wrap(model, "tp: all-gather the output's sequence", partial(_whole_output, tp.get_group()))
    trial.compare()
    return model


def placement(table: dict[str, ShardingRule], name: str, parameter: nn.Parameter) -> Placement:
    """Of a parameter on `tp`."""
    cut = find_rule(table, name)
    return Shard(cut) if isinstance(cut, int) and parameter.ndim else Replicate()


def overlap(group: dist.ProcessGroup) -> None:
    """Have Inductor split collectives and the products beside them into pieces that overlap (async TP).

    Raises:
        UserError: the GPUs do not reach one another's memory.
    """
    try:
        overlap_tensor_parallel(group.group_name)
    except RuntimeError as error:
        raise UserError(
            f"parallel.async_tp: these GPUs do not reach one another's memory ({error}); remove it"
        ) from error


def share_parts(model: nn.Module, table: dict[str, ShardingRule], state: ModelState) -> None:
    """Shard what the table names, and have each of its modules gather and sum over the ranks of `tp`."""
    tp, elsewhere = state.world.tensor, Experts if state.world.experts is not None else ()
    assert tp is not None

    def placements(module: nn.Module, name: str, parameter: nn.Parameter) -> list[Placement] | None:
        # FSDP2 shards no scalars: they are replicated over all ranks at once (`replicate_scalars`).
        left = isinstance(module, elsewhere) or not parameter.ndim
        return None if left else [placement(table, name, parameter)]

    distribute_parameters(model, tp, placements)
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if find_rule(table, f"{path}.{name}".lstrip(".")) == "added":
                state.shares[module, name] = 1 / tp.size()
        kind = find_rule(table, path) if path else None
        if isinstance(kind, str) and kind in _WRAPPERS:
            wrapper, label = _WRAPPERS[kind]
            state.wrap(module, f"tp: {label}", partial(wrapper, module, tp.get_group()))


def share_decoder(model: Decoder, table: dict[str, ShardingRule], state: ModelState) -> None:
    """`share_parts`, and what the decoder has seams for: heads, dropout, and the split vocabulary."""
    share_parts(model, table, state)
    tp = state.world.tensor
    assert tp is not None
    group, rank, ranks = tp.get_group(), tp.get_local_rank(), tp.size()
    for module in model.modules():
        if isinstance(module, CoreAttention):
            each = module.num_heads // ranks
            state.fill(module, "heads", f"tp: heads / {ranks}", slice(rank * each, (rank + 1) * each))
            module.weights_dropout = WeightsDropout(module)
        elif isinstance(module, LatentAttention):
            state.fill(module, "heads", f"tp: heads / {ranks}", module.heads // ranks)
        elif isinstance(module, Attention) and module.kv_heads % ranks:
            head = rank * module.kv_heads // ranks
            rows = slice(head * module.head_dim, (head + 1) * module.head_dim)
            for linear in (module.k_proj, module.v_proj):
                state.wrap(linear, "tp: one head of a replicated matrix", partial(_rows, linear, rows))
    each = model.config.num_attention_heads // ranks
    model.heads = slice(rank * each, (rank + 1) * each)
    share_row([model.embedding_dropout], lambda tokens: slice_of(tokens, group))
    state.fill(model, "token_logprobs", "tp: split vocabulary", _token_logprobs(model.token_logprobs, group))
    state.fill(model, "logits", "tp: all-gather the vocabulary", _logits(group))


def slice_of(tokens: int, group: dist.ProcessGroup) -> tuple[int, torch.Tensor]:
    """Of a rank's slice of so many tokens: the length of the whole, and their places in it."""
    return tokens * group.size(), torch.arange(tokens) + tokens * group.rank()


# A module of the table, in other words: the closures below keep to functions that torch.compile can follow.


def _part(module: nn.Module, group: dist.ProcessGroup, forward: Callable) -> Callable:
    """All tokens in, a summand out. A balance of experts is reckoned by every rank: each adds its share of it."""
    balances, ranks = isinstance(module, MixtureOfExperts), group.size()

    def call(x, *arguments, **named):
        if balances:
            arguments = tuple(shares if shares is None else shares / ranks for shares in arguments)
        out = forward(gather(x, SEQUENCE, group), *arguments, **named)
        return scatter_sum(out, SEQUENCE, group)

    return call


def _embedding(module: nn.Module, group: dist.ProcessGroup, forward: Callable) -> Callable:
    """The rows of ids that are here, zero for the others, summed."""
    assert isinstance(module, nn.Embedding)
    rows = module.num_embeddings // group.size()
    first = group.rank() * rows
    padding = module.padding_idx
    padding = padding - first if padding is not None and padding // rows == group.rank() else None

    def call(ids):
        own = ids - first
        elsewhere = (own < 0) | (own >= module.weight.shape[0])
        found = F.embedding(own.masked_fill(elsewhere, 0), module.weight, padding)
        out = scatter_sum(found.masked_fill(elsewhere.unsqueeze(-1), 0), SEQUENCE, group)
        # What is not awaited before it enters compiled code gets a wrong gradient from there (PyTorch 2.13).
        return out.clone() if out.requires_grad else out

    return call


def _sliced(module: nn.Module, group: dist.ProcessGroup, forward: Callable) -> Callable:
    def call(positions):
        return forward(positions.chunk(group.size(), -1)[group.rank()])  # `[seq]` or `[batch, seq]`

    return call


def _rows(module: nn.Linear, rows: slice, forward: Callable) -> Callable:
    """Some rows of a map that is whole on all ranks."""

    def call(x):
        return F.linear(x, module.weight[rows], None if module.bias is None else module.bias[rows])

    return call


def _norm(module: nn.Module, group: dist.ProcessGroup, forward: Callable) -> Callable:
    """The RMS norm of a vector whose parts the ranks have."""
    assert isinstance(module, RMSNorm)

    def call(x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = sum_parts(wide.square().sum(-1, keepdim=True), group) / (wide.shape[-1] * group.size())
        return (wide * torch.rsqrt(mean + module.eps) * module.scale(wide.dtype)).to(module.weight.dtype)

    return call


@dataclass(frozen=True)
class _CutVocabulary:
    """`weft.kernels.cross_entropy.Vocabulary` over a group."""

    first: int
    group: dist.ProcessGroup

    def join(self, chosen: torch.Tensor, normalizers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One gathering of two numbers a token and rank."""
        all_of_them = gather_copies(torch.stack((chosen, normalizers)).unsqueeze(0), 0, self.group)
        return all_of_them[:, 0].sum(0), all_of_them[:, 1].logsumexp(0)


def _token_logprobs(function: Callable, group: dist.ProcessGroup) -> Callable:
    """Of all tokens by all words, a part of which each rank has: log-probabilities that all ranks have."""

    def call(hidden, weight, labels, softcap=None, **options):
        vocabulary = _CutVocabulary(group.rank() * len(weight), group)
        hidden = gather(hidden, SEQUENCE, group)
        return function(hidden, weight, labels, softcap, vocabulary=vocabulary, **options)

    return call


def _logits(group: dist.ProcessGroup) -> Callable:
    def call(hidden, weight):
        return gather_copies(F.linear(gather(hidden, SEQUENCE, group), weight), -1, group)

    return call


def _head(module: nn.Module, group: dist.ProcessGroup, forward: Callable) -> Callable:
    """Returns all logits on every rank of `tp`. Each rank's gradient of them is 1 / ranks of theirs.

    After the head all ranks compute the same. `_partial_gradient` divides the gradient there, so that a replicated
    parameter after the head gets a partial gradient, as everywhere else.
    """

    def call(x):
        logits = scale_gradient(forward(gather(x, SEQUENCE, group)), group.size())
        return gather_copies(logits, -1, group)

    return call


def _partial_gradient(ranks: int, forward: Callable) -> Callable:
    """Divides the gradient of the output, which is the same on all ranks of `tp`, by their number."""

    @wraps(forward)
    def call(*arguments, **named):
        return scale_gradient(forward(*arguments, **named), 1 / ranks)

    return call


def _whole_output(group: dist.ProcessGroup, forward: Callable) -> Callable:
    @wraps(forward)
    def call(*arguments, **named):
        return gather_copies(forward(*arguments, **named), SEQUENCE, group)

    return call


# Kind in a model's table -> wrapper (module, group, forward), and what it is called in a picture of the model.
_WRAPPERS: dict[str, tuple[Callable[[nn.Module, dist.ProcessGroup, Callable], Callable], str]] = {
    "part": (_part, "all-gather the sequence, reduce-scatter the output"),
    "embedding": (_embedding, "rows of the split vocabulary, reduce-scatter"),
    "positions": (_sliced, "this rank's slice of the sequence"),
    "head": (_head, "all-gather the sequence, all-gather the logits"),
    "norm": (_norm, "all-reduce the mean square"),
}
