"""Packing: every document is packed or counted under a reason, in Megatron's format, whole or not at all."""

import json
import struct

import numpy as np
import pytest
import tokenizers

from weft.cli.main import main
from weft.data.stores.store import TokenStore
from weft.data.tokenizers.tokenizer import Tokenizer

TRICKY = [
    "",
    "a",
    "two words\r\n",
    "a literal <|endoftext|> inside",
    "\U00016ebb\U00016ea0 new letters",
    "emoji 🎉 né",
    "x" * 5000,
]


def write_lines(path, records):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in records), encoding="utf-8")
    return path


def pack(*arguments):
    return main(["data", "pack", *map(str, arguments)])


def test_ids_are_those_of_the_tokenizers_library_in_megatrons_format(tmp_path, tiny_tokenizer):
    texts = TRICKY * 9
    assert pack(write_lines(tmp_path / "in.jsonl", texts), "--tokenizer", tiny_tokenizer, "--out", tmp_path / "s") == 0
    index, data = (tmp_path / "s" / "tokens.idx").read_bytes(), (tmp_path / "s" / "tokens.bin").read_bytes()
    magic, version, code, count, boundaries = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version, code, count, boundaries) == (b"MMIDIDX\0\0", 1, 8, len(texts), len(texts) + 1)
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    offsets = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    assert struct.unpack_from(f"<{boundaries}q", index, 34 + 12 * count) == tuple(range(boundaries))
    reference = tokenizers.Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    end = reference.token_to_id("<|endoftext|>")
    for text, length, offset in zip(texts, lengths, offsets, strict=True):
        ids = struct.unpack_from(f"<{length}H", data, offset)
        assert list(ids) == [*reference.encode(text, add_special_tokens=False).ids, end]
    info = TokenStore(tmp_path / "s").info
    assert (info.documents, info.empty_documents) == (len(texts), 9)
    assert info.bytes == sum(len(text.encode()) for text in texts)


def test_the_same_input_gives_the_same_bytes_and_a_second_call_nothing_to_do(
    tmp_path, tiny_corpus, tiny_tokenizer, capsys
):
    for out in ("a", "b"):
        assert pack(tiny_corpus / "train", "--tokenizer", tiny_tokenizer, "--out", tmp_path / out) == 0
    for name in ("tokens.bin", "tokens.idx", "store.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    capsys.readouterr()
    assert pack(tiny_corpus / "train", "--tokenizer", tiny_tokenizer, "--out", tmp_path / "a") == 0
    assert "up to date" in capsys.readouterr().out
    assert pack(tiny_corpus / "heldout", "--tokenizer", tiny_tokenizer, "--out", tmp_path / "a") == 2


BROKEN = {
    b'{"text": "cut\n': "broken JSON",
    b'{"text": null}\n': "null",
    b'{"other": "x"}\n': "no field",
    b'{"text": "\xff"}\n': "UTF-8",
    b'{"text": 7}\n': "not text",
    b"[1]\n": "not a JSON object",
    b'{"text": "\\ud800"}\n': "UTF-8",
}


@pytest.mark.parametrize(("line", "reason"), BROKEN.items(), ids=list(BROKEN.values()))
def test_what_is_no_document_is_reported_with_its_line(tmp_path, tiny_tokenizer, capsys, line, reason):
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b'{"text": ""}\n')
    arguments = (tmp_path / "in.jsonl", "--tokenizer", tiny_tokenizer, "--out", tmp_path / "s")
    assert pack(*arguments) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "in.jsonl:3: " in told
    assert reason in told
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]
    assert pack(*arguments, "--on-error", "skip") == 0
    info = TokenStore(tmp_path / "s").info
    assert (info.documents, info.empty_documents, info.blank_lines, sum(info.rejected.values())) == (2, 1, 1, 1)
    reject = json.loads((tmp_path / "s" / "rejects.jsonl").read_text())
    assert pack(*arguments) == 2  # not the store that was packed with "skip"
    assert "rejected 1 document" in capsys.readouterr().err
    assert pack(*arguments, "--on-error", "skip") == 0
    assert reject["line"] == 3
    assert reason in reject["reason"]


