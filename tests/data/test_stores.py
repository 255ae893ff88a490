"""Operations on stores: which documents, whole, with their masks and partners, and numbers that add up."""

import json
from collections import Counter

import numpy as np
import pytest
from store_cases import EOD, make_store

from weft.cli.main import main
from weft.data.stores import indexed
from weft.data.stores.operations.verify import verify
from weft.data.stores.store import TokenStore


def weft(*arguments) -> int:
    return main(["data", *map(str, arguments)])


def make(folder, documents=200, *, seed=0, copies=0, **changes):
    """A store of random documents, each closed by EOD; the last `copies` are copies of the first ones."""
    chooser = np.random.default_rng(seed)
    texts = [[*chooser.integers(1, 500, chooser.integers(0, 60)).tolist(), EOD] for _ in range(documents)]
    texts += texts[:copies]
    tokens, lengths = np.concatenate(texts), [len(text) for text in texts]
    if "mask" in changes:
        changes["mask"] = tokens % 3 == 0
    return make_store(folder, lengths, tokens=tokens, **changes)


def documents(path):
    """What is in a store: each document's ids with its mask, as tuples."""
    store = TokenStore(path)
    starts = store.offsets // store.tokens.dtype.itemsize
    found = []
    for start, length in zip(starts.tolist(), store.lengths.tolist(), strict=True):
        ids = tuple(store.tokens[start : start + length].tolist())
        found.append(ids if store.loss_mask is None else (ids, tuple(store.loss_mask[start : start + length].tolist())))
    return found


@pytest.fixture(params=["one block", "small blocks"], autouse=True)
def block_size(request, monkeypatch):
    """Stores that need many blocks, without being large."""
    if request.param == "small blocks":
        import weft.data.stores.operations.shuffle as shuffling

        for module in (indexed, shuffling):
            monkeypatch.setattr(module, "BLOCK_TOKENS", 100)
            monkeypatch.setattr(module, "BLOCK_DOCUMENTS", 16)


