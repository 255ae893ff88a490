"""`weft delta`: base + delta = model, bit for bit; against the model itself, and transformers for plain differences."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_huggingface import SMALL, folder, logits, tensors, theirs, weft_command
from test_pickled import as_bins
from transformers import AutoModelForCausalLM

import weft
from weft.checkpoint.delta.delta_format import decode, encode


def moved(model, amount=1e-3):
    """The model after some training."""
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * amount
    return model


def others(path):
    """All files of a folder but its weights."""
    return {
        file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and "safetensors" not in file.suffix
    }


def made_again(tmp_path, base, model):
    assert weft_command("delta", "make", base, model, tmp_path / "delta") == 0
    assert weft_command("delta", "apply", base, tmp_path / "delta", tmp_path / "again") == 0
    return tmp_path / "again"


CASES = {
    "float32": ("llama", torch.float32, "5GB", {}),
    "bfloat16 in shards": ("llama", torch.bfloat16, SMALL, {}),
    "tied": ("gpt2", torch.float16, SMALL, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_hugging_face_folders(tmp_path, tiny_tokenizer, case):
    kind, dtype, shards, more = CASES[case]
    base = folder(tmp_path / "base", theirs(kind, dtype, **more))
    model = folder(tmp_path / "model", moved(theirs(kind, dtype, **more)), tiny_tokenizer, shards)
    again = made_again(tmp_path, base, model)
    assert tensors(again) == tensors(model)
    assert others(again) == others(model)
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in model.iterdir())
    tokens = torch.randint(0, 512, (2, 9))
    one, other = (AutoModelForCausalLM.from_pretrained(path) for path in (model, again))
    assert torch.equal(logits(one, tokens), logits(other, tokens))
    # The same again, byte for byte; and smaller than the model.
    assert weft_command("delta", "make", base, model, tmp_path / "delta2") == 0
    files = [sorted(path for path in (tmp_path / name).rglob("*") if path.is_file()) for name in ("delta", "delta2")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    size = sum(path.stat().st_size for path in (tmp_path / "delta").glob("*.bin"))
    assert size < 0.85 * sum(path.stat().st_size for path in model.glob("*.safetensors"))


@pytest.mark.xdist_group("ranks")
def test_a_run_of_ours_against_the_folder_that_it_began_from(ranks, tmp_path, run_yaml, tiny_tokenizer):
    """Its state is float32 and sharded, the base is bfloat16 with Hugging Face's names."""
    base = folder(tmp_path / "hf", theirs(dtype=torch.bfloat16), tiny_tokenizer)
    yaml = run_yaml(model=None, training={"steps": 2}, schedule={"warmup_steps": 1}, tokenizer=str(tiny_tokenizer))
    yaml.write_text(yaml.read_text() + f"model: {{from: {base}}}\n")
    ranks.run(yaml, 2)
    run = tmp_path / "runs" / "demo"
    again = made_again(tmp_path, base, run)
    one, other = weft.load_model(run).state_dict(), weft.load_model(again).state_dict()
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == torch.float32
        assert torch.equal(value.view(torch.int32), other[name].view(torch.int32)), name
    assert (again / "tokenizer" / "tokenizer.json").is_file()
    assert str(tmp_path) not in (tmp_path / "delta" / "model" / "model.json").read_text()
    # And its export, against the import: Hugging Face's names on both sides again.
    assert weft_command("import", base, tmp_path / "imported") == 0
    assert weft_command("export", run, tmp_path / "exported") == 0
    assert weft_command("delta", "make", tmp_path / "imported", tmp_path / "exported", tmp_path / "delta2") == 0
    assert weft_command("delta", "apply", tmp_path / "imported", tmp_path / "delta2", tmp_path / "again2") == 0
    assert tensors(tmp_path / "again2") == tensors(tmp_path / "exported")


