"""llama.cpp runs exported GGUF files of every architecture: the results equal Weft's (`make export-check`)."""
# ruff: noqa: RUF001

import inspect
import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from gguf_models import GROUPED, MODELS
from tokenizers import models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.cli.main import main
from weft.data.tokenizers.exactness import PATTERNS
from weft.data.tokenizers.import_tokenizer import EDGE_CASES, TEST_TEXTS
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError

PYTHON = Path(os.environ.get("WEFT_LLAMA_PYTHON", ".venv-llama/bin/python")).absolute()
pytestmark = [
    pytest.mark.export,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: make export-check builds it"),
]
HOSTILE = [
    *TEST_TEXTS, *EDGE_CASES, "Don'T I'LL we'Ve 'ſ ſs 'S x'S y'LL z'ſ", "ПриветМир ÉCOLEété ΑβΓ ǅungla ABCdefGHI jkLm",
    "१२३ ๑๒๓ 1٢3 ²³ ⅷ ١٢٣٤٥ ½½½½ ₁₂₃ ªº", "a\u0301e\u0308 a\u0301b c\u0301' ค่ำ हिन्दी भाषा", "🧑🏽\u200d🚀 🏳️",
    "tab\tnew\r\n\r\n  \t x", "\u00a0nbsp\u2009thin\u3000wide", "«quotes» „low“ …—–", "x\u200d\u200cy", "ـــعربيـ",
    "<|endoftext|>x<|endoftext|> y", "中文，标点。！？ 。。a,,b!!\n\n c??\r\nd", " \n \n", "\n\n\n\na  b\t\tc\n\n d \n",
    "ΣΑΣ σας ᾳ ὰ ΐ", "𝔘𝓫 𠀀𠀁",
]  # fmt: skip
# ggml computes GELU from a table in half precision.
TOLERANCE = dict.fromkeys(("gemma2", "gemma3", "starcoder2", "gpt_neox", "gpt2", "mpt"), 2e-2)


def llama(model, *, texts=(), prompts=(), tokens=0, context=256, lora=None, vocab_only=False):
    """Runs llama.cpp in its environment, as llama_answers.py describes."""
    asked = {
        "model": str(model), "texts": list(texts), "prompts": prompts, "tokens": tokens, "context": context,
        "lora": lora and str(lora), "vocab_only": vocab_only,
    }  # fmt: skip
    command = [PYTHON, Path(__file__).with_name("llama_answers.py")]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Source code with its tokenizer and store; a model that has learned it continues it with many different tokens."""
    folder = tmp_path_factory.mktemp("code")
    text = Path(inspect.__file__).read_text()[:12_000].split("\n\n")
    (folder / "code.jsonl").write_text("\n".join(json.dumps({"text": part}) for part in text * 20))
    code, tokenizer = str(folder / "code.jsonl"), str(folder / "tokenizer")
    assert main(["data", "train-tokenizer", code, "--vocab-size", "512", "--out", tokenizer]) == 0
    assert main(["data", "pack", code, "--tokenizer", tokenizer, "--out", str(folder / "store")]) == 0
    return folder


def train(folder, corpus, model, steps=120, **more):
    """Trains a model; returns the run's folder."""
    config = {
        "run": {"name": "run", "directory": str(folder), "seed": 7}, "model": model,
        "tokenizer": str(corpus / "tokenizer"), "data": {"train": str(corpus / "store"), "sequence_length": 64},
        "objective": {"type": "pretrain"}, "optimizer": {"type": "adamw", "lr": 5e-3},
        "schedule": {"type": "cosine", "warmup_steps": 5}, "checkpoint": {"every": steps},
        "training": {
            "steps": steps, "batch_tokens": 1024, "micro_batch_size": 16, "dtype": "float32", "compile": False,
            "threads": 1,
        },
        **more,
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items()))
    assert main(["train", str(file)]) == 0
    return folder / "run"


def prompts_of(corpus, *spans):
    tokenizer = Tokenizer.load(corpus / "tokenizer")
    ids = tokenizer.encode(Path(inspect.__file__).read_text()[:9000])
    return [ids[start:end] for start, end in spans]


def weft_answers(model, prompts, tokens):
    """Returns the logits of each prompt and its greedy continuation, without a cache."""
    answers = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            logits = model(ids)[0].numpy()
            for _ in range(tokens):
                ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
            answers.append((logits, ids[0, len(prompt) :].tolist()))
    return answers


