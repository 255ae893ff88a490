"""Weights that are published quantized, written here by the formats' definitions, against transformers' own reading."""

import json
import re
import shutil
import warnings

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_huggingface import weft_command
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import weft
from weft.checkpoint.huggingface.folder import open_folder

SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT_OSS = transformers.GptOssConfig(
    vocab_size=96, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
    sliding_window=8, **SPECIAL,
)  # fmt: skip
DEEPSEEK = transformers.DeepseekV3Config(
    vocab_size=96, hidden_size=48, intermediate_size=80, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
    q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1,
    max_position_embeddings=128, **SPECIAL,
)  # fmt: skip
QWEN3 = transformers.Qwen3Config(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, **SPECIAL,
)  # fmt: skip
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(weight):
    """`[expert, in, out]` -> blocks `[expert, out, in / 32, 16]` and scales: the nearest of 16 numbers."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1, keepdim=True).clamp(min=2**-20).log2().floor() - 2).clamp(-127, 127)
    scaled = groups / 2**exponents
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), (exponents.squeeze(-1) + 127).to(torch.uint8)


def fp8(weight, block):
    """`[out, in]` -> numbers of e4m3, and the factor that each rectangle of `block` is to be multiplied by."""
    rows, columns = (-(-length // size) for length, size in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            place = tuple(slice(n * s, (n + 1) * s) for n, s in zip((row, column), block, strict=True))
            scales[row, column] = weight[place].abs().max().clamp(min=1e-12) / 448
            numbers[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
    return numbers, scales


def saved(path, config, seed=0):
    """A random model as save_pretrained writes it, in bfloat16."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.2)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def rewrite(path, quantization, change):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    state = load_file(path / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "model.safetensors")


