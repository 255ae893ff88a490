"""Numbers of documents, such as labels: from records into stores, through every operation, never lost or changed."""

import json
import shutil

import numpy as np
import pytest
from chat_cases import chat_folder  # noqa: F401
from store_cases import make_store

from weft.cli.main import main
from weft.data.packing.merge import merge
from weft.data.sequences.packed import PackedDataset
from weft.data.stores.indexed import IndexedWriter
from weft.data.stores.operations.dedup import dedup
from weft.data.stores.operations.filter import filter_store
from weft.data.stores.operations.new_store import Output
from weft.data.stores.operations.sample import sample
from weft.data.stores.operations.shuffle import shuffle
from weft.data.stores.operations.split import split
from weft.data.stores.operations.verify import verify
from weft.data.stores.store import StoreInfo, TokenStore
from weft.data.stores.store_json import write_store_json
from weft.errors import UserError

# As TRL's unpaired preferences, of texts and of messages; the numbers are those of JSON.
RECORDS = [
    {"prompt": "Hi", "completion": "Yo", "label": True, "score": 0.25},
    {"prompt": "Hi", "completion": "No", "label": False, "score": -3},
    {
        "prompt": [{"role": "user", "content": "Bye"}],
        "completion": [{"role": "assistant", "content": "weft"}],
        "label": True,
        "score": 1e-9,
    },
]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def pack(folder, path, out, *options):
    command = ["data", "pack", path, "--tokenizer", folder, "--out", out, "--chat-template", "chatml", *options]
    return main(list(map(str, command)))


def test_numbers_of_records_are_stored_shown_and_verified(folder, tmp_path, capsys):
    path = write(tmp_path / "kto.jsonl", RECORDS)
    assert pack(folder, path, tmp_path / "store", "--document-fields", "label,score") == 0
    store = TokenStore(tmp_path / "store")
    assert store.info.kind == "conversations"
    assert store.fields["label"].tolist() == [1, 0, 1]
    assert store.fields["score"].tolist() == np.array([0.25, -3, 1e-9], np.float32).tolist()
    assert pack(folder, path, tmp_path / "plain") == 0
    plain = TokenStore(tmp_path / "plain")
    assert plain.info.bin_sha256 == store.info.bin_sha256
    assert plain.info.digest != store.info.digest
    capsys.readouterr()
    assert main(["data", "show", str(store.path), "--tokenizer", str(folder), "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert "trained on, label 1, score 0.25)\n" in shown
    assert "label 1, score 1e-09)\n" in shown
    assert main(["data", "inspect", str(store.path)]) == 0
    assert "field      label: 0 to 1, mean 0.666667" in capsys.readouterr().out
    assert not verify(store.path)
    changed = shutil.copytree(store.path, tmp_path / "changed")
    values = np.array([1, 1, 1], "<f4")
    (changed / "field.label.bin").write_bytes(values.tobytes())
    (found,) = verify(changed)
    assert "field.label.bin: its bytes were changed" in found
    (changed / "field.label.bin").write_bytes(values[:2].tobytes())
    with pytest.raises(UserError, match=r"field\.label\.bin: damaged: it has 8 bytes instead of 12"):
        TokenStore(changed)
    (changed / "field.label.bin").unlink()
    with pytest.raises(UserError, match="has 0 bytes"):
        TokenStore(changed)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "field 'label' is null"),
        ("good", "field 'label' is not a number"),
        ([1], "field 'label' is not a number"),
    ],
)
def test_a_record_without_its_number_is_rejected_with_its_line(folder, tmp_path, capsys, value, told):
    path = write(tmp_path / "a.jsonl", [RECORDS[0], RECORDS[1] | {"label": value}])
    assert pack(folder, path, tmp_path / "store", "--document-fields", "label") == 2
    assert f"a.jsonl:2: {told}" in capsys.readouterr().err


def test_numbers_may_be_text_and_have_another_key(folder, tmp_path, capsys):
    records = [{"prompt": "Hi", "completion": "Yo", "good": text} for text in ("True", "false", "0.5", 2)]
    path = write(tmp_path / "a.jsonl", records)
    assert pack(folder, path, tmp_path / "store", "--document-fields", "label", "--fields", "label=good") == 0
    assert TokenStore(tmp_path / "store").fields["label"].tolist() == [1, 0, 0.5, 2]
    capsys.readouterr()
    assert pack(folder, path, tmp_path / "b", "--document-fields", "label") == 2
    told = capsys.readouterr().err
    assert "the first records have no number 'label' (their keys: 'prompt', 'completion', 'good')" in told
    assert "; name its key with --fields label=..." in told
    for names in ("label,label", "tokens", "a-b", "../x"):
        assert pack(folder, path, tmp_path / "b", "--document-fields", names) == 2
        assert f"--document-fields {names}: " in capsys.readouterr().err


