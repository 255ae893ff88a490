"""`weft evaluate --adapter`: against PEFT's logits, and against the model into which the adapter is merged."""

# ruff: noqa: F811 (a fixture of another file)
import json
import math
import shutil
import warnings

import numpy as np
import peft
import pytest
import torch
from evaluation_cases import random_llama
from store_cases import make_store
from test_harness import tasks  # noqa: F401

import weft
from weft.cli.main import main
from weft.data.stores.store import TokenStore
from weft.headers import read_tokenizer_header

LENGTHS = np.array([5, 30, 9, 17])


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_tokenizer):
    """A folder with `base`, `peft` and a token store, and PEFT's model."""
    root = tmp_path_factory.mktemp("adapters")
    base = random_llama(root / "base", 512, bos_token_id=None, eos_token_id=0)
    for file in tiny_tokenizer.iterdir():
        shutil.copy(file, root / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], use_dora=True))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.add_((torch.rand_like(parameter) - 0.3) * 2)
        model.save_pretrained(root / "peft")
    make_store(root / "store", LENGTHS, tokens=np.random.default_rng(0).integers(1, 512, LENGTHS.sum()))
    file = root / "store" / "store.json"
    digest = {"tokenizer_digest": read_tokenizer_header(root / "base").digest}
    file.write_text(json.dumps(json.loads(file.read_text()) | digest))
    return root, model.eval()


def evaluated(place, *words):
    assert main(["evaluate", str(place / "base"), "--json", str(place / "out.json"), *map(str, words)]) == 0
    return json.loads((place / "out.json").read_text())


def test_the_loss_is_that_of_peft(place):
    root, model = place
    store, losses = TokenStore(root / "store"), []
    for number in range(len(LENGTHS)):
        ids = torch.from_numpy(store.document(number).astype(np.int64))[None]
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        losses += (-logprobs.gather(1, ids[0, 1:, None])).flatten().tolist()
    common = ("--store", root / "store", "--sequence-length", 64)
    found = evaluated(root, *common, "--adapter", root / "peft")
    assert found["adapter"] == str(root / "peft")
    assert found["all"]["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert found["all"]["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    plain = evaluated(root, *common)
    assert "adapter" not in plain
    assert abs(plain["all"]["loss"] - found["all"]["loss"]) > 1e-3
    # A loaded model has no adapter after the evaluation.
    loaded = weft.load_model(root / "base")
    for adapter, expected in ((root / "peft", found), (None, plain)):
        one = weft.evaluate(loaded, store=root / "store", sequence_length=64, adapter=adapter)
        assert one.loss == pytest.approx(expected["all"]["loss"], abs=1e-6)


def test_scores_of_tasks_are_those_of_the_merged_model(place, tasks, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    root, _ = place
    weft.merge_adapter(root / "base", tmp_path / "merged", root / "peft")
    chosen = {"tasks": "rolling,choices", "include_path": tasks(["x"])}
    with_adapter = weft.evaluate(root / "base", adapter=root / "peft", **chosen)
    merged, plain = (weft.evaluate(path, **chosen) for path in (tmp_path / "merged", root / "base"))
    for task, found in with_adapter.tasks.items():
        for one, other in zip(found["scores"], merged.tasks[task]["scores"], strict=True):
            assert one["value"] == pytest.approx(other["value"], rel=1e-4)
    assert plain.tasks["rolling"]["scores"] != merged.tasks["rolling"]["scores"]


def test_an_adapter_that_does_not_fit_is_refused_before_the_model_is_loaded(place, tmp_path, monkeypatch, capsys):
    root, _ = place
    monkeypatch.setattr("weft.evaluation.evaluate.load_model", None)
    for adapter, said in ((tmp_path / "none", "none"), (root / "base", "neither a folder of PEFT")):
        assert main(["evaluate", str(root / "base"), "--store", str(root / "store"), "--adapter", str(adapter)]) == 2
        line = capsys.readouterr().err
        assert said in line
        assert line.count("\n") == 1
