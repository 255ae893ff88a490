"""Numbers that follow from a config."""

import math

import pytest
from config_cases import RUN, SHORT, load

from weft.config.derive import derive
from weft.config.mesh import MeshShape
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.families import presets


def test_the_documented_run():
    length = derive(load(RUN), train_tokens=10_000)
    assert (length.steps, length.sequences_per_step, length.tokens_per_step) == (30, 16, 1024)
    assert (length.sequences_per_rank, length.micro_batch_size, length.accumulation) == (16, 4, 4)
    assert (length.validation_every, length.checkpoint_every, length.samples_every) == (3, 10, 3)
    assert length.tokens == 30 * 1024
    assert length.epochs == pytest.approx(30 * 16 / ((10_000 - 1) // 64))


def test_defaults():
    length = derive(load(SHORT))
    assert (length.sequences_per_step, length.micro_batch_size, length.accumulation) == (32, 8, 4)
    assert length.checkpoint_every == length.validation_every == 1
    assert derive(load(SHORT, "data.sequence_length=16")).micro_batch_size == 32


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16, 20])
def test_ranks_share_the_rows_and_none_is_lost(ranks):
    length = derive(load(RUN), mesh=MeshShape(dp_shard=ranks))
    assert length.sequences_per_rank == math.ceil(16 / ranks)
    assert length.micro_batch_size <= length.sequences_per_rank
    assert (length.accumulation - 1) * length.micro_batch_size < length.sequences_per_rank
    assert length.accumulation * length.micro_batch_size >= length.sequences_per_rank
    assert length.steps == 30


def test_length_in_tokens_and_epochs_is_rounded_up():
    config = load(RUN, "training.steps=null", "training.tokens=1025", "schedule.warmup_steps=1")
    assert derive(config).steps == 2
    config = load(RUN, "training.steps=null", "training.epochs=2", "schedule.warmup_steps=1")
    assert derive(config, train_samples=160).steps == 20
    assert derive(config, train_samples=161).steps == 21
    assert derive(config, train_tokens=160 * 64 + 1).steps == 20
    with pytest.raises(UserError, match="size of the training data is not known"):
        derive(config)
    with pytest.raises(UserError, match="shorter than one sequence"):
        derive(config, train_samples=0)


def test_a_third_of_an_epoch_thrice_is_one():
    config = load(RUN, "training.steps=null", "training.epochs=0.1", "schedule.warmup_steps=0")
    assert derive(config, train_samples=4800).steps == 30  # 0.1 * 4800 is 480.00000000000006


def test_intervals_that_are_set_stay():
    config = load(RUN, "validation.every=7", "samples.every=2", "training.steps=1000")
    length = derive(config)
    assert (length.validation_every, length.samples_every, length.checkpoint_every) == (7, 2, 10)


SHAPES = [
    *({"vocab_size": 300, **keys, "num_hidden_layers": 2} for name, keys in presets().items() if "8b" not in name),
    {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 7, "qk_norm": True},
    {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "head_dim": 6, "vocab_size": 7,
     "mlp": "plain", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "norm": "layernorm"},
    {"hidden_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 7, "mlp_bias": True,
     "attention_bias": True, "position": "learned"},
]  # fmt: skip


@pytest.mark.parametrize("keys", SHAPES)
def test_sizes_are_those_of_the_model(keys):
    import torch

    from weft.models.build import build_model, matmul_parameters

    section = ModelSection(**keys)
    with torch.device("meta"):
        model = build_model(section)
    size = section.size()
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.matmul == matmul_parameters(model)


def test_a_size_needs_a_vocabulary():
    section = ModelSection(**presets()["llama-tiny"])
    assert section.size(512) == section.model_copy(update={"vocab_size": 512}).size()
    with pytest.raises(ValueError, match="vocab_size"):
        section.size()
