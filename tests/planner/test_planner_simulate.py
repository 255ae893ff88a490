"""The memory of a rank by steps of the real code without memory, beside closed forms and formulas."""

import json

import pytest
import yaml

from weft.config.run import RunConfig
from weft.errors import UserError
from weft.planner.memory import memory_of
from weft.planner.simulate import simulate, simulate_rank

MODEL = {
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
# Embedding, head and final norm, and layers with two norms.
PARAMETERS = (2 * 32_000 + 1) * 1024 + 2 * (4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024)


@pytest.fixture
def run(tmp_path):
    """Returns a function from a mesh and overrides to a checked config on 8 ranks."""

    def load(mesh=None, *overrides: str) -> RunConfig:
        content = {
            "model": MODEL,
            "data": {"sequence_length": 2048},
            "training": {"steps": 2, "batch_tokens": 16 * 2048, "micro_batch_size": 2, "dtype": "bfloat16"},
            "parallel": mesh or {},
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(content))
        return RunConfig.load(path, overrides, check_data=False, ranks=8)

    return load


MESHES = ({}, {"tp": 2})
FULL = "training.activation_checkpointing=full", f"training.batch_tokens={32 * 2048}"
OTHERS = ({"dp_replicate": 8, "dp_shard": 1}, {"dp_replicate": 2}, {"cp": 2})
LONG = [pytest.param(mesh, marks=pytest.mark.long) for mesh in OTHERS]


@pytest.mark.parametrize("mesh", [*MESHES, *LONG], ids=json.dumps)
def test_the_formulas_say_what_the_real_code_needs(run, mesh):
    config = run(mesh)
    (found,), (planned,) = simulate(config, 8), memory_of(config, 8, cpu=True)
    share = 8 // mesh.get("dp_replicate", 1)
    assert found.memory.parameters == pytest.approx(4 * PARAMETERS / share, rel=1e-3)
    assert found.memory.optimizer == pytest.approx(2 * found.memory.parameters, rel=1e-3)
    assert planned.total == pytest.approx(found.memory.total, rel=0.05)


def test_the_first_rank_of_a_pipeline_and_the_one_that_needs_most_are_simulated(run):
    config = run({"pp": 2}, f"training.batch_tokens={32 * 2048}")  # with fewer micro-batches the formula is too high
    planned = memory_of(config, 8, cpu=True)
    found = simulate(config, 8)
    assert [one.rank for one in found] == [0, 4]
    assert found[1].memory.total > found[0].memory.total
    assert sum(one.memory.parameters for one in found) * 4 == pytest.approx(4 * PARAMETERS, rel=1e-3)
    for one in found:
        assert planned[one.rank // 4].total == pytest.approx(one.memory.total, rel=0.05)


@pytest.mark.long
def test_each_pipeline_rank_with_gpipe_keeps_the_logits_of_all_micro_batches(run):
    changes = f"training.batch_tokens={32 * 2048}", "training.activation_checkpointing=full"
    config = run({"pp": 2, "pp_schedule": "gpipe"}, *changes)
    planned, (_, last) = memory_of(config, 8, cpu=True), simulate(config, 8)
    # Of the three micro-batches that wait for the backward of the first, two sequences and two bytes.
    assert last.memory.logits > 3 * 2 * 2 * 2048 * 32_000
    assert planned[1].total == pytest.approx(last.memory.total, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_logits_do_not_exist_at_once(run, dtype):
    """8,192 tokens have more logits than are kept: two blocks, one after the other, whose gradients are summed."""
    sizes = "model.hidden_size=256", "model.num_attention_heads=4", "model.intermediate_size=512"
    config = run({}, *sizes, f"training.dtype={dtype}", "training.micro_batch_size=4", *FULL)
    one, width = simulate_rank(config, 8), 4 if dtype == "float32" else 2
    assert 0.9 < one.memory.logits / (width * (1 << 27)) < 1.1  # all logits have twice as many bytes
    assert one.memory.gradients > 4 * 32_000 * 256  # of the first block
    (planned,) = memory_of(config, 8, cpu=True)
    assert planned.total == pytest.approx(one.memory.total, rel=0.05)


def _twice_read(h, n, w):
    return h + (n(h) @ w + (n(h) @ w).sin())


def _shared(a, _, b):
    return a.sin() + b.cos() + (a + b).square()


@pytest.mark.parametrize("function", [_twice_read, _shared])
def test_gradients_are_summed_in_place_where_autograd_does(function, monkeypatch):
    import torch

    from weft.planner import torch_private as private

    def backward():
        h, w = (torch.ones(8, 8, requires_grad=True) for _ in range(2))
        function(h, torch.nn.functional.silu, w).sum().backward()

    with torch.profiler.profile() as profile:
        backward()
    names = [event.name for event in profile.events()]
    answers, ask = [], private._is_sum_in_place
    monkeypatch.setattr(private, "_is_sum_in_place", lambda func, args: answers.append(ask(func, args)) or answers[-1])
    with private.without_values(0, 0) as mode, mode, private.MemoryCounter(mode, []):
        backward()
    assert 0 < answers.count(True) == names.count("aten::add_")


@pytest.mark.long
def test_recomputation_needs_less(run):
    plain, full = (simulate_rank(run({}, f"training.activation_checkpointing={mode}"), 8) for mode in ("none", "full"))
    assert full.memory.total < plain.memory.total
    assert full.memory.parameters == plain.memory.parameters


def test_ranks_of_a_layer_save_less_in_each_mode(run):
    """The input of a layer is gathered again, and its partial sums are not saved, in `none` and in `selective`."""
    found = []
    for mode in ("none", "selective", "full"):
        sizes = "training.batch_tokens=4096", "model.num_hidden_layers=6"
        config = run({"tp": 8}, *sizes, f"training.activation_checkpointing={mode}")
        (planned,), simulated = memory_of(config, 8, cpu=True), simulate_rank(config, 8).memory
        assert planned.total == pytest.approx(simulated.total, rel=0.05)
        found.append(simulated.activations)
    assert found[0] > found[1] > found[2]


def test_replicas_of_one_rank_are_simulated_without_warnings(run, recwarn):
    simulate_rank(run({"dp_replicate": 8}, "model.num_hidden_layers=1"), 8)
    assert not [one for one in recwarn if "FakeTensor" in str(one.message)]


def test_a_budget_includes_the_inputs_of_a_layer(run):
    config = run({}, "model.num_hidden_layers=4", "training.activation_checkpointing=budget-0.25")
    (planned,), simulated = memory_of(config, 8, cpu=True), simulate_rank(config, 8).memory
    assert planned.total == pytest.approx(simulated.total, rel=0.05)


@pytest.mark.parametrize("option", ["sliding_window=512", "attn_logit_softcapping=50", "attention_sinks=true"])
def test_attention_needs_no_memory_for_all_scores_or_a_mask(run, option):
    sizes = "training.batch_tokens=16384", "training.micro_batch_size=1", "model.vocab_size=1024"
    config = run({}, *sizes, f"model.{option}")
    (planned,), simulated = memory_of(config, 8, cpu=True), simulate_rank(config, 8).memory
    assert 0.8 < simulated.activations / planned.activations < 1.05


# Logits have rows of one and a half memory pages: rows of whole pages are longer on some processors, and with 1,024
# words, the peaks of the loss and of the layer are equal on the others.
SMALL = "model.hidden_size=512", "model.num_attention_heads=8", "model.num_hidden_layers=1", "model.vocab_size=1536"
EXPERTS = "{num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 512, swiglu_limit: 7, expert_bias: true}"
SINKS = "model.attention_sinks=true", f"model.moe={EXPERTS}", "training.dtype=float32"
CAPS = "model.attn_logit_softcapping=50", "model.logit_softcap=30"
NORMS = "model.norm=rmsnorm1p", "model.norm_placement=both"


@pytest.mark.parametrize("options", [SINKS, (*CAPS, *NORMS)], ids=["gpt_oss", "gemma2"])
def test_formulas_count_the_tensors_of_sinks_soft_caps_and_clipped_experts(run, options):
    config = run({}, "training.batch_tokens=16384", "training.micro_batch_size=1", *SMALL, *options)
    (planned,), simulated = memory_of(config, 8, cpu=True), simulate_rank(config, 8).memory
    assert planned.total == pytest.approx(simulated.total, rel=0.02)
    assert planned.logits == pytest.approx(simulated.logits, rel=0.02)


SELECTIVE = "training.activation_checkpointing=selective"


@pytest.mark.parametrize(
    ("mesh", "options"),
    [({}, ("training.dtype=float32", "model.num_hidden_layers=2")), ({"ep": 2}, ())],
    ids=["float32", "ep"],
)
def test_selective_recomputation_keeps_products_that_backward_does_not_read(run, mesh, options):
    sizes = "training.batch_tokens=16384", "training.micro_batch_size=1", f"model.moe={EXPERTS}"
    config = run(mesh, *SMALL, *sizes, SELECTIVE, *options)
    (planned,), simulated = memory_of(config, 8, cpu=True), simulate_rank(config, 8).memory
    assert planned.total == pytest.approx(simulated.total, rel=0.02)


@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("option", ["attention_sinks=true", "attn_logit_softcapping=50"])
def test_sinks_and_soft_caps_need_all_scores_if_ring_attention_gathers_keys(run, option, mode):
    sizes = "data.sequence_length=1024", "training.batch_tokens=8192", "training.micro_batch_size=1"
    shape = "model.num_key_value_heads=4", "model.intermediate_size=512", f"model.{option}"
    mesh = {"cp": 2, "cp_method": "ring"}
    config = run(mesh, *SMALL, *sizes, *shape, f"training.activation_checkpointing={mode}")
    (planned,), simulated = memory_of(config, 8, cpu=True), simulate_rank(config, 8).memory
    assert planned.total == pytest.approx(simulated.total, rel=0.02)


def test_a_layer_with_a_window_has_no_ring_attention(run):
    sizes = "training.micro_batch_size=1", "training.activation_checkpointing=selective", "model.num_hidden_layers=8"
    plain, window, gathered = (
        memory_of(run({"cp": 2, "cp_method": method}, *SMALL, *sizes, *options), 8)[0].activations
        for method, options in (("ring", ()), ("ring", ("model.sliding_window=512",)), ("all_gather", ()))
    )
    assert plain < window == gathered


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_tied_weight_has_gradients_of_embedding_and_head_beside_those_of_earlier_micro_batches(run, mode, dtype):
    """Autograd adds one of them to the other in place; only within a mode, as here, it would make a third tensor."""
    sizes = "model.hidden_size=256", "model.num_attention_heads=4", "model.intermediate_size=512"
    tied = "model.tie_word_embeddings=true", "model.vocab_size=32000", "data.sequence_length=128"
    options = "training.batch_tokens=2048", "training.micro_batch_size=1", f"training.dtype={dtype}"
    config = run({}, *SMALL, *sizes, *tied, *options, f"training.activation_checkpointing={mode}")
    (planned,), simulated = memory_of(config, 8, cpu=True), simulate_rank(config, 8).memory
    assert planned.gradients == pytest.approx(simulated.gradients, rel=0.02)
    assert planned.total == pytest.approx(simulated.total, rel=0.02)


def test_exponentials_take_the_place_of_logits_in_float32(run):
    sizes = "model.hidden_size=64", "model.num_attention_heads=4", "model.intermediate_size=128"
    options = "training.batch_tokens=16384", "training.micro_batch_size=1", "training.dtype=float32"
    config = run({"dp_replicate": 8, "dp_shard": 1}, *SMALL, *sizes, "model.vocab_size=512", *options)
    (planned,), simulated = memory_of(config, 8, cpu=True), simulate_rank(config, 8).memory
    assert planned.logits == pytest.approx(simulated.logits, rel=0.02)
    assert planned.total == pytest.approx(simulated.total, rel=0.04)


def test_what_it_cannot_simulate_is_refused(run):
    config = run()
    objective = config.objective.model_copy(update={"type": "dpo"})
    with pytest.raises(UserError, match=r"objective\.type: dpo"):
        simulate_rank(config.model_copy(update={"objective": objective}), 8)
    with pytest.raises(UserError, match=r"parallel\.offload: optimizer"):
        simulate_rank(run({"offload": "optimizer"}), 8)
