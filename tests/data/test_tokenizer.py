"""Ids are those of the `tokenizers` library for every text; streams show what decoding the whole shows."""

import json
import time

import numpy as np
import pytest
import tokenizer_cases as cases
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from weft.cli.main import main
from weft.data.tokenizers import exactness
from weft.data.tokenizers.copy import copy_tokenizer
from weft.data.tokenizers.exactness import PATTERNS, split_document
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError

TEXTS = cases.prose()


def rows(tokenizer, texts, **options):
    ids, lengths = tokenizer.encode_batch(texts, **options)
    assert ids.dtype == np.uint32
    assert lengths.dtype == np.int64
    assert len(lengths) == len(texts)
    assert lengths.sum() == len(ids)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(texts) else []


def expected(made, texts):
    return [encoding.ids for encoding in made.encode_batch_fast(texts, add_special_tokens=False)]


def assert_same(tokenizer, made, texts, fast=True):
    found = rows(tokenizer, texts)
    for text, ours, theirs in zip(texts, found, expected(made, texts), strict=True):
        assert ours == theirs, ascii(text)
    assert tokenizer.exact is not fast, tokenizer.reason


BYTE_LEVEL = [(pattern, False) for pattern in PATTERNS] + [("qwen2", True)]
SHORT = [("llama3", False), ("qwen2", True)]
NAMES = [f"{pattern}{'-nfc' * nfc}" for pattern, nfc in BYTE_LEVEL]


@pytest.mark.parametrize(
    ("pattern", "nfc"),
    [pytest.param(*one, marks=() if one in SHORT else pytest.mark.long) for one in BYTE_LEVEL],
    ids=NAMES,
)
def test_every_character_beside_every_class_of_others(tmp_path, pattern, nfc):
    made = cases.by_pairs(pattern, nfc=nfc)
    tokenizer = Tokenizer.load(cases.save(made, tmp_path))
    # All of them for the tokenizers that Weft trains and for the pattern that knows most classes.
    step = 1 if pattern in ("llama3", "o200k") else 4
    assert_same(tokenizer, made, list(map(cases.in_contexts, cases.characters()[::step])))


@pytest.mark.parametrize(("pattern", "nfc"), BYTE_LEVEL, ids=NAMES)
def test_nasty_texts_by_a_trained_tokenizer(tmp_path, pattern, nfc):
    made = cases.trained(pattern, TEXTS, nfc=nfc)
    tokenizer = Tokenizer.load(cases.save(made, tmp_path))
    texts = cases.nasty_texts(11, 600) + TEXTS
    texts += [f"{text}{cases.SPECIAL}{text}" for text in texts[::7]]
    assert_same(tokenizer, made, texts)
    # One large document, which both cut into parts; and with a doubtful character, of which only a part goes slowly.
    large = " ".join(TEXTS) * (30 if pattern == "llama3" else 1)  # more than gigatoken encodes in one thread
    assert_same(tokenizer, made, [large, (" ".join(TEXTS) + " \u0c5c\U00016ebb ") * 2, ""])


@pytest.mark.parametrize("shape", ["prepend", "gemma", "always", "first", "never"])
def test_bpe_on_whole_texts_with_byte_fallback(tmp_path, shape):
    made = cases.llama2_like(TEXTS, shape)
    tokenizer = Tokenizer.load(cases.save(made, tmp_path, "</s>"))
    texts = cases.nasty_texts(12, 600) + TEXTS + [f"a </s>{text} <s> b" for text in TEXTS[:20]]
    assert_same(tokenizer, made, texts)
    assert_same(tokenizer, made, list(map(cases.in_contexts, cases.characters()[::9])))


def other_kinds():
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("▁", -2.0), ("b", -3.0)], unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "b": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    lowered = cases.trained("gpt2", TEXTS)
    lowered.normalizer = normalizers.Lowercase()
    prefixed = cases.trained("gpt2", TEXTS)
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    digits = cases.trained("gpt2", TEXTS)
    digits.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), digits.pre_tokenizer])
    merged = cases.trained("llama3", TEXTS)
    merged.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERNS["llama3"]), "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    own = cases.trained("llama3", TEXTS)
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\w+|\W"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    few = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<unk>": 3}, [("a", "b")], unk_token="<unk>"))
    few.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return {
        "unigram": unigram,
        "wordpiece": words,
        "lowercase": lowered,
        "prefix": prefixed,
        "digits": digits,
        "merged": merged,
        "own": own,
        "few": few,
    }


