"""A mixture of experts, which replaces the MLP of a block (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.config.model import ModelSection
from weft.config.model_sections import ExpertsSection
from weft.kernels.grouped import grouped_linear
from weft.models.layers.dropout import Dropout
from weft.models.layers.lora import expert_product
from weft.models.layers.mlp import MLP, intermediate_size, make_activation
from weft.torch_private import backward_number

SWIGLU_ALPHA = 1.702  # in gpt-oss's activation: x * sigmoid(1.702 x) approximates gelu


class MixtureOfExperts(nn.Module):
    """A mixture of experts: the sum of the chosen experts' outputs, weighted by the router, plus shared experts."""

    def __init__(self, config: ModelSection):
        super().__init__()
        moe = config.moe
        assert moe is not None
        inner = moe.moe_intermediate_size or intermediate_size(config)
        self.router = Router(config.hidden_size, moe)
        self.experts = Experts(config.hidden_size, inner, moe, config.hidden_act)
        shared = config.model_copy(update={"intermediate_size": inner * moe.n_shared_experts, "hidden_dropout": 0.0})
        self.shared = MLP(shared) if moe.n_shared_experts else None
        # A capacity makes shapes depend on data: not compiled. If experts are sharded, `parallel/` sets `send`, which
        # starts to send the tokens, and replaces `dispatch`, which then gets the result of `send`.
        self.dispatch: Any = dispatch if moe.capacity_factor is None else torch.compiler.disable(dispatch)
        self.send: Callable[..., Any] | None = None
        self.hidden_dropout = Dropout(config.hidden_dropout)

    def forward(self, x: torch.Tensor, loss_weights: torch.Tensor | None = None) -> torch.Tensor:
        """Maps `x` `[batch, seq, hidden]` to `[batch, seq, hidden]`; `loss_weights` is as in `Decoder.forward`."""
        weights, chosen, scores = self.router(x)
        if loss_weights is not None and loss_weights.dim() == 1:
            tokens_of_sequence = x.shape[1] * self.router.sequence_shards
            loss_weights = (loss_weights / tokens_of_sequence).unsqueeze(1).expand(-1, x.shape[1])
        dropped = self.router.over_capacity(chosen, loss_weights) if self.training else None
        tokens = tuple(None if tensor is None else tensor.flatten(0, 1) for tensor in (x, weights, chosen, dropped))
        if self.send is not None:
            tokens = (self.send(self.experts, *tokens),)
        shared = None if self.shared is None else self.shared(x)  # while tokens are on their way
        out = self.dispatch(self.experts, *tokens).view_as(x)
        if shared is not None:
            out = out + shared
        out = self.hidden_dropout(out)
        if self.training and loss_weights is not None:
            loss = self.router.auxiliary_loss(scores, chosen, loss_weights, dropped)
            if loss is not None:
                out = _AttachLoss.apply(out, loss)
        return out


