"""Tensor parallelism (Shoeybi et al., 2019) with sequence parallelism (Korthikanti et al., 2022), by a model's table.

Parameters are DTensors: cut over `tp`, or whole on each of its ranks. Inside a layer's forward the rank's own part
stands in their place, so the model's plain code computes with it. One rule gives all gradients: between parts a rank
has its slice of the sequence and inside a part a summand of the output, so what a whole parameter gets on one rank is
always one summand of its gradient.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from weft.config.errors import UserError
from weft.models.decoder import Decoder
from weft.models.layers.attention import Attend, Attention
from weft.models.layers.experts import Experts, MixtureOfExperts
from weft.models.layers.latent import LatentAttention
from weft.models.layers.norm import RMSNorm
from weft.models.sharding import Cut, cut_of
from weft.parallel.collectives import gather, gather_copies, scatter_sum, sum_parts
from weft.parallel.randomness import WeightsDropout, share_row

SEQUENCE = 1  # the dimension of `[batch, seq, width]` that is sliced between parts


def cut_parameters(
    model: nn.Module, table: dict[str, Cut], tp: DeviceMesh | None, experts: DeviceMesh | None = None
) -> None:
    """Make parameters DTensors, cut as the table says. All ranks have the same values, if they have any.

    Args:
        tp: the axis `tp`; None: there is none, and only experts are cut.
        experts: the axes `ep` and, beside a `tp`, that: experts' first dimension is cut over `ep`.
    """
    # Whole values are wanted now and then, for samples and by optimizers of matrices: every rank would tell each time
    # that they take two gatherings.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # a tied one stays one
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = cut_of(table, f"{path}.{name}".lstrip("."))
            if parameter not in replaced:
                along = Shard(cut) if isinstance(cut, int) and parameter.ndim else Replicate()
                mesh, placements = tp, [along]
                if experts is not None and isinstance(module, Experts):
                    mesh, placements = experts, [Shard(0)] + ([along] if tp is not None else [])
                whole = parameter.detach()
                if mesh is not None:
                    whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                replaced[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            setattr(module, name, replaced[parameter])
            if tp is not None and cut == "added":
                module.weft_shares = {**getattr(module, "weft_shares", {}), name: 1 / tp.size()}


def local_part(parameter: DTensor) -> torch.Tensor:
    """This rank's part. Its gradient is one summand of it, over dimensions of the mesh that do not cut it."""
    placements = [p if isinstance(p, Shard) else Partial() for p in parameter.placements]
    return parameter.to_local(grad_placements=placements)


def local_parts(
    forward: Callable,
    unit: nn.Module,
    apart: Collection[nn.Module] = (),
    *,
    part_of: Callable[[DTensor], torch.Tensor] = local_part,
) -> Callable:
    """`forward`, with this rank's parts in the place of all DTensors that are parameters of `unit`.

    Args:
        unit: one of FSDP2's, whose parameters are gathered when `forward` is called.
        apart: modules inside it that are units of their own.
        part_of: gives the part.
    """
    others = {id(module) for one in apart for module in one.modules()}
    places = [
        (module, name, getattr(module, "weft_shares", {}).get(name))
        for module in unit.modules()
        if id(module) not in others
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]

    @functools.wraps(forward)
    def call(*arguments, **named):
        before = [module._parameters[name] for module, name, _ in places]
        try:
            for (module, name, share), parameter in zip(places, before, strict=True):
                part = part_of(parameter)
                module._parameters[name] = part if share is None else part * share
            return forward(*arguments, **named)
        finally:
            for (module, name, _), parameter in zip(places, before, strict=True):
                module._parameters[name] = parameter

    return call if places else forward


