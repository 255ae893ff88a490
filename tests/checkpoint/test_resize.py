"""`weft resize`, beside transformers' `resize_token_embeddings`."""

import json
import shutil

import pytest
import torch
from test_huggingface import folder, logits, theirs, weft_command
from transformers import AutoModelForCausalLM, AutoTokenizer

import weft

ROWS = ("embed_tokens.weight", "lm_head.weight")


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_same_but_rows(before, after, kept):
    """All other tensors and the first `kept` rows have the same bits. Returns the new rows."""
    assert before.keys() == after.keys()
    for name, value in before.items():
        rows = slice(kept if name in ROWS else None)
        assert after[name].dtype == value.dtype
        assert torch.equal(bits(after[name][rows]), bits(value[rows])), name
    return {name: after[name][kept:] for name in ROWS if name in after}


KINDS = {"untied": {}, "tied": {"tie_word_embeddings": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_transformers_does_it(tmp_path, kind, dtype):
    """The model with more rows gives the logits that transformers' resized one gives, given the same new rows."""
    model = theirs("llama", dtype, **KINDS[kind])
    source = folder(tmp_path / "hf", model)
    assert weft_command("import", source, tmp_path / "ours") == 0
    for number, start in enumerate((source, tmp_path / "ours")):
        out = tmp_path / f"out{number}"
        assert weft_command("resize", start, out, "--vocab-size", 515, "--multiple", 64) == 0
        before, after = weft.load_model(start).state_dict(), weft.load_model(out).state_dict()
        new = assert_same_but_rows(before, after, 512)
        assert set(new) == {name for name in ROWS if name in before}
        for name, rows in new.items():
            mean = before[name].double().mean(dim=0).to(dtype)
            assert rows.shape == (64, 32)
            assert torch.equal(rows, mean.expand(64, 32))

    resized = theirs("llama", dtype, **KINDS[kind])
    resized.resize_token_embeddings(515, pad_to_multiple_of=64, mean_resizing=False)
    with torch.no_grad():
        resized.get_input_embeddings().weight[512:] = new[ROWS[0]]
        resized.get_output_embeddings().weight[512:] = new.get(ROWS[1], new[ROWS[0]])
    tokens = torch.randint(0, 576, (2, 9))
    assert weft_command("export", tmp_path / "out1", tmp_path / "back") == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert back.config.vocab_size == 576
    assert all(torch.equal(value, resized.state_dict()[name]) for name, value in back.state_dict().items())
    if dtype == torch.float32:  # casting a model of transformers' to bfloat16 rounds its rotations too
        assert torch.equal(logits(back, tokens), logits(resized.eval(), tokens))


def test_ways_to_make_new_rows_and_the_same_bytes_again(tmp_path):
    source = folder(tmp_path / "hf", theirs())
    before = weft.load_model(source).state_dict()
    for init in ("zero", "normal"):
        for number in (0, 1):
            assert (
                weft_command("resize", source, tmp_path / f"{init}{number}", "--vocab-size", 2512, "--init", init) == 0
            )
        new = assert_same_but_rows(before, weft.load_model(tmp_path / f"{init}0").state_dict(), 512)
        for rows in new.values():
            assert rows.std() == pytest.approx(0.02 if init == "normal" else 0.0, rel=0.02)
        files = [sorted((tmp_path / f"{init}{number}").glob("*")) for number in (0, 1)]
        assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_new_tokens_of_a_tokenizer_are_trained_alone(tmp_path, run_yaml, tiny_tokenizer, tiny_corpus):
    """From a run to a model with more tokens, whose old rows stay; as a user goes it."""
    assert weft_command("train", run_yaml(training={"steps": 2}, schedule={"warmup_steps": 1})) == 0
    bigger = AutoTokenizer.from_pretrained(tiny_tokenizer)
    bigger.add_special_tokens({"additional_special_tokens": ["<one>", "<two>"], "pad_token": "<pad>"})
    bigger.save_pretrained(tmp_path / "bigger")
    run, out = tmp_path / "runs" / "demo", tmp_path / "resized"
    assert weft_command("resize", run, out, "--tokenizer", tmp_path / "bigger") == 0
    new = assert_same_but_rows(weft.load_model(run).state_dict(), weft.load_model(out).state_dict(), 512)
    assert {rows.shape[0] for rows in new.values()} == {3}
    assert (out / "tokenizer" / "tokenizer.json").read_bytes() == (tmp_path / "bigger" / "tokenizer.json").read_bytes()
    assert json.loads((out / "optimizer.json").read_text()) is None

    store = tmp_path / "store"
    text = tmp_path / "text.txt"
    text.write_text("<one>Kalo mi<two>ren\n" * 600)
    assert weft_command("data", "pack", text, "--tokenizer", tmp_path / "bigger", "--out", store) == 0
    yaml = run_yaml(
        run={"name": "new"},
        model=None,
        tokenizer=str(tmp_path / "bigger"),
        data={"train": str(store), "validation": None},
        training={"steps": 3, "only_rows_from": 512},
        schedule={"warmup_steps": 1},
    )
    yaml.write_text(yaml.read_text() + f"model: {{from: {out}}}\n")
    assert weft_command("train", yaml) == 0
    trained = weft.load_model(tmp_path / "runs" / "new").state_dict()
    moved = assert_same_but_rows(weft.load_model(out).state_dict(), trained, 512)
    assert all((rows[:2] != new[name][:2]).any(dim=1).all() for name, rows in moved.items())


def test_fewer_rows_and_the_same(tmp_path, tiny_tokenizer, capsys):
    source = folder(tmp_path / "hf", theirs())
    capsys.readouterr()
    before = weft.load_model(source).state_dict()
    assert weft_command("resize", source, tmp_path / "out", "--vocab-size", 500) == 2
    said = capsys.readouterr().err
    assert "the model has 512 rows, and a resize to 500 drops the last 12; use --shrink" in said
    assert said.count("\n") == 1
    assert weft_command("resize", source, tmp_path / "less", "--vocab-size", 500, "--shrink") == 0
    assert weft_command("resize", source, tmp_path / "same", "--vocab-size", 512) == 0
    assert assert_same_but_rows(before, weft.load_model(tmp_path / "same").state_dict(), 512)[ROWS[0]].numel() == 0
    less = weft.load_model(tmp_path / "less").state_dict()
    for name, value in before.items():
        assert torch.equal(less[name], value[:500] if name in ROWS else value)

    for file in tiny_tokenizer.iterdir():
        shutil.copy(file, source)
    capsys.readouterr()
    assert weft_command("resize", source, tmp_path / "out", "--vocab-size", 500, "--shrink") == 2
    assert "the tokenizer has 512 tokens, more than the 500 rows" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_special_ids_follow_the_new_tokenizer(tmp_path, tiny_tokenizer):
    model = theirs(eos_token_id=[3, 4], pad_token_id=None)
    source = folder(tmp_path / "hf", model, tiny_tokenizer)
    bigger = AutoTokenizer.from_pretrained(tiny_tokenizer)
    bigger.add_special_tokens({"pad_token": "<pad>"})
    bigger.save_pretrained(tmp_path / "bigger")
    assert weft_command("resize", source, tmp_path / "out", "--tokenizer", tmp_path / "bigger", "--multiple", 8) == 0
    assert weft_command("export", tmp_path / "out", tmp_path / "back") == 0
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "back").config
    assert (config.vocab_size, config.pad_token_id) == (520, 512)
    assert config.eos_token_id == bigger.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path / "back").pad_token_id == 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vocab-size", "0"), "--vocab-size 0: use a number of at least 1"),
        (("--vocab-size", "600", "--multiple", "0"), "--multiple 0"),
        (("--vocab-size", "600", "--tokenizer", "x"), "not allowed with"),
        ((), "required"),
        (("--tokenizer", "nowhere"), "nowhere"),
    ],
)
def test_mistakes(tmp_path, capsys, arguments, message):
    source = folder(tmp_path / "hf", theirs())
    capsys.readouterr()
    assert weft_command("resize", source, tmp_path / "out", *arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
