"""Log-probabilities of labels, computed in blocks of tokens, without materializing all logits."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol

import torch

from weft.kernels import compiler
from weft.kernels.autocast import as_autocast
from weft.kernels.linear import ONEDNN, matmul

KEPT_ELEMENTS = 1 << 27  # most logits that are saved for backward; more logits are recomputed in blocks of this size
# Elementwise operations run on chunks that fit into a CPU's L2 cache. For 4,096 tokens (hidden size 384, bf16, 4
# cores), a vocabulary of 32,000 then takes 229 ms instead of 262, a vocabulary of 4,096 31 ms instead of 50; compiled,
# 209 and 26 ms. `F.linear_cross_entropy` takes 196 and 24 ms, but rounds losses to bfloat16: an error of 0.06.
CHUNK_ELEMENTS = {"cpu": 1 << 20}
PAGE = 4096  # bytes of memory whose places the cache of a CPU core tells apart


class Vocabulary(Protocol):
    """The interface of an output head whose rows (vocabulary entries) are sharded over ranks."""

    first: int  # the token id of this rank's first row
    size: int  # number of rows of all ranks

    def join(self, chosen: torch.Tensor, normalizers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduces two values per token, each `[tokens]`: `chosen` by sum, and `normalizers` by log-sum-exp.

        Args:
            chosen: logit of each token's label; 0 if the label's row is on another rank.
            normalizers: log-sum-exp of the logits of this rank's rows.
        """
        ...

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns all logits `[tokens, vocab]`, from the logits of this rank's rows. Not differentiable."""
        ...


