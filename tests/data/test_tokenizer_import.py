"""Imported tokenizers give the ids of the library that they come from; where they do not, it is said."""

import base64
import inspect
import io
import json
import re
import subprocess
import sys

import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public
import tokenizer_cases as cases

from weft.cli.main import main
from weft.data.tokenizers import import_tokenizer
from weft.data.tokenizers.exactness import PATTERNS
from weft.data.tokenizers.tokenizer import Tokenizer

TEXTS = [text for text in cases.prose() if text.strip()]
NASTY = cases.nasty_texts(21, 400)


def run(*arguments):
    return main(["data", "import-tokenizer", *map(str, arguments)])


def model_file(folder, **options):
    """A SentencePiece model trained on TEXTS."""
    made = io.BytesIO()
    options = {"vocab_size": 700, "character_coverage": 0.98, "minloglevel": 2, "num_threads": 1} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=made, hard_vocab_limit=False, **options
    )
    file = folder / "made.model"
    file.write_bytes(made.getvalue())
    return file


MODELS = {
    "like Llama 2": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "like Gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "BPE with unknown characters": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "identity"},
    "unigram with bytes": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_sentencepiece_models_keep_their_ids(tmp_path, name, capsys):
    file = model_file(tmp_path, **MODELS[name])
    assert run(file, "--out", tmp_path / "tok") == 0
    assert "documents end with </s> (2)" in capsys.readouterr().out
    own, tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(file)), Tokenizer.load(tmp_path / "tok")
    assert tokenizer.vocab_size == own.vocab_size()
    assert tokenizer.eod_id == own.eos_id()
    for text in [*TEXTS, *NASTY]:
        assert tokenizer.encode(text) == own.encode(text), ascii(text)
        if "\0" not in text and "byte" in name:
            assert tokenizer.decode(own.encode(text)) == own.decode(own.encode(text))
    ids, _ = tokenizer.encode_batch([*TEXTS, *NASTY])
    assert ids.tolist() == [id for text in [*TEXTS, *NASTY] for id in own.encode(text)]
    # Models whose normalizer does nothing but mark blanks go fast.
    assert tokenizer.exact is (name not in {"like Llama 2", "like Gemma"})


def test_a_model_whose_ids_differ_is_refused_unless_that_is_wanted(tmp_path, capsys):
    # A symbol of the user's: SentencePiece puts its blank before a text that begins with one, tokenizer.json behind it.
    file = model_file(tmp_path, **MODELS["like Llama 2"], user_defined_symbols=["<sep>"])
    assert run(file, "--out", tmp_path / "tok") == 2
    assert "ids differ from those of sentencepiece on" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["made.model"]
    assert run(file, "--out", tmp_path / "tok", "--allow-differences") == 0
    assert "ids differ" in capsys.readouterr().err
    file = model_file(tmp_path, **MODELS["like Gemma"], user_defined_symbols=["<sep>", "\n\n"])
    assert run(file, "--out", tmp_path / "gemma") == 0


def test_a_model_that_normalizes_says_where_ids_may_differ(tmp_path, capsys):
    file = model_file(tmp_path, model_type="bpe", byte_fallback=True)  # nmt_nfkc, SentencePiece's default
    assert run(file, "--out", tmp_path / "tok") == 0
    told = capsys.readouterr()
    assert "ids can differ" in told.err
    assert "the tokenizers library, which is slower: the normalizer" in told.out + told.err
    own, tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(file)), Tokenizer.load(tmp_path / "tok")
    for text in TEXTS[:300]:
        assert tokenizer.encode(text) == own.encode(text), ascii(text)
    (tmp_path / "more.txt").write_text("a\u0323\u0301 " * 9, encoding="utf-8")
    assert run(file, "--out", tmp_path / "other", "--check", tmp_path / "more.txt") == 2


def test_word_models_are_refused(tmp_path, capsys):
    file = model_file(tmp_path, model_type="char")
    assert run(file, "--out", tmp_path / "tok") == 2
    assert "only BPE and unigram" in capsys.readouterr().err
    file.write_bytes(b"no model")
    assert run(file, "--out", tmp_path / "tok") == 2
    assert "not a SentencePiece model" in capsys.readouterr().err
    file = model_file(tmp_path, **MODELS["like Llama 2"], eos_id=-1)
    assert run(file, "--out", tmp_path / "tok") == 2
    assert "--eod TOKEN" in capsys.readouterr().err
    assert run(file, "--out", tmp_path / "tok", "--eod", "<s>") == 0
    assert not list(tmp_path.glob(".*"))


def test_an_empty_model_is_one_line(tmp_path, capsys):
    (tmp_path / "e.model").touch()
    assert run(tmp_path / "e.model", "--out", tmp_path / "tok") == 2
    said = capsys.readouterr().err
    assert "e.model: not a SentencePiece model" in said
    assert len(said.splitlines()) == 1


def test_of_a_unigram_model_it_is_always_said_where_ids_may_differ(tmp_path, capsys):
    for name, warned in (("unigram", True), ("BPE with unknown characters", False)):
        (tmp_path / name).mkdir()
        file = model_file(tmp_path / name, **MODELS[name])
        assert run(file, "--out", tmp_path / name / "tok") == 0
        assert ("3 times or more in a row ('000', '...')" in capsys.readouterr().err) is warned
    assert {"6300000", "9.000", "...."} <= set(import_tokenizer.TEST_TEXTS)


