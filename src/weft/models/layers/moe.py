"""A mixture of experts in place of the MLP (Shazeer et al., 2017): each token goes through a few of many."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.config.model import ModelSection
from weft.config.moe import ExpertsSection
from weft.kernels.grouped import grouped_linear
from weft.models.layers.dropout import Dropout
from weft.models.layers.mlp import MLP, intermediate_size, make_activation
from weft.torch_private import in_backward

SWIGLU_ALPHA = 1.702  # gpt-oss's: x * sigmoid(1.702 x) is close to gelu


class MixtureOfExperts(nn.Module):
    """The sum of a few experts' outputs, weighted by the router, and of the shared ones'."""

    def __init__(self, config: ModelSection):
        super().__init__()
        moe = config.moe
        assert moe is not None
        inner = moe.moe_intermediate_size or intermediate_size(config)
        self.router = Router(config.hidden_size, moe)
        self.experts = Experts(config.hidden_size, inner, moe, config.hidden_act)
        shared = config.model_copy(update={"intermediate_size": inner * moe.n_shared_experts, "hidden_dropout": 0.0})
        self.shared = MLP(shared) if moe.n_shared_experts else None
        # A seam: experts may be on other ranks. How many rows are left is known to no compiler.
        self.dispatch: Any = dispatch if moe.capacity_factor is None else torch.compiler.disable(dispatch)
        self.hidden_dropout = Dropout(config.hidden_dropout)

    def forward(self, x: torch.Tensor, loss_weights: torch.Tensor | None = None) -> torch.Tensor:
        """`[batch, seq, width]` -> `[batch, seq, width]`; `loss_weights` is as in `Decoder.forward`."""
        weights, chosen, scores = self.router(x)
        dropped = self.router.dropped(chosen) if self.training else None
        tokens = (None if each is None else each.flatten(0, 1) for each in (x, weights, chosen, dropped))
        out = self.dispatch(self.experts, *tokens).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x)
        out = self.hidden_dropout(out)
        if self.training and loss_weights is not None:
            penalty = self.router.balance(scores, chosen, loss_weights, dropped)
            if penalty is not None:
                out = _AttachLoss.apply(out, penalty)
        return out


class Router(nn.Module):
    """Chooses each token's experts, in at least float32.

    Attributes:
        correction_bias: added to the scores for the choice alone (Wang et al., 2024); None without.
        load: how many tokens have chosen each expert since it was last looked at, in training.
        dropped_counts: how many of them it had no room for.
    """

    correction_bias: torch.Tensor | None
    load: torch.Tensor
    dropped_counts: torch.Tensor

    def __init__(self, width: int, config: ExpertsSection):
        super().__init__()
        self.config = config
        experts = config.num_experts
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.bias = nn.Parameter(torch.zeros(experts)) if config.router_bias else None
        self.register_buffer("correction_bias", torch.zeros(experts) if config.correction_bias else None)
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.register_buffer("dropped_counts", torch.zeros(experts), persistent=False)
        # Seams, if each row's tokens lie on several ranks: sums over these, and what is found of the whole row.
        self.sum_over_sequence, self.sequence_shards = lambda x: x, 1
        self.on_full_sequence = lambda find, chosen: find(chosen)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose.

        Args:
            x: `[batch, seq, width]`.

        Returns:
            The chosen experts' weights, in `x`'s dtype, and numbers, each `[batch, seq, num_experts_per_tok]`; and all
            experts' scores before they are made weights `[batch, seq, experts]`.
        """
        config, dtype = self.config, torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        scores = F.linear(x.to(dtype), self.weight.to(dtype), bias)
        likely = scores
        if config.scoring_func != "softmax_of_chosen":
            likely = scores.softmax(-1) if config.scoring_func == "softmax" else scores.sigmoid()
        chosen = self.choose(likely.detach())
        weights = likely.gather(-1, chosen)
        if config.scoring_func == "softmax_of_chosen":
            weights = weights.softmax(-1)
        elif config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * config.routed_scaling_factor).to(x.dtype), chosen, scores

    def choose(self, likely: torch.Tensor) -> torch.Tensor:
        """The numbers of the experts that score best, of the groups that do."""
        config = self.config
        if self.correction_bias is not None:
            likely = likely + self.correction_bias
        if config.n_group > 1:
            groups = likely.unflatten(-1, (config.n_group, -1))
            # DeepSeek-V2 goes by a group's best expert, DeepSeek-V3 (sigmoid) by the best two together.
            best = 2 if config.scoring_func == "sigmoid" else 1
            of_group = groups.topk(min(best, groups.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(of_group, dtype=torch.bool)
            kept = kept.scatter(-1, of_group.topk(config.topk_group, dim=-1).indices, True)
            likely = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        return likely.topk(config.num_experts_per_tok, dim=-1).indices

    def dropped(self, chosen: torch.Tensor) -> torch.Tensor | None:
        """Which choices are of an expert that has no room: bool `[batch, seq, num_experts_per_tok]`; None: all have.

        Each sequence by itself, its first tokens first: so nothing depends on how a batch is cut, and no token's output
        on later ones. (Lepikhin et al., 2021, put all first choices before the second ones; there and in Fedus et al.,
        2021, it is the tokens of one device that compete.)
        """
        return None if self.config.capacity_factor is None else self.on_full_sequence(self._dropped, chosen)

    def _dropped(self, chosen: torch.Tensor) -> torch.Tensor:
        config, (batch, seq, each) = self.config, chosen.shape
        assert config.capacity_factor is not None
        # Nothing is rounded up that is whole but for an error of the product.
        room = math.ceil(config.capacity_factor * seq * each / config.num_experts - 1e-9)
        had = torch.zeros(batch, seq, config.num_experts, dtype=torch.int32, device=chosen.device)
        return had.scatter_(2, chosen, 1).cumsum(1).gather(2, chosen) > room

    def balance(
        self,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        loss_weights: torch.Tensor,
        dropped: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Count the tokens of rows that matter; returns their auxiliary losses, if the config has any.

        The balancing loss (Fedus et al., 2021) is taken of each sequence by itself, as DeepSeek-V2 does: so it does not
        depend on how a batch is cut.
        """
        config, seq = self.config, chosen.shape[1] * self.sequence_shards
        chosen = chosen.flatten(1)
        had = scores.new_zeros(len(chosen), config.num_experts)
        had = had.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=had.dtype))  # [batch, experts]
        # Run again in backward it adds nothing, and by the same operations: what is kept of them is found by counting.
        matter, once = (loss_weights > 0).unsqueeze(1), 0 if _recomputing() else 1
        self.load.add_((had * matter).sum(0), alpha=once)
        if dropped is not None:
            lost = torch.zeros_like(had).scatter_add_(1, chosen, dropped.flatten(1).to(had.dtype))
            self.dropped_counts.add_((lost * matter).sum(0), alpha=once)
        losses = []
        if config.router_aux_loss_coef:
            likely = scores.sigmoid() if config.scoring_func == "sigmoid" else scores.softmax(-1)
            likely = (likely / likely.sum(-1, keepdim=True)).sum(1) / seq
            had, likely = self.sum_over_sequence(torch.stack((had, likely)))
            unequal = (had * likely).sum(1) * (config.num_experts / (config.num_experts_per_tok * seq))
            losses.append(config.router_aux_loss_coef * unequal)
        if config.router_z_loss_coef:
            losses.append(config.router_z_loss_coef * scores.logsumexp(-1).square().sum(1) / seq)
        return (torch.stack(losses).sum(0) * loss_weights.to(losses[0].dtype)).sum() if losses else None


class Experts(nn.Module):
    """Gated MLPs side by side, each weight stacked `[expert, out, in]`."""

    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, width: int, inner: int, config: ExpertsSection, hidden_act: str):
        super().__init__()
        experts = self.num_experts = config.num_experts
        self.gate_proj = nn.Parameter(torch.empty(experts, inner, width))
        self.up_proj = nn.Parameter(torch.empty(experts, inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))
        for name, size in (("gate_bias", inner), ("up_bias", inner), ("down_bias", width)):
            self.register_parameter(name, nn.Parameter(torch.zeros(experts, size)) if config.expert_bias else None)
        self.activation, self.limit = make_activation(hidden_act), config.swiglu_limit

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`[rows, width]`, the first expert's first, with `ends` as `grouped_linear`'s -> `[rows, width]`."""
        gate, up = grouped_linear(x, self.gate_proj, ends), grouped_linear(x, self.up_proj, ends)
        own = None
        if self.gate_bias is not None and self.up_bias is not None:
            # By a product, not an index: its gradient is a product too, and no sum of one row after another.
            which = torch.searchsorted(ends, torch.arange(len(x), device=x.device, dtype=ends.dtype), right=True)
            own = F.one_hot(which, len(ends)).to(x.dtype)  # [rows, experts]
            gate, up = gate + own @ self.gate_bias, up + own @ self.up_bias
        if self.limit is None:
            inner = self.activation(gate) * up
        else:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            inner = (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)
        out = grouped_linear(inner, self.down_proj, ends)
        return out if own is None or self.down_bias is None else out + own @ self.down_bias


def dispatch(
    experts: Experts,
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    dropped: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sort tokens by expert, run the experts, and sum what belongs to one token.

    Args:
        experts: `(rows, ends) -> rows`, of `num_experts`.
        x: `[tokens, width]`.
        weights, chosen: `[tokens, experts per token]`.
        dropped: bool, of the same shape: what is not computed. None: all is.

    Returns:
        `[tokens, width]`
    """
    tokens, each = chosen.shape
    if dropped is not None:  # they come last
        weights, chosen = weights.masked_fill(dropped, 0), chosen.masked_fill(dropped, experts.num_experts)
    by_expert, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts.num_experts, device=x.device)
    ends = torch.searchsorted(by_expert, numbers, right=True).to(torch.int32)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    rows = x.unsqueeze(1).expand(-1, each, -1).reshape(tokens * each, -1)
    rows = Permute.apply(rows, order, back)
    if dropped is None:
        out = experts(rows, ends)
    else:
        kept = int(ends[-1])
        out = F.pad(experts(rows[:kept], ends), (0, 0, 0, len(rows) - kept))
    out = Permute.apply(out, back, order)
    return (out.view(tokens, each, -1) * weights.unsqueeze(-1)).sum(1)


def _recomputing() -> bool:
    """Whether a forward runs inside of backward, as activation checkpointing has it. Compiled code runs each once."""
    return not torch.compiler.is_compiling() and in_backward()


class Permute(torch.autograd.Function):
    """`x[order]`, with a gradient that is a permutation too: indexing's own adds up, in an order that may change."""

    @staticmethod
    def forward(ctx, x, order, back):
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        (back,) = ctx.saved_tensors
        return grad[back], None, None


class _AttachLoss(torch.autograd.Function):
    """`x`; in backward, what is joined to it counts as a part of the loss."""

    @staticmethod
    def forward(ctx, x, joined):
        ctx.save_for_backward(torch.ones_like(joined))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.saved_tensors[0]