def test_other_tensors_and_rows(tmp_path, capsys):
    """A resized vocabulary, another head, a buffer more and one less; every dtype that a file can have."""
    base = folder(tmp_path / "base", theirs(tie_word_embeddings=True))
    model = shutil.copytree(base, tmp_path / "model")
    state = load_file(model / "model.safetensors")
    save_file(state | {"gone": torch.ones(3)}, base / "model.safetensors", {"format": "pt"})
    state["model.embed_tokens.weight"] = torch.cat([state["model.embed_tokens.weight"], torch.randn(70, 32)])
    state["lm_head.weight"] = torch.randn(582, 32)
    state["model.norm.weight"] = state["model.norm.weight"][:20].clone()
    for dtype in (torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        state[f"odd.{dtype}"] = torch.randint(0, 2, (5, 3)).to(dtype)
    state |= {"odd.fp8": torch.randn(7).to(torch.float8_e4m3fn), "odd.scalar": torch.tensor(3.0)}
    state |= {"odd.none": torch.empty(0, 4), "odd.nan": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])}
    save_file(state, model / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    again = made_again(tmp_path, base, model)
    assert tensors(again) == tensors(model)
    said = capsys.readouterr().err
    assert "not in the base: lm_head.weight, odd.fp8, odd.nan and 9 more" in said
    assert "only in the base: gone" in said
    assert "model.embed_tokens.weight: [512, 32] in the base, [582, 32] in the model" in said
    # And the other way round, to fewer rows.
    assert weft_command("delta", "make", model, base, tmp_path / "back") == 0
    assert weft_command("delta", "apply", model, tmp_path / "back", tmp_path / "base2") == 0
    assert tensors(tmp_path / "base2") == tensors(base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_any_bits_there_are(dtype):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    low, high = torch.iinfo(integers).min, torch.iinfo(integers).max
    model, base = (torch.randint(low, high, (301, 7), dtype=integers).view(dtype) for _ in range(2))
    for beside in (None, base, base[:100], base[:0]):
        found = decode(encode(model, beside), beside, dtype, (301, 7))
        assert torch.equal(found.view(integers), model.view(integers))


def test_a_large_tensor_goes_through_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.checkpoint.saved_tensor.BLOCK", 1000)
    base, model = folder(tmp_path / "base", theirs()), folder(tmp_path / "model", moved(theirs()), shards=SMALL)
    assert weft_command("import", base, tmp_path / "ours") == 0
    assert tensors(made_again(tmp_path, tmp_path / "ours", model)) == tensors(model)
    manifest = json.loads((tmp_path / "delta" / "delta.json").read_text())
    assert {line["rows"] for line in manifest["tensors"].values()} == {4, 7, 250}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A base, and a delta against it."""
    path = tmp_path_factory.mktemp("whole")
    base = folder(path / "base", theirs())
    model = folder(path / "model", moved(theirs()))
    assert weft_command("delta", "make", base, model, path / "delta") == 0
    return path


def rewritten(path, edit):
    """Another delta.json, with the digest that belongs to it."""
    content = json.loads((path / "delta.json").read_text())
    del content["digest"]
    edit(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / "delta.json").write_text(json.dumps(content | {"digest": digest}))


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def change(path, edit):
    state = load_file(path / "model.safetensors")
    edit(state)
    save_file(state, path / "model.safetensors", {"format": "pt"})


NORM = "model.norm.weight"
DAMAGES = {
    "one number": (
        lambda b, d: change(b, lambda s: s[NORM].mul_(2)),
        f"not made against this base: .*{NORM} .*; give the base",
    ),
    "missing": (
        lambda b, d: change(b, lambda s: s.pop(NORM)),
        f"this base: the base has no {NORM}; give the base",
    ),
    "shape": (
        lambda b, d: change(b, lambda s: s.update({NORM: torch.ones(3)})),
        r"is float32 \[3\] instead of float32 \[32\]; give the base",
    ),
    "delta": (lambda b, d: flip(next(d.glob("*.bin")), 40), "damaged delta: .* differs"),
    "end of delta": (lambda b, d: flip(next(d.glob("*.bin"))), "damaged delta: .* differs"),
    "half": (
        lambda b, d: (f := next(d.glob("*.bin"))).write_bytes(f.read_bytes()[:-9]),
        r"damaged delta: delta-0\S+ has",
    ),
    "gone": (lambda b, d: next(d.glob("*.bin")).unlink(), "damaged delta: delta-00001-of-00001.bin is missing"),
    "manifest": (lambda b, d: flip(d / "delta.json", 500), "delta.json: "),
    "config": (lambda b, d: flip(d / "model" / "config.json", 5), "config.json: .* of the delta is missing or damaged"),
    "version": (lambda b, d: rewritten(d, lambda c: c.update(version=2)), "delta.json: version 2 "),
    "keys": (lambda b, d: rewritten(d, lambda c: c.pop("removed")), "delta.json: invalid content .*again"),
    "dtype": (lambda b, d: rewritten(d, lambda c: c["tensors"][NORM].update(dtype="nn")), f"{NORM} has a dtype"),
    "place": (
        lambda b, d: rewritten(d, lambda c: c["tensors"][NORM].update(place="../evil.safetensors")),
        "not a file name that Weft writes; do not use",
    ),
    "no delta": (lambda b, d: shutil.rmtree(d), "not a delta.* `weft delta make`"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_wrong_bases_and_damaged_deltas(tmp_path, whole, capsys, case):
    damage, message = DAMAGES[case]
    base, delta = (shutil.copytree(whole / name, tmp_path / name) for name in ("base", "delta"))
    damage(base, delta)
    capsys.readouterr()
    assert weft_command("delta", "apply", base, delta, tmp_path / "out") == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("adding")]
    assert len(said) == 1
    assert re.search(message, said[0]), said
    assert not {"out", ".out.partial"} & {entry.name for entry in tmp_path.iterdir()}


@pytest.mark.parametrize("pickled", [False, True])
def test_plain_differences_as_fastchat_has_them(tmp_path, capsys, pickled):
    """apply_delta's sum, of tensors of transformers' own."""
    base, model = theirs(dtype=torch.float16), moved(theirs(dtype=torch.float16), 0.1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    start = folder(tmp_path / "base", base)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            parameter -= base.state_dict()[name]
    delta = folder(tmp_path / "plain", model, shards=SMALL)
    differences = {name: value.clone() for name, value in model.state_dict().items()}
    flags = ["--allow-pickle"] if pickled else []
    if pickled:
        as_bins(delta)
        assert weft_command("delta", "apply", start, delta, tmp_path / "out") == 2
        assert "--allow-pickle" in capsys.readouterr().err
    assert weft_command("delta", "apply", start, delta, tmp_path / "out", *flags) == 0
    assert "plain differences" in capsys.readouterr().err
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, value in found.items():
        assert torch.equal(value, (base.state_dict()[name].float() + differences[name].float()).half())
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-3)

    longer = load_file(start / "model.safetensors")
    longer["model.embed_tokens.weight"] = longer["model.embed_tokens.weight"][:500].clone()
    save_file(longer, start / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    assert weft_command("delta", "apply", start, delta, tmp_path / "out2", *flags) == 2
    said = capsys.readouterr().err
    assert "`weft resize --vocab-size 512`" in said
    assert said.count("\n") == 1