def overlap(tp: DeviceMesh) -> None:
    """Have Inductor cut gatherings, sums and the products beside them into pieces that overlap (async TP).

    Raises:
        UserError: the GPUs do not reach one another's memory.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    try:
        enable_symm_mem_for_group(tp.get_group().group_name)
    except RuntimeError as error:
        raise UserError(
            f"parallel.async_tp: these GPUs do not reach one another's memory ({error}); remove it"
        ) from error


def share_parts(model: nn.Module, table: dict[str, Cut], tp: DeviceMesh) -> None:
    """Have each module that the table names gather and sum over the ranks of `tp`."""
    group, rank = tp.get_group(), tp.get_local_rank()
    for path, module in model.named_modules():
        kind = cut_of(table, path) if path else None
        if kind == "part":
            module.forward = _part(module, module.forward, group)
        elif kind == "embedding":
            module.forward = _embedding(module, group)
        elif kind == "positions":
            module.forward = _sliced(module.forward, group)
        elif kind == "head":
            module.forward = _head(module.forward, group)
        elif kind == "norm":
            module.forward = _norm(module, group)
        if isinstance(module, Attend):
            each = module.all_heads // tp.size()
            module.heads = slice(rank * each, (rank + 1) * each)
            module.weights_dropout = WeightsDropout(module)
        elif isinstance(module, LatentAttention):
            module.heads //= tp.size()
        elif isinstance(module, Attention) and module.kv_heads % tp.size():
            head = rank * module.kv_heads // tp.size()
            rows = slice(head * module.head_dim, (head + 1) * module.head_dim)
            for of in (module.k_proj, module.v_proj):
                of.forward = _rows(of, rows)
    if isinstance(model, Decoder):
        each = model.config.num_attention_heads // tp.size()
        model.heads = slice(rank * each, (rank + 1) * each)
        share_row([model.embedding_dropout], lambda tokens: slice_of(tokens, group))
        model.token_logprobs = _token_logprobs(model.token_logprobs, group)
        model.logits = _logits(group)
    elif "head" not in table.values():
        model.forward = _whole_output(model.forward, group)


def slice_of(tokens: int, group: dist.ProcessGroup) -> tuple[int, torch.Tensor]:
    """Of a rank's slice of so many tokens: the length of the whole, and their places in it."""
    return tokens * group.size(), torch.arange(tokens) + tokens * group.rank()


# A module of the table, in other words: the closures below keep to functions that torch.compile can follow.


def _part(module: nn.Module, forward: Callable, group: dist.ProcessGroup) -> Callable:
    """All tokens in, a summand out. A balance of experts is reckoned by every rank: each adds its share of it."""
    balances, ranks = isinstance(module, MixtureOfExperts), group.size()

    def call(x, *arguments, **named):
        if balances:
            arguments = tuple(shares if shares is None else shares / ranks for shares in arguments)
        out = forward(gather(x, SEQUENCE, group), *arguments, **named)
        return scatter_sum(out, SEQUENCE, group)

    return call


def _embedding(module: nn.Module, group: dist.ProcessGroup) -> Callable:
    """The rows of ids that are here, zero for the others, summed."""
    first = group.rank() * (module.num_embeddings // group.size())

    def call(ids):
        own = ids - first
        elsewhere = (own < 0) | (own >= module.weight.shape[0])
        found = F.embedding(own.masked_fill(elsewhere, 0), module.weight)
        out = scatter_sum(found.masked_fill(elsewhere.unsqueeze(-1), 0), SEQUENCE, group)
        # What is not awaited before it enters compiled code gets a wrong gradient from there (PyTorch 2.13).
        return out.clone() if out.requires_grad else out

    return call


def _sliced(forward: Callable, group: dist.ProcessGroup) -> Callable:
    def call(positions):
        return forward(positions.chunk(group.size(), -1)[group.rank()])  # `[seq]` or `[batch, seq]`

    return call


def _rows(module: nn.Linear, rows: slice) -> Callable:
    """Some rows of a map that is whole on all ranks."""

    def call(x):
        return F.linear(x, module.weight[rows], None if module.bias is None else module.bias[rows])

    return call


def _norm(module: nn.Module, group: dist.ProcessGroup) -> Callable:
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


def _head(forward: Callable, group: dist.ProcessGroup) -> Callable:
    def call(x):
        return gather_copies(forward(gather(x, SEQUENCE, group)), -1, group)

    return call


def _whole_output(forward: Callable, group: dist.ProcessGroup) -> Callable:
    @functools.wraps(forward)
    def call(*arguments, **named):
        return gather_copies(forward(*arguments, **named), SEQUENCE, group)

    return call