def test_shuffle_gives_the_same_documents_in_another_order_and_again_the_same(tmp_path):
    make(tmp_path / "in", mask=True, kind="conversations")
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert weft("shuffle", tmp_path / "in", "--out", tmp_path / out, "--seed", seed) == 0
    before, a, c = (documents(tmp_path / name) for name in ("in", "a", "c"))
    assert a != before
    assert a != c
    assert Counter(a) == Counter(c) == Counter(before)
    for name in ("tokens.bin", "tokens.idx", "loss_mask.bin", "store.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    old, new = TokenStore(tmp_path / "in").info, TokenStore(tmp_path / "a").info
    assert (new.kind, new.bytes, new.tokens, new.dtype) == (old.kind, old.bytes, old.tokens, old.dtype)
    assert verify(tmp_path / "a") == []


def test_a_permutation_moves_documents_far(tmp_path):
    make(tmp_path / "in", 400)
    weft("shuffle", tmp_path / "in", "--out", tmp_path / "out")
    place = {ids: i for i, ids in enumerate(documents(tmp_path / "in"))}
    moved = np.array([place[ids] for ids in documents(tmp_path / "out")])
    assert abs(np.corrcoef(moved, np.arange(400))[0, 1]) < 0.2


@pytest.mark.parametrize(
    "command", [["shuffle"], ["sample", "--documents", 30], ["filter", "--min-tokens", 20], ["dedup"]]
)
def test_pairs_stay_together(tmp_path, command):
    make(tmp_path / "in", 200, copies=20, kind="preferences", mask=True)
    assert weft(command[0], tmp_path / "in", "--out", tmp_path / "out", *command[1:]) == 0
    before, after = documents(tmp_path / "in"), documents(tmp_path / "out")
    pairs = Counter(zip(before[::2], before[1::2], strict=True))
    found = Counter(zip(after[::2], after[1::2], strict=True))
    assert found
    assert not found - pairs
    info = TokenStore(tmp_path / "out").info
    assert info.kind == "preferences"
    assert info.documents + sum(info.rejected.values()) == len(before)


def test_split_keeps_copies_in_one_part_and_all_documents(tmp_path, capsys):
    make(tmp_path / "in", 600, copies=200)
    outs = [tmp_path / "train", tmp_path / "held"]
    assert weft("split", tmp_path / "in", "--validation", "0.25", "--out", *outs) == 0
    train, held = map(documents, outs)
    # Documents without text are all alike, so they are in one part together.
    assert not set(train) & set(held)
    assert Counter(train) + Counter(held) == Counter(documents(tmp_path / "in"))
    assert 0.2 < len(held) / 800 < 0.3
    order = {ids: i for i, ids in reversed(list(enumerate(documents(tmp_path / "in"))))}
    places = [order[ids] for ids in train[: len(train) // 2]]
    assert places == sorted(places)
    assert "800 documents = " in capsys.readouterr().out
    # What a document's part is does not depend on the rest of the store.
    make(tmp_path / "more", 600)
    assert weft("split", tmp_path / "more", "--validation", "0.25", "--out", tmp_path / "x", tmp_path / "y") == 0
    assert set(documents(tmp_path / "y")) == set(held)
    capsys.readouterr()
    for share in ("1.5", "1", "nan"):
        assert weft("split", tmp_path / "in", "--validation", share, "--out", *outs) == 2
        assert f"--validation {share}: must be above 0 and below 1" in capsys.readouterr().err
    for wrong in (["--fractions", "0.5", "0.6"], ["--fractions", "1"], ["--validation", "0"]):
        assert weft("split", tmp_path / "in", *wrong, "--out", tmp_path / "p", tmp_path / "q") == 2


def test_sample_draws_exactly_so_many_evenly_and_in_order(tmp_path):
    make(tmp_path / "in", 500)
    before = documents(tmp_path / "in")
    place = {ids: i for i, ids in enumerate(before)}
    assert weft("sample", tmp_path / "in", "--documents", 100, "--out", tmp_path / "a", "--seed", 3) == 0
    assert weft("sample", tmp_path / "in", "--fraction", 0.2, "--out", tmp_path / "b", "--seed", 4) == 0
    a, b = documents(tmp_path / "a"), documents(tmp_path / "b")
    assert len(a) == len(b) == 100
    assert a != b
    numbers = [place[ids] for ids in a if len(ids) > 1]
    assert numbers == sorted(numbers)
    assert 25 < sum(number < 250 for number in numbers) < 75
    assert TokenStore(tmp_path / "a").info.rejected == {"not drawn": 400}
    assert weft("sample", tmp_path / "in", "--documents", 501, "--out", tmp_path / "c") == 2
    assert not (tmp_path / "c").exists()


def test_filter_by_length_and_function_says_how_many_and_why(tmp_path, monkeypatch, capsys):
    make(tmp_path / "in", mask=True, kind="conversations")
    (tmp_path / "taste.py").write_text("def even(ids):\n    return ids.sum() % 2 == 0\n")
    monkeypatch.chdir(tmp_path)
    limits = ["--min-tokens", 10, "--max-tokens", 50]
    assert weft("filter", "in", "--out", "out", *limits, "--function", "taste:even") == 0
    before = documents(tmp_path / "in")
    fits = [d for d in before if 10 <= len(d[0]) - 1 <= 50]
    assert documents(tmp_path / "out") == [d for d in fits if sum(d[0]) % 2 == 0]
    info = TokenStore(tmp_path / "out").info
    short = sum(len(d[0]) - 1 < 10 for d in before)
    assert info.rejected["fewer than 10 tokens"] == short
    assert info.documents + sum(info.rejected.values()) == len(before)
    assert f"{short:,} fewer than 10 tokens" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "store.json").read_text())["made_from"]["function"] == "taste:even"


def test_a_function_that_fails_is_one_line_with_the_document(tmp_path, monkeypatch, capsys):
    make(tmp_path / "in", 50)
    leaves = "def leaves(ids):\n    if len(ids) <= 40: raise SystemExit(3)\n    return True\n"
    (tmp_path / "bad_taste.py").write_text("def fails(ids):\n    return 1 / (len(ids) > 40)\n" + leaves)
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    first = next(i for i, ids in enumerate(documents("in")) if len(ids) - 1 <= 40)
    for function, told in (
        ("bad_taste:fails", f"document {first}: --function bad_taste:fails failed: ZeroDivisionError"),
        ("bad_taste:leaves", f"document {first}: --function bad_taste:leaves failed: SystemExit: 3"),
        ("leaving:any", "--function leaving:any: SystemExit: 0; fix the module"),
        ("bad_taste:absent", "no function 'absent'"),
        ("absent_module:x", "ModuleNotFoundError"),
        ("nonsense", "module:name"),
    ):
        assert weft("filter", "in", "--out", "out", "--function", function) == 2
        lines = capsys.readouterr().err.splitlines()
        assert told in lines[-1]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["bad_taste.py", "in", "leaving.py"]


def test_filter_by_text_and_the_bytes_that_are_left(tmp_path, tiny_store, tiny_tokenizer, monkeypatch):
    from weft.data.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tiny_tokenizer)
    (tmp_path / "short_texts.py").write_text("def short(text):\n    return len(text) < 200\n")
    monkeypatch.chdir(tmp_path)
    assert weft("filter", tiny_store, "--out", "out", "--function", "short_texts:short") == 2
    assert (
        weft("filter", tiny_store, "--out", "out", "--function", "short_texts:short", "--tokenizer", tiny_tokenizer)
        == 0
    )
    texts = [tokenizer.decode(ids[:-1]) for ids in documents(tiny_store)]
    kept = [tokenizer.decode(ids[:-1]) for ids in documents("out")]
    assert kept == [text for text in texts if len(text) < 200]
    assert TokenStore("out").info.bytes == sum(len(text.encode()) for text in kept)
    # Of all documents it is what packing counted from the text itself.
    assert weft("shuffle", tiny_store, "--out", "all", "--tokenizer", tiny_tokenizer) == 0
    assert TokenStore("all").info.bytes == TokenStore(tiny_store).info.bytes


