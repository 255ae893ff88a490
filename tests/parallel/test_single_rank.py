"""Gradients of a model on one rank: those of plain PyTorch, whatever happened in the backward pass before."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from weft.config.mesh import ParallelSection
from weft.config.model import ModelSection
from weft.parallel.apply import build_sharded_model
from weft.parallel.local_parameters import local
from weft.parallel.model_state import ModelPlan
from weft.parallel.world import start_world

SECTION = ModelSection(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)


class Fails(torch.autograd.Function):
    """Backward raises an error, after later operators had theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError


@pytest.fixture
def model():
    torch.manual_seed(0)
    parallel = ParallelSection()
    world = start_world(parallel)
    yield build_sharded_model(ModelPlan(SECTION, parallel, dtype=torch.float32), world)
    world.close()


def loss(model, seed=0):
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(seed))
    return -model(tokens, labels=tokens.roll(-1, 1)).mean()


def gradients(model):
    return {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_the_gradients_of_micro_batches_are_added(model):
    apart = []
    for seed in range(3):
        loss(model, seed).backward()
        apart.append(gradients(model))
        model.zero_grad()
    for seed in range(3):
        loss(model, seed).backward()
    assert len(apart[0]) == len(list(model.parameters()))
    assert equal(gradients(model), {name: apart[0][name] + apart[1][name] + apart[2][name] for name in apart[0]})


def test_a_failed_backward_pass_leaves_no_gradient_for_the_next(model):
    loss(model).backward()
    expected = gradients(model)
    model.zero_grad()
    hook = model.layers[0].register_forward_hook(lambda module, inputs, out: Fails.apply(out))
    with pytest.raises(ArithmeticError):
        loss(model, 1).backward()
    hook.remove()
    model.zero_grad()
    loss(model).backward()
    assert equal(gradients(model), expected)


def test_a_backward_pass_within_another_takes_its_gradients_along(model):
    """As reentrant checkpoints do."""
    loss(model).backward()
    expected = gradients(model)
    model.zero_grad()
    layer = model.layers[0]
    forward = layer.forward

    def recomputed(x, *arguments, **named):
        return checkpoint(lambda y: forward(y, *arguments, **named), x, use_reentrant=True)

    layer.forward = recomputed
    loss(model).backward()
    assert equal(gradients(model), expected)


def test_sums_of_one_rank_are_numbers_of_whatever_was_given():
    world = start_world(ParallelSection())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            given = torch.tensor(1.5, requires_grad=True), torch.tensor(2), 3, torch.tensor(0.1, dtype=torch.float64)
            found = world.sum(*given, votes=[1, 0.5])
    finally:
        world.close()
    assert found == [1.5, 2.0, 3.0, 0.1, 1.0, 0.5]
    assert all(type(value) is float for value in found)
