"""`weft.load_model`: out of a checkpoint alone comes the model that was saved."""

import json

import pytest
import torch
import transformers
from checkpoint_cases import write
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.build import build_model
from weft.models.initialize import initialize

TINY = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def saved(run, dtype=torch.float32, **more):
    section = ModelSection(**TINY, **more)
    model = build_model(section).to(dtype)
    initialize(model, seed=3)
    write(run, model, None, architecture=section.model_dump(mode="json", by_alias=True))
    return model.eval()


class Tokens(nn.Module):
    """A user's model: a table that it computes itself, and which no checkpoint holds."""

    def __init__(self, vocab_size: int, width: int = 4):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.register_buffer("table", torch.arange(width) / 10, persistent=False)

    def forward(self, tokens):
        return (self.embed(tokens) + self.table) @ self.embed.weight.T


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_logits_from_a_run_and_from_a_checkpoint(tmp_path, tied, dtype):
    model = saved(tmp_path, dtype, tie_word_embeddings=tied, hidden_dropout=0.5, **{"from": "somewhere/gone"})
    tokens = torch.randint(0, 40, (2, 7))
    for path in (tmp_path, str(tmp_path / "checkpoints" / "step-00000003")):
        loaded = weft.load_model(path)
        assert not loaded.training
        assert not any(p.is_meta for p in loaded.parameters())
        assert torch.equal(loaded(tokens), model(tokens))
        assert loaded(tokens).shape == (2, 7, 40)
        assert {p.dtype for p in loaded.parameters()} == {dtype}


def test_dtype(tmp_path):
    model = saved(tmp_path)
    loaded = weft.load_model(tmp_path, dtype=torch.bfloat16)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in loaded.state_dict().items())


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that was made with memory."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not found.is_meta:
            self.bytes = max(self.bytes, found.nbytes)
        return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("norms", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", [None, torch.bfloat16, torch.float64])
def test_every_tensor_has_its_dtype_from_the_beginning(tmp_path, tied, norms, asked):
    """None is made in float32 first, which takes twice the memory of bfloat16."""
    section = ModelSection(**TINY | {"vocab_size": 1000}, tie_word_embeddings=tied)
    model = build_model(section)
    initialize(model, seed=3)
    model.bfloat16()
    model.norm.to(norms)
    write(tmp_path, model, None, architecture=section.model_dump(mode="json", by_alias=True))
    with Largest() as largest:
        loaded = weft.load_model(tmp_path, dtype=asked)
    assert largest.bytes == 1000 * 16 * (asked or torch.bfloat16).itemsize
    expected, found = model.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].dtype == (asked or value.dtype), name
        assert torch.equal(found[name], value.to(found[name].dtype)), name


def test_a_model_of_the_users_own(tmp_path):
    pytest.importorskip("weft.config.components")
    torch.manual_seed(0)
    model = Tokens(11, width=6).double()
    write(tmp_path, model, None, architecture={"type": "test_load_model:Tokens", "vocab_size": 11, "width": 6})
    tokens = torch.randint(0, 11, (2, 3))
    loaded = weft.load_model(tmp_path)
    assert torch.equal(loaded(tokens), model(tokens))


def test_an_architecture_that_is_none(tmp_path):
    write(tmp_path, nn.Linear(2, 2), None, architecture={"type": "decoder", "width": 3})
    with pytest.raises(UserError, match=r"model\.json: .*this version of Weft"):
        weft.load_model(tmp_path)


def test_model_json_is_the_resolved_section(tmp_path):
    saved(tmp_path)
    content = json.loads((tmp_path / "checkpoints" / "step-00000003" / "model.json").read_text())
    assert content["hidden_size"] == 16


def test_weights_that_do_not_fit_in_memory_are_refused_before_anything_is_loaded(tmp_path):
    """A folder whose files say that they have 4.4 TB, without blocks on the disk."""
    shape = {"vocab_size": 2**24, "hidden_size": 2**16, "num_hidden_layers": 1, "num_attention_heads": 64}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, intermediate_size=64))
    model.config.save_pretrained(tmp_path)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert 4.4e12 < end < 4.5e12
    for act in (weft.load_model, lambda path: weft.generate(path, [1, 2])):
        with pytest.raises(
            UserError, match=r"the weights need 4\.43\d TB, but cpu has [\d.]+ [GM]B .* smaller dtype"
        ) as told:
            act(tmp_path)
        assert "\n" not in str(told.value)
    with pytest.raises(UserError, match=r"need 8\.8\d+ TB"):
        weft.load_model(tmp_path, dtype=torch.float32)
    with pytest.raises(UserError, match=r"need 3\.\d+ TB"):  # the embedding stays in bfloat16
        weft.load_model(tmp_path, quantize="int8")