@pytest.mark.parametrize("name", ["unigram", "wordpiece", "lowercase", "prefix", "digits", "merged", "own", "few"])
def test_what_gigatoken_was_not_verified_for_goes_through_tokenizers_and_says_why(tmp_path, name):
    made = other_kinds()[name]
    made.add_special_tokens([cases.SPECIAL])
    tokenizer = Tokenizer.load(cases.save(made, tmp_path))
    assert_same(tokenizer, made, [*cases.nasty_texts(13, 200), f"ab{cases.SPECIAL} ab"], fast=False)
    assert tokenizer.reason


ADDED = {
    "plain": [AddedToken("<a>", special=True), AddedToken("<a><b>", special=True), AddedToken("<b>c", special=False)],
    "normalized": [
        AddedToken("<a>", normalized=True),
        AddedToken("a<", normalized=False),
        AddedToken("é<", normalized=True),
    ],
    "strips": [AddedToken("<a>", lstrip=True), AddedToken("<b>", rstrip=True), AddedToken("<c>")],
    "word": [AddedToken("ab", single_word=True), AddedToken("<c>")],
    "blanks": [AddedToken("<a b>"), AddedToken("  "), AddedToken("<c>")],
    "many": [AddedToken(f"<|reserved_{i}|>", special=True) for i in range(300)],
    "decomposed": [AddedToken("e\u0301", normalized=True), AddedToken("a\u0301", normalized=False)],
}


@pytest.mark.parametrize(
    ("flags", "nfc"),
    [
        *((flags, False) for flags in ADDED),
        (next(iter(ADDED)), True),
        *(pytest.param(flags, True, marks=pytest.mark.long) for flags in list(ADDED)[1:]),
    ],
)
def test_added_tokens_inside_texts(tmp_path, flags, nfc):
    made = cases.trained("llama3", TEXTS, nfc=nfc, size=400)
    made.add_tokens(ADDED[flags])
    tokenizer = Tokenizer.load(cases.save(made, tmp_path))
    words = [
        "<a>",
        "<a><b>",
        "<b>c",
        "<b>",
        "<c>",
        "ab",
        "<a b>",
        "  ",
        "é<",
        "a<",
        "e\u0301",
        "\u00e9",
        "á",
        "x",
        " ",
        "\n",
    ]
    words += ["<|reserved_7|>", "<|reserved_77|>", "<|reserved_", cases.SPECIAL, "\u0c5c", "word ", "1"]
    chooser = np.random.default_rng(3)
    texts = ["".join(chooser.choice(words, size=chooser.integers(0, 12))) for _ in range(800)]
    assert_same(tokenizer, made, texts)
    texts = ["".join(chooser.choice(words, size=30_000)) for _ in range(2)]
    assert_same(tokenizer, made, texts)


def test_two_merges_to_one_token_and_whole_words_first(tmp_path):
    # As in Llama 3: every pair that makes a token is a merge, and a whole word in the vocabulary is looked up first.
    made = cases.trained("llama3", TEXTS, size=2000)
    content = json.loads(made.to_str())
    vocabulary = content["model"]["vocab"]
    pairs = [
        (token[:i], token[i:])
        for token in sorted(vocabulary, key=vocabulary.get)
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary and token != cases.SPECIAL
    ]
    for whole in (False, True):
        for longest_first in (False, True):
            order = sorted(pairs, key=lambda p: (vocabulary["".join(p)], -len(p[0]) if longest_first else len(p[0])))
            content["model"] |= {"merges": order, "ignore_merges": whole}
            made = tokenizers.Tokenizer.from_str(json.dumps(content))
            tokenizer = Tokenizer.load(cases.save(made, tmp_path))
            texts = cases.nasty_texts(14, 1000) + [
                "".join(np.random.default_rng(i).choice(list("aab "), 200)) for i in range(99)
            ]
            assert_same(tokenizer, made, texts + TEXTS)


def test_each_text_is_closed_by_one_end_of_document_token(tmp_path):
    for name, made in {"fast": cases.trained("llama3", TEXTS), "exact": other_kinds()["lowercase"]}.items():
        made.add_special_tokens([cases.SPECIAL])
        tokenizer = Tokenizer.load(cases.save(made, tmp_path / name))
        texts = ["", "a", "", "b c", cases.SPECIAL, "\0\1weft: the next document\1\0", "\u0c5c", ""]
        for some in (texts, texts[:4], [""], []):
            assert rows(tokenizer, some, close=True) == [[*ids, tokenizer.eod_id] for ids in expected(made, some)]
            assert rows(tokenizer, some) == expected(made, some)


def test_truncation_and_padding_are_left_out(tmp_path):
    made = cases.trained("gpt2", TEXTS)
    whole = made.encode("many words here").ids
    made.enable_truncation(2)
    made.enable_padding(length=50)
    tokenizer = Tokenizer.load(cases.save(made, tmp_path))
    assert tokenizer.encode("many words here") == whole
    assert rows(tokenizer, ["many words here", cases.SPECIAL]) == [whole, [tokenizer.eod_id]]


