"""Rows of several documents through the whole model: the numbers of each document by itself, compiled or not."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from weft.config.model import ModelSection
from weft.models.build import build_model
from weft.models.initialize import initialize

LENGTHS = [[9, 20, 3], [32], [1, 1, 14, 16]]
SHAPE = {
    "vocab_size": 67, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip


def decoder(dtype=torch.float64, device="cpu", **changes):
    model = build_model(ModelSection(**SHAPE | changes)).to(device, dtype)
    initialize(model, seed=0)
    return model


def packed(device="cpu", lengths=LENGTHS):
    torch.manual_seed(0)
    shape = len(lengths), sum(lengths[0])
    inputs = {name: torch.randint(0, 67, shape, device=device) for name in ("tokens", "labels")}
    inputs["segments"] = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])
    inputs["positions"] = torch.tensor([[i for n in row for i in range(n)] for row in lengths])
    return {name: value.to(device) for name, value in inputs.items()}


def one_by_one(model, inputs, lengths=LENGTHS):
    """The same log-probabilities, from a forward per document without segments or positions."""
    result = []
    for row, documents in enumerate(lengths):
        edges = [sum(documents[:i]) for i in range(len(documents) + 1)]
        parts = [slice(a, b) for a, b in pairwise(edges)]
        result.append(
            torch.cat(
                [model(inputs["tokens"][row : row + 1, p], labels=inputs["labels"][row : row + 1, p]) for p in parts], 1
            )
        )
    return torch.cat(result)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def ways(model, way):
    """Recompute or compile each block, as training does."""
    for block in model.layers:
        if "recomputed" in way:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if "traced" in way:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        elif "compiled" in way:
            block.forward = torch.compile(block.forward)


@pytest.mark.parametrize(
    "way", ["eager", "recomputed", pytest.param("traced", marks=pytest.mark.long), "recomputed and traced"]
)
def test_rows_of_documents_are_the_documents_alone(way):
    model, inputs = decoder(), packed()
    expected = one_by_one(model, inputs)
    wanted = gradients(model, expected.sum())
    ways(model, way)
    ours = model(**inputs)
    assert (ours - expected).abs().max() < 1e-12
    for name, gradient in gradients(model, ours.sum()).items():
        assert (gradient - wanted[name]).abs().max() < 1e-12 * max(1.0, wanted[name].abs().max().item()), name


WINDOWED = {"sliding_window": 5, "sliding_window_pattern": 2, "attn_logit_softcapping": 1.5}


@pytest.mark.parametrize("way", ["eager", pytest.param("traced", marks=pytest.mark.long)])
def test_sliding_windows_and_capped_scores_stay_inside_documents(way):
    model, inputs = decoder(**WINDOWED), packed()
    expected = one_by_one(model, inputs)
    assert (expected - one_by_one(decoder(), inputs)).abs().max() > 1e-3
    ways(model, way)
    assert (model(**inputs) - expected).abs().max() < 1e-12


def test_a_sliding_window_is_that_wide():
    model, tokens = decoder(sliding_window=5, num_hidden_layers=1), torch.arange(20)[None]
    changed = tokens.clone()
    changed[0, 3] = 66
    differ = (model(tokens) - model(changed)).abs().amax(-1)[0] > 1e-9
    assert differ.nonzero().flatten().tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("norm_placement", ["pre", "post", "both"])
def test_the_residual_stream_may_be_wider_than_the_matrices(norm_placement):
    block = decoder(torch.bfloat16, norm_placement=norm_placement, position="learned").layers[0]
    assert block(torch.randn(1, 8, 64)).dtype == torch.float32


def test_traced_code_serves_every_cut_into_documents():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = decoder()
    ways(model, "traced")
    for lengths in (LENGTHS, [[32]] * 3, [[4] * 8] * 3, [[1] * 32] * 3):
        inputs = packed(lengths=lengths)
        assert (model(**inputs) - one_by_one(decoder(), inputs, lengths)).abs().max() < 1e-12
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] <= 4  # one for each layer, not one for each way to cut; and with no_grad


def test_dropout_keeps_documents_apart_and_stops_in_evaluation():
    model, inputs = decoder(attention_dropout=0.5), packed()
    assert not torch.equal(model.train()(**inputs), model(**inputs))
    assert (model.eval()(**inputs) - one_by_one(model, inputs)).abs().max() < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("alone", [False, True])
def test_on_a_gpu_sliding_windows_and_capped_scores_stay_inside_documents(way, alone):
    torch.set_float32_matmul_precision("highest")
    lengths = [[600], [600]] if alone else [[90, 500, 10], [600]]
    keys = {"max_position_embeddings": 600, **WINDOWED, "sliding_window": 70}
    inputs = packed("cuda", lengths)
    expected = one_by_one(decoder(torch.float64, "cuda", **keys), inputs, lengths)
    model = decoder(torch.float32, "cuda", **keys)
    ways(model, way)
    if alone:
        del inputs["segments"]
    assert (model(**inputs) - expected).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "recomputed", "compiled", "recomputed and compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_rows_of_documents_are_the_documents_alone(way, dtype):
    torch.set_float32_matmul_precision("highest")
    lengths = [[90, 500, 10], [600], [1, 99, 300, 200]]
    model, inputs = decoder(dtype, "cuda", max_position_embeddings=600), packed("cuda", lengths)
    expected = one_by_one(model, inputs, lengths)
    wanted = gradients(model, expected.sum())
    ways(model, way)
    ours = model(**inputs)
    bound = 1e-3 if dtype == torch.float32 else 0.1
    assert (ours - expected).abs().max() < bound
    for name, gradient in gradients(model, ours.sum()).items():
        assert (gradient - wanted[name]).norm() < bound * wanted[name].norm(), name
