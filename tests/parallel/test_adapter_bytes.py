"""The bytes that ranks hold of a model with an adapter: its frozen base, its adapter, and the optimizer's state."""

from types import SimpleNamespace

import pytest
import torch
from matrix import Case, write_run

from weft.config.adapter import AdapterSection, adapted_layers, adapter_parameters, decoder_layers
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.models.adapter import add_adapter, is_adapter
from weft.models.decoder import Decoder
from weft.parallel.apply import shard_for_inference
from weft.parallel.local_parameters import local
from weft.parallel.world import start_world
from weft.train.build import build

pytestmark = pytest.mark.xdist_group("ranks")


def held(file) -> dict[str, int]:
    """On a rank: bytes of frozen parameters by dtype, of the adapter, and of the optimizer's state after a step."""
    config = RunConfig.load(file)
    world = start_world(config.parallel)
    model, optimizer = build(config, world)
    found = {"adapter": 0, "state": 0}
    for name, parameter in model.named_parameters():
        kind = "adapter" if is_adapter(name) else str(parameter.dtype).removeprefix("torch.")
        found[kind] = found.get(kind, 0) + local(parameter).untyped_storage().nbytes()
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        found["state"] += sum(local(value).untyped_storage().nbytes() for value in state.values() if value.dim())
    world.close()
    return found


@pytest.mark.parametrize(
    ("quantize", "mesh", "bits"),
    [("nf4", {"dp_shard": 2}, 4), pytest.param("int8", {"tp": 2}, 8, marks=pytest.mark.matrix), (None, {}, 16)],
    ids=str,
)
def test_a_rank_holds_its_shards_and_state_of_the_adapter_alone(runner, quantize, mesh, bits):
    base = runner.reference(Case("gqa", "plain"), steps=1)
    file = write_run(
        runner.folder,
        Case("gqa", "lora", mesh),
        name=f"held-{quantize}",
        model={"from": str(base.path)},
        adapter={"r": 4, "quantize": quantize},
        training={"dtype": "bfloat16"},
        optimizer={"type": "adamw"},
    )
    model = RunConfig.load(file).model
    layers = decoder_layers(model)
    chosen = adapted_layers(AdapterSection.model_validate({"r": 4}), layers, [])
    trained = adapter_parameters(AdapterSection.model_validate({"r": 4}), layers, chosen)
    weights = sum(shape.size for shape in layers.values())
    ranks = 2 if mesh else 1
    per_rank = runner.pool.call(held, ranks, file)
    total = {kind: sum(rank.get(kind, 0) for rank in per_rank) for kind in per_rank[0]}
    other = model.size().parameters - weights  # embedding, head and norms
    if "tp" not in mesh:  # which replicates norms, and A or B
        assert total["adapter"] == 4 * trained
        assert total.get("bfloat16", 0) >= 2 * other
        assert max(rank["adapter"] for rank in per_rank) <= 4 * trained / ranks + 64
    assert total["state"] == 2 * total["adapter"]  # two moments of AdamW, in float32
    if quantize is None:
        assert total == {"adapter": 4 * trained, "state": 8 * trained, "bfloat16": 2 * (weights + other)}
        return
    codes = total["uint8" if quantize == "nf4" else "int8"]
    assert codes == weights * bits // 8
    assert all(rank["uint8" if quantize == "nf4" else "int8"] == codes // 2 for rank in per_rank)


def test_inference_refuses_ranks_that_would_split_a_block():
    keys = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 16, "head_dim": 2}
    with torch.device("meta"):
        model = Decoder(ModelSection.model_validate(keys | {"intermediate_size": 128}))
    add_adapter(model, AdapterSection.model_validate({"quantize": "nf4"}))
    world = SimpleNamespace(shape=SimpleNamespace(tp=16), tp_mesh=SimpleNamespace(size=lambda: 16))
    with pytest.raises(
        UserError, match=r"tp 16 would split the blocks of layers.0.attention.q_proj.weight, .* 8 blocks"
    ):
        shard_for_inference(model, world)