def test_exact_sends_all_through_tokenizers(tmp_path, monkeypatch):
    import gigatoken

    made = cases.trained("gpt2", TEXTS)
    folder = cases.save(made, tmp_path)
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", None)
    tokenizer = Tokenizer.load(folder, exact=True)
    assert rows(tokenizer, TEXTS) == expected(made, TEXTS)
    large = [" ".join(TEXTS) * 5, "x" * 1_100_000]  # in pieces, where that gives the same ids
    assert rows(tokenizer, large) == expected(made, large)
    assert tokenizer.reason is None


def test_a_library_that_disagrees_is_found_out_by_the_first_batch(tmp_path, monkeypatch):
    import gigatoken

    made = cases.trained("llama3", TEXTS)
    tokenizer = Tokenizer.load(cases.save(made, tmp_path))
    other = gigatoken.Tokenizer.from_json
    monkeypatch.setattr(
        gigatoken.Tokenizer, "from_json", lambda text: other(text.replace(b"\\\\p{N}{1,3}", b"\\\\p{N}"))
    )
    assert_same(tokenizer, made, ["12345 no digits"], fast=False)
    assert "other ids" in tokenizer.reason


def test_a_library_that_refuses_is_passed_over_and_one_that_fails_is_not(tmp_path, monkeypatch):
    import gigatoken

    made = cases.trained("llama3", TEXTS)
    folder = cases.save(made, tmp_path)

    def refuse(data):
        raise RuntimeError("Unsupported kind of merge\n\nLocation:\n    src/load.rs:1:1")

    with monkeypatch.context() as patch:
        patch.setattr(gigatoken.Tokenizer, "from_json", refuse)
        tokenizer = Tokenizer.load(folder)
        assert_same(tokenizer, made, TEXTS, fast=False)
    assert "gigatoken" in tokenizer.reason
    assert tokenizer.reason.endswith(": Unsupported kind of merge")

    def fail(self, text):
        raise ValueError("assignment destination is read-only")

    monkeypatch.setattr(gigatoken.Tokenizer, "encode", fail)
    with pytest.raises(ValueError, match="read-only"):
        Tokenizer.load(folder).encode_batch(TEXTS)