def cap(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Soft-caps logits to (-softcap, softcap), as in Gemma 2. If `softcap` is None, the logits are unchanged."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def logprobs_of_logits(logits: torch.Tensor, labels: torch.Tensor, *, normalizers: bool = False) -> torch.Tensor:
    """Returns log softmax(logits)[label] in at least float32: `[..., vocab]` -> `[...]`.

    With `normalizers`, returns `[..., 2]`: this value and log(sum(exp(logits))).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.stack((logprobs, logits.logsumexp(-1)), -1) if normalizers else logprobs


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    softcap: float | None = None,
    *,
    compiled: bool = False,
    vocabulary: Vocabulary | None = None,
    normalizers: bool = False,
) -> torch.Tensor:
    """Returns log softmax(cap(hidden weight^T))[label] for each position.

    Args:
        hidden: `[..., hidden]`.
        weight: `[vocab, hidden]`, the output head.
        labels: `[...]`, int64.
        softcap: bound of the logits, as in `cap`.
        compiled: whether elementwise operations are fused with `torch.compile`.
        vocabulary: the sharding of `weight`, or None if `weight` has all rows. With a sharded head, the gradient of
            `hidden` is partial.
        normalizers: whether to return the normalizers log(sum(exp(cap(hidden weight^T)))), too.

    Returns:
        `[...]`, float32 (float64 for float64 inputs). With `normalizers`, `[..., 2]`: log-probability and normalizer.
        Only the matrix products are in the inputs' dtype.
    """
    flat, weight = as_autocast(hidden.reshape(-1, hidden.shape[-1]), weight)
    both = _Logprobs.apply(flat, weight, labels, softcap, compiled, vocabulary)
    return torch.stack(both, -1) if normalizers else both[0]


class _Logprobs(torch.autograd.Function):
    """The autograd function of `token_logprobs`.

    Logits are saved in the inputs' dtype, and backward overwrites them with their gradient. Only one chunk of logits at
    a time is upcast. In float32 on CPUs, exp(logits - maximum) takes their place, and is all that backward needs of
    them (`_TokenFactors`). `compiled` then changes nothing: compiled code takes as long, and seconds to compile.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, softcap, compiled, vocabulary):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        result = torch.empty(labels.shape, dtype=wide, device=hidden.device)  # not a view: FSDP2 warns about views
        logprobs, labels = result.view(-1), labels.reshape(-1)
        is_local = None  # for each label, whether its row is on this rank
        if vocabulary is not None:
            labels = labels - vocabulary.first
            is_local = (labels >= 0) & (labels < len(weight))
            labels = labels.where(is_local, 0)
        all_normalizers = torch.empty_like(result)  # log of the sum of exp(logits)
        normalizers = all_normalizers.view(-1)
        blocks = list(slices(len(hidden), KEPT_ELEMENTS // len(weight)))
        in_place = softcap is None and hidden.dtype == wide and hidden.device.type == "cpu"
        maxima, compiled = torch.empty_like(normalizers) if in_place else None, compiled and not in_place
        normalize = _compiled(_normalize) if compiled else _normalize
        logits = None
        for block in blocks:
            del logits  # else those of two blocks would need memory
            logits = _logits(hidden[block], weight)
            for rows in _chunks(logits, compiled):
                if maxima is None:
                    chunk = normalize(logits[rows], labels[block][rows], softcap)
                else:
                    chunk = _normalize_in_place(logits[rows], labels[block][rows], maxima[block][rows])
                logprobs[block][rows], normalizers[block][rows] = chunk
        if vocabulary is not None and is_local is not None:
            chosen, joined = vocabulary.join((logprobs + normalizers) * is_local, normalizers)
            torch.sub(chosen, normalizers.copy_(joined), out=logprobs)
        ctx.save_for_backward(hidden, weight, labels, all_normalizers, is_local)
        ctx.set_materialize_grads(False)
        # Not a saved tensor: backward overwrites it, and a second backward (retain_graph) recomputes it.
        ctx.kept, ctx.maxima = logits if len(blocks) == 1 else None, maxima
        ctx.softcap, ctx.compiled = softcap, compiled
        return result, all_normalizers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient, normalizer_gradient):
        hidden, weight, labels, normalizers, is_local = ctx.saved_tensors
        normalizers = normalizers.view(-1)
        gradient = torch.zeros_like(normalizers) if gradient is None else gradient.reshape(-1)
        label_gradient = gradient if is_local is None else gradient * is_local
        softmax_gradient = -gradient if normalizer_gradient is None else normalizer_gradient.reshape(-1) - gradient
        kept, ctx.kept = ctx.kept, None
        maxima, factors = ctx.maxima, None
        differentiate = _compiled(_differentiate) if ctx.compiled else _differentiate
        if maxima is not None:
            factors = _TokenFactors(labels, softmax_gradient * (maxima - normalizers).exp_(), label_gradient)

        def overwrite(block, logits):
            for rows in _chunks(logits, ctx.compiled):
                if maxima is None:
                    per_token = (x[block][rows] for x in (labels, normalizers, softmax_gradient, label_gradient))
                    differentiate(logits[rows], *per_token, ctx.softcap)
                elif kept is None:
                    _exponentiate(logits[rows], maxima[block][rows])

        return *head_gradients(hidden, weight, kept, overwrite, ctx.needs_input_grad, factors), None, None, None, None


class _TokenFactors(NamedTuple):
    """Factors per token that turn exp(logits - maximum) into the gradient of the logits.

    The gradient is `scales * exp(logits - maximum)`, and `label_gradient` more at the label. The factors are applied to
    the results of the products, not to the logits: backward needs no pass over them.

    Attributes:
        labels, scales, label_gradient: `[tokens]`.
    """

    labels: torch.Tensor
    scales: torch.Tensor
    label_gradient: torch.Tensor


def _logits(hidden, weight):
    """Returns `hidden weight^T`. On CPUs, rows in float32 never all begin at the same place of a memory page: such rows
    displace each other from the caches, and products with them take up to 1.3 times as long with MKL.
    """
    bytes_of_row = len(weight) * hidden.element_size()
    if ONEDNN or hidden.device.type != "cpu" or hidden.dtype != torch.float32 or bytes_of_row % PAGE:
        return matmul(hidden, weight.mT)
    rows = hidden.new_empty(len(hidden), len(weight) + 16)
    return torch.mm(hidden, weight.mT, out=rows[:, :-16])


def head_gradients(hidden, weight, kept, overwrite, needed, factors: _TokenFactors | None = None):
    """Returns the gradients of `hidden` and `weight`, each None if not `needed`, from the gradient of the logits.

    Args:
        kept: the logits of all tokens, or None to recompute them in blocks.
        overwrite: function `(block, logits)` that overwrites the logits `[tokens of the block, vocab]` of a block, a
            slice of the tokens, with their gradient.
        factors: what turns the result of `overwrite` into the gradient, if it is not the gradient itself.
    """
    blocks = list(slices(len(hidden), KEPT_ELEMENTS // len(weight)))
    hidden_gradient, weight_gradient = torch.empty_like(hidden) if needed[0] else None, None
    for block in blocks:
        logits = _logits(hidden[block], weight) if kept is None else kept
        overwrite(block, logits)
        tokens = scaled = hidden[block]
        if factors is not None:
            labels, (scales, chosen) = factors.labels[block], (x[block].unsqueeze(-1) for x in factors[1:])
            if needed[1]:
                scaled = tokens * scales
        if hidden_gradient is not None:
            found = matmul(logits, weight, out=hidden_gradient[block])
            if factors is not None:
                found.mul_(scales).addcmul_(weight[labels], chosen)
        if not needed[1]:
            continue
        product = _weight_gradient(logits, scaled, accumulates=len(blocks) > 1)
        if factors is not None:
            product.index_add_(0, labels, tokens * chosen)
        weight_gradient = product if weight_gradient is None else weight_gradient.add_(product)
        del logits, product  # the next block would need memory beside them
    return hidden_gradient, None if weight_gradient is None else _rounded_gradient(weight_gradient, weight.dtype)


# `weft.planner.torch_private` knows these two functions by their names.


def _weight_gradient(logits, tokens, *, accumulates: bool):
    """Returns the head's gradient of a block, `logits^T tokens`: in at least float32 if `accumulates` over blocks."""
    product = matmul(logits.mT, tokens)
    return product.to(torch.promote_types(product.dtype, torch.float32)) if accumulates else product


def _rounded_gradient(gradient, dtype):
    return gradient.to(dtype)


def _cap_by_sigmoid(logits, softcap):
    """Returns `cap(logits, softcap)`, with an absolute error of about softcap x 1e-7 in float32.

    tanh(x) is 2 sigmoid(2x) - 1. On CPUs, sigmoid takes half the time of tanh.
    """
    if softcap is None:
        return logits
    return (logits * (2 / softcap)).sigmoid_().mul_(2 * softcap).sub_(softcap)


def _normalize(logits, labels, softcap):
    """Returns the labels' log-probabilities `[rows]`, and the normalizers log(sum(exp(logits))) `[rows]`."""
    logits = _cap_by_sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
    normalizers = torch.logsumexp(logits, -1)
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normalizers, normalizers


def _differentiate(logits, labels, normalizers, softmax_gradient, label_gradient, softcap):
    """Overwrites the logits `[rows, vocab]` with their gradient.

    The gradient of a log-probability is onehot(label) - softmax(logits), that of a normalizer softmax(logits).

    Args:
        softmax_gradient: the factor of softmax(logits), `[rows]`.
        label_gradient: the factor of onehot(label), `[rows]`: the gradient of the log-probability, but 0 if the label's
            row is on another rank.
    """
    capped = _cap_by_sigmoid(logits.to(normalizers.dtype), softcap)
    result = (capped - normalizers.unsqueeze(-1)).exp_().mul_(softmax_gradient.unsqueeze(-1))
    columns = labels.unsqueeze(-1)
    if torch.compiler.is_compiling():  # fused; a scatter makes a copy of all logits in float32, and 8 times as slow
        chosen = torch.arange(logits.shape[-1], device=logits.device) == columns
        result = result + torch.where(chosen, label_gradient.unsqueeze(-1), 0.0)
    else:
        result.scatter_add_(-1, columns, label_gradient.unsqueeze(-1))
    if softcap is not None:
        result.mul_(1 - (capped / softcap).square())
    logits.copy_(result)


def _exponentiate(logits, maxima):
    """Overwrites logits `[rows, vocab]` with exp(logits - maxima), and returns them. `maxima` are `[rows]`."""
    return logits.sub_(maxima.unsqueeze(-1)).exp_()


def _normalize_in_place(logits, labels, maxima):
    """As `_normalize`, for logits in float32, which `_exponentiate` overwrites. Writes `maxima`, too."""
    torch.amax(logits, -1, out=maxima)
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    normalizers = maxima + _exponentiate(logits, maxima).sum(-1).log_()
    return chosen - normalizers, normalizers


@cache
def _compiled(function):
    # Dynamic shapes from the start: the last block of a batch is shorter and would cause a recompilation.
    return compiler.compiled(function, dynamic=True)


def _chunks(logits: torch.Tensor, compiled: bool):
    held = KEPT_ELEMENTS if compiled else CHUNK_ELEMENTS.get(logits.device.type, KEPT_ELEMENTS)
    return slices(len(logits), held // logits.shape[-1])


def slices(rows: int, size: int):
    size = max(1, size)
    return (slice(start, start + size) for start in range(0, rows, size))
