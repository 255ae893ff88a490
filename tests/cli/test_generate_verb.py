"""`weft generate`: prompts from everywhere, where a text ends, and what it says of mistakes."""

import io
import json
import re
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from weft.cli.main import main
from weft.data.tokenizers.tokenizer import Tokenizer

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 56, "max_position_embeddings": 128, "sliding_window": 8,
}  # fmt: skip


@pytest.fixture
def their_folder(tmp_path, tiny_tokenizer):
    """A Hugging Face folder of a small model with random weights."""

    def make(vocab_size=512):
        torch.manual_seed(4)
        model = MistralForCausalLM(MistralConfig(vocab_size=vocab_size, **SHAPE, initializer_range=0.3))
        model.generation_config.eos_token_id = None
        model.save_pretrained(tmp_path / "theirs")
        for file in tiny_tokenizer.iterdir():
            shutil.copy(file, tmp_path / "theirs")
        return tmp_path / "theirs"

    return make


def written(capsys, *words):
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 0
    return capsys.readouterr().out


def mistake(capsys, *words):
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def test_text_of_a_hugging_face_folder_is_that_of_transformers(their_folder, tmp_path, capsys):
    folder = their_folder()
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("Kalo mi")
    model = AutoModelForCausalLM.from_pretrained(folder)
    new = model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False, eos_token_id=None)[0, len(ids) :]
    stop = int(new[20])
    greedy = ("Kalo mi", "--max-new-tokens", 30, "--temperature", 0)
    assert written(capsys, folder, *greedy) == "Kalo mi" + tokenizer.decode(new.tolist()) + "\n"
    # Chat models end a turn with a token that only generation_config.json knows.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, 511]}))
    shorter = "Kalo mi" + tokenizer.decode(new[: new.tolist().index(stop)].tolist()) + "\n"
    assert written(capsys, folder, *greedy) == shorter
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert written(capsys, tmp_path / "ours", *greedy) == shorter


def test_prompts_from_a_file(their_folder, tmp_path, capsys):
    folder, file = their_folder(), tmp_path / "prompts.txt"
    lines = [f"Kalo {chr(97 + number)}" for number in range(17)] + ["Kalo a", "Kalo a"]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "", " "]).encode())
    out = written(capsys, folder, "--prompts", file, "--max-new-tokens", 5)
    _, *parts = re.split(r"^\[(\d+)\] ", out, flags=re.MULTILINE)
    assert parts[::2] == [str(number) for number in range(1, 20)]
    texts = parts[1::2]
    for number in (5, 16):  # alone, and in another batch
        assert texts[number].strip() == written(capsys, folder, lines[number], "--max-new-tokens", 5).strip()
    assert len({texts[0].strip(), texts[17].strip(), texts[18].strip()}) == 3


def test_a_text_that_ends_at_the_maximum_length_is_reported(their_folder, capsys):
    folder = their_folder()
    with pytest.warns(UserWarning, match=r"a text ended at the maximum length of 9 tokens, before 128 new tokens; set"):
        short = written(capsys, folder, "Kalo mi ren", "--max-length", 9, "--temperature", 0)
    assert written(capsys, folder, "Kalo mi ren", "--max-new-tokens", 40, "--temperature", 0).startswith(short[:-1])


def test_a_prompt_of_no_text_begins_a_document(their_folder, capsys):
    folder = their_folder()
    assert written(capsys, folder, "", "--max-new-tokens", 5)
    assert written(capsys, folder, " ", "--max-new-tokens", 5).startswith(" ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no prompt was given; give a PROMPT, - for standard input, or --prompts FILE"),
        (["-", "-"], "only once; give '-' once"),
        (["a", "--top-p", "0"], "top_p is 0.0; set it to a number above 0, at most 1"),
        *(
            (
                ["a", "--temperature", value],
                f"temperature is {value}; set it to 0 (greedy decoding) or a finite number above 0",
            )
            for value in ("nan", "inf", "-1.0")
        ),
        (["a", "--lookup", "0"], "--lookup 0: set it to at least 1, or omit it"),
        (["a", "--regex", ""], "regex is empty, so that only the empty text matches; omit it, or give a pattern"),
        (["a", "--max-length", "1"], "max_length is 1; set it to at least 2"),
        (["ka lo " * 70], "prompt tokens and 128 new tokens do not fit in the model's maximum length of 128 tokens"),
        (["a", "--tp", "3"], "tensor parallelism over 3 ranks: 3 does not divide 4 attention heads"),
        (["a", "--tp", "2", "--top-p", "7"], "top_p is 7.0"),
        (["a", "--max-new-tokens", "0"], "max_new_tokens is 0; set it to at least 1"),
        (["--prompts", "none.txt"], "none.txt: the file of prompts cannot be read: No such file or directory"),
        (["--prompts", "blank.txt"], "blank.txt: the file has no prompts; write one"),
        (["--prompts", "odd.txt"], "odd.txt:2: this prompt is not UTF-8 text; convert the file to UTF-8"),
    ],
)
def test_mistakes_are_one_line(their_folder, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.launch.local.launch_local", None)  # no ranks are started
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "odd.txt").write_bytes(b"a\n\xff\n")
    assert said in mistake(capsys, their_folder(), *words)