def make_mxfp4(path, config=GPT_OSS):
    def change(state):
        for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            state[f"{name}_blocks"], state[f"{name}_scales"] = mxfp4(state.pop(name).float())

    rewrite(saved(path, config), {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, change)
    return path


def make_fp8(path, block, further=0, config=DEEPSEEK, kept=torch.float32):
    def change(state):
        if further:
            for name in [name for name in state if "layers.1." in name]:
                state[name.replace("layers.1.", "layers.2.")] = state[name].clone()
            state["model.layers.2.shared_head.head.weight"] = state["lm_head.weight"].clone()
        for name in [name for name in state if "_proj" in name and name.endswith(".weight")]:
            state[name], scales = fp8(state[name].float(), block)
            state[f"{name}_scale_inv"] = scales.to(kept)

    kind = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    rewrite(saved(path, config), kind, change)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": further}))
    return path


def in_shards(path):
    """Each tensor in a file by the parity of its place: numbers and scales apart."""
    state = load_file(path / "model.safetensors")
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    where = {name: names[name.endswith(("_scales", "_scale_inv"))] for name in state}
    for file in names:
        save_file({name: tensor for name, tensor in state.items() if where[name] == file}, path / file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return make_mxfp4(tmp_path_factory.mktemp("mxfp4") / "hf")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return make_fp8(tmp_path_factory.mktemp("fp8") / "hf", (8, 16), further=1)


def quietly(path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weft.load_model(path, **options)


def test_mxfp4_as_transformers_reads_it(gpt_oss, tmp_path, capsys):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        gpt_oss, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    state = load_file(gpt_oss / "model.safetensors")
    for layer, name in enumerate(("gate_up_proj", "down_proj") * 2):
        there = f"model.layers.{layer // 2}.mlp.experts.{name}"
        expected = convert_moe_packed_tensors(state[f"{there}_blocks"], state[f"{there}_scales"])
        assert torch.equal(theirs.get_parameter(there), expected)
        assert expected.count_nonzero() > 0
    assert weft_command("import", gpt_oss, tmp_path / "out") == 0
    said = capsys.readouterr()
    assert said.err.count("4 tensors are quantized (mxfp4) and will be read as bfloat16") == 1
    tokens = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(0))
    for path in (tmp_path / "out", gpt_oss):
        ours = quietly(path, dtype=torch.float32)
        assert (ours(tokens) - theirs.float()(tokens).logits).abs().max() < 2e-5
    for name, tensor in quietly(tmp_path / "out").named_parameters():
        assert tensor.dtype == torch.bfloat16, name


@pytest.mark.parametrize("apart", [False, True], ids=["one file", "scales in another"])
def test_fp8_as_transformers_reads_it(deepseek, tmp_path, capsys, apart):
    path = shutil.copytree(deepseek, tmp_path / "hf")
    if apart:
        in_shards(path)
    assert weft_command("import", path, tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert re.search(r"[\d,]+ tensors are quantized \(fp8\) and will be read as bfloat16", said)
    assert re.search(r"[\d,]+ tensors belong to .*num_nextn_predict_layers.* and will not be read", said)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    tokens = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="read as bfloat16|left out") as told:
        ours = weft.load_model(path, dtype=torch.float32)
    ends = [str(one.message).rpartition(" and ")[2].partition(";")[0] for one in told]
    assert ends == ["will be read as bfloat16", "will not be read"]
    expected = theirs.float()(tokens).logits
    assert (ours(tokens) - expected).abs().max() < 2e-5
    assert (quietly(tmp_path / "out", dtype=torch.float32)(tokens) - expected).abs().max() < 2e-5


def test_fp8_of_another_family_with_scales_in_bfloat16(tmp_path):
    path = make_fp8(tmp_path / "hf", (16, 16), config=QWEN3, kept=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    tokens = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(0))
    ours = quietly(path, dtype=torch.float32)
    assert (ours(tokens) - theirs.float()(tokens).logits).abs().max() < 2e-5


def test_fp8_blocks_that_do_not_divide_the_matrix(tmp_path):
    """As of 576 rows in blocks of 128: the last ones are smaller. transformers' own function takes equal ones only."""
    path = make_fp8(tmp_path / "hf", (32, 20))
    state = load_file(path / "model.safetensors")
    folder = open_folder(path)
    name = "layers.0.attention.kv_a_proj.weight"
    numbers = state[folder.sources[name].name].float()
    scales = state[f"{folder.sources[name].name}_scale_inv"]
    assert scales.shape == (1, 3)
    rows, columns = numbers.shape
    expected = numbers * scales.repeat_interleave(32, 0)[:rows].repeat_interleave(20, 1)[:, :columns]
    assert torch.equal(folder.read(name), expected.bfloat16())
    padded = torch.zeros(32, 60)
    padded[:rows, :columns] = numbers
    whole = Fp8Dequantize(None)._dequantize_one(padded.to(torch.float8_e4m3fn), scales, torch.bfloat16)
    assert torch.equal(folder.read(name), whole[:rows, :columns])


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek"])
def test_rectangles_are_parts_of_the_whole(kind, request):
    """What a rank of a mesh reads is what it would cut out of the whole tensor."""
    folder = open_folder(request.getfixturevalue(kind))
    generator = torch.Generator().manual_seed(3)
    checked = 0
    for name, source in folder.sources.items():
        whole = folder.read(name)
        assert whole.shape == source.shape
        assert whole.dtype == torch.bfloat16 or "correction_bias" in name
        for _ in range(3):
            start = [int(torch.randint(0, length, (), generator=generator)) for length in source.shape]
            size = [
                int(torch.randint(0, length - first + 1, (), generator=generator))
                for first, length in zip(start, source.shape, strict=True)
            ]
            place = tuple(slice(first, first + many) for first, many in zip(start, size, strict=True))
            part = folder.read(name, tuple(start), tuple(size))
            assert part.dtype == whole.dtype
            assert torch.equal(part, whole[place])
            checked += part.numel() > 0
    assert checked > 20


def test_what_is_refused(gpt_oss, deepseek, tmp_path, capsys):
    def refused(source, message, change=lambda path: None, **quantization):
        path = tmp_path / "hf"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path)
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] |= quantization
        (path / "config.json").write_text(json.dumps(config))
        change(path)
        assert weft_command("import", path, tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert re.search(message, said), said
        assert not (tmp_path / "out").exists()

    def edit(path, change):
        with safe_open(path / "model.safetensors", "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        change(state)
        save_file(state, path / "model.safetensors")

    for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors"):
        refused(gpt_oss, rf"quantized \({method}\) .* mxfp4, and fp8", quant_method=method)
    refused(deepseek, "fp8 with weight_block_size None", weight_block_size=None)
    refused(deepseek, "fp8 with .* and fmt e5m2", fmt="e5m2")
    name = "model.layers.0.mlp.experts.down_proj"
    refused(
        gpt_oss,
        rf"{name}_scales has shape \[4, 64\], .* {name}_blocks; download",
        lambda path: edit(
            path, lambda state: state.update({f"{name}_scales": state[f"{name}_scales"][..., 0].clone()})
        ),
    )
    name = "model.layers.0.mlp.up_proj.weight"
    refused(
        deepseek,
        f"{name} is stored as torch.float8_e4m3fn: quantized weights",
        lambda path: edit(path, lambda state: state.pop(f"{name}_scale_inv")),
    )
    name = "model.layers.0.mlp.down_proj.weight"
    refused(deepseek, rf"{name}_scale_inv has shape \[6, 5\], .* \[48, 80\] of {name}", weight_block_size=[16, 16])
