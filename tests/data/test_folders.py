"""What --out may be: nothing of the user's is ever replaced, and what cannot be made is one line before any work."""

import os
from pathlib import Path

import pytest
from store_cases import make_store

from weft.cli.main import main
from weft.data.output_folder import STORE, TOKENIZER, exists_already, publish
from weft.errors import UserError

THESIS = b"ten years of work"


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def place(tmp_path, tiny_tokenizer, monkeypatch):
    """Inputs, a tokenizer, two stores, and folders of the user's, in the working directory."""
    for name in ("held/a.txt", "held/b.txt", "precious/thesis.md", "store-json/store.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(THESIS)
    tok = tmp_path / "tok"
    tok.mkdir()
    for file in tiny_tokenizer.iterdir():
        (tok / file.name).write_bytes(file.read_bytes())
    for name in ("s", "s2", "with-notes", "with-notes-within"):
        make_store(tmp_path / name, [3, 4, 5, 6])
    (tmp_path / "with-notes" / "notes.md").write_bytes(THESIS)
    (tmp_path / "with-notes-within" / "packing").mkdir()
    (tmp_path / "with-notes-within" / "packing" / "notes.md").write_bytes(THESIS)
    (tmp_path / "file").write_bytes(THESIS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = {
    "pack": "pack held --tokenizer tok",
    "train-tokenizer": "train-tokenizer held --vocab-size 260",
    "import-tokenizer": "import-tokenizer tok",
    "merge": "merge s s2",
    "shuffle": "shuffle s",
    "sample": "sample s --documents 2",
    "filter": "filter s --min-tokens 3",
    "dedup": "dedup s",
    "split": "split s --validation 0.5",
    "convert": "convert s --to weft",
}


def call(verb, out):
    outs = [out, "other-part"] if verb == "split" else [out]
    return main(["data", *COMMANDS[verb].split(), "--overwrite", "--out", *outs])


@pytest.mark.parametrize("verb", COMMANDS)
def test_overwrite_replaces_nothing_of_another_kind(place, capsys, verb):
    tokenizer = verb.endswith("tokenizer")
    own = ["s2", "with-notes", "with-notes-within"] if tokenizer else ["tok"]
    kind = "tokenizer" if tokenizer else "token store"
    before = tree(place)
    for out, told in (
        ("precious", f"precious: exists already and is not a {kind}"),
        ("store-json", f"is not a {kind}"),
        *((name, f"is not a {kind}") for name in own),
        ("held", ""),
        ("file", "file: exists already and is not a folder"),
        (".", "must end with the name of the output folder"),
        ("", "must end with the name of the output folder"),
        ("/", "must end with the name of the output folder"),
        ("held/..", "must end with the name of the output folder"),
        ("file/new", "is not a folder"),
    ):
        assert call(verb, out) == 2, out
        lines = capsys.readouterr().err.strip().splitlines()
        assert told in lines[-1], out
        assert "--overwrite" not in lines[-1]
        assert "Traceback" not in "".join(lines)
    assert tree(place) == before


@pytest.mark.parametrize("verb", [verb for verb in COMMANDS if not verb.endswith("tokenizer")])
def test_a_store_with_more_in_it_stays(place, capsys, verb):
    before = tree(place)
    for out, told in (("with-notes", "contains 'notes.md'"), ("with-notes-within", "contains 'packing/notes.md'")):
        assert call(verb, out) == 2
        assert told in capsys.readouterr().err
    assert tree(place) == before


@pytest.mark.parametrize("verb", [verb for verb in COMMANDS if " s" in COMMANDS[verb]])
def test_an_input_is_not_replaced_nor_written_into(place, capsys, verb):
    (place / "link").symlink_to("s")
    before = tree(place)
    for out, told in (
        ("s", "is the input s itself"),
        ("link", "is the input s itself"),
        ("s/inner", "lies in the input s"),
    ):
        assert call(verb, out) == 2
        assert told in capsys.readouterr().err
    assert tree(place) == before


def test_the_parts_of_a_split_are_apart(place, capsys):
    for second, told in (("held/../a", "is the other --out a itself"), ("a/b", "lies in the other --out a")):
        assert main(["data", "split", "s", "--validation", "0.5", "--out", "a", second]) == 2
        assert told in capsys.readouterr().err


def test_what_is_of_the_kind_is_replaced(place):
    for verb in ("pack", "merge", "shuffle"):
        make_store(place / f"old-{verb}", [9])
        (place / f"old-{verb}" / "packing" / "best_fit-8").mkdir(parents=True)
        assert call(verb, f"old-{verb}") == 0
        assert not (place / f"old-{verb}" / "packing").exists()
    (place / "empty").mkdir()
    assert call("pack", "empty") == 0
    assert call("train-tokenizer", "tok") == 0
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


def test_a_store_within_the_input_is_replaced_and_an_input_within_the_store_is_not(place, capsys):
    command = ["data", "pack", "held", "--tokenizer", "tok", "--out", "held/store"]
    assert main(command) == 0
    assert main([*command, "--overwrite"]) == 0
    (place / "held" / "store" / "rejects.jsonl").write_text('{"text": "a"}\n')
    named = ["held/store/rejects.jsonl", *command[2:]]
    assert main(["data", "pack", *named, "--overwrite"]) == 2
    assert "contains the input held/store/rejects.jsonl" in capsys.readouterr().err


def test_a_pair_of_files_is_replaced_only_by_its_kind(place, capsys):
    def convert(to, out, *more):
        return main(["data", "convert", "s", "--to", to, "--out", out, *more])

    for to, names in (("megatron", ["m.bin", "m.idx"]), ("nanogpt", ["n.bin"]), ("pbin", ["p.pbin"])):
        out = names[0].removesuffix(".bin") if to == "megatron" else names[0]
        for name in names:
            (place / name).write_bytes(THESIS)
        if to != "nanogpt":  # whose files say nothing of themselves
            assert convert(to, out, "--overwrite") == 2
            assert "another --out" in capsys.readouterr().err
            assert (place / names[0]).read_bytes() == THESIS
        for name in names:
            (place / name).unlink()
        assert convert(to, out) == 0
        assert convert(to, out) == 2
        assert "--overwrite" in capsys.readouterr().err
        assert convert(to, out, "--overwrite") == 0
    (place / "thesis.md").write_bytes(THESIS)
    assert convert("nanogpt", "thesis.md", "--overwrite") == 2
    assert convert("megatron", "s/tokens", "--overwrite") == 2
    assert (place / "thesis.md").read_bytes() == THESIS


def test_what_came_meanwhile_is_not_replaced(place):
    make_store(place / ".new.partial", [2])
    with pytest.raises(UserError, match=r"precious: was created while this command ran.*is not a token store"):
        publish(place / ".new.partial", Path("precious"))
    assert (place / "precious" / "thesis.md").read_bytes() == THESIS


def test_a_link_to_a_store_gives_its_name_and_leaves_nothing(place):
    (place / "link").symlink_to("s2")
    before = tree(place / "s2")
    assert call("shuffle", "link") == 0
    assert not (place / "link").is_symlink()
    assert tree(place / "s2") == before
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_to_is_reported(place, capsys):
    (place / "locked").mkdir(mode=0o555)
    assert call("shuffle", "locked/new") == 2
    assert "not writable" in capsys.readouterr().err


def test_overwrite_is_named_only_where_it_would_do(place):
    assert "--overwrite" in str(exists_already(Path("s"), STORE))
    assert "--overwrite" in str(exists_already(Path("tok"), TOKENIZER))
    for name in ("precious", "with-notes", "tok", "file"):
        assert "--overwrite" not in str(exists_already(Path(name), STORE))
