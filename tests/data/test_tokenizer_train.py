"""Training a tokenizer: the same text gives the same bytes; samples are even; nothing half-made is left."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import tokenizer_cases as cases
import tokenizers

from weft.cli.main import main
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.data.tokenizers.train import split_long_words, subsample


def train(*arguments):
    return main(["data", "train-tokenizer", *map(str, arguments)])


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in cases.prose()), encoding="utf-8")
    return file


def test_the_same_text_gives_the_same_bytes_with_special_tokens_first(tmp_path, corpus):
    arguments = (corpus, "--vocab-size", 600, "--special", "<|im_start|>", "--special", "<|im_end|>")
    for out in ("a", "b"):
        assert train(*arguments, "--out", tmp_path / out) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    tokenizer = Tokenizer.load(tmp_path / "a")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (600, 0)
    assert tokenizer.encode("<|im_start|>a<|im_end|><|endoftext|>")[::2] == [1, 2]
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(theirs) == 600
    assert theirs.decode(theirs("<|im_start|>a<|im_end|>")["input_ids"], skip_special_tokens=True) == "a"
    ids, _ = tokenizer.encode_batch(cases.prose())
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    assert ids.tolist() == [id for text in cases.prose() for id in made.encode(text).ids]
    assert not tokenizer.exact


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--vocab-size", 256), "at least 257"),
        (("--vocab-size", 257, "--special", "<a>"), "at least 258"),
        (("--vocab-size", 300, "--special", "<|endoftext|>"), "<|endoftext|>"),
        (("--vocab-size", 300, "--special", ""), "empty"),
        (("--vocab-size", 1_000_000_000), "at most 10,000,000"),
        (("--vocab-size", "9" * 20), "at most 10,000,000"),
        (("--vocab-size", 300, "--max-bytes", "inf"), "number of bytes"),
        (("--vocab-size", 300, "--max-bytes", "nan"), "number of bytes"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, corpus, capsys, arguments, told):
    assert train(corpus, *arguments, "--out", tmp_path / "tok") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert told in lines[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_sample_is_evenly_spaced_and_no_larger_than_asked(tmp_path, corpus, capsys):
    texts = [f"{number:04}" + "x" * (number % 90) for number in range(2000)]
    total = sum(map(len, texts))
    for most in (0, 1, total // 10, total // 3, total, 10 * total):
        taken = list(subsample(texts, most, total, lambda: 1.0))
        assert sum(map(len, taken)) <= most + 100
        assert sum(map(len, taken)) >= min(most, total) - 100
        assert most < 2 or len([t for t in taken if int(t[:4]) >= 1000]) / len(taken) == pytest.approx(0.5, abs=0.06)
    # Compressed: the texts are more than the files. Unknown: the first ones.
    assert sum(map(len, subsample(texts, 1000, total // 5, lambda: 1.0))) <= 1100
    assert (
        list(subsample(texts, 1000, None, lambda: 1.0)) == texts[: len(list(subsample(texts, 1000, None, lambda: 1.0)))]
    )
    size = corpus.stat().st_size
    assert train(corpus, "--vocab-size", 300, "--max-bytes", size // 4, "--out", tmp_path / "tok") == 0
    said = re.search(r"\((\d+) kB\)", capsys.readouterr().out)
    assert said is not None
    assert 0 < 1000 * int(said[1]) <= size // 4 + 500
    with open(tmp_path / "tok" / "tokenizer.json", "rb") as first:
        assert train(corpus, "--vocab-size", 300, "--max-bytes", size // 4, "--out", tmp_path / "tok2") == 0
        assert first.read() == (tmp_path / "tok2" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("text", ["", "{}", '{"text": ""}\n' * 3])
def test_without_any_text_there_is_no_tokenizer(tmp_path, capsys, text):
    (tmp_path / "in.jsonl").write_text(text.replace("{}", ""))
    assert train(tmp_path / "in.jsonl", "--vocab-size", 300, "--out", tmp_path / "tok") == 2
    assert "no text to learn from" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "tok").exists()


@pytest.mark.parametrize("character", ["a", "-", " ", "_", "\n", "\u6f22"])
def test_a_word_of_any_length_is_learned_from_in_time(tmp_path, character):
    # As one word these take minutes: merging within it costs its length squared.
    (tmp_path / "in.txt").write_text(f"some words {character * 300_000} and more", encoding="utf-8")
    began = time.monotonic()
    assert train(tmp_path / "in.txt", "--vocab-size", 300, "--out", tmp_path / "tok") == 0
    assert time.monotonic() - began < 10
    tokenizer = Tokenizer.load(tmp_path / "tok")
    assert len(tokenizer.encode(character * 600)) < 60


def test_only_words_of_more_than_a_thousand_characters_are_cut():
    assert list(split_long_words("")) == [""]
    for text in (*cases.prose(), "a" * 999, "a b" * 5000, "a1" * 5000, ("x" * 999 + " ") * 9):
        assert list(split_long_words(text)) == [text]
    for text in ("a" * 12_345, "word " * 333 + "=" * 5000 + " rest of it", "a" * 999 + " " * 5000, "_-" * 3000):
        pieces = list(split_long_words(text))
        assert "".join(pieces) == text
        longest = max(len(word) for piece in pieces for word in re.findall(r"[^\W\d_]+|\s+|(?:[^\w\s]|_)+", piece))
        assert longest <= 2000


@pytest.mark.parametrize("moment", ["reading", "merging"])
def test_ctrl_c_is_answered_at_once(tmp_path, moment):
    # Letters without blanks, each piece of which is another word: pairs are counted and merged for many seconds.
    letters = "".join(random.Random(3).choices("abcdefghijklmnop", k=2_000_000))
    (tmp_path / "in.txt").write_text(letters if moment == "merging" else "\n".join(letters))
    command = ["data", "train-tokenizer", str(tmp_path / "in.txt"), "--vocab-size", "60000", "--out", "tok"]
    if moment == "reading":
        command += ["--separator", r"\n"]
    program = subprocess.Popen(
        [sys.executable, "-m", "weft", *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in program.stderr:
        if line.startswith("reading"):
            break
    time.sleep(1.0 if moment == "merging" else 0.1)
    assert program.poll() is None
    program.send_signal(signal.SIGINT)
    told = program.communicate(timeout=5)[1].splitlines()
    assert program.returncode == 130
    assert told[-1] == "interrupted; nothing was written"
    assert not any("Traceback" in line or "panic" in line for line in told)
    assert os.listdir(tmp_path) == ["in.txt"]


def test_ctrl_c_leaves_nothing(tmp_path):
    # Text that keeps coming on standard input, until the program is stopped.
    program = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "weft",
            "data",
            "train-tokenizer",
            "-",
            "--vocab-size",
            "500",
            "--out",
            str(tmp_path / "tok"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    line = json.dumps({"text": "some words " * 100}).encode() + b"\n"
    for _ in range(20):
        program.stdin.write(line)
        program.stdin.flush()
        time.sleep(0.1)
    program.send_signal(signal.SIGINT)
    time.sleep(0.2)
    with contextlib.suppress(BrokenPipeError):
        program.stdin.close()
    assert program.wait(30) == 130
    assert os.listdir(tmp_path) == []