def test_a_folder_of_text_skips_binary_files_and_says_so(tmp_path, tiny_tokenizer, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    (folder / "b.bin").write_bytes(b"\0\1\2")
    assert pack(folder, "--tokenizer", tiny_tokenizer, "--out", tmp_path / "s") == 0
    assert "skipped 1 binary" in capsys.readouterr().err
    assert TokenStore(tmp_path / "s").info.documents == 1


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda s: (s / "tokens.bin").write_bytes((s / "tokens.bin").read_bytes()[:-1]), "tokens.bin: "),
        (lambda s: (s / "tokens.idx").write_bytes(b"x" + (s / "tokens.idx").read_bytes()[1:]), "MMIDIDX"),
        (lambda s: (s / "tokens.idx").write_bytes((s / "tokens.idx").read_bytes()[:-1]), "tokens.idx: "),
        (lambda s: (s / "store.json").write_text("{"), "store.json"),
        (lambda s: (s / "store.json").unlink(), "store.json"),
    ],
)
def test_a_damaged_store_is_one_clear_line(tmp_path, tiny_corpus, tiny_tokenizer, capsys, damage, told):
    assert pack(tiny_corpus / "heldout", "--tokenizer", tiny_tokenizer, "--out", tmp_path / "s") == 0
    damage(tmp_path / "s")
    capsys.readouterr()
    assert main(["data", "inspect", str(tmp_path / "s")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert told in lines[0]


def test_a_flipped_byte_is_found_by_verify(tmp_path, tiny_corpus, tiny_tokenizer, capsys):
    assert pack(tiny_corpus / "heldout", "--tokenizer", tiny_tokenizer, "--out", tmp_path / "s") == 0
    data = bytearray((tmp_path / "s" / "tokens.bin").read_bytes())
    assert main(["data", "inspect", str(tmp_path / "s"), "--verify", "--tokenizer", str(tiny_tokenizer)]) == 0
    data[100] ^= 1
    (tmp_path / "s" / "tokens.bin").write_bytes(data)
    assert main(["data", "inspect", str(tmp_path / "s"), "--verify"]) == 2


def test_training_a_tokenizer_twice_gives_the_same_bytes_and_transformers_loads_it(tmp_path, tiny_corpus):
    from transformers import AutoTokenizer

    for out in ("a", "b"):
        command = [
            "data",
            "train-tokenizer",
            str(tiny_corpus / "train"),
            "--vocab-size",
            "300",
            "--out",
            str(tmp_path / out),
        ]
        assert main(command) == 0
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
    ours, theirs = Tokenizer.load(tmp_path / "a"), AutoTokenizer.from_pretrained(tmp_path / "a")
    assert ours.vocab_size == len(theirs) == 300
    assert theirs.eos_token_id == ours.eod_id
    for text in TRICKY:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
    assert main(["data", "train-tokenizer", str(tiny_corpus), "--vocab-size", "256", "--out", str(tmp_path / "c")]) == 2


def test_streaming_never_gives_half_a_character(tiny_tokenizer):
    tokenizer = Tokenizer.load(tiny_tokenizer)
    text = "né 🎉 日本語 end" * 20
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.step(id) for id in tokenizer.encode(text)]
    assert "".join(pieces) + decoder.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_tokenizer_that_states_no_end_of_document_is_refused(tmp_path, tiny_tokenizer, tiny_corpus, capsys):
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_bytes((tiny_tokenizer / "tokenizer.json").read_bytes())
    assert pack(tiny_corpus, "--tokenizer", tmp_path / "tok", "--out", tmp_path / "s") == 2
    assert "end-of-document" in capsys.readouterr().err


def test_encode_batch_keeps_order_where_some_texts_go_the_slow_way(tiny_tokenizer):
    tokenizer = Tokenizer.load(tiny_tokenizer)
    ids, lengths = tokenizer.encode_batch(TRICKY)
    assert [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] == [tokenizer.encode(t) for t in TRICKY]


def test_a_prompts_last_blank_is_left_to_the_model(tiny_tokenizer):
    tokenizer = Tokenizer.load(tiny_tokenizer)
    prompt = tokenizer.prompt("ka ")
    assert (prompt.text, prompt.ids) == ("ka", tokenizer.encode("ka"))
    assert all(tokenizer.decode([id]).startswith(" ") for id in prompt.first)
    assert tokenizer.encode("ka lo")[len(prompt.ids)] in prompt.first
    assert tokenizer.prompt("ka").first is None
    assert tokenizer.prompt("").ids == [tokenizer.eod_id]


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("t.txt", ["--field", "X"], ("--field X: ", "records", "plain text", "--format")),
        ("t.txt", ["--template", "{x}"], ("--template: ", "records", "plain text", "--format")),
        ("t.jsonl", ["--separator", "x"], ("--separator: ", "plain text", " jsonl;", "--format")),
        ("t.csv", ["--separator", "x"], ("--separator: ", "plain text", " csv;", "--format")),
    ],
)
def test_options_for_other_kinds_of_files_are_refused(tmp_path, capsys, tiny_tokenizer, name, options, told):
    (tmp_path / name).write_text('{"text": "some", "X": "x"}\n')
    for verb in (["pack", "--tokenizer", str(tiny_tokenizer)], ["train-tokenizer", "--vocab-size", "300"]):
        assert main(["data", *verb, str(tmp_path / name), "--out", str(tmp_path / "out"), *options]) == 2
        said = capsys.readouterr().err
        assert all(part in said for part in told)
        assert len(said.splitlines()) == 1
    # Where one file at least is of the kind, they are of use.
    for other in ("u.txt", "u.jsonl"):
        (tmp_path / other).write_text('{"text": "other", "X": "x", "x": "y"}\n')
    both = [tmp_path / "u.txt", tmp_path / "u.jsonl"]
    assert pack(*both, "--tokenizer", tiny_tokenizer, "--out", tmp_path / "out", *options) == 0


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.jsonl", "\n", "no document in 1 file (all blank); name files that contain records with text"),
        ("a.csv", "text\n", "no document in 1 file (all blank); name files that contain rows with text"),
        ("a.txt", "\0", "no document in 1 file (skipped 1 binary); name files that contain text"),
        ("a.txt", "", "no text in 1 file (1 empty document); name files that contain text"),
        ("a.jsonl", '{"text": ""}\n' * 2, "no text in 1 file (2 empty documents); name files that contain records"),
    ],
)
def test_files_without_documents_are_reported_with_what_fits_them(tmp_path, capsys, tiny_tokenizer, name, text, wanted):
    (tmp_path / name).write_text(text)
    assert pack(tmp_path / name, "--tokenizer", tiny_tokenizer, "--out", tmp_path / "s") == 2
    assert wanted in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_files_without_text_beside_others_are_named(tmp_path, capsys, tiny_tokenizer):
    for name in ("a.txt", "b.jsonl", "c.jsonl", "d.txt"):
        (tmp_path / name).write_text("\n" if name == "c.jsonl" else "")
    (tmp_path / "e.jsonl").write_text('{"text": ""}\n{"text": "some"}\n')
    for _ in range(2):  # also if the store is up to date
        assert pack(tmp_path, "--tokenizer", tiny_tokenizer, "--out", tmp_path.with_name("s")) == 0
        names = ", ".join(str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.jsonl"))
        assert f"warning: no text in 4 files ({names} and 1 more; see " in capsys.readouterr().err
