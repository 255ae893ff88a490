"""`weft export --to gguf` and `weft import FILE.gguf`, read by the library gguf. test_llama_cpp.py runs llama.cpp."""

import json
import re
import shutil
import struct
import sys

import forked
import gguf
import numpy as np
import pytest
import torch
from gguf_models import MODELS
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import weft
from weft.checkpoint.gguf.architectures import ARCHITECTURES
from weft.checkpoint.gguf.metadata import architecture_of, read_section, write_metadata
from weft.checkpoint.gguf.tensors import tensor_names
from weft.cli.main import main
from weft.config.model import ModelSection
from weft.data.tokenizers.exactness import PATTERNS
from weft.data.tokenizers.import_tokenizer import TEST_TEXTS
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.export.gguf import FAMILIES
from weft.models.layers.rope import rotary_cos_sin

SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def theirs(kind):
    """A Transformers model with random weights, also in norms and biases."""
    torch.manual_seed(3)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, rope_parameters=LLAMA3))
    elif kind == "gemma2":
        model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=32, query_pre_attn_scalar=50, sliding_window=16))
    elif kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=3))
    elif kind == "deepseek_v3":
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        latent = {
            "kv_lora_rank": 24,
            "q_lora_rank": 40,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 16,
            "v_head_dim": 12,
        }
        more = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "rms_norm_eps": 1e-5}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE | more, **experts, **latent))
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=128))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def saved(path, model, tokenizer):
    model.save_pretrained(path)
    for file in tokenizer.iterdir():
        shutil.copy(file, path)
    return path


def read(file):
    """Returns the metadata and the dequantized tensors of a GGUF file."""
    reader = gguf.GGUFReader(file)
    tensors = {one.name: gguf.quants.dequantize(one.data, one.tensor_type).copy() for one in reader.tensors}
    return {key: field.contents() for key, field in reader.fields.items()}, tensors, reader


def weft_command(capsys, *words):
    capsys.readouterr()
    return main([str(word) for word in words]), *capsys.readouterr()


def test_llama_has_interleaved_queries_and_factors_of_frequencies(tmp_path, tiny_tokenizer, capsys):
    model = theirs("llama")
    source, out = saved(tmp_path / "hf", model, tiny_tokenizer), tmp_path / "model.gguf"
    code, said, _ = weft_command(capsys, "export", source, out, "--to", "gguf", "--type", "f32")
    assert (code, said.split(": ", 1)[1][:27]) == (0, "llama as f32, 30 tensors, 5")
    metadata, tensors, _ = read(out)
    state = {name: one.detach().numpy() for name, one in model.named_parameters()}
    # Row 2j + i of a head is row i * (head_dim / 2) + j of Transformers, for pairs (j, i).
    for name, heads in (("q", 4), ("k", 2)):
        for kind in ("weight", "bias"):
            found, expected = (
                tensors[f"blk.1.attn_{name}.{kind}"],
                state[f"model.layers.1.self_attn.{name}_proj.{kind}"],
            )
            assert all(
                np.array_equal(found[16 * head + 2 * j + i], expected[16 * head + 8 * i + j])
                for head in range(heads)
                for j in range(8)
                for i in range(2)
            )
    assert np.array_equal(tensors["blk.0.attn_v.weight"], state["model.layers.0.self_attn.v_proj.weight"])
    assert np.array_equal(tensors["output.weight"], state["lm_head.weight"])
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    assert np.allclose(plain / tensors["rope_freqs.weight"], model.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)
    expected = {
        "general.architecture": "llama", "llama.context_length": 128, "llama.embedding_length": 64,
        "llama.block_count": 2, "llama.feed_forward_length": 96, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 16, "llama.rope.freq_base": 10000.0,
        "llama.attention.key_length": 16, "general.file_type": 0,
    }  # fmt: skip
    assert expected.items() <= metadata.items()
    modelfile = (tmp_path / "model.Modelfile").read_text()
    assert modelfile == 'FROM ./model.gguf\nPARAMETER stop "<|endoftext|>"\nPARAMETER num_ctx 128\n'


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "mixtral", "deepseek_v3"])
def test_import_returns_the_model_and_its_tokenizer(tmp_path, tiny_tokenizer, kind):
    model = theirs(kind)
    source = saved(tmp_path / "hf", model, tiny_tokenizer)
    weft.export_model(source, tmp_path / "out", "gguf", type="f32")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["Modelfile", "model.gguf"]
    made = weft.import_model(tmp_path / "out" / "model.gguf", tmp_path / "again")
    assert made.section.family == kind
    ours, ids = weft.load_model(tmp_path / "again").eval(), torch.randint(0, 512, (2, 40))
    with torch.no_grad():
        # Gemma's scale 1 / sqrt(50) is now part of the queries, and its norms are 1 + weight.
        assert (ours(ids) - model(ids).logits).abs().max() < 1e-4
    one, other = Tokenizer.load(tiny_tokenizer), Tokenizer.load(tmp_path / "again" / "tokenizer")
    assert [one.encode(text) for text in TEST_TEXTS] == [other.encode(text) for text in TEST_TEXTS]
    assert one.eod_id == other.eod_id
    if kind == "deepseek_v3":
        with pytest.raises(UserError, match="no adapter to latent attention; leave --adapter-only out"):
            weft.export_model(source, tmp_path / "adapter.gguf", "gguf", adapter_only=True)
    if kind == "llama":
        assert ours.config.rope_scaling.rope_type == "llama3"