def test_both_documents_of_a_preference_have_its_number(folder, tmp_path):
    records = [{"prompt": "Hi", "chosen": "Yo", "rejected": "No", "margin": n / 4} for n in range(5)]
    records[1]["rejected"] = "Yo"  # left out
    records[2]["rejected"] = "loom " * 50  # too long
    path = write(tmp_path / "a.jsonl", records)
    assert pack(folder, path, tmp_path / "store", "--document-fields", "margin", "--max-tokens", "40") == 0
    store = TokenStore(tmp_path / "store")
    assert store.fields["margin"].tolist() == [0, 0, 0.75, 0.75, 1, 1]
    dataset = PackedDataset(store, 40, values=store.fields)
    found = [dataset[n]["margin"][dataset[n]["weight"] > 0] for n in range(len(dataset))]
    assert sorted(set(np.concatenate(found).tolist())) == [0, 0.75, 1]


def test_shards_and_workers_give_the_files_of_one_pack(folder, tmp_path):
    records = [{"prompt": f"Hi {n}", "completion": "Yo " * (n % 7), "label": n % 3 == 0} for n in range(300)]
    path, fields = write(tmp_path / "a.jsonl", records), ("--document-fields", "label")
    assert pack(folder, path, tmp_path / "one", *fields, "--workers", "1") == 0
    assert pack(folder, path, tmp_path / "two", *fields, "--workers", "2") == 0
    shards = [tmp_path / f"shard{n}" for n in (1, 2)]
    for n, shard in enumerate(shards, start=1):
        assert pack(folder, path, shard, *fields, "--shard", f"{n}/2") == 0
    merge(shards, tmp_path / "merged")
    one = (tmp_path / "one" / "field.label.bin").read_bytes()
    assert np.frombuffer(one, "<f4").tolist() == [float(n % 3 == 0) for n in range(300)]
    for name in ("two", "merged"):
        assert (tmp_path / name / "field.label.bin").read_bytes() == one
        assert not verify(tmp_path / name)


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """A store of documents whose first token is their number, with a field that is the number / 8."""
    folder = tmp_path_factory.mktemp("labeled") / "store"
    folder.mkdir()
    lengths = np.random.default_rng(0).integers(3, 9, 200)
    tokens = np.ones(lengths.sum(), np.int64)
    starts = np.cumsum(lengths) - lengths
    tokens[starts], tokens[starts + lengths - 1] = np.arange(200) % 150 + 2, 0  # documents 150 to 199 may be copies
    writer = IndexedWriter(folder / "tokens", np.int32, mask=True, fields=["value"])
    for some in (slice(0, 77), slice(77, 200)):
        span = slice(starts[some][0], starts[some][-1] + lengths[some][-1])
        values = {"value": (np.arange(200)[some] % 150) / 8}
        writer.add(tokens[span], lengths[some], np.ones(span.stop - span.start, np.uint8), values)
    info = StoreInfo(kind="conversations", tokenizer_digest="x", vocab_size=200, eod_id=0, bytes=9, **writer.finish())
    write_store_json(folder, info.model_dump())
    return folder


def check(path, documents=None):
    """Every document has its own value still."""
    store = TokenStore(path)
    assert not verify(path)
    assert documents is None or store.num_documents == documents
    for number in range(store.num_documents):
        assert store.fields["value"][number] == (store.document(number)[0] - 2) / 8
    return store.num_documents


def test_every_operation_keeps_the_numbers_of_documents(labeled, tmp_path):
    check(labeled, 200)
    shuffle(labeled, Output(tmp_path / "shuffled"), seed=3)
    check(tmp_path / "shuffled", 200)
    assert TokenStore(tmp_path / "shuffled").fields["value"].tolist() != TokenStore(labeled).fields["value"].tolist()
    sample(labeled, Output(tmp_path / "sample"), documents=40)
    check(tmp_path / "sample", 40)
    filter_store(labeled, Output(tmp_path / "filtered"), min_tokens=4)
    assert 0 < check(tmp_path / "filtered") < 200
    parts = [tmp_path / "a", tmp_path / "b"]
    split(labeled, Output(tmp_path), parts, [0.5, 0.5])
    assert sum(map(check, parts)) == 200
    dedup(labeled, Output(tmp_path / "unique"))
    assert 150 <= check(tmp_path / "unique") < 200
    merge([*parts, tmp_path / "sample"], tmp_path / "merged")
    check(tmp_path / "merged", 240)


def test_stores_of_other_fields_are_not_merged(labeled, tmp_path):
    info = json.loads((labeled / "store.json").read_text())
    other = make_store(tmp_path / "other", [3, 3], mask=np.ones(6), kind="conversations")
    stored = json.loads((other.path / "store.json").read_text())
    write_store_json(other.path, stored | {key: info[key] for key in ("tokenizer_digest", "vocab_size", "eod_id")})
    with pytest.raises(UserError, match=r"lacks the field 'value' of documents, but .* has it; merge only"):
        merge([labeled, other.path], tmp_path / "merged")
    damaged = shutil.copytree(labeled, tmp_path / "damaged")
    (damaged / "field.value.bin").write_bytes(bytes(800))
    with pytest.raises(UserError, match=r"field\.value\.bin: damaged: the file's digest differs"):
        merge([damaged, labeled], tmp_path / "merged")