def test_exact_duplicates_leave_and_the_first_one_stays(tmp_path, monkeypatch):
    from weft.data.stores.operations import equal_keys

    monkeypatch.setattr(equal_keys, "BUCKET_ITEMS", 64)  # several files of keys
    make(tmp_path / "in", 300, copies=120, mask=True, kind="conversations")
    assert weft("dedup", tmp_path / "in", "--out", tmp_path / "out") == 0
    before = documents(tmp_path / "in")
    assert documents(tmp_path / "out") == list(dict.fromkeys(before))
    lines = [json.loads(line) for line in (tmp_path / "out" / "duplicates.jsonl").read_text().splitlines()]
    assert [line["document"] for line in lines] == [i for i, d in enumerate(before) if d in before[:i]]
    assert all(before.index(before[line["document"]]) == line["duplicate_of"] for line in lines)
    assert TokenStore(tmp_path / "out").info.rejected == {"duplicates": len(lines)}
    assert not (tmp_path / "out" / "work").exists()


def jaccard(a, b, n=5):
    a, b = ({tuple(ids[i : i + n]) for i in range(len(ids) - n)} for ids in (a, b))
    return len(a & b) / len(a | b)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["dedup", "--exact", "--threshold", "0.5"], "--threshold: applies to near duplicates only; add --near"),
        (["dedup", "--ngram", "5"], "--ngram: applies to near duplicates only; add --near"),
        (["dedup", "--near", "--ngram", "100000"], "--ngram 100000: must be from 1 to 64"),
        (["dedup", "--near", "--ngram", "0"], "--ngram 0: must be from 1 to 64"),
        (["filter", "--min-tokens", "-1"], "--min-tokens -1: must be 0 or more"),
        (["filter", "--max-tokens", "-3"], "--max-tokens -3: must be 0 or more"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(tmp_path, capsys, arguments, told):
    make(tmp_path / "in", 5)
    verb, *options = arguments
    assert weft(verb, tmp_path / "in", "--out", tmp_path / "out", *options) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_near_duplicates_by_their_true_similarity(tmp_path):
    pytest.importorskip("rensa")
    chooser = np.random.default_rng(0)
    base = [chooser.integers(1, 5000, 300).tolist() for _ in range(60)]
    texts = list(base)
    for number, changed in ((0, 1), (1, 3), (2, 5), (3, 25), (4, 60)):
        near = list(base[number])
        for place in chooser.choice(300, changed, replace=False).tolist():
            near[place] = 5001
        texts.append(near)
    texts += [base[7], [1, 2, 3], [1, 2, 3], [1, 2], [], []]
    texts = [[*text, EOD] for text in texts]
    make_store(tmp_path / "in", [len(t) for t in texts], tokens=np.concatenate(texts))
    assert weft("dedup", tmp_path / "in", "--near", "--threshold", "0.8", "--out", tmp_path / "out") == 0
    found = [json.loads(line) for line in (tmp_path / "out" / "duplicates.jsonl").read_text().splitlines()]
    twins = {(line["document"], line["duplicate_of"]): line["similarity"] for line in found}
    assert set(twins) == {(60, 0), (61, 1), (62, 2), (65, 7), (67, 66), (70, 69)}
    for (a, b), similarity in twins.items():
        if len(texts[a]) > 5:
            assert abs(similarity - jaccard(texts[a], texts[b])) < 0.12
    assert jaccard(texts[63], texts[3]) < 0.7
    kept = documents(tmp_path / "out")
    assert kept == [tuple(t) for i, t in enumerate(texts) if i not in {a for a, _ in twins}]
    assert weft("dedup", tmp_path / "in", "--near", "--threshold", "1.5", "--out", tmp_path / "x") == 2


def test_a_second_call_has_nothing_to_do_and_another_one_is_refused(tmp_path, capsys):
    make(tmp_path / "in", 50)
    assert weft("sample", tmp_path / "in", "--documents", 9, "--out", tmp_path / "a") == 0
    capsys.readouterr()
    assert weft("sample", tmp_path / "in", "--documents", 9, "--out", tmp_path / "a") == 0
    assert "up to date" in capsys.readouterr().out
    assert weft("sample", tmp_path / "in", "--documents", 8, "--out", tmp_path / "a") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert weft("sample", tmp_path / "in", "--documents", 8, "--out", tmp_path / "a", "--overwrite") == 0
    assert len(documents(tmp_path / "a")) == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "in"]