@pytest.mark.parametrize(("type", "dtype"), [("f16", torch.float16), ("q8_0", torch.bfloat16)])
def test_imported_weights_have_one_dtype_and_generate(tmp_path, tiny_tokenizer, type, dtype):
    model = theirs("gpt2")  # its vectors and positions are float32 in every file
    weft.export_model(saved(tmp_path / "hf", model, tiny_tokenizer), tmp_path / "model.gguf", "gguf", type=type)
    weft.import_model(tmp_path / "model.gguf", tmp_path / "again")
    assert {one.dtype for one in weft.load_model(tmp_path / "again").parameters()} == {dtype}
    assert isinstance(weft.generate(tmp_path / "again", "Kalo", max_new_tokens=3, temperature=0), str)


def test_every_architecture_has_the_names_of_the_gguf_library():
    """Names of tensors and keys are in the library's own tables, and the metadata describe an equal section."""
    assert sorted(ARCHITECTURES) == FAMILIES.removesuffix(".").split(", ")
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    for name, given in MODELS.items():
        section = ModelSection(**given)
        kind = architecture_of(section)
        names = tensor_names(section, kind)
        known = {gguf.TENSOR_NAMES[one] for one in gguf.MODEL_TENSORS[numbers[kind.name]]}
        stems = {re.sub(r"blk\.\d+", "blk.{bid}", one).rpartition(".")[0] for one in names}
        assert stems <= known, name
        metadata, factors, _ = write_metadata(section, kind)
        tables = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
        everywhere = set(re.findall(r"{arch}([\w.]+)", str([vars(table) for table in tables])))
        assert {key.removeprefix(kind.name) for key in metadata} <= everywhere, name
        again = read_section(metadata | {"general.architecture": kind.name}, names, 512, factors)
        expected, found = section.resolved(), again.resolved()
        skipped = {"family", "sliding_window_pattern", "no_rope_layer_interval"}
        if name == "mistral":  # llama.cpp's Llama has no window; the context ends where it would begin to matter
            assert (again.family, found["max_position_embeddings"]) == ("llama", 96)
            skipped |= {"sliding_window", "layer_types", "max_position_embeddings"}
        if name == "olmoe":  # llama.cpp wants the output head, also if it is the embedding
            skipped |= {"tie_word_embeddings"}
        if section.mla is not None:  # rotated pairs are adjacent, and all groups together are one
            skipped |= {"mla", "moe"} if name.endswith("halves") else set()
            skipped |= {"attention_multiplier"}
            if name != "deepseek_v3":  # llama.cpp has another scale with linear scaling; the queries are divided by it
                assert abs(found["attention_multiplier"] - expected["attention_multiplier"]) < 1e-6
        if name in ("gemma2", "gemma3"):  # the scale is part of the queries
            skipped |= {"attention_multiplier"}
        if section.rope_scaling is not None:
            skipped |= {"rope_scaling"}
            one, other = (
                rotary_cos_sin(torch.arange(90)[None], 16, 1e4, torch.float64, scaling)
                for scaling in (section.rope_scaling, again.rope_scaling)
            )
            assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(one, other, strict=True)), name
        for key in expected.keys() - skipped:
            assert (name, key, found[key]) == (name, key, expected[key])