def compare(model, found, prompts, tokens, tolerance):
    """Checks logits and greedy continuations; returns the number of different tokens of the continuations."""
    greedy = set()
    for (logits, ids), answer in zip(weft_answers(model, prompts, tokens), found["answers"], strict=True):
        assert np.abs(np.array(answer["logits"]) - logits).max() < tolerance
        assert answer["greedy"] == ids
        greedy |= set(ids)
    return len(greedy)


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same_logits(tmp_path, corpus, name):
    run = train(tmp_path, corpus, MODELS[name])
    assert main(["export", str(run), str(tmp_path / "model.gguf"), "--to", "gguf", "--type", "f32"]) == 0
    # llama.cpp chooses the factors of LongRoPE by the size of the context, not of the prompt.
    spans = [(0, 70), (300, 380)] if name == "phi3" else [(0, 70), (300, 380), (900, 907)]
    prompts = prompts_of(corpus, *spans)
    found = llama(tmp_path / "model.gguf", texts=HOSTILE, prompts=prompts, tokens=12)
    tokenizer = Tokenizer.load(corpus / "tokenizer")
    assert found["texts"] == found["with_bos"] == [tokenizer.encode(text) for text in HOSTILE]
    assert (found["eos"], found["ends"]) == (tokenizer.eod_id, [tokenizer.eod_id])
    model = weft.load_model(run, dtype=torch.float32).eval()
    assert compare(model, found, prompts, 12, TOLERANCE.get(name, 1e-4)) > 8


def test_short_factors_apply_in_short_contexts(tmp_path, corpus):
    """llama.cpp rounds contexts up to multiples of 256."""
    scaling = MODELS["phi3"]["rope_scaling"] | {"original_max_position_embeddings": 256}
    run = train(tmp_path, corpus, MODELS["phi3"] | {"rope_scaling": scaling, "max_position_embeddings": 1024})
    weft.export_model(run, tmp_path / "model.gguf", "gguf", type="f32")
    prompts = prompts_of(corpus, (0, 40), (300, 450))
    found = llama(tmp_path / "model.gguf", prompts=prompts, tokens=8, context=256)
    compare(weft.load_model(run, dtype=torch.float32).eval(), found, prompts, 8, 1e-4)


