"""Training mixtures of experts: the same on any ranks, and balanced as the papers have it."""

import pytest
import torch
from running import QUIET, assert_same_weights, losses, metrics, train, weights

from weft.config.model import ModelSection
from weft.models.build import build_model
from weft.models.initialize import initialize

EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "scoring_func": "sigmoid", "n_group": 3, "topk_group": 2, "correction_bias": True,
    "router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001, "bias_update_speed": 0.01,
}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK = {
    "preset": None, "family": "deepseek_v3", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "mla": LATENT, "moe": EXPERTS,
}  # fmt: skip
GPT_OSS = {
    "preset": None, "family": "gpt_oss", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "attention_bias": True, "attention_sinks": True,
    "sliding_window": 16, "sliding_window_pattern": 2,
    "moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "scoring_func": "softmax_of_chosen", "router_bias": True,
        "expert_bias": True, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.01,
    },
}  # fmt: skip


@pytest.fixture
def write(run_yaml, tmp_path):
    """Writes runs in float64."""

    def write(name, model, *, sequences=16, micro=4, steps=4, **changes):
        training = {"steps": steps, "batch_tokens": sequences * 64, "micro_batch_size": micro, "dtype": "float64"}
        file = run_yaml(
            f"{name}.yaml",
            run={"name": name},
            model=model,
            training=training | changes.pop("training", {}),
            schedule={"warmup_steps": 1},
            validation={"every": steps, "tokens": 640},
            log=QUIET,
            **changes,
        )
        return file, tmp_path / "runs" / name

    return write


def assert_equal_runs(one, other):
    assert len(losses(one)) == len(losses(other)) == 2
    for mine, theirs in zip(metrics(one), metrics(other), strict=True):
        for key in ("loss", "grad_norm", "expert_load"):
            assert mine[key] == pytest.approx(theirs[key], rel=0, abs=1e-9), key
    assert_same_weights(one, other, within=1e-9)


# 6 sequences on 4 ranks: the last one has rows that do not count, neither in the loss nor in the balance.
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("model", "sequences"),
    [(DEEPSEEK, 6), pytest.param(GPT_OSS, 16, marks=pytest.mark.long)],
    ids=["deepseek, uneven", "gpt-oss"],
)
def test_four_ranks_and_single_rows_are_one_process(runner, write, model, sequences):
    few = {"sequences": sequences, "steps": 2}
    alone, alone_run = write("alone", model, **few)
    four, four_run = write("four", model, **few, micro=2, parallel={"dp_replicate": 2, "dp_shard": 2})
    single, single_run = write("single", model, **few, micro=1)
    runner.pool.run(four, 4, seconds=120)
    assert train(alone) == train(single) == 0
    assert_equal_runs(alone_run, four_run)
    assert_equal_runs(alone_run, single_run)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "parallel",
    [{"cp": 2, "tp": 2}, pytest.param({"pp": 2, "dp_shard": 2, "ep": 2}, marks=pytest.mark.long)],
    ids=["cp, tp", "pp, ep"],
)
def test_padding_counts_on_no_rank(runner, write, parallel):
    model = DEEPSEEK | {"num_hidden_layers": 4, "moe": EXPERTS | {"capacity_factor": 0.8}}
    padded = {"data": {"packing": "pad"}, "sequences": 8, "micro": 2, "steps": 2}
    alone, alone_run = write("alone", model, **padded)
    four, four_run = write("four", model, **padded, parallel=parallel)
    runner.pool.run(four, 4, seconds=120)
    assert train(alone) == 0
    assert_equal_runs(alone_run, four_run)
    assert 0 < metrics(alone_run)[-1]["dropped"] == pytest.approx(metrics(four_run)[-1]["dropped"], abs=1e-12)


def test_a_run_goes_on_as_if_it_had_not_stopped(write):
    straight, straight_run = write("straight", DEEPSEEK, training={"dtype": "float32"})
    halves, halves_run = write("halves", DEEPSEEK, training={"dtype": "float32"}, checkpoint={"every": 2})
    assert train(straight) == train(halves, "training.steps=2") == 0
    assert train(halves) == 0
    assert losses(straight_run)[2:] == losses(halves_run)[2:]
    after = weights(halves_run)
    assert all(torch.equal(value, after[name]) for name, value in weights(straight_run).items())
    bias = after["layers.2.mlp.router.correction_bias"]
    assert bias.dtype == torch.float32
    assert set((bias / 0.01).round().abs().tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0}  # four steps up or down
    assert bias.any()


def small(**moe):
    section = ModelSection(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        moe={"num_experts": 5, "num_experts_per_tok": 2, **moe},
    )  # fmt: skip
    model = build_model(section).double()
    initialize(model, 3)
    with torch.no_grad():
        model.layers[0].mlp.router.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model.train()


def test_balancing_losses_are_the_papers():
    """Fedus et al. (2021), equation 4, and Zoph et al. (2022), equation 5, a sequence each; in backward alone."""
    model = small(router_aux_loss_coef=0.3, router_z_loss_coef=0.07)
    tokens, shares = torch.randint(0, 50, (3, 12)), torch.tensor([0.5, 0.0, 0.25], dtype=torch.float64)
    seen = []
    hook = model.layers[0].mlp.router.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs))
    out = model(tokens, loss_weights=shares).logsumexp(-1).sum()
    hook.remove()
    parameters = list(model.parameters())
    whole = torch.autograd.grad(out, parameters, retain_graph=True)
    assert out == small(router_aux_loss_coef=0.0)(tokens).logsumexp(-1).sum()

    _, chosen, scores = seen[0]
    penalty = 0.0
    for row, share in enumerate(shares):
        likely = scores[row].softmax(-1)
        fractions = torch.stack([(chosen[row] == expert).any(-1).double().mean() for expert in range(5)]) / 2
        balance = 5 * sum(fractions[expert] * likely[:, expert].mean() for expert in range(5))
        z = scores[row].exp().sum(-1).log().square().mean()
        penalty = penalty + share * (0.3 * balance + 0.07 * z)
    model.zero_grad()
    plain = model(tokens).logsumexp(-1).sum()
    expected = torch.autograd.grad(plain, parameters)
    extra = torch.autograd.grad(penalty, parameters, allow_unused=True)
    for mine, one, more in zip(whole, expected, extra, strict=True):
        torch.testing.assert_close(mine, one if more is None else one + more, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    "section", [DEEPSEEK, pytest.param(GPT_OSS, marks=pytest.mark.long)], ids=["deepseek", "gpt-oss"]
)
def test_a_block_compiles_whole(section):
    torch._dynamo.reset()
    section = {key: value for key, value in section.items() if value is not None} | {"num_hidden_layers": 2}
    model = build_model(ModelSection(vocab_size=50, **section)).train()
    initialize(model, 1)
    tokens, shares = torch.randint(0, 50, (2, 20)), torch.tensor([0.5, 0.5])
    expected = model(tokens, loss_weights=shares)
    gradients = torch.autograd.grad(expected.square().mean(), list(model.parameters()))
    for block in model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    out = model(tokens, loss_weights=shares)
    torch.testing.assert_close(out, expected)
    for mine, one in zip(torch.autograd.grad(out.square().mean(), list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(mine, one, atol=1e-5, rtol=1e-4)