class Router(nn.Module):
    """Chooses the experts of each token. The router computes in at least float32.

    Attributes:
        correction_bias: bias that is added to the scores only to choose experts (Wang et al., 2024), or None.
        load: `[experts]`, number of tokens that were routed to each expert in training since the last reset.
        dropped_counts: `[experts]`, number of these tokens that each expert dropped, because they exceeded the
            expert's capacity.
    """

    correction_bias: torch.Tensor | None
    load: torch.Tensor
    dropped_counts: torch.Tensor

    def __init__(self, hidden_size: int, config: ExpertsSection):
        super().__init__()
        self.config = config
        experts = config.num_experts
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(experts)) if config.router_bias else None
        self.register_buffer("correction_bias", torch.zeros(experts) if config.correction_bias else None)
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.register_buffer("dropped_counts", torch.zeros(experts), persistent=False)
        # `parallel/` replaces these for sharded sequences: a sum over ranks, and a call with the full sequence.
        self.sum_over_sequence, self.sequence_shards = lambda x: x, 1
        self.on_full_sequence = lambda function, chosen: function(chosen)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Chooses experts for each token of `x` `[batch, seq, hidden]`.

        Returns:
            The weights of the chosen experts (in the dtype of `x`) and their indices, each `[batch, seq,
            num_experts_per_tok]`; and the router logits of all experts, `[batch, seq, experts]`.
        """
        config, dtype = self.config, torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        scores = F.linear(x.to(dtype), self.weight.to(dtype), bias)
        affinity = scores
        if config.scoring_func != "softmax_of_chosen":
            affinity = scores.softmax(-1) if config.scoring_func == "softmax" else scores.sigmoid()
        chosen = self.choose(affinity.detach())
        weights = affinity.gather(-1, chosen)
        if config.scoring_func == "softmax_of_chosen":
            weights = weights.softmax(-1)
        elif config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * config.routed_scaling_factor).to(x.dtype), chosen, scores

    def choose(self, affinity: torch.Tensor) -> torch.Tensor:
        """Returns the indices of the `num_experts_per_tok` experts with the highest affinity.

        If experts are grouped (`n_group`), they are chosen within the `topk_group` best groups.

        Args:
            affinity: `[batch, seq, experts]`.
        """
        config = self.config
        if self.correction_bias is not None:
            affinity = affinity + self.correction_bias
        if config.n_group > 1:
            groups = affinity.unflatten(-1, (config.n_group, -1))
            # DeepSeek-V2 ranks groups by their best expert, DeepSeek-V3 (sigmoid) by the sum of the best two.
            best = 2 if config.scoring_func == "sigmoid" else 1
            group_scores = groups.topk(min(best, groups.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(group_scores, dtype=torch.bool)
            kept = kept.scatter(-1, group_scores.topk(config.topk_group, dim=-1).indices, True)
            affinity = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        return affinity.topk(config.num_experts_per_tok, dim=-1).indices

    def over_capacity(self, chosen: torch.Tensor, loss_weights: torch.Tensor | None = None) -> torch.Tensor | None:
        """Returns a bool mask, true where a token exceeds the chosen expert's capacity; None without a capacity limit.

        Capacity is counted within each sequence, and earlier tokens take precedence. So results do not depend on the
        batch's sharding, and no token's output depends on later tokens. (In Lepikhin et al., 2021, and Fedus et al.,
        2021, the tokens of one device compete for capacity.)

        Args:
            chosen: indices of the chosen experts, `[batch, seq, num_experts_per_tok]`; the mask has the same shape.
            loss_weights: as in `auxiliary_loss`. Tokens that do not count have a capacity of their own.
        """
        if self.config.capacity_factor is None:
            return None
        return self.on_full_sequence(self._over_capacity, self._mark_uncounted(chosen, loss_weights))

    def _over_capacity(self, chosen: torch.Tensor) -> torch.Tensor:
        config, (batch, seq, _) = self.config, chosen.shape
        assert config.capacity_factor is not None
        counted = chosen < config.num_experts
        choices = torch.where(counted, counted.sum((1, 2), keepdim=True), (~counted).sum((1, 2), keepdim=True))
        # The small constant keeps a product that should be an integer from being rounded up.
        capacity = (config.capacity_factor * choices.double() / config.num_experts - 1e-9).ceil()
        counts = torch.zeros(batch, seq, 2 * config.num_experts, dtype=torch.int32, device=chosen.device)
        return counts.scatter_(2, chosen, 1).cumsum(1).gather(2, chosen) > capacity

    def _mark_uncounted(self, chosen: torch.Tensor, loss_weights: torch.Tensor | None) -> torch.Tensor:
        """Returns `chosen`, plus the number of experts for tokens that do not count."""
        if loss_weights is None:
            return chosen
        return torch.where((loss_weights > 0).unsqueeze(-1), chosen, chosen + self.config.num_experts)

    def auxiliary_loss(
        self,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        loss_weights: torch.Tensor,
        dropped: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Updates `load` and `dropped_counts`; returns the sum of the auxiliary losses, or None if all are disabled.

        The load balancing loss (Fedus et al., 2021) is computed per sequence, as in DeepSeek-V2, so the loss does not
        depend on the batch's sharding.

        Args:
            scores: router logits, `[batch, seq, experts]`.
            chosen: indices of the chosen experts, `[batch, seq, num_experts_per_tok]`.
            loss_weights: `[batch, seq]`, as in `Decoder.forward`.
            dropped: mask that `over_capacity` returned.
        """
        config, experts = self.config, self.config.num_experts
        chosen = self._mark_uncounted(chosen, loss_weights).flatten(1)
        counts = scores.new_zeros(len(chosen), 2 * experts)
        counts = counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=counts.dtype))
        counts = counts[:, :experts]  # without tokens that do not count
        # Recomputation in backward adds 0. It must run the same operations as forward, because selective activation
        # checkpointing identifies operations by their order.
        alpha = 0 if _recomputing() else 1
        self.load.add_(counts.sum(0), alpha=alpha)
        if dropped is not None:
            drops = scores.new_zeros(len(chosen), 2 * experts)
            drops = drops.scatter_add_(1, chosen, dropped.flatten(1).to(drops.dtype))[:, :experts]
            self.dropped_counts.add_(drops.sum(0), alpha=alpha)
        losses, weights = [], loss_weights.to(scores.dtype)
        if config.router_aux_loss_coef:
            affinity = scores.sigmoid() if config.scoring_func == "sigmoid" else scores.softmax(-1)
            affinity = (affinity / affinity.sum(-1, keepdim=True) * weights.unsqueeze(-1)).sum(1)
            counts, affinity = self.sum_over_sequence(torch.stack((counts, affinity)))
            fractions = counts / counts.sum(1, keepdim=True).clamp(min=1)
            losses.append(config.router_aux_loss_coef * experts * (fractions * affinity).sum())
        if config.router_z_loss_coef:
            losses.append(config.router_z_loss_coef * (scores.logsumexp(-1).square() * weights).sum())
        return torch.stack(losses).sum() if losses else None