@pytest.fixture
def sensitive(corpus):
    """A tokenizer.json whose merges cross all boundaries of words, so that each different split changes ids."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(HOSTILE * 3, trainers.BpeTrainer(vocab_size=3000, **special))
    content = json.loads((corpus / "tokenizer" / "tokenizer.json").read_text())
    return content | {"model": json.loads(made.to_str())["model"]}


def with_model(folder, tokenizer):
    """Adds a random model to a copy of a tokenizer's folder."""
    shutil.copytree(tokenizer, folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    size = Tokenizer.load(folder).vocab_size
    LlamaForCausalLM(LlamaConfig(vocab_size=size, **sizes)).save_pretrained(folder)
    return folder


def ids_of_both(folder, tmp_path, **options):
    weft.export_model(folder, tmp_path / "model.gguf", "gguf", **options)
    found, tokenizer = llama(tmp_path / "model.gguf", texts=HOSTILE, vocab_only=True), Tokenizer.load(folder)
    weft.import_model(tmp_path / "model.gguf", tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again" / "tokenizer")
    expected = [tokenizer.encode(text) for text in HOSTILE]
    whole = [tokenizer.encode(text, add_special_tokens=True) for text in HOSTILE]
    assert [again.encode(text) for text in HOSTILE] == expected
    assert [again.encode(text, add_special_tokens=True) for text in HOSTILE] == whole
    return found, expected, whole


FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [
        ("smaug-bpe", "llama3"), ("llama-bpe", "llama3"), ("qwen2", "qwen2"), ("gpt-2", "gpt2"), ("starcoder", "gpt2"),
        ("qwen35", "qwen35"),
    ],
)  # fmt: skip
def test_byte_level_ids_are_equal(tmp_path, corpus, sensitive, pre, pattern):
    steps = sensitive["pre_tokenizer"]["pretokenizers"]
    qwen35 = PATTERNS["qwen2"].replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
    steps[0]["pattern"]["Regex"] = PATTERNS.get(pattern, qwen35)
    if pre == "starcoder":
        sensitive["pre_tokenizer"]["pretokenizers"] = [{"type": "Digits", "individual_digits": True}, *steps]
    sensitive["model"]["ignore_merges"] = pre == "llama-bpe"
    sensitive["post_processor"] = FIRST if pre == "qwen2" else None
    shutil.copytree(corpus / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(sensitive))
    found, expected, whole = ids_of_both(with_model(tmp_path / "hf", tmp_path / "tokenizer"), tmp_path)
    assert found["metadata"]["tokenizer.ggml.pre"] == pre
    assert found["texts"] == expected
    assert found["with_bos"] == whole
    assert (whole[0] == [0]) == (pre == "qwen2")


def test_an_approximate_pattern_really_differs(tmp_path, corpus, sensitive):
    """The reason for refusing o200k without --pre. If llama.cpp has mended it, the table can have it."""
    sensitive["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERNS["o200k"]
    shutil.copytree(corpus / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(sensitive))
    found, expected, _ = ids_of_both(with_model(tmp_path / "hf", tmp_path / "tokenizer"), tmp_path, pre="gpt-4o")
    assert found["texts"] != expected


@pytest.mark.parametrize("kind", ["bpe", "bpe-without-prefix", "unigram"])
def test_sentencepiece_ids_are_equal(tmp_path, kind):
    bpe = kind.startswith("bpe")
    text = Path(inspect.__file__).read_text().splitlines()[:800] + ["né 日本語 русский текст עברית ไทย"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in text if line), model_prefix=str(tmp_path / "sp"), vocab_size=700,
        model_type="bpe" if bpe else "unigram", byte_fallback=bpe, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=kind != "bpe-without-prefix", minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    assert main(["data", "import-tokenizer", str(tmp_path / "sp.model"), "--out", str(tmp_path / "tokenizer")]) == 0
    found, expected, whole = ids_of_both(with_model(tmp_path / "hf", tmp_path / "tokenizer"), tmp_path)
    blank = [not text.strip(" ") for text in HOSTILE]  # the unigram model adds no blank to these, as the export warns
    for ids, ours in ((found["texts"], expected), (found["with_bos"], whole)):
        pairs = zip(HOSTILE, ids, ours, blank, strict=True)
        assert [text for text, one, other, skipped in pairs if one != other and (bpe or not skipped)] == []


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_are_added_or_merged(tmp_path, corpus, name):
    """llama.cpp adds the exported adapter to the exported base model; merged weights are equal."""
    base = train(tmp_path, corpus, MODELS[name], steps=40)
    (tmp_path / "tuned").mkdir()
    adapter = {"adapter": {"r": 4, "alpha": 32, "targets": ["q_proj", "k_proj", "down_proj"]}}
    run = train(tmp_path / "tuned", corpus, {"from": str(base)}, steps=60, **adapter)
    weft.export_model(base, tmp_path / "base.gguf", "gguf", type="f32")
    weft.export_model(run, tmp_path / "adapter.gguf", "gguf", type="f32", adapter_only=True)
    weft.export_model(run, tmp_path / "merged.gguf", "gguf", type="f32")
    with pytest.raises(UserError, match="--dequantize: the model has no adapter on a quantized base model"):
        weft.export_model(run, tmp_path / "other.gguf", "gguf", dequantize=True)
    prompts = prompts_of(corpus, (0, 70), (300, 310))
    plain, added, merged = (
        llama(tmp_path / f"{file}.gguf", prompts=prompts, tokens=8, lora=lora)
        for file, lora in (("base", None), ("base", tmp_path / "adapter.gguf"), ("merged", None))
    )
    logits = [[np.array(answer["logits"]) for answer in one["answers"]] for one in (plain, added, merged)]
    tolerance = TOLERANCE.get(name, 1e-4)
    assert np.abs(logits[1][0] - logits[0][0]).max() > 10 * tolerance  # the adapter changes what is compared
    model = weft.load_model(run, dtype=torch.float32).eval()
    compare(model, added, prompts, 8, tolerance)
    compare(model, merged, prompts, 8, tolerance)


def test_k_quants_are_made_by_llama_cpp(tmp_path, corpus):
    """In the environment of llama-cpp-python, with Weft's packages behind its own."""
    keys = GROUPED | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    run = train(tmp_path, corpus, keys, steps=30)
    path = os.pathsep.join([str(Path(weft.__file__).parents[1]), sysconfig.get_path("purelib")])
    weft.export_model(run, tmp_path / "f32.gguf", "gguf", type="f32")
    prompts = prompts_of(corpus, (0, 70))
    exact = np.array(llama(tmp_path / "f32.gguf", prompts=prompts)["answers"][0]["logits"])
    errors = []
    for kind in ("q6_K", "q4_K_M"):
        out = tmp_path / f"{kind}.gguf"
        command = [PYTHON, "-m", "weft", "export", run, out, "--to", "gguf", "--type", kind]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found = np.array(llama(out, prompts=prompts)["answers"][0]["logits"])
        errors.append(np.sqrt(((found - exact) ** 2).mean()) / exact.std())
        assert out.stat().st_size < 0.4 * (tmp_path / "f32.gguf").stat().st_size
        assert not list(tmp_path.glob(".*"))
    assert 0 < errors[0] < 0.05
    assert errors[0] < errors[1] < 0.25
