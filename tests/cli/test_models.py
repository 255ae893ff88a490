"""`weft models`, and that its presets have the sizes of the models whose names they bear."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.families import families, presets

REST = """
data: {train: store, sequence_length: 64}
training: {steps: 30, batch_tokens: 1024}
"""
# As model cards and papers state them, in 10^6.
PUBLISHED = {
    "llama-1b": 1_240, "llama-3b": 3_210, "llama-8b": 8_030,
    "llama3.2-1b": 1_240, "llama3.2-3b": 3_210, "llama3.1-8b": 8_030, "llama3.1-70b": 70_600, "llama3.1-405b": 406_000,
    "llama2-7b": 6_740, "tinyllama-1.1b": 1_100, "smollm2-135m": 135, "smollm2-360m": 362, "smollm2-1.7b": 1_710,
    "smollm3-3b": 3_080, "mistral-7b": 7_240, "mistral-7b-v0.3": 7_250, "mixtral-8x7b": 46_700,
    "mixtral-8x22b": 141_000,
    "qwen2.5-0.5b": 494, "qwen2.5-1.5b": 1_540, "qwen2.5-3b": 3_090, "qwen2.5-7b": 7_610,
    "qwen3-0.6b": 596, "qwen3-1.7b": 1_720, "qwen3-4b": 4_020, "qwen3-8b": 8_190, "qwen3-14b": 14_800,
    "qwen3-32b": 32_800, "qwen3-30b-a3b": 30_500, "qwen3-235b-a22b": 235_000,
    "gemma2-2b": 2_610, "gemma2-9b": 9_240, "gemma2-27b": 27_200, "gemma3-1b": 1_000, "gemma3-4b": 3_884,
    "gemma3-12b": 11_771, "gemma3-27b": 27_016,
    "phi3-mini": 3_820, "phi3-medium": 14_000, "phi4": 14_700,
    "olmo2-1b": 1_480, "olmo2-7b": 7_300, "olmo2-13b": 13_700, "olmo2-32b": 32_200, "olmoe-1b-7b": 6_920,
    "gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1_558,
    "pythia-70m": 70.4, "pythia-160m": 162.3, "pythia-410m": 405.3, "pythia-1b": 1_011.8, "pythia-1.4b": 1_414.6,
    "pythia-2.8b": 2_775.2, "pythia-6.9b": 6_857.3, "pythia-12b": 11_846, "gpt-neox-20b": 20_554.6,
    "mpt-7b": 6_650, "mpt-30b": 29_950, "starcoder2-3b": 3_030, "starcoder2-7b": 7_170,
    "granite3.0-2b": 2_530, "granite3.0-8b": 8_170,
    "deepseek-v2-lite": 15_700, "deepseek-v2": 236_000, "deepseek-v3": 671_000,
    "gpt-oss-20b": 20_910, "gpt-oss-120b": 116_830,
}  # fmt: skip
# Of a mixture of experts, those that a token goes through, in 10^6; most count the embedding's rows with them.
ACTIVE = {
    "mixtral-8x7b": 12_900, "mixtral-8x22b": 39_100, "qwen3-30b-a3b": 3_350, "qwen3-235b-a22b": 22_200,
    "olmoe-1b-7b": 1_280, "deepseek-v2-lite": 2_660, "deepseek-v2": 21_400, "deepseek-v3": 37_550,
}  # fmt: skip
ACTIVE_WITHOUT_EMBEDDING = {"gpt-oss-20b": 3_610, "gpt-oss-120b": 5_130}


@pytest.fixture
def told(capsys):
    """Runs `weft models ...`: its exit code, and what it printed."""

    def run(*words):
        code = main(["models", *words])
        out, err = capsys.readouterr()
        return code, out + err

    return run


@pytest.fixture
def sizes(told):
    return {one["preset"]: one for one in json.loads(told("--json")[1])}


def test_every_preset_has_the_published_size(sizes):
    assert sizes.keys() == presets().keys()
    named = {name for name, one in sizes.items() if one["vocab_size"] is not None}
    assert named == PUBLISHED.keys(), "a preset needs a line in PUBLISHED"
    for name, millions in PUBLISHED.items():
        assert sizes[name]["parameters"] == pytest.approx(millions * 1e6, rel=0.01), name


def test_tokens_go_through_as_many_parameters_as_published(sizes):
    assert {name for name, keys in presets().items() if "moe" in keys} == {*ACTIVE, *ACTIVE_WITHOUT_EMBEDDING}
    for name, millions in ACTIVE.items():
        active = sizes[name]["matmul_parameters"] + presets()[name]["vocab_size"] * presets()[name]["hidden_size"]
        assert active == pytest.approx(millions * 1e6, rel=0.01), name
    for name, millions in ACTIVE_WITHOUT_EMBEDDING.items():
        assert sizes[name]["matmul_parameters"] == pytest.approx(millions * 1e6, rel=0.01), name


# Where transformers' defaults are a published model's, they say every key, not only the sizes.
DEFAULTS = {
    "Llama": ("llama2-7b", {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "Gemma2": ("gemma2-2b", {}),
    "GPT2": ("gpt2", {}),
    "GPTNeoX": ("gpt-neox-20b", {"vocab_size": 50432, "hidden_act": "gelu_fast"}),
    "GptOss": ("gpt-oss-120b", {}),
    "Mixtral": ("mixtral-8x7b", {"max_position_embeddings": 32768}),
    "DeepseekV3": ("deepseek-v3", {
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0,
        },
    }),
    "Phi3": ("phi3-mini", {"sliding_window": 2047}),
    "SmolLM3": ("smollm3-3b", {
        "max_position_embeddings": 65536, "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0}
    }),
}  # fmt: skip


@pytest.mark.parametrize("kind", DEFAULTS)
def test_presets_are_transformers_own_defaults(kind):
    import transformers

    from weft.config.huggingface_config import model_keys
    from weft.models.huggingface_weights import to_config_json

    name, more = DEFAULTS[kind]
    config = getattr(transformers, f"{kind}Config")(**more).to_dict()
    ours = to_config_json(ModelSection(**presets()[name]))
    theirs = to_config_json(ModelSection(**model_keys(config | {"architectures": ours["architectures"]})))
    # Those are about training, or a tokenizer's, which a preset has none of.
    training = ("dropout", "pdrop", "initializer_range", "router_aux_loss_coef", "pad_token_id")
    training += ("num_nextn_predict_layers",)
    for key in theirs.keys() | ours.keys():
        if not key.endswith(training):
            assert ours[key] == pytest.approx(theirs[key]), key


def test_every_preset_can_be_written_for_transformers():
    from weft.models.huggingface_weights import to_config_json

    for name, keys in presets().items():
        section = ModelSection(**{"vocab_size": 64, **keys})
        assert to_config_json(section)["architectures"][0] in families()[section.family].ARCHITECTURES, name


def test_the_table(told, sizes):
    code, out = told()
    assert code == 0
    lines = out.splitlines()
    assert "gemma2       gemma2-2b              2.61B    2.61B         20.92      256,000    8,192" in lines
    assert sum(line.startswith("llama ") for line in lines) == 1
    assert all(f" {name} " in out for name in presets())
    assert all(len(line) <= 120 for line in lines)
    assert "FLOPs per token = 6 x matmul parameters + 12 x layers x width x sequence" in out
    # By hand: 32 layers, width 4096, 8,192 tokens.
    assert sizes["llama-8b"]["flops_per_token"] == 6 * sizes["llama-8b"]["matmul_parameters"] + 12 * 32 * 4096 * 8192


def test_flops_at_another_length(told):
    code, out = told("gpt2", "--json", "--sequence-length", "100")
    found = json.loads(out)
    assert (code, found["sequence_length"]) == (0, 100)
    assert found["flops_per_token"] == 6 * found["matmul_parameters"] + 12 * 12 * 768 * 100
    assert "100 tokens" in told("--sequence-length", "100")[1]
    code, message = told("--sequence-length", "0")
    assert code == 2
    assert message.startswith("--sequence-length 0: ")
    assert message.endswith("at least 1\n")


@pytest.mark.parametrize("name", presets())
def test_a_presets_keys_are_the_model(name, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out = told(name)
    assert code == 0
    Path("model.yaml").write_text(out)
    Path("run.yaml").write_text(out + REST)
    Path("extending.yaml").write_text("extends: model.yaml\n" + REST)
    Path("named.yaml").write_text(f"model: {name}\n{REST}")
    pasted, extending, named = (
        RunConfig.load(f, check_data=False).model for f in ("run.yaml", "extending.yaml", "named.yaml")
    )
    assert pasted == extending
    filled = {
        "preset": None, "num_key_value_heads": named.kv_heads, "intermediate_size": pasted.intermediate_size,
        "head_dim": None if named.mla else named.qk_head_dim,
    }  # fmt: skip
    assert pasted == named.model_copy(update=filled)


def test_a_family_by_its_name_or_by_transformers_name(told):
    code, out = told("gpt_neox")
    assert code == 0
    assert out.startswith("gpt_neox: GPT-NeoX (Black et al., 2022)")
    assert "\nreads GPTNeoXForCausalLM\n" in out
    assert "pythia-160m" in out
    assert "llama" not in out
    assert told("GPTNeoXForCausalLM") == (code, out)
    found = json.loads(told("gpt_neox", "--json")[1])
    assert found["architectures"] == ["GPTNeoXForCausalLM"]
    assert [one["preset"] for one in found["presets"]] == [n for n, k in presets().items() if k["family"] == "gpt_neox"]


def test_mistakes(told):
    assert told("qwen3-8B")[1].startswith("qwen3-8B: ")
    assert "did you mean 'qwen3-8b'?" in told("qwen3-8B")[1]
    assert "did you mean 'LlamaForCausalLM'" in told("LlamaForCasualLM")[1]
    code, message = told("zzz")
    assert code == 2
    assert message.startswith("zzz: ")
    assert message.endswith("`weft models` lists them\n")
    code, message = told("gpt2", "--markdown")
    assert code == 2
    assert message.startswith("--markdown ")
    assert message.endswith("remove NAME\n")


def test_the_page_of_families_is_up_to_date(told):
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == told("--markdown")[1], "run `make docs`"
    assert all(f"| `{family}` |" in page for family in families())


@pytest.mark.parametrize("words", [[], ["llama"], ["gpt2"]])
def test_it_needs_no_torch(words):
    program = "import sys; from weft.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program, "models", *words], check=True, capture_output=True, timeout=60)
