"""The planned memory of a rank, beside closed forms and the tensors that real blocks save."""

import json

import pytest
import torch
import yaml
from test_planner_step import run  # noqa: F401 - a fixture

from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.planner.memory import DEVICE_BYTES, FRAGMENTATION, memory_of

pytestmark = pytest.mark.filterwarnings("ignore")
# The parameters of the file's model, by hand: embedding, head and final norm, and 8 blocks with two norms.
LAYER = 4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024
PARAMETERS = 2 * 64 * 1024 + 1024 + 8 * LAYER


def one(config, devices=1, **options):
    (found,) = memory_of(config, devices, cpu=True, **options)
    return found


def test_weights_and_optimizer_are_four_bytes_a_value(run):  # noqa: F811
    found = one(run())
    assert found.parameters == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert found.optimizer == pytest.approx(8 * PARAMETERS, rel=1e-3)
    assert one(run(1, "optimizer={type: muon, lr: 0.01}")).optimizer < found.optimizer
    assert found.total == pytest.approx(sum(found.parts().values()))


@pytest.mark.parametrize(
    ("devices", "mesh", "share"),
    [
        (8, "{}", 8),
        (8, "{dp_replicate: 2, dp_shard: 4}", 4),
        (8, "{tp: 4}", 8),
        (8, "{cp: 2}", 8),
        (2, "{dp_replicate: 2, dp_shard: 1}", 1),
    ],
)
def test_each_axis_divides_the_state_as_it_should(run, devices, mesh, share):  # noqa: F811
    found = one(run(devices, f"parallel={mesh}"), devices)
    assert found.parameters == pytest.approx(4 * PARAMETERS / share, rel=1e-2)
    assert found.optimizer == pytest.approx(2 * found.parameters)


def test_offloading_moves_the_state_to_the_host(run):  # noqa: F811
    plain = one(run(4), 4)
    optimizer = one(run(4, "parallel.offload=optimizer"), 4)
    everything = one(run(4, "parallel.offload=parameters"), 4)
    assert optimizer.optimizer == everything.optimizer == everything.parameters == 0
    assert plain.parameters == optimizer.parameters > 0


def test_stages_of_a_pipeline_have_all_weights_between_them(run):  # noqa: F811
    stages = memory_of(run(4, "parallel={pp: 4}", "training.batch_tokens=16384"), 4, cpu=True)
    assert len(stages) == 4
    assert sum(one.parameters for one in stages) == pytest.approx(4 * PARAMETERS, rel=1e-3)
    # Under 1F1B the first stage keeps as many micro-batches as there are stages, the last keeps one.
    assert stages[0].activations > 2.5 * stages[3].activations


def test_recomputation_keeps_less_the_more_it_repeats(run):  # noqa: F811
    modes = ("none", "selective", "full")
    kept = [one(run(1, f"training.activation_checkpointing={mode}")).activations for mode in modes]
    assert kept[0] > kept[1] > kept[2]
    assert one(run(1, "training.micro_batch_size=4")).activations == pytest.approx(4 * kept[0], rel=0.01)


def test_compiled_code_overwrites_logits_without_a_copy_in_float32(run):  # noqa: F811
    wide = ("model.vocab_size=100000", "training.dtype=bfloat16", "training.micro_batch_size=2")
    eager, compiled = (one(run(1, *wide, f"training.compile={way}"), chunks=False) for way in ("false", "true"))
    logits = 2 * 512 * 100000  # of the largest micro-batch, in 2 bytes; and the gradient of the hidden states
    assert compiled.logits == 2 * logits + 2 * 2 * 512 * 1024
    assert eager.logits == compiled.logits + 2 * 4 * logits  # the cast, and its softmax


def test_a_gpu_needs_more_for_its_context_and_fragmentation(run):  # noqa: F811
    (gpu,) = memory_of(run(1, "training.dtype=bfloat16"), 1)
    changing = gpu.activations + gpu.logits + gpu.gathered + gpu.buffers - DEVICE_BYTES
    assert gpu.buffers >= DEVICE_BYTES
    assert gpu.fragmentation == pytest.approx(FRAGMENTATION * changing)


BLOCKS = [
    "{}",
    "{mlp: gated, hidden_act: silu, intermediate_size: 2816}",
    "{num_key_value_heads: 2, qk_norm: true}",
    "{norm_placement: both}",
    "{mlp: gated, hidden_act: silu, moe: {num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 512}}",
]
# In bfloat16, processors differ in the kernels of sinks and soft caps.
FLOAT32_BLOCKS = [
    "{norm: rmsnorm1p, norm_placement: both, attn_logit_softcapping: 50, sliding_window: 32}",
    "{attention_sinks: true, mlp: gated, moe: {num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 512, "
    "swiglu_limit: 7, expert_bias: true}}",
]


@pytest.mark.parametrize(
    ("dtype", "model"),
    [
        *(("float32", model) for model in BLOCKS + FLOAT32_BLOCKS),
        *(pytest.param("bfloat16", model, marks=pytest.mark.long if model != BLOCKS[2] else ()) for model in BLOCKS),
    ],
)
def test_a_block_saves_as_many_bytes_as_the_real_one(run, model, dtype):  # noqa: F811
    changes = [f"training.dtype={dtype}", "model.hidden_size=512", "model.vocab_size=64", "data.sequence_length=128"]
    given = [f"model.{key}={value}" for key, value in _items(model)]

    def config(layers: int):
        return run(1, *changes, *given, f"model.num_hidden_layers={layers}", "training.micro_batch_size=2")

    planned = one(config(5)).activations - one(config(4)).activations
    measured = _saved(config(2), dtype) - _saved(config(1), dtype)
    assert planned == pytest.approx(measured, rel=0.08)


def _items(text: str) -> list[tuple[str, str]]:
    """Keys and values of a YAML mapping, values as YAML in one line."""
    return [(key, json.dumps(value)) for key, value in yaml.safe_load(text).items()]


def _saved(config, dtype: str) -> int:
    """Bytes of the storages that autograd keeps in a forward pass, without those of parameters."""
    model = build_model(config.model).to_empty(device="cpu").to(getattr(torch, dtype))
    initialize(model, 0)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(torch.zeros(2, 128, dtype=torch.long))
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del result
    return found
