"""The estimated memory of a step, against tensors that a run really holds and saves."""

from dataclasses import replace

import pytest
import torch
from matrix import Case, write_run

from weft.cli.main import main
from weft.config.adapter import AdapterSection
from weft.config.mesh import ParallelSection
from weft.config.model import ModelSection
from weft.families import presets
from weft.models.adapter import add_adapter, quantized_weights
from weft.models.decoder import Decoder
from weft.parallel.memory.estimate import saved_per_block
from weft.parallel.model_state import ModelPlan
from weft.parallel.structure import estimated_memory

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
LARGER = SMALL | {"hidden_size": 64}
QLORA = AdapterSection.model_validate({"quantize": "nf4"})


def plan(model, **keys):
    return ModelPlan(ModelSection.model_validate(model), ParallelSection(), **{"dtype": torch.bfloat16, **keys})


@pytest.mark.long
def test_a_model_of_7_billion_parameters_fits_16_gb_with_qlora():
    llama = presets()["llama2-7b"]
    found = estimated_memory(plan(llama, adapter=QLORA, sequence=1024), 1, micro_batch_size=1)
    assert found.device <= 16
    assert 3.5e9 < found.frozen < 4.1e9  # 6.5 billion weights in 4.5 bits, and the embedding and head in 16
    assert found.optimizer == 2 * found.trained == 2 * found.gradients < 0.4e9
    shorter = estimated_memory(
        plan(llama, adapter=QLORA, sequence=4096, activation_checkpointing="full"), 1, micro_batch_size=1
    )
    assert shorter.device <= 16
    for keys in ({"adapter": AdapterSection.model_validate({})}, {}):  # LoRA without QLoRA; all weights
        found = estimated_memory(plan(llama, sequence=1024, **keys), 1, micro_batch_size=1)
        assert found.device is None or found.device > 16
    assert found.total > 16 * 6.7e9  # 16 bytes per parameter


@pytest.mark.parametrize("adapter", [None, {"r": 4}, {"r": 4, "quantize": "int8", "dora": True}], ids=str)
def test_saved_bytes_are_those_of_a_block_that_runs(adapter):
    section = None if adapter is None else AdapterSection.model_validate(adapter)
    chosen = plan(SMALL, dtype=torch.float32, adapter=section)
    model = Decoder(chosen.model)
    if section is not None:
        add_adapter(model, section)
        for codes, _, _ in quantized_weights(model).values():
            codes.zero_()
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    saved = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())  # kept alive
        return tensor

    x = torch.randn(3, 20, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.layers[0](x)
    assert out.shape == x.shape
    real = sum(size for _, size in saved.values())
    # The reference has no rotary embedding, whose tables are saved too.
    assert saved_per_block(chosen, 3, 20, [0])[0] == pytest.approx(real, rel=0.15)
    assert real > 3 * 20 * 32 * 4


def test_a_part_of_the_saved_bytes_includes_the_inputs_of_a_block():
    """Beside them, all saved tensors of one block exist in its backward."""
    model = SMALL | {"num_hidden_layers": 8}
    modes = ("none", "budget-0.5", "budget-0.25", "selective", "full")
    saved = [
        estimated_memory(plan(model, sequence=64, activation_checkpointing=mode), 1, micro_batch_size=1).saved
        for mode in modes
    ]
    none, half, quarter, selective, full = saved
    assert full < quarter < half == selective
    assert (half, quarter) == pytest.approx((none * (4 + 1) / 8, none * (2 + 1) / 8), abs=16)


def test_profile_and_check_say_it(tmp_path, capsys):
    base = write_run(tmp_path, Case("dense", "plain"), name="base", training={"steps": 1})
    assert main(["train", str(base)]) == 0
    adapter = {"r": 4, "quantize": "nf4"}
    model = {"from": str(tmp_path / "base")}
    file = write_run(tmp_path, Case("dense", "lora"), name="tuned", model=model, adapter=adapter)
    capsys.readouterr()
    assert main(["profile", str(file), "--structure"]) == 0
    text = capsys.readouterr().out
    assert "memory of rank 0, estimated for micro-batches of 1 x 32 tokens" in text
    assert "fits a device with 8 GB" in text
    assert "adapter: LoRA of rank 4, nf4" in text
    assert main(["config", "check", str(file)]) == 0
    assert "8.7k trained parameters: LoRA of rank 4, scale 1.5, on 28 layers" in capsys.readouterr().out


def test_frozen_models_count_in_the_dtype_of_the_computation():
    trained = plan(SMALL, sequence=64)
    copy = replace(trained, frozen=True)
    alone = estimated_memory(trained, 2, micro_batch_size=1)
    both = estimated_memory(trained, 2, micro_batch_size=1, frozen=[copy, replace(copy, model=plan(LARGER).model)])
    parameters = [sum(p.numel() for p in Decoder(plan(model).model).parameters()) for model in (SMALL, LARGER)]
    assert both.references == both.total - alone.total == sum(parameters)  # 2 bytes, on 2 ranks
    assert "frozen models of the objective" in "".join(both.lines())
    shared = plan(SMALL, sequence=64, adapter=AdapterSection.model_validate({"r": 4}))
    model = Decoder(shared.model)
    add_adapter(model, shared.adapter)
    adapter = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert estimated_memory(shared, 1, micro_batch_size=1, frozen=[shared]).references == 2 * 4 * adapter