@pytest.mark.parametrize(
    "unit",
    ["x", " ", "1", "\u0c5c", *(pytest.param(unit, marks=pytest.mark.long) for unit in ("ab", "=", "\n", "é", "日"))],
)
def test_long_words_take_linear_time_and_keep_their_ids(tmp_path, unit):
    made = cases.trained("llama3", TEXTS)
    tokenizer = Tokenizer.load(cases.save(made, tmp_path))
    short = unit * (20_000 // len(unit.encode()))
    assert_same(tokenizer, made, [short, "a " + short + " b"])
    began = time.perf_counter()
    ids, _ = tokenizer.encode_batch([unit * (1_000_000 // len(unit.encode()))])
    assert len(ids)
    assert time.perf_counter() - began < 6


def test_pieces_of_a_cut_text_give_the_ids_of_the_whole(monkeypatch):
    monkeypatch.setattr(exactness, "PIECE", 400)
    for pattern in PATTERNS:
        made = cases.by_pairs(pattern, seed=1)
        for text in (" ".join(cases.nasty_texts(15, 600)), "".join(cases.nasty_texts(16, 600))):
            pieces = split_document(text)
            assert len(pieces) > 20
            assert "".join(pieces) == text
            ids = [id for encoding in made.encode_batch(pieces) for id in encoding.ids]
            assert ids == made.encode(text).ids


# --- Broken and inconsistent tokenizers ---


def test_an_id_outside_the_vocabulary_is_an_error(tmp_path):
    made = cases.trained("gpt2", TEXTS, size=300)
    content = json.loads(made.to_str())
    # The file numbers its end-of-document token 5, which the library, finding 5 taken, does not.
    content["added_tokens"][0]["id"] = 5
    tokenizer = Tokenizer.load(cases.save(json.dumps(content), tmp_path))
    with pytest.raises(UserError, match="inconsistent"):
        tokenizer.encode_batch(["a text", cases.SPECIAL])
    tokenizer = Tokenizer.load(cases.save(made, tmp_path))
    tokenizer.vocab_size = 100
    with pytest.raises(UserError, match=r"id \d+, .* 100 tokens"):
        tokenizer.encode_batch(["zzz", "\u00ff"])


def test_what_is_no_tokenizer_is_one_line_with_what_to_do(tmp_path, capsys):
    folder = cases.save(cases.trained("gpt2", TEXTS, size=300), tmp_path / "tok")
    assert Tokenizer.load(folder / "tokenizer.json").eod_id == Tokenizer.load(folder).eod_id
    (tmp_path / "in.txt").write_text("text")

    def told(path):
        assert (
            main(["data", "pack", str(tmp_path / "in.txt"), "--tokenizer", str(path), "--out", str(tmp_path / "s")])
            == 2
        )
        *before, line = capsys.readouterr().err.strip().splitlines()
        assert all(shown.startswith("packing ") for shown in before)  # what is not seen before the first part
        return line

    for name in ("spm.model", "ranks.tiktoken"):
        (tmp_path / name).write_bytes(b"x")
        assert f"import-tokenizer {tmp_path / name} --out" in told(tmp_path / name)
    (tmp_path / "folder").mkdir()
    (tmp_path / "spm.model").rename(tmp_path / "folder" / "spm.model")
    assert "import-tokenizer" in told(tmp_path / "folder")
    assert "no such" in told(tmp_path / "nowhere")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    assert "'<none>' is not in the vocabulary" in told(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    assert "--eod TOKEN" in told(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": cases.SPECIAL}}))
    assert Tokenizer.load(folder).eod_id is not None


def test_a_run_keeps_the_tokenizer_and_not_the_weights_beside_it(tmp_path):
    folder = cases.save(cases.trained("gpt2", TEXTS, size=300), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    copy_tokenizer(folder, tmp_path / "a")
    copy_tokenizer(folder / "tokenizer.json", tmp_path / "b")
    for copy in ("a", "b"):
        assert Tokenizer.load(tmp_path / copy).digest == Tokenizer.load(folder).digest
        names = {path.name for path in (tmp_path / copy).iterdir()}
        assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


# --- Streams ---


def streamed(tokenizer, ids):
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.step(id) for id in ids]
    return pieces, "".join(pieces) + decoder.flush()


@pytest.mark.parametrize("kind", ["llama3", "prepend", "first"])
def test_a_stream_shows_what_decoding_the_whole_shows(tmp_path, kind):
    made = cases.trained(kind, TEXTS) if kind == "llama3" else cases.llama2_like(TEXTS, kind)
    tokenizer = Tokenizer.load(cases.save(made, tmp_path, cases.SPECIAL if kind == "llama3" else "</s>"))
    for text in [*cases.nasty_texts(17, 300), *TEXTS[:20], " leading", "  two", "né 🎉 日本語 end" * 20]:
        ids = tokenizer.encode(text)
        pieces, whole = streamed(tokenizer, ids)
        assert whole == tokenizer.decode(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
    chooser = np.random.default_rng(4)
    for _ in range(300):  # ids as a model without sense gives them: half characters, bytes that never fit
        ids = chooser.integers(0, tokenizer.vocab_size, size=chooser.integers(1, 30)).tolist()
        assert streamed(tokenizer, ids)[1] == tokenizer.decode(ids)


def test_words_appear_as_they_come(tmp_path):
    for kind in ("llama3", "prepend"):
        made = cases.trained(kind, TEXTS) if kind == "llama3" else cases.llama2_like(TEXTS, kind)
        tokenizer = Tokenizer.load(cases.save(made, tmp_path, cases.SPECIAL if kind == "llama3" else "</s>"))
        pieces, _ = streamed(tokenizer, tokenizer.encode("the tokens and the tokens"))
        assert all(pieces)
        assert "".join(pieces) == "the tokens and the tokens"


@pytest.mark.parametrize("shape", ["prepend", "gemma", "always", "never", "llama3"])
def test_the_bytes_of_tokens_and_a_text_after_a_prompt(tmp_path, shape):
    made = cases.trained(shape, TEXTS) if shape == "llama3" else cases.llama2_like(TEXTS, shape)
    eod = cases.SPECIAL if shape == "llama3" else "</s>"
    tokenizer = Tokenizer.load(cases.save(made, tmp_path, eod))
    assert tokenizer.special_ids >= {tokenizer.eod_id}
    for text in [*TEXTS[:30], "Kalo mi \u65e5\u672c\U0001f600 {x: 1}\n\n y"]:
        ids = tokenizer.encode(text)
        written = b"".join(tokenizer.token_bytes[id] for id in ids)  # SentencePiece's decoder removes a first blank
        assert tokenizer.decode(ids).encode() == written.removeprefix(b"" if shape == "llama3" else b" ")
        for cut in range(1, len(ids), 3):
            prompt = tokenizer.decode(ids[:cut])
            if "\ufffd" in prompt or text.startswith(" "):
                continue
            decoder = tokenizer.stream_decoder(ids[:cut])
            assert prompt + "".join(map(decoder.step, ids[cut:])) + decoder.flush() == tokenizer.decode(ids)
