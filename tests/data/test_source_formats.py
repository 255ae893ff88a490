"""A source format of somebody else's, the one of docs/data.md: one class, found by name, entry point or suffix."""

import json
import re
import sys
from pathlib import Path

import pytest

from weft import plugins
from weft.cli.main import main
from weft.data.sources import source_format
from weft.data.stores.store import TokenStore
from weft.data.tokenizers.tokenizer import Tokenizer

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
CARDS = "title: one\ntext: first\n\ntitle: two\ntext: second\n\nbroken\ntext: lost\n\ntitle: three\ntext: third\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a file of cards; the class is a module's on the path."""
    section = DOCS.read_text().partition("### Add a source format")[2]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "weft_cards_test.py").write_text(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    (tmp_path / "a.cards").write_text(CARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = (plugins._installed, source_format._by_suffix, source_format.source_format)
    for cache in found:
        cache.cache_clear()
    yield tmp_path
    for cache in found:
        cache.cache_clear()


def pack(tokenizer, out, *options):
    return main(["data", "pack", "a.cards", "--tokenizer", str(tokenizer), "--out", out, *options])


def texts(tokenizer, out):
    store, tokenizer = TokenStore(out), Tokenizer.load(tokenizer)
    return [tokenizer.decode(store.document(n)[:-1]) for n in range(store.num_documents)]


def test_a_class_by_its_name_packs_its_files(place, tiny_tokenizer, capsys):
    named = ["--format", "weft_cards_test:Cards"]
    assert pack(tiny_tokenizer, "s", *named) == 2
    assert "a.cards: record 3: no such line ('broken'); fix the input, or use --on-error" in capsys.readouterr().err
    options = [*named, "--on-error", "skip", "--template", "{title}: {text}", "--workers", "2"]
    assert pack(tiny_tokenizer, "s", *options) == 0
    assert texts(tiny_tokenizer, "s") == ["one: first", "two: second", "three: third"]
    rejects = [json.loads(line) for line in Path("s/rejects.jsonl").read_text().splitlines()]
    assert rejects == [{"path": "a.cards", "line": 3, "reason": "no such line"}]
    assert main(["data", "verify", "s"]) == 0


def test_bytes_that_are_no_text_are_one_reject(place, tiny_tokenizer):
    (place / "a.cards").write_bytes(CARDS.encode().replace(b"second", b"\xff"))
    assert pack(tiny_tokenizer, "s", "--format", "weft_cards_test:Cards", "--on-error", "skip") == 0
    assert texts(tiny_tokenizer, "s") == ["first", "third"]
    rejects = [json.loads(line) for line in Path("s/rejects.jsonl").read_text().splitlines()]
    assert [(one["line"], one["reason"]) for one in rejects] == [(2, "invalid UTF-8"), (3, "no such line")]


RAISES = """from weft.data.sources import RecordFormat, Unfit


class Cards(RecordFormat):
    def records(self, file):
        yield {"text": "first"}
        WHAT
"""


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raise KeyError('title')", "KeyError: 'title'"),
        ("int('x')", "ValueError: invalid literal for int() with base 10: 'x'"),
        ("raise Unfit('torn')", "Unfit: torn"),
    ],
)
def test_what_a_format_of_the_users_raises_is_reported_in_one_line(place, tiny_tokenizer, capfd, what, told, workers):
    (place / "raises.py").write_text(RAISES.replace("WHAT", what))
    (place / "b.cards").write_text(CARDS)
    options = ["b.cards", "--format", "raises:Cards", "--on-error", "skip", "--workers", workers]
    try:
        assert pack(tiny_tokenizer, "s", *options) == 2
    finally:
        sys.modules.pop("raises", None)
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].endswith(f"raises.py:7: {told} (in raises:Cards, reading a.cards)")
    assert not any("Traceback" in line for line in lines)


def test_a_record_that_is_no_dict_is_the_formats_mistake(place, tiny_tokenizer, capfd, monkeypatch):
    (place / "texts.py").write_text(RAISES.replace("WHAT", "yield 'second'"))
    monkeypatch.delitem(sys.modules, "texts", raising=False)
    assert pack(tiny_tokenizer, "s", "--format", "texts:Cards", "--on-error", "skip") == 2
    said = capfd.readouterr().err
    assert "`records` of Cards must yield a dict or Unfit, not a str (record 2 of a.cards)" in said
    assert "fix the input" not in said


def test_a_format_without_its_method_is_refused(place, tiny_tokenizer, capsys):
    (place / "halves.py").write_text(
        "from weft.data.sources import RecordFormat, SourceFormat\n"
        "class One(RecordFormat):\n    def record(self, file):\n        yield {}\n"
        "class Two(SourceFormat):\n    pass\n"
    )
    for name, method in (("One", "records"), ("Two", "read")):
        assert pack(tiny_tokenizer, "s", "--format", f"halves:{name}") == 2
        assert (
            capsys.readouterr().err == f"--format halves:{name}: {name} has no method {method}; add it (docs/data.md)\n"
        )
    sys.modules.pop("halves", None)


def test_a_module_of_a_format_that_cannot_be_imported_is_reported_in_one_line(place, tiny_tokenizer, capsys):
    (place / "torn.py").write_text("a = 1\nb = a / 0\n")
    assert pack(tiny_tokenizer, "s", "--format", "torn:Cards") == 2
    assert (
        "torn.py:2: ZeroDivisionError: division by zero (on importing --format torn:Cards)" in capsys.readouterr().err
    )


def test_a_packages_entry_point_gives_a_name_and_a_suffix(place, tiny_tokenizer):
    info = place / "site" / "cards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weft.plugins]\nsource.cards = weft_cards_test:Cards\n")
    for number, options in enumerate(([], ["--format", "cards"])):
        assert pack(tiny_tokenizer, f"s{number}", "--on-error", "skip", *options) == 0
        assert texts(tiny_tokenizer, f"s{number}") == ["first", "second", "third"]


def test_what_is_no_format_is_refused_in_one_line(place, tiny_tokenizer, capsys):
    for name, told in (
        ("json:JSONDecoder", "is not a source format"),
        ("weft_cards_test:Nothing", "has no 'Nothing'"),
        ("weft_no_such_module:Cards", "no module 'weft_no_such_module'"),
        ("cadrs", "there is no source 'cadrs'"),
    ):
        assert pack(tiny_tokenizer, "s", "--format", name) == 2
        assert told in capsys.readouterr().err
