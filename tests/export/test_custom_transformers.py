"""`weft export` of runs of custom models that are classes of Transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import weft
from weft.cli.main import main

LLAMA = """
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "max_position_embeddings": 64}


class Llama(LlamaForCausalLM):
    def __init__(self, vocab_size=512):
        super().__init__(LlamaConfig(vocab_size=vocab_size, **SIZES))

    def forward(self, tokens):
        return super().forward(input_ids=tokens, use_cache=False).logits


class Wrapper(nn.Module):
    def __init__(self, vocab_size=512):
        super().__init__()
        self.net = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, **SIZES))

    def forward(self, tokens):
        return self.net(input_ids=tokens, use_cache=False).logits


class Scaled(Wrapper):
    def forward(self, tokens):
        return super().forward(tokens) * 3.0


class Gelu(Llama):
    def __init__(self, vocab_size=512):
        super().__init__(vocab_size)
        for layer in self.model.layers:
            layer.mlp.act_fn = nn.GELU()


class Window(Wrapper):
    def forward(self, tokens):
        length = tokens.shape[1]
        ones = torch.ones(length, length, dtype=torch.bool)
        far = ones.tril(-9) | ones.triu(1)
        mask = torch.zeros(length, length).masked_fill(far, float("-inf"))[None, None]
        return self.net(input_ids=tokens, attention_mask=mask, use_cache=False).logits


class Opt(nn.Module):
    def __init__(self, vocab_size=512):
        super().__init__()
        sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = OPTConfig(vocab_size=vocab_size, word_embed_proj_dim=16, max_position_embeddings=64, **sizes)
        self.net = AutoModelForCausalLM.from_config(config)

    def forward(self, tokens):
        return self.net(input_ids=tokens, use_cache=False).logits


class WithHead(Wrapper):
    def __init__(self, vocab_size=512):
        super().__init__(vocab_size)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, tokens):
        return super().forward(tokens) + self.bias
"""


class Tokens:
    """Sequences of random tokens."""

    def __init__(self, *, vocab_size: int = 512):
        self.vocab_size = vocab_size

    def __len__(self):
        return 64

    def __getitem__(self, number):
        ids = np.random.default_rng(number).integers(3, self.vocab_size, 17)
        return {"tokens": ids[:-1], "labels": ids[1:]}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Trains a class for two steps; returns the run directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"custom_llama_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(LLAMA)

    def train(kind):
        sections = {
            "run": {"name": kind, "directory": str(tmp_path), "seed": 1},
            "model": {"type": f"{module}:{kind}"},
            "data": {"sequence_length": 16, "train": {"type": "test_custom_transformers:Tokens"}},
            "training": {"steps": 2, "dtype": "float32", "batch_tokens": 64, "threads": 1},
            "log": {"trackers": []},
        }
        (tmp_path / "run.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
        assert main(["train", str(tmp_path / "run.yaml")]) == 0
        return tmp_path / kind

    return train


@pytest.mark.parametrize("kind", ["Llama", "Wrapper"])
def test_a_run_of_a_class_of_transformers_is_exported_as_its_family(run, tmp_path, tiny_tokenizer, kind):
    source, ids = run(kind), torch.randint(3, 512, (2, 9))
    shutil.copytree(tiny_tokenizer, source / "tokenizer")
    assert main(["export", str(source), "hf"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    expected = weft.load_model(source)(ids)
    assert torch.allclose(AutoModelForCausalLM.from_pretrained("hf")(ids).logits, expected, atol=1e-6)
    assert AutoTokenizer.from_pretrained("hf").vocab_size == 512
    assert main(["export", str(source), "model.gguf", "--to", "gguf"]) == 0
    assert (tmp_path / "model.gguf").read_bytes()[:4] == b"GGUF"
    assert {one.name for one in tmp_path.iterdir() if one.name.startswith(".weft")} == set()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Scaled", "not exported as LlamaForCausalLM of Transformers: its logits differ from those of the custom"),
        ("Gelu", "not exported as LlamaForCausalLM of Transformers: its logits differ"),
        ("Window", "not exported as LlamaForCausalLM of Transformers: its logits differ"),
        ("Opt", "not exported as OPTForCausalLM of Transformers: no model family of Weft has this class"),
        ("WithHead", "not exported as LlamaForCausalLM of Transformers: the model also has the parameter bias"),
    ],
)
def test_a_model_that_computes_something_else_is_refused(run, tmp_path, capsys, kind, words):
    assert main(["export", str(run(kind)), "hf"]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
