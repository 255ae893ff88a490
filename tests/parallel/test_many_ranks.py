"""2,048 ranks on one machine: a large model's step on each kind of mesh, as one of the ranks takes it."""

import pytest
import shapes
from pool import Pool
from shapes import LLAMA_28B, MESHES, MOE_30B, RANKS, write_run

pytestmark = pytest.mark.xdist_group("ranks")

STATE = 16  # bytes a parameter: float32, its gradient, AdamW's two means
SMALL = {
    "dense": LLAMA_28B | {"num_hidden_layers": 2},
    "experts": MOE_30B | {"num_hidden_layers": 2},
}


def parameters(model):
    """Those of the layers and those of the rest."""
    width, heads, kv = model["hidden_size"], model["num_attention_heads"], model["num_key_value_heads"]
    head = model.get("head_dim", width // heads)
    attention = 2 * width * head * (heads + kv)
    if moe := model.get("moe"):
        mlp = moe["num_experts"] * width * (1 + 3 * moe["moe_intermediate_size"])
    else:
        mlp = 3 * width * model["intermediate_size"]
    return model["num_hidden_layers"] * (attention + mlp + 2 * width), (2 * model["vocab_size"] + 1) * width


def check(folder, mesh, model, rank=0, **training):
    """A rank has its share of the model, and takes its steps. Returns what the last one was like."""
    pool = Pool()
    try:
        (found,) = pool.call(shapes.imagine, 1, write_run(folder, mesh, model, **training), RANKS, rank, seconds=900)
    finally:
        pool.close()
    assert found.resident < 2e9
    layers, rest = parameters(model)
    stages = mesh.get("pp", 1)
    # The first stage has the embedding, and somewhat fewer layers; cuts are rounded up.
    share = STATE * (layers + rest / min(stages, 2) * stages) * mesh.get("dp_replicate", 1) / RANKS
    assert 0.7 * share < found.state < 1.2 * share
    assert found.state < found.peak
    return found


def test_a_step_on_2048_ranks(tmp_path):
    """A few layers, on nearly all axes at once."""
    dense = check(tmp_path, {"dp_replicate": 2, "cp": 2, "tp": 8}, SMALL["dense"], steps=1)
    assert {call.axis for call in dense.calls} >= {"dp_replicate", "fsdp", "cp", "tp"}
    experts = check(tmp_path, {"pp": 2, "ep": 8}, SMALL["experts"], rank=RANKS // 2, steps=1)
    assert {call.axis for call in experts.calls} >= {"pp", "dp_shard", "ep", "efsdp"}


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_large_models_step_on_2048_ranks(tmp_path, mesh):
    check(tmp_path, mesh, MOE_30B if "ep" in mesh else LLAMA_28B)
