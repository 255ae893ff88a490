"""The largest micro-batch, sequence and model that fit, beside trying every value."""

import pytest
from planner_hardware import ideal
from test_planner_step import run  # noqa: F401 - a fixture

from weft.config.derive import batch_sequences
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.planner.largest import largest
from weft.planner.memory import memory_of


def of(memory_gb: float):
    """An ideal device with so much memory."""
    hardware = ideal(tflops=100)
    device = hardware.device.model_copy(update={"memory_gb": memory_gb})
    return hardware.model_copy(update={"device": device})


def needs(config, devices=1) -> float:
    return max(one.total for one in memory_of(config, devices)) / 1e9


@pytest.mark.parametrize("memory_gb", [3.5, 4.5, pytest.param(6.0, marks=pytest.mark.long)])
def test_one_sequence_more_than_the_largest_micro_batch_does_not_fit(run, memory_gb):  # noqa: F811
    found = largest("micro_batch", run(), 1, of(memory_gb))
    tried = [size for size in range(1, 65) if needs(run(1, f"training.micro_batch_size={size}")) <= memory_gb]
    assert found.value == found.config.training.micro_batch_size == max(tried)
    assert batch_sequences(found.config) == 64
    assert found.limited == (max(tried) == 64)


def test_the_global_batch_limits_the_micro_batch(run):  # noqa: F811
    found = largest("micro_batch", run(), 1, of(10_000))
    assert (found.value, found.limited) == (64, True)


@pytest.mark.parametrize("mesh", ["{}", "{cp: 4, tp: 2}"])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(run, mesh):  # noqa: F811
    config = run(8, f"parallel={mesh}", "training.activation_checkpointing=full")
    found = largest("sequence", config, 8, of(8))
    assert found.value % 128 == 0
    assert needs(found.config, 8) <= 8
    data = found.config.data.model_copy(update={"sequence_length": found.value + (128 if mesh == "{}" else 1024)})
    assert needs(found.config.model_copy(update={"data": data}), 8) > 8
    assert (found.config.training.batch_tokens or 0) >= 32768
    assert found.value > largest("sequence", config, 8, of(4)).value


def test_the_largest_model_uses_nearly_all_memory_and_grows_with_devices(run):  # noqa: F811
    found = [
        largest("model", run(devices, "parallel={tp: 2, reduce_gradients: last}"), devices, of(16))
        for devices in (8, 64)
    ]
    for devices, one in zip((8, 64), found, strict=True):
        assert 0.7 * 16 < needs(one.config, devices) <= 16
        assert isinstance(one.config.model, ModelSection)
        assert one.value == one.config.model.size().parameters
        assert one.config.model.qk_head_dim == 128
        assert one.config.model.num_attention_heads % 2 == 0
    assert found[1].value > found[0].value


def test_nothing_that_fits_is_said_with_remedies(run):  # noqa: F811
    with pytest.raises(UserError, match=r"smallest micro-batch.*more devices"):
        largest("micro_batch", run(), 1, of(1.2))