def test_nothing_is_left_of_an_operation_that_failed(tmp_path, monkeypatch, capsys):
    import errno

    make(tmp_path / "in", 50)

    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert weft("filter", tmp_path / "in", "--min-tokens", 1000, "--out", tmp_path / "a") == 2
    assert "50" in capsys.readouterr().err
    monkeypatch.setattr(indexed.IndexedWriter, "finish", full)
    assert weft("split", tmp_path / "in", "--validation", "0.5", "--out", tmp_path / "a", tmp_path / "b") == 2
    assert "No space left" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_after_a_kill_the_same_call_makes_the_same_store(tmp_path):
    import os
    import signal
    import subprocess
    import sys

    make(tmp_path / "in", 300, copies=100)
    # Killed when the files are whole, before the first has its name.
    program = (
        "import os, signal\n"
        "from weft.cli.main import main\n"
        "import weft.data.stores.operations.new_store as making\n"
        "making.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"main(['data', 'dedup', '{tmp_path / 'in'}', '--out', '{tmp_path / 'out'}'])"
    )
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ}, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    for out in ("out", "again"):
        assert weft("dedup", tmp_path / "in", "--out", tmp_path / out) == 0
    for name in ("tokens.bin", "store.json", "duplicates.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "in", "out"]


def test_an_open_store_is_read_only(tmp_path):
    store = make(tmp_path / "in", 5, mask=True)
    for array in (store.tokens, store.lengths, store.offsets, store.loss_mask):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
