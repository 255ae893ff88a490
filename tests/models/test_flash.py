"""Attention by flash-attn, whose kernels are stood in for by the reference that its authors test them against."""

import sys
import types

import flash_attn_reference
import pytest
import torch
from part_cases import decoder, packed, the_same, tokens

from weft.errors import UserError
from weft.kernels import flash


@pytest.fixture
def flash_attn(monkeypatch):
    """A package of that name, for any device and dtype; the calls of its functions."""
    calls = []

    def counted(function):
        def call(*arguments, **settings):
            calls.append(function.__name__)
            return function(*arguments, **settings)

        return call

    package = types.ModuleType("flash_attn")
    for function in (flash_attn_reference.flash_attn_func, flash_attn_reference.flash_attn_varlen_func):
        setattr(package, function.__name__, counted(function))
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr("weft.kernels.masks.flash_usable", lambda *_: True)
    return calls


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sliding_window": 5, "sliding_window_pattern": 2},
        {"attn_logit_softcapping": 2.0, "attention_multiplier": 0.3},
        {"position": "alibi"},
        {
            "mla": {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6},
            "num_key_value_heads": 4,
        },
    ],
    ids=["plain", "windows", "softcap", "alibi", "latent"],
)
def test_flash_attn_is_asked_for_what_it_knows(flash_attn, keys):
    ours, theirs = decoder(attention_implementation="flash", **keys), decoder(**keys)
    the_same(ours, theirs)
    segments, positions = packed()
    outs = [model(tokens(), segments=segments, positions=positions) for model in (ours, theirs)]
    assert (outs[0] - outs[1]).abs().max() < 1e-9
    assert flash_attn == ["flash_attn_func"] * 2 + ["flash_attn_varlen_func"] * 2


def test_flash_attn_that_cannot_run_raises_one_line(monkeypatch):
    model = decoder(attention_implementation="flash")
    with pytest.raises(UserError) as error:
        model(tokens())
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("model.attention_implementation: flash: ")
    assert "not cpu" in message
    assert message.endswith("set it to auto")
    cuda = torch.device("cuda")
    with pytest.raises(UserError, match=r"bfloat16 and float16, not float64; set training.dtype"):
        flash.flash_usable(cuda, torch.float64)
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="is not installed; run `pip install flash-attn`, or set it to auto"):
        flash.flash_usable(cuda, torch.bfloat16)
    with torch.no_grad():
        assert not flash.flash_usable(cuda, torch.bfloat16)
        assert torch.equal(model(tokens()), decoder()(tokens()))
