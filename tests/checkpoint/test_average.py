"""`weft average`, beside averages that are computed by hand with transformers and from a run's checkpoints."""

import json

import pytest
import torch
from test_huggingface import folder, logits, theirs, weft_command
from transformers import AutoModelForCausalLM

import weft
from weft.cli.main import main


def model(seed, dtype=torch.float32, **changes):
    found = theirs("llama", dtype, **changes)
    torch.manual_seed(seed)
    for parameter in found.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.1)
    return found


@pytest.mark.parametrize("shares", [None, (3, 1)])
def test_a_soup_is_the_mean_of_its_models(tmp_path, shares):
    models = [model(seed) for seed in (1, 2)]
    sources = [folder(tmp_path / f"hf{seed}", one) for seed, one in enumerate(models)]
    assert weft_command("import", sources[1], tmp_path / "imported") == 0
    words = [] if shares is None else ["--weights", *shares]
    assert weft_command("average", tmp_path / "out", sources[0], tmp_path / "imported", *words) == 0
    one, two = (share / sum(shares or (1, 1)) for share in shares or (1, 1))
    with torch.no_grad():
        for parameter, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            parameter.copy_(one * parameter.double() + two * other.double())
    assert weft_command("export", tmp_path / "out", tmp_path / "back") == 0
    back, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "back"), torch.randint(0, 512, (2, 9))
    assert torch.equal(logits(back, tokens), logits(models[0].eval(), tokens))


def test_sums_are_wider_than_bfloat16(tmp_path):
    sources = [folder(tmp_path / str(seed), model(seed, torch.bfloat16)) for seed in range(5)]
    made = weft.average_models(sources, tmp_path / "out")
    weights = [weft.load_model(source).state_dict() for source in sources]
    for name, value in weft.load_model(tmp_path / "out").state_dict().items():
        exact = torch.stack([one[name].double() for one in weights]).mean(0)
        assert torch.equal(value, exact.to(torch.bfloat16)), name
    assert made.tensors == len(weights[0])
    weft.average_models(sources, tmp_path / "wide", dtype="float32")
    assert {value.dtype for value in weft.load_model(tmp_path / "wide").state_dict().values()} == {torch.float32}


def test_checkpoints_of_a_run_and_its_ema(tmp_path, run_yaml, tiny_heldout):
    settings = {"training": {"steps": 3}, "schedule": {"warmup_steps": 1}, "log": {"trackers": []}}
    file = run_yaml(**settings, callbacks=[{"type": "ema", "decay": 0.75}], checkpoint={"every": 1, "keep_last": 3})
    assert main(["train", str(file)]) == 0
    run = tmp_path / "runs" / "demo"
    saved = [weft.load_model(path).state_dict() for path in sorted((run / "checkpoints").iterdir())]
    assert len(saved) == 3
    assert weft_command("average", tmp_path / "last", run, "--last", 2) == 0
    for number in range(3):
        assert (
            weft_command("average", tmp_path / f"ema{number}", run / f"checkpoints/step-0000000{number + 1}", "--ema")
            == 0
        )
    averages = [weft.load_model(tmp_path / f"ema{number}").state_dict() for number in range(3)]
    for name, value in weft.load_model(tmp_path / "last").state_dict().items():
        torch.testing.assert_close(value, (saved[1][name] + saved[2][name]) / 2, rtol=1e-6, atol=0)
        for number in (1, 2):
            expected = 0.75 * averages[number - 1][name] + 0.25 * saved[number][name]
            torch.testing.assert_close(averages[number][name], expected, rtol=0, atol=1e-6)
        assert not torch.equal(averages[2][name], saved[2][name]) or "norm" in name
    # What comes out is a model like any other, with its tokenizer.
    assert weft_command("evaluate", tmp_path / "last", "--store", tiny_heldout, "--max-tokens", 200) == 0
    assert len(weft.generate(tmp_path / "last", "Kalo", max_new_tokens=2)) > 0
    file = run_yaml("next.yaml", **settings, model=None, tokenizer=None, run={"name": "next"})
    assert main(["train", str(file), f"model.from={tmp_path / 'last'}"]) == 0


def refused(capsys, tmp_path, *words):
    capsys.readouterr()
    assert weft_command("average", tmp_path / "out", *words) == 2
    assert not list(tmp_path.glob("*out*"))
    *progress, line = capsys.readouterr().err.splitlines()
    assert all(other.startswith("averaging") for other in progress)
    return line


def test_what_has_no_average_is_refused(tmp_path, capsys, tiny_tokenizer):
    one = folder(tmp_path / "one", model(1))
    other = folder(tmp_path / "other", model(2))
    assert "give several, or --last" in refused(capsys, tmp_path, one)
    assert "3 numbers for 2 models" in refused(capsys, tmp_path, one, other, "--weights", 1, 2, 3)
    assert "0.0 is not a positive number" in refused(capsys, tmp_path, one, other, "--weights", 1, 0)
    assert "for the checkpoints of one run, but 2" in refused(capsys, tmp_path, one, other, "--last", 2)
    assert "--last 2: the run has 0 checkpoints" in refused(capsys, tmp_path, one, "--last", 2)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    folder(run / "checkpoints" / "step-00000001", model(1))
    assert "the run has 1 checkpoint; use" in refused(capsys, tmp_path, run, "--last", 2)
    assert "no averages of the callback ema" in refused(capsys, tmp_path, one, "--ema")
    theta = folder(tmp_path / "theta", model(2, rms_norm_eps=0.5))
    assert f"{theta}: model.rms_norm_eps is 0.5, but 1e-06" in refused(capsys, tmp_path, one, theta)
    broken = model(3)
    broken.model.norm.weight.data[0] = torch.nan
    broken = folder(tmp_path / "broken", broken)
    assert f"{broken}: norm.weight has an infinite value or NaN" in refused(capsys, tmp_path, one, broken)
    tokens = [folder(tmp_path / name, model(2)) for name in ("tok1", "tok2")]
    content = json.loads((tiny_tokenizer / "tokenizer.json").read_text())
    for number, path in enumerate(tokens):
        (path / "tokenizer.json").write_text(json.dumps(content, indent=number + 1))
    assert f"{tokens[1]}: the tokenizer differs from that of {tokens[0]}" in refused(capsys, tmp_path, *tokens)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    assert weft_command("average", tmp_path / "there", one, other) == 2
    assert "there" in capsys.readouterr().err


def test_an_adapter_is_refused(tmp_path, capsys, run_yaml, hf_folder):
    file = run_yaml(
        model=None, tokenizer=None, training={"steps": 2}, schedule={"warmup_steps": 1}, log={"trackers": []}
    )
    assert main(["train", str(file), f"model.from={hf_folder}", "adapter.r=2"]) == 0
    capsys.readouterr()
    run = tmp_path / "runs" / "demo"
    assert "contains only an adapter; merge it" in refused(capsys, tmp_path, run, run)
