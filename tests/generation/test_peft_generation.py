"""Generation with adapters in PEFT's files, against PEFT. All matrices B differ from zero, as after training."""

import shutil
import warnings

import peft
import pytest
import torch
from test_families import ROWS
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import weft
from weft.cli.main import main
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.families import family_of

SHAPE = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 56, "max_position_embeddings": 128, "attention_bias": True, "eos_token_id": None,
}  # fmt: skip
TEXT = "Kalo mi ren"


def randomized(model, scale):
    torch.manual_seed(6)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape) * scale)
            if "magnitude" in name:
                parameter.data.abs_().add_(0.5)
    return model.eval()


def folders(path, tokenizer=None, config=None, **options):
    """A model's folder, an adapter's folder and PEFT's model."""
    base = randomized(AutoModelForCausalLM.from_config(config or LlamaConfig(**SHAPE)), 0.25)
    base.save_pretrained(path / "base")
    for file in tokenizer.iterdir() if tokenizer else []:
        shutil.copy(file, path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(r=3, task_type="CAUSAL_LM", **options))
        randomized(model, 0.3).save_pretrained(path / "adapter")
    return path / "base", path / "adapter", model


def greedy(model, ids, count=12):
    """PEFT's greedy continuation of token ids."""
    found = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return found[0, len(ids) :].tolist()


@pytest.mark.parametrize("options", [{}, {"use_dora": True, "use_rslora": True}], ids=["lora", "dora"])
def test_texts_are_those_of_peft(tmp_path, tiny_tokenizer, capsys, options):
    modules = ["q_proj", "v_proj", "down_proj"]
    base, adapter, model = folders(tmp_path, tiny_tokenizer, target_modules=modules, **options)
    ids = Tokenizer.load(base).encode(TEXT)
    expected = greedy(model, ids)
    with model.disable_adapter():
        plain = greedy(model, ids)
    assert expected != plain
    loaded = weft.load_model(base)
    found = weft.generate(loaded, [ids, ids[:1]], max_new_tokens=12, ignore_eos=True, adapter=adapter)
    assert found == [expected, greedy(model, ids[:1])]
    assert weft.generate(loaded, ids, max_new_tokens=12, ignore_eos=True) == plain
    engine = weft.Engine(loaded)
    engine.add_adapter("tuned", adapter)
    sampling = weft.Sampling(12, temperature=0)
    streams = [engine.submit(ids, sampling, adapter=name) for name in (None, "tuned")]
    assert [[piece.token for piece in stream] for stream in streams] == [plain, expected]

    text = weft.generate(base, TEXT, max_new_tokens=12, adapter=adapter)
    words = ["generate", base, TEXT, "--max-new-tokens", "12", "--temperature", "0", "--adapter", adapter]
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    assert capsys.readouterr().out == f"{TEXT}{text}\n"


def test_an_adapter_is_read_at_each_call(tmp_path):
    base, adapter, model = folders(tmp_path, target_modules=["q_proj", "o_proj"])
    loaded, ids = weft.load_model(base), [5, 6, 7]
    first = weft.generate(loaded, ids, max_new_tokens=12, adapter=adapter)
    assert first == greedy(model, ids)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.neg_()
    model.save_pretrained(adapter)
    second = weft.generate(loaded, ids, max_new_tokens=12, adapter=adapter)
    assert second == greedy(model, ids) != first


def test_quantized_models_take_lora(tmp_path):
    base, adapter, model = folders(tmp_path, target_modules=["q_proj", "v_proj"])
    assert weft.generate(base, [5, 6, 7], quantize="int8", adapter=adapter, max_new_tokens=3) == greedy(
        model, [5, 6, 7], 3
    )


def test_what_cannot_be_added_to_each_request_is_refused(tmp_path, tiny_tokenizer, capsys):
    def mistake(path, config=None, quantize=None, **options):
        base, adapter, _ = folders(tmp_path / path, config=config, **options)
        with pytest.raises(weft.UserError) as caught:
            weft.generate(base, [1, 2], max_new_tokens=2, adapter=adapter, quantize=quantize)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    q = {"target_modules": ["q_proj"]}
    assert "replaces the full weight lm_head.weight; merge the adapter" in mistake(
        "full", modules_to_save=["lm_head"], **q
    )
    assert "lm_head is not a linear layer that can be adapted" in mistake("head", target_modules=["lm_head"])
    assert "is quantized; omit quantize" in mistake("quantized", quantize="int8", use_dora=True, **q)
    (row,) = [rows["as is"] for family, rows in ROWS.items() if family == "Mixtral"]
    mixtral = AutoConfig.for_model("mixtral", **row)
    assert family_of(mixtral.to_dict()).MODEL_TYPE == "mixtral"
    experts = {"target_modules": [], "target_parameters": ["experts.down_proj"]}
    assert "experts.down_proj is not a linear layer" in mistake("experts", mixtral, **experts)

    base, adapter = tmp_path / "full/base", tmp_path / "full/adapter"
    for words, expected in (
        (["--tp", "2", "--adapter", adapter], "--tp: adapters need a model on a single process"),
        (["--adapter", tmp_path / "absent"], "absent: there is no such folder"),
        (["--adapter", base], "adapter_config.json is missing) nor a run"),
    ):
        for file in tiny_tokenizer.iterdir():
            shutil.copy(file, base)
        capsys.readouterr()
        assert main(["generate", str(base), "Kalo", *map(str, words)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line