def test_what_llama_cpp_takes_for_another_deepseek_is_refused():
    v2, v3 = MODELS["deepseek_v2"], MODELS["deepseek_v3"]
    for given, said in (
        (v3 | {"num_hidden_layers": 27}, "q_lora_rank is 48, but llama.cpp takes a model of 27 layers for one without"),
        (v2 | {"moe": v2["moe"] | {"n_group": 2}}, "n_group is 2, but llama.cpp ranks groups by their best two"),
        (v2 | {"moe": v2["moe"] | {"n_shared_experts": 0}}, "n_shared_experts is not set, which llama.cpp's"),
    ):
        with pytest.raises(UserError, match=said):
            architecture_of(ModelSection(**given))


def test_the_model_of_the_quickstart_needs_other_keys():
    keys = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 512, "qk_norm": True}
    with pytest.raises(UserError, match=r"model.qk_norm is True.*--to torch and --to onnx hold the model"):
        architecture_of(ModelSection(**keys, mlp="plain", hidden_act="relu2"))
    assert architecture_of(ModelSection(**keys, family="qwen3")).name == "qwen3"  # what docs/export/gguf.md says


def test_blocks_are_as_exact_as_their_bits(tmp_path, tiny_tokenizer):
    source = saved(tmp_path / "hf", theirs("llama"), tiny_tokenizer)
    weft.export_model(source, tmp_path / "exact.gguf", "gguf", type="f32")
    _, exact, _ = read(tmp_path / "exact.gguf")
    # The number of steps between the extremes of a block; rounding is at most half a step, a clipped extreme one step.
    steps = {"q8_0": 2 * 127, "q5_1": 31, "q5_0": 32, "q4_1": 15, "q4_0": 16}
    errors = {}
    for kind, number in steps.items():
        weft.export_model(source, tmp_path / f"{kind}.gguf", "gguf", type=kind)
        _, found, reader = read(tmp_path / f"{kind}.gguf")
        types = {one.name: one.tensor_type.name for one in reader.tensors}
        assert types["blk.0.ffn_up.weight"] == kind.upper()
        assert (types["output.weight"], types["blk.0.attn_norm.weight"]) == ("Q8_0", "F32")
        values = exact["blk.0.ffn_up.weight"].reshape(-1, 32)
        difference = np.abs(found["blk.0.ffn_up.weight"].reshape(-1, 32) - values)
        extent = np.ptp(values, axis=1) if kind.endswith("1") else 2 * np.abs(values).max(axis=1)
        assert (difference.max(axis=1) <= 1.01 * extent / number).all()
        errors[kind] = float(np.sqrt((difference**2).mean()))
        assert np.array_equal(found["blk.1.attn_norm.weight"], exact["blk.1.attn_norm.weight"])
    assert list(errors) == sorted(errors, key=errors.get)
    again = weft.import_model(tmp_path / "q4_0.gguf", tmp_path / "again", dtype="float32")
    model = weft.load_model(tmp_path / "again")
    assert again.section.family == "llama"
    assert np.array_equal(
        model.layers[0].mlp.up_proj.weight.detach().numpy(), read(tmp_path / "q4_0.gguf")[1]["blk.0.ffn_up.weight"]
    )