def rank_file(folder, pattern="llama3"):
    """Ranks of a tokenizer trained on TEXTS, and tiktoken with them."""
    made = json.loads(cases.trained(pattern, TEXTS).to_str())
    alphabet = {char: byte for byte, char in cases.spelling().items()}
    ranks = {}
    for token in sorted(made["model"]["vocab"], key=made["model"]["vocab"].get):
        if token != cases.SPECIAL:
            ranks[bytes(alphabet[char] for char in token)] = len(ranks)
    file = folder / "ranks.tiktoken"
    file.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    return file, ranks


def tiktokens_own_patterns():
    source = inspect.getsource(tiktoken_ext.openai_public.cl100k_base)
    (cl100k,) = re.findall(r'"pat_str": r"""(.*)"""', source)
    o200k = "|".join(re.findall(r'r"""(.*)"""', inspect.getsource(tiktoken_ext.openai_public.o200k_base)))
    return {"gpt2": tiktoken_ext.openai_public.r50k_pat_str, "cl100k": cl100k, "o200k": o200k}


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", "o200k", "llama3", "qwen2"])
def test_tiktoken_ranks_keep_their_ids(tmp_path, pattern):
    file, ranks = rank_file(tmp_path)
    special = {"<|endoftext|>": len(ranks), "<|start|>": len(ranks) + 7}
    arguments = ("--pattern", pattern, "--special", "<|endoftext|>", "--special", f"<|start|>={len(ranks) + 7}")
    assert run(file, "--out", tmp_path / "tok", *arguments, "--eod", "<|endoftext|>") == 0
    regex = tiktokens_own_patterns().get(pattern, PATTERNS[pattern])
    own = tiktoken.Encoding("own", pat_str=regex, mergeable_ranks=ranks, special_tokens=special)
    tokenizer = Tokenizer.load(tmp_path / "tok")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (own.n_vocab, len(ranks))
    texts = [*TEXTS, *NASTY, "<|start|>a<|endoftext|>b"]
    texts = [text for text in texts if not any(c >= "\u0378" and not is_settled(c) for c in text)]
    wanted = [own.encode(text, allowed_special="all") for text in texts]
    for text, ids in zip(texts, wanted, strict=True):
        assert tokenizer.encode(text) == ids, ascii(text)
    ids, _lengths = tokenizer.encode_batch(texts)
    assert ids.tolist() == [id for text in texts for id in tokenizer.encode(text)]
    assert not tokenizer.exact
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def is_settled(char):
    from weft.data.tokenizers.exactness import is_settled

    return is_settled(ord(char))


def test_what_a_rank_file_does_not_say_is_asked_for(tmp_path, capsys):
    file, _ranks = rank_file(tmp_path)
    for arguments, told in (
        ((), "--pattern"),
        (("--pattern", "llama3"), "--eod TOKEN"),
        (("--pattern", "llama3", "--eod", "<|end|>"), "--special <|end|>"),
        (("--pattern", "(", "--eod", "<|end|>"), "--pattern"),
        (("--pattern", "llama3", "--special", "<|end|>=5", "--eod", "<|end|>"), "taken"),
    ):
        assert run(file, "--out", tmp_path / "tok", *arguments) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert told in lines[0]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks.tiktoken"]
    file.write_text("no ranks here\n")
    assert run(file, "--out", tmp_path / "tok", "--pattern", "llama3", "--eod", "x") == 2
    assert f"{file}:1: not a tiktoken rank file" in capsys.readouterr().err


def test_a_folder_gets_an_end_of_document_token_and_special_tokens(tmp_path, capsys):
    folder = cases.save(cases.trained("qwen2", TEXTS), tmp_path / "old")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 77}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 1
    assert run(folder, "--out", tmp_path / "new") == 2
    assert "--eod TOKEN" in capsys.readouterr().err
    arguments = ("--eod", "<|im_end|>", "--special", "<|im_start|>", "--special", "<|im_end|>")
    assert run(folder / "tokenizer.json", "--out", tmp_path / "new", *arguments) == 0
    tokenizer = Tokenizer.load(tmp_path / "new")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (size + 2, size + 1)
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [size, size + 1]
    assert json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())["model_max_length"] == 77
    assert (tmp_path / "new" / "chat_template.jinja").exists()
    assert run(folder, "--out", tmp_path / "new", "--eod", cases.SPECIAL) == 2
    assert run(folder, "--out", tmp_path / "new", "--eod", cases.SPECIAL, "--overwrite") == 0
    assert Tokenizer.load(tmp_path / "new").vocab_size == size


def test_missing_libraries_are_named(tmp_path):
    code = (
        "import sys; sys.modules.update(sentencepiece=None, tiktoken=None)\n"
        "from weft.cli.main import main\n"
        "sys.exit(main(['data', 'import-tokenizer', *sys.argv[1:]]))"
    )
    file, _ = rank_file(tmp_path)
    (tmp_path / "x.model").write_bytes(b"x")
    for arguments in ([tmp_path / "x.model"], [file, "--pattern", "gpt2", "--eod", "a"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments), "--out", str(tmp_path / "tok")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "pip install 'weft-train[tokenizers]'" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
