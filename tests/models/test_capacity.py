"""Experts with a capacity: what is dropped, what it costs, and that nothing is outside of training."""

import math

import pytest
import torch

from weft.config.model import ModelSection
from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.models.layers.moe import MixtureOfExperts

EXPERTS, EACH = 5, 2


def section(**moe):
    return ModelSection(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        moe={"num_experts": EXPERTS, "num_experts_per_tok": EACH, **moe},
    )  # fmt: skip


def mixture(capacity_factor, **moe):
    """In training, with a router that prefers some experts."""
    module = MixtureOfExperts(section(capacity_factor=capacity_factor, **moe)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return module.train()


def inputs(batch=3, seq=13):
    return torch.randn(batch, seq, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def one_expert(experts, number, x):
    """An expert's output of one token, by the plain products."""
    gate, up = experts.gate_proj[number] @ x, experts.up_proj[number] @ x
    if experts.gate_bias is not None:
        gate, up = gate + experts.gate_bias[number], up + experts.up_bias[number]
    out = experts.down_proj[number] @ (gate * gate.sigmoid() * up)
    return out if experts.down_bias is None else out + experts.down_bias[number]


def by_loop(module, x, factor):
    """Token by token; returns the output and how many choices found no room."""
    weights, chosen, _ = module.router(x)
    out, lost = [], 0
    for row in range(len(x)):
        left = dict.fromkeys(range(EXPERTS), math.ceil(factor * x.shape[1] * EACH / EXPERTS))
        for token in range(x.shape[1]):
            total = torch.zeros(16, dtype=x.dtype)
            for weight, number in zip(weights[row, token], chosen[row, token].tolist(), strict=True):
                if left[number] > 0:
                    left[number] -= 1
                    total = total + weight * one_expert(module.experts, number, x[row, token])
                else:
                    lost += 1
            out.append(total)
    return torch.stack(out).view_as(x), lost


@pytest.mark.parametrize("factor", [0.25, 1.0, 1.3, 5.0])
@pytest.mark.parametrize("options", [{}, {"norm_topk_prob": False, "expert_bias": True}], ids=["plain", "biases"])
def test_first_tokens_of_a_sequence_have_room(factor, options):
    module, x = mixture(factor, **options), inputs().requires_grad_()
    expected, lost = by_loop(module, x, factor)
    shares = torch.ones(len(x), dtype=torch.float64)
    out = module(x, shares)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    wanted = [x, *module.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(out.sin().sum(), wanted), torch.autograd.grad(expected.sin().sum(), wanted), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
    assert (lost > 0) == (factor < 5)
    assert module.router.dropped_counts.sum() == lost
    assert module.router.load.sum() == x.shape[0] * x.shape[1] * EACH


def test_what_is_dropped_is_not_computed():
    module, x, given = mixture(0.5), inputs(), []
    module.experts.register_forward_pre_hook(lambda _, arguments: given.append(arguments))
    module(x)
    ((rows, ends),) = given
    room = math.ceil(0.5 * x.shape[1] * EACH / EXPERTS) * len(x)
    assert len(rows) == ends[-1] < 0.6 * x.shape[0] * x.shape[1] * EACH
    assert ends.diff(prepend=ends.new_zeros(1)).max() <= room


def test_a_token_does_not_depend_on_later_ones_nor_on_other_rows():
    module, x = mixture(0.5), inputs()
    changed = x.clone()
    changed[0, 7:] = inputs(1, 6)[0]
    out, other = module(x), module(changed)
    torch.testing.assert_close(out[0, :7], other[0, :7], atol=1e-12, rtol=0)
    assert not torch.allclose(out[0, 7:], other[0, 7:])
    torch.testing.assert_close(module(x[1:2]), out[1:2], atol=1e-12, rtol=0)


def test_nothing_is_dropped_outside_of_training():
    limited, unlimited = mixture(0.5), mixture(None)
    assert not torch.allclose(limited(inputs()), unlimited(inputs()))
    assert torch.equal(limited.eval()(inputs()), unlimited.eval()(inputs()))


def test_whole_numbers_are_not_rounded_up():
    module = mixture(1.1)  # 1.1 x 25 x 2 / 5 is 11.000000000000002 in floating point
    chosen = torch.tensor([0, 1]).expand(1, 25, 2)
    assert (~module.router.over_capacity(chosen)).sum(1).tolist() == [[11, 11]]


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.long), "aot_eager"])
def test_a_block_compiles(backend):
    torch._dynamo.reset()
    model = build_model(section(capacity_factor=0.5)).double().train()
    initialize(model, 1)
    tokens, shares = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(0)), torch.ones(2)
    expected = model(tokens, loss_weights=shares)
    gradients = torch.autograd.grad(expected.square().mean(), list(model.parameters()))
    for block in model.layers:
        block.forward = torch.compile(block.forward, backend=backend)
    out = model(tokens, loss_weights=shares)
    torch.testing.assert_close(out, expected)
    for mine, one in zip(torch.autograd.grad(out.square().mean(), list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(mine, one)