def test_chat_models_end_at_the_end_of_a_turn(tmp_path, hf_folder, capsys):
    """The end-of-sequence token is the template's, the template is llama.cpp's Jinja, and Ollama has a Go template."""
    settings = json.loads((hf_folder / "tokenizer.json").read_text())
    source = tmp_path / "hf"
    shutil.copytree(hf_folder, source)
    for id, token in ((510, "<|im_start|>"), (511, "<|im_end|>")):
        old = next(piece for piece, number in settings["model"]["vocab"].items() if number == id)
        del settings["model"]["vocab"][old]
        settings["model"]["merges"] = [merge for merge in settings["model"]["merges"] if "".join(merge) != old]
        settings["model"]["vocab"][token] = id
        settings["added_tokens"].append({**settings["added_tokens"][0], "id": id, "content": token})
    (source / "tokenizer.json").write_text(json.dumps(settings))
    assert weft_command(capsys, "export", source, tmp_path / "out", "--to", "gguf")[0] == 0
    metadata, _, _ = read(tmp_path / "out" / "model.gguf")
    ids = {name: metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom", "bos")}
    assert ids == {"eos": 511, "eot": 511, "eom": 0, "bos": 511}
    assert metadata["tokenizer.ggml.token_type"][509:] == [1, 3, 3]
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert "generation" not in metadata["tokenizer.chat_template"].replace("add_generation_prompt", "")
    assert (tmp_path / "out" / "Modelfile").read_text().splitlines() == [
        "FROM ./model.gguf",
        'TEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system',
        "{{ .Content }}<|im_end|>",
        '{{ else if eq .Role "user" }}<|im_start|>user',
        "{{ .Content }}<|im_end|>",
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant',
        "{{ .Content }}<|im_end|>",
        "{{ end }}{{ end }}<|im_start|>assistant",
        '"""',
        'PARAMETER stop "<|im_end|>"',
        'PARAMETER stop "<|endoftext|>"',
        "PARAMETER num_ctx 128",
    ]


def test_what_llama_cpp_cannot_hold_is_refused(tmp_path, hf_folder, tiny_tokenizer, capsys, monkeypatch):
    def refused(source, *words, out="out.gguf"):
        code, _, said = weft_command(capsys, "export", source, tmp_path / out, "--to", "gguf", *words)
        assert (code, "Traceback" in said) == (2, False), said
        assert not (tmp_path / out).exists()
        return said.splitlines()[-1]

    assert "--type q3: not a type; use one of f32, f16, bf16, q8_0" in refused(hf_folder, "--type", "q3")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert "K-quants need llama.cpp's quantizer; pip install" in refused(hf_folder, "--type", "Q4_K_M")
    assert "this model has no adapter; leave --adapter-only out" in refused(hf_folder, "--adapter-only")
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: free)
        for out in ("full.gguf", "full"):
            assert re.search(
                r"the disk is full: \d+,\d{3} bytes are needed, 1,000 are free", refused(hf_folder, out=out)
            )
    (tmp_path / "there.gguf").write_bytes(b"")
    code, _, said = weft_command(capsys, "export", hf_folder, tmp_path / "there.gguf", "--to", "gguf")
    assert (code, "already exists" in said) == (2, True)

    def changed(name, **keys):
        folder = tmp_path / name
        shutil.copytree(hf_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | keys))
        return folder

    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    said = refused(changed("dynamic", rope_parameters=dynamic))
    assert "model.rope_scaling.rope_type is 'dynamic', but llama.cpp's architecture llama supports only" in said
    assert "model.hidden_act is 'gelu', but llama.cpp's" in refused(changed("act", hidden_act="gelu"))
    large = changed("large")
    model = LlamaForCausalLM.from_pretrained(large)
    model.model.layers[0].mlp.up_proj.weight.data[3, 4] = 70000.0
    model.save_pretrained(large)
    assert "blk.0.ffn_up.weight: has numbers that are too large for f16; use --type bf16" in refused(large)
    assert weft_command(capsys, "export", large, tmp_path / "bf16.gguf", "--to", "gguf", "--type", "bf16")[0] == 0
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'weft-train[gguf]'" in refused(hf_folder)