def test_another_models_tokenizer(their_folder, capsys):
    line = mistake(capsys, their_folder(vocab_size=40), "Kalo mi", "--max-new-tokens", 3)
    assert "the model has ids 0 to 39; " in line


@pytest.mark.parametrize("prompts", [["Kalo mi"], ["Kalo mi", "Ka"]])
def test_what_is_written_before_ctrl_c_is_shown(their_folder, monkeypatch, capsys, prompts):
    from weft.generation import text

    def interrupted(engine, prompts, *args, **kwargs):
        pieces = stream_pieces(engine, prompts, *args, **kwargs)
        yield from (next(pieces) for _ in range(3 * len(prompts)))
        raise KeyboardInterrupt

    stream_pieces, folder = text.stream_pieces, their_folder()
    three = written(capsys, folder, *prompts, "--max-new-tokens", 3)
    monkeypatch.setattr(text, "stream_pieces", interrupted)
    assert main(["generate", str(folder), *prompts, "--max-new-tokens", "9"]) == 130
    assert capsys.readouterr().out == three


@pytest.mark.parametrize(("prompt", "named"), [("-", "the prompt on standard input"), ("ab\udcff", "the prompt 'ab")])
def test_a_prompt_that_is_not_utf8_is_one_line(run_yaml, tmp_path, monkeypatch, capsys, prompt, named):
    short = {"training": {"steps": 1}, "schedule": {"warmup_steps": 0}, "data": {"validation": None}}
    assert main(["train", str(run_yaml(**short, log={"trackers": []}))]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff\xfe"), errors="surrogateescape"))
    assert main(["generate", str(tmp_path / "runs" / "demo"), prompt, "--max-new-tokens", "4"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(named)
    assert "has invalid UTF-8 at byte 2; convert" in line


def test_stats_and_their_cost(their_folder, capsys):
    folder = their_folder()
    prompts = ["kalo mi ren ka", "ren kalo"]
    plain = written(capsys, folder, *prompts, "--max-new-tokens", 6, "--temperature", 0)
    assert main(["generate", str(folder), *prompts, "--max-new-tokens=6", "--temperature=0", "--stats"]) == 0
    said = capsys.readouterr()
    assert said.out == plain
    assert re.search(
        r"12 new tokens in [\d.]+ s \([\d.,]+ tokens/s\); .* 0 prompt tokens from the cache; 6 steps$", said.err.strip()
    )
    words = ["--max-new-tokens=6", "--temperature=0", "--stats", "--batch-invariant"]
    assert main(["generate", str(folder), *prompts, *words]) == 0
    said = capsys.readouterr()
    assert said.out == plain
    assert said.err.strip().endswith("batch-invariant: 12 forward passes instead of 6")


def test_texts_that_follow_a_schema_a_regex_or_a_grammar(their_folder, tmp_path, capsys):
    folder, file = their_folder(), tmp_path / "schema.json"
    file.write_text(
        '{"type": "object", "required": ["a"], "properties": {"a": {"enum": [1, true]}}, "maxProperties": 1}'
    )
    assert json.loads(
        written(capsys, folder, "Kalo: ", "--json-schema", file, "--max-new-tokens", 99)[len("Kalo: ") :]
    )["a"] in (1, True)
    assert re.fullmatch(r"Kalo[ab]{3}\n", written(capsys, folder, "Kalo", "--regex", "[ab]{3}", "--max-new-tokens", 9))
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: "x" start? "y"')
    grown = written(capsys, folder, "Kalo", "--grammar", grammar, "--max-new-tokens", 100, "--seed", 2)[4:-1]
    assert grown == "x" * (len(grown) // 2) + "y" * (len(grown) // 2)
    file.write_text('{"items": {"not": {}}}')
    refused = mistake(capsys, folder, "Kalo", "--json-schema", file)
    assert "schema.json: json_schema: /items/not: this keyword cannot be enforced; remove it" in refused
    assert "unclosed group" in mistake(capsys, folder, "Kalo", "--regex", "(")
    assert "none.json: this file cannot be read" in mistake(
        capsys, folder, "a", "--json-schema", tmp_path / "none.json"
    )


def test_proposals_change_no_greedy_text(their_folder, tmp_path, capsys):
    folder = their_folder()
    words = ["kalo mi ren ka kalo mi", "--max-new-tokens=12", "--temperature=0"]
    plain = written(capsys, folder, *words)
    assert written(capsys, folder, *words, "--lookup", 4) == plain
    assert main(["generate", str(folder), *words, "--draft", str(folder), "--draft-tokens=3", "--stats"]) == 0
    said = capsys.readouterr()
    assert said.out == plain
    assert said.err.strip().endswith("; 3 steps; 9 of 9 proposed tokens accepted")
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    line = mistake(capsys, folder, *words, "--draft", other)
    assert str(other) in line
    assert str(folder) in line
    assert line.endswith("; use a draft model with the same tokenizer")