class Experts(nn.Module):
    """The gated MLPs of all experts, with weights stacked as `[experts, out, in]`."""

    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, hidden_size: int, inner: int, config: ExpertsSection, hidden_act: str):
        super().__init__()
        experts = self.num_experts = config.num_experts
        self.gate_proj = nn.Parameter(torch.empty(experts, inner, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(experts, inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, inner))
        for name, size in (("gate_bias", inner), ("up_bias", inner), ("down_bias", hidden_size)):
            self.register_parameter(name, nn.Parameter(torch.zeros(experts, size)) if config.expert_bias else None)
        self.activation, self.limit = make_activation(hidden_act), config.swiglu_limit
        self.product: Callable[..., torch.Tensor] = grouped_linear  # replaced if weights are quantized

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Applies the experts to rows that are sorted by expert.

        Args:
            x: `[rows, hidden]`.
            ends: int32 `[experts]`, the index after each expert's last row, as in `grouped_linear`.

        Returns:
            `[rows, hidden]`.
        """
        gate, up = expert_product(self, "gate_proj", x, ends), expert_product(self, "up_proj", x, ends)
        one_hot = None
        if self.gate_bias is not None and self.up_bias is not None:
            # A matrix product instead of indexing, whose gradient would be a sequential sum over rows.
            rows = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype).unsqueeze(1)
            one_hot = ((rows < ends) & (rows >= F.pad(ends[:-1], (1, 0)))).to(x.dtype)  # [rows, experts]
            gate, up = gate + one_hot @ self.gate_bias, up + one_hot @ self.up_bias
        out = expert_product(self, "down_proj", self.activate(gate, up), ends)
        return out if one_hot is None or self.down_bias is None else out + one_hot @ self.down_bias

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Returns the inputs of the down projection, for the outputs of the gate and up projections."""
        if self.limit is None:
            return self.activation(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)


def dispatch(
    experts: Experts,
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    dropped: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sorts tokens by expert, runs the experts, and sums the weighted outputs of each token.

    Args:
        experts: the experts, called with rows and their ends (`Experts.forward`).
        x: `[tokens, hidden]`.
        weights: `[tokens, experts per token]`, weights of the experts' outputs.
        chosen: `[tokens, experts per token]`, indices of the experts.
        dropped: bool `[tokens, experts per token]`, true for choices that are not computed; None: all are computed.

    Returns:
        `[tokens, hidden]`.
    """
    tokens, per_token = chosen.shape
    if dropped is not None:  # dropped rows are sorted last
        weights, chosen = weights.masked_fill(dropped, 0), chosen.masked_fill(dropped, experts.num_experts)
    by_expert, order = chosen.flatten().sort(stable=True)
    indices = torch.arange(experts.num_experts, device=x.device)
    ends = torch.searchsorted(by_expert, indices, right=True).to(torch.int32)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    rows = x.unsqueeze(1).expand(-1, per_token, -1).reshape(tokens * per_token, -1)
    rows = Permute.apply(rows, order, inverse)
    if dropped is None:
        out = experts(rows, ends)
    else:
        kept = int(ends[-1])
        out = F.pad(experts(rows[:kept], ends), (0, 0, 0, len(rows) - kept))
    out = Permute.apply(out, inverse, order)
    return (out.view(tokens, per_token, -1) * weights.unsqueeze(-1)).sum(1)


def _recomputing() -> bool:
    """Whether this forward pass is a recomputation by activation checkpointing, in backward; false in compiled code."""
    return not torch.compiler.is_compiling() and backward_number() is not None


class Permute(torch.autograd.Function):
    """The indexing `x[order]`. Backward is a gather; PyTorch's backward is a nondeterministic scatter-add."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


class _AttachLoss(torch.autograd.Function):
    """Returns `x` unchanged. In backward, gives `loss` the gradient 1, as if it were added to the training loss."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.saved_tensors[0]