def test_tokenizers_are_compared_with_the_patterns_of_llama_cpp(tmp_path, hf_folder, capsys):
    content = json.loads((hf_folder / "tokenizer.json").read_text())
    steps, warned = content["pre_tokenizer"]["pretokenizers"], []

    def exported(name, *words, change=None, pattern=None):
        folder = tmp_path / name
        shutil.copytree(hf_folder, folder)
        made = json.loads(json.dumps(content)) | (change or {})
        if pattern:
            made["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
        (folder / "tokenizer.json").write_text(json.dumps(made))
        out = tmp_path / f"{name}.gguf"
        code, _, said = weft_command(capsys, "export", folder, out, "--to", "gguf", *words)
        warned.append(said)
        return read(out)[0]["tokenizer.ggml.pre"] if code == 0 else said

    ignoring = {"model": content["model"] | {"ignore_merges": True}}
    assert exported("llama3") == "smaug-bpe"
    assert exported("ignoring", change=ignoring) == "llama-bpe"
    assert exported("qwen2", pattern=PATTERNS["qwen2"]) == "qwen2"
    assert exported("gpt2", change={"pre_tokenizer": steps[1] | {"use_regex": True}}) == "gpt-2"
    digits = [{"type": "Digits", "individual_digits": True}, steps[1] | {"use_regex": True}]
    assert exported("digits", change={"pre_tokenizer": {"type": "Sequence", "pretokenizers": digits}}) == "starcoder"
    assert "treats letters outside of A-Z as both" in exported("o200k", pattern=PATTERNS["o200k"])
    assert exported("given", "--pre", "gpt-4o", pattern=PATTERNS["o200k"]) == "gpt-4o"
    said = exported("custom", pattern=r"\w+|\W")
    assert r"its pattern '\\w+|\\W' equals none of gpt-2, starcoder" in said
    assert "use --pre NAME" in said
    lower = {"normalizer": {"type": "Lowercase"}}
    assert "its normalizer Lowercase does not exist in llama.cpp" in exported("lower", change=lower)
    assert exported("nonsense", "--pre", "nonsense", pattern=r"\w+|\W") == "nonsense"
    assert "--pre nonsense: not a name that Weft knows" in warned[-1]
    assert "not a name" not in "".join(warned[:-1])
    prefix = {"pre_tokenizer": steps[1] | {"add_prefix_space": True}}
    assert "its ByteLevel with add_prefix_space does not exist" in exported("prefix", change=prefix)
    without = {key: value for key, value in content["model"].items() if key != "merges"}
    damaged = ({"model": without}, {"pre_tokenizer": {"type": "Sequence"}}, {"normalizer": {"x": 1}})
    for n, change in enumerate(damaged):
        said = exported(f"damaged-{n}", change=change)
        assert "tokenizer.json: the tokenizers library cannot read this tokenizer" in said
        assert said.count("\n") == 1


def changed_array(whole, **change):
    """Returns a file whose array of the types of tokens has another type of items or another length."""
    at = whole.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 4
    kind, length = struct.unpack_from("<IQ", whole, at)
    found = {"kind": kind, "length": length} | change
    return whole[:at] + struct.pack("<IQ", found["kind"], found["length"]) + whole[at + 12 :]


def with_text(folder, key):
    writer = gguf.GGUFWriter(folder / "text.gguf", "llama")
    writer.add_string(key, "many")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return (folder / "text.gguf").read_bytes()


def test_damaged_files_are_refused(tmp_path, hf_folder, capsys):
    weft.export_model(hf_folder, tmp_path / "model.gguf", "gguf", type="f32")
    whole = (tmp_path / "model.gguf").read_bytes()
    for name, content, said in (
        ("short", whole[: len(whole) // 2], "not a GGUF file, or damaged"),
        ("other", b"safetensors" * 9, "not a GGUF file, or damaged"),
        (
            "arch",
            whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lamma"),
            "general.architecture is 'lamma'",
        ),
        ("name", whole.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xy.weight"), "blk.0.ffn_up.weight is missing"),
        ("pre", whole.replace(b"smaug-bpe", b"snaug-bpe"), "tokenizer.ggml.pre is 'snaug-bpe', which is not supported"),
        ("long", changed_array(whole, length=2**40), "an array has 1,099,511,627,776 items"),
        ("past", changed_array(whole, length=len(whole) // 2), "it ends too early"),
        ("bytes", changed_array(whole, kind=gguf.GGUFValueType.UINT8, length=2**21), "an array has 2,097,152 items"),
        ("texts", changed_array(whole, kind=gguf.GGUFValueType.FLOAT32), "tokenizer.ggml.token_type does not fit"),
        ("split", with_text(tmp_path, "split.count"), "a part of a split file"),
        ("model", with_text(tmp_path, "general.type"), "this file has a GGUF many, not a model"),
    ):
        (tmp_path / f"{name}.gguf").write_bytes(content)
        code, _, error = weft_command(capsys, "import", tmp_path / f"{name}.gguf", tmp_path / "out")
        assert (code, error.count("\n"), said in error) == (2, 1, True), error
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 10**9),
        ("llama.context_length", 0),
        ("llama.attention.head_count", 0),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.rope.freq_base", float("nan")),
        ("llama.rope.dimension_count", 7),
        ("tokenizer.ggml.eos_token_id", 4_000_000_000),
    ],
)
def test_numbers_that_describe_no_model_are_refused(key, value, tmp_path, hf_folder, capsys):
    weft.export_model(hf_folder, tmp_path / "model.gguf", "gguf", type="f32")
    field = gguf.GGUFReader(tmp_path / "model.gguf", "r+").get_field(key)
    field.parts[field.data[0]][0] = value
    del field
    code, _, error = weft_command(capsys, "import", tmp_path / "model.gguf", tmp_path / "out")
    assert (code, error.count("\n")) == (2, 1), error
    assert "model.gguf" in error
    assert not (tmp_path / "out").exists()


def test_nothing_is_replaced_or_ignored(tmp_path, hf_folder, capsys):
    (tmp_path / "model.Modelfile").write_text("FROM other")
    for words, part in (([], "model.Modelfile"), (["--dequantize"], "--dequantize")):
        out = tmp_path / ("model.gguf" if not words else "other.gguf")
        code, _, error = weft_command(capsys, "export", hf_folder, out, "--to", "gguf", *words)
        assert (code, error.count("\n"), part in error, out.exists()) == (2, 1, True, False), error
    assert (tmp_path / "model.Modelfile").read_text() == "FROM other"
    weft.export_model(hf_folder, tmp_path / "LARGE.GGUF", "gguf")  # a file, too
    assert (tmp_path / "LARGE.GGUF").read_bytes()[:4] == b"GGUF"
    assert (tmp_path / "LARGE.Modelfile").read_text().startswith("FROM ./LARGE.GGUF\n")
    assert read(tmp_path / "LARGE.GGUF")[0]["general.name"] == "LARGE"
    code, _, error = weft_command(capsys, "generate", tmp_path / "LARGE.GGUF", "Ka")
    assert (code, error) == (2, f"{tmp_path}/LARGE.GGUF: this is a file; import it: weft import {tmp_path}/LARGE.GGUF "
                                "OUT\n")  # fmt: skip
    code, _, error = weft_command(capsys, "import", tmp_path / "LARGE.Modelfile", tmp_path / "in")
    assert (code, "LARGE.Modelfile: this is a file; give" in error) == (2, True)


def test_writing_beyond_the_limit_of_a_file_leaves_nothing(tmp_path, hf_folder):
    limits = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))"
    code = f"{limits}; from weft.cli.main import main; sys.exit(main(sys.argv[1:]))"
    out = tmp_path / "model.gguf"
    done = forked.run("export", hf_folder, out, "--to", "gguf", "--type", "f32", program=code)
    error = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert error == f"{out}: cannot be written: the disk is full, or the file is too large; nothing was written"
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_chat_template_is_left_out_with_a_warning(tmp_path, hf_folder, capsys):
    source = shutil.copytree(hf_folder, tmp_path / "hf")
    (source / "chat_template.jinja").write_text("{% for x in ")
    code, _, said = weft_command(capsys, "export", source, tmp_path / "out.gguf", "--to", "gguf")
    assert (code, "the chat template is left out: the chat template (chat_template.jinja) is invalid" in said) == (0, 1)
    assert "tokenizer.chat_template" not in read(tmp_path / "out.gguf")[0]
