"""Raw files, folders and saved datasets as the data of a run: what is learned, what is cached, what is refused."""

import csv
import gzip
import json
import os
import shutil
import signal
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Forked
from running import QUIET, losses, train

from weft.cli.main import main
from weft.config.run import RunConfig
from weft.data.conversations.named_templates import NAMED
from weft.data.raw.cache import cached_store
from weft.data.raw.pack_sources import detect_sources, pack_sources
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.observe.console import Console
from weft.parallel.world import start_world
from weft.train.data import open_data

ROOT = Path(__file__).parents[2]
LENGTH = 96
ANSWERS = ["Kalo mi.", "Ren sta tu, vo shi pra el.", "Zx" * 60, "x", "Tu vo. " * 3, "El?", "Mi mi mi.", "Sta " * 12]
RECORDS = [{"instruction": f"Vo shi {n}?", "input": "", "output": answer} for n, answer in enumerate(ANSWERS)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def alpaca(tmp_path):
    path = tmp_path / "my.json"
    path.write_text(json.dumps(RECORDS))
    return path


@pytest.fixture
def raw_yaml(tmp_path, hf_folder):
    """Writes the run file of a Hugging Face model and raw data, without tokenizer: `raw_yaml(train=...) -> Path`."""

    def write(name="demo.yaml", **data):
        sections = {
            "run": {"directory": str(tmp_path / "runs"), "seed": 3},
            "model": {"from": str(hf_folder)},
            "data": {"sequence_length": LENGTH} | data,
            "training": {"steps": 2, "batch_tokens": 4 * LENGTH, "dtype": "float32"},
            "log": QUIET,
        }
        path = tmp_path / name
        path.write_text("".join(f"{name}: {json.dumps(section)}\n" for name, section in sections.items()))
        return path

    return write


def prepared(path, *overrides):
    return pack_sources(RunConfig.load(path, list(overrides)))


def store_of(config):
    return TokenStore(config.data.stores["data.train"])


def refused(path, *overrides):
    with pytest.raises(UserError) as caught:
        prepared(path, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def by_transformers(folder, records=RECORDS):
    """Ids and mask of each conversation, as transformers computes them."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    found = []
    for record in records:
        messages = [
            {"role": "user", "content": record["instruction"]},
            {"role": "assistant", "content": record["output"]},
        ]
        one = tokenizer.apply_chat_template(
            messages, chat_template=NAMED["chatml"].source, return_dict=True, return_assistant_tokens_mask=True
        )
        found.append((one["input_ids"], one["assistant_masks"]))
    return found


def test_a_raw_file_and_its_packed_store_give_the_same_run(raw_yaml, alpaca, hf_folder, tmp_path, cache, capsys):
    assert train(raw_yaml(train=str(alpaca))) == 0
    said = capsys.readouterr().err
    long = sum(len(ids) + 1 > LENGTH for ids, _ in by_transformers(hf_folder))
    assert long == 1
    assert "packing into sequences 7/7 documents" in said
    assert f"warning: data.train: dropped 1 of 8 conversations: longer than {LENGTH} tokens" in said
    run = tmp_path / "runs" / "demo"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["data_left_out"] == {"train": {f"longer than {LENGTH} tokens": 1}}
    saved = (run / "config.yaml").read_text()
    assert str(alpaca) in saved
    assert "packing: best_fit" in saved
    assert str(cache) not in saved
    assert (run / "tokenizer" / "tokenizer.json").read_bytes() == (hf_folder / "tokenizer.json").read_bytes()

    options = ["--tokenizer", hf_folder, "--max-tokens", LENGTH, "--conversations", "--out", tmp_path / "store"]
    assert main(["data", "pack", *map(str, [alpaca, *options])]) == 0
    assert train(raw_yaml("store.yaml", train=str(tmp_path / "store"))) == 0
    assert losses(run) == losses(tmp_path / "runs" / "store")
    assert "packing: best_fit" in (tmp_path / "runs" / "store" / "config.yaml").read_text()


def test_a_run_is_evaluated_on_its_raw_validation_data(raw_yaml, alpaca, tmp_path, cache):
    import weft

    assert train(raw_yaml(train=str(alpaca), validation=str(alpaca)), "training.steps=1") == 0
    measured = json.loads((tmp_path / "runs" / "demo" / "metrics.jsonl").read_text())["validation_loss"]
    found = weft.evaluate(tmp_path / "runs" / "demo")
    assert found.loss == pytest.approx(measured, rel=1e-5)
    assert [one.store for one in found.stores] == [str(alpaca)]
    assert train(raw_yaml("none.yaml", train=str(alpaca)), "training.steps=1") == 0
    with pytest.raises(UserError, match=r"runs/none: this run has no validation data \(data.validation\); set `store`"):
        weft.evaluate(tmp_path / "runs" / "none")


def test_padded_samples_are_transformers_conversations(raw_yaml, alpaca, hf_folder, cache):
    config = prepared(raw_yaml(train=str(alpaca), packing="pad", shuffle=False))
    assert config.data.document_attention
    eod = store_of(config).info.eod_id
    source = open_data(config, start_world(config.parallel)).source
    expected = sorted(([*ids, eod], [*mask, 1]) for ids, mask in by_transformers(hf_folder) if len(ids) + 1 <= LENGTH)
    found = []
    samples = (zip(b.tokens, b.labels, b.weight, b.segments, strict=True) for b in map(source.batch, range(2)))
    for tokens, labels, weight, segments in (sample for batch in samples for sample in batch):
        length = int((segments == 0).sum())
        assert weight[length:].sum() == 0
        ids = [int(tokens[0]), *labels[:length].tolist()]
        assert tokens[:length].tolist() == ids[:-1]
        found.append((ids, [0, *weight[:length].int().tolist()]))
    assert sorted(found[: len(expected)]) == expected


def test_the_cache_is_keyed_by_content_tokenizer_and_options(raw_yaml, alpaca, tmp_path, cache):
    file = raw_yaml(train=str(alpaca))
    first = store_of(prepared(file)).path
    made = (first / "store.json").stat().st_mtime_ns
    assert store_of(prepared(file)).path == first
    shutil.copy(alpaca, tmp_path / "copy.json")
    assert store_of(prepared(file, f"data.train={tmp_path / 'copy.json'}")).path == first
    assert (first / "store.json").stat().st_mtime_ns == made
    others = {first}
    for override in ("data.train_on=all", "data.overlong=truncate", "data.chat_template=zephyr"):
        others.add(store_of(prepared(file, override)).path)
    others.add(store_of(prepared(file, "data.sequence_length=64")).path)
    assert len(others) == 5
    # A change that keeps size and modification time is a change.
    times = os.stat(alpaca)
    alpaca.write_text(alpaca.read_text().replace("Kalo", "Kali"))
    os.utime(alpaca, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert store_of(prepared(file)).path not in others
    # A damaged store is packed again.
    with open(first / "tokens.bin", "ab") as tokens:
        tokens.write(b"more")
    alpaca.write_text(json.dumps(RECORDS))
    assert store_of(prepared(file)).path == first


def test_an_unchanged_file_is_not_read_again(raw_yaml, alpaca, cache, monkeypatch):
    os.utime(alpaca, (1e9, 1e9))
    monkeypatch.setattr("weft.files.SETTLED", -10)  # so that the test need not wait
    file = raw_yaml(train=str(alpaca))
    first = prepared(file).data.stores
    monkeypatch.setattr("weft.data.raw.digests.BLOCK", None)  # reading would fail
    monkeypatch.setattr("weft.data.raw.digests.open", None, raising=False)
    assert prepared(file).data.stores == first


PROGRAM = """
import sys
from weft.config.run import RunConfig
from weft.data.raw.pack_sources import pack_sources
from weft.observe.console import Console
print(pack_sources(RunConfig.load(sys.argv[1]), Console()).data.stores["data.train"])
"""


def start_packing(file):
    return Forked(file, program=PROGRAM)


def test_several_processes_pack_once_and_a_killed_one_leaves_nothing_half(raw_yaml, tmp_path, cache):
    big = tmp_path / "big.jsonl"
    big.write_text("".join(json.dumps(RECORDS[n % 8] | {"instruction": f"{n}?"}) + "\n" for n in range(6_000)))
    file = raw_yaml(train=str(big))
    process = start_packing(file)
    deadline = time.monotonic() + 60
    while not list(cache.glob(".*.partial/parts")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in cache.iterdir() if not path.name.startswith(".")] == ["digests"]
    asking = [start_packing(file) for _ in range(2)]
    answers = [process.communicate(timeout=120) for process in asking]
    assert [process.returncode for process in asking] == [0, 0], answers
    assert len({out for out, _ in answers}) == 1
    ended = [line for _, err in answers for line in err.splitlines() if line.startswith("packing ") and "took" in line]
    assert len(ended) == 1
    store = TokenStore(answers[0][0].strip())
    assert store.num_documents + sum(store.info.rejected.values()) == 6_000
    assert not list(cache.glob(".*.partial"))


def test_a_resumed_run_notices_that_its_raw_file_changed(raw_yaml, alpaca, cache, capsys):
    file = raw_yaml(train=str(alpaca))
    assert train(file, "training.steps=1") == 0
    assert train(file, "training.steps=2") == 0
    assert "data.train (content)" not in capsys.readouterr().err
    alpaca.write_text(json.dumps([*RECORDS[:-1], RECORDS[0]]))
    assert train(file, "training.steps=3") == 2
    told = capsys.readouterr().err
    assert "data.train (content): " in told
    assert "--fresh to start over" in told
    assert train(file, "training.steps=3", "--accept-changes") == 0


def test_a_file_that_cannot_be_read_is_not_reported_as_a_full_disk(raw_yaml, alpaca, hf_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    (raw,) = detect_sources(RunConfig.load(raw_yaml(train=str(alpaca)), [f"model.from={folder}"])).values()
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="file/data: cannot be written: Not a directory; free space, or set WEFT_CACHE"):
        cached_store(raw, Console(prints=False))
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(UserError, match=r"hf/tokenizer.json: cannot be read: Is a directory; check the file"):
        cached_store(raw, Console(prints=False))


@pytest.mark.parametrize("saved", ["dict", "parquet", "jsonl"])
def test_only_the_split_of_a_saved_dataset_is_read(raw_yaml, tmp_path, saved):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    parts = {"train": RECORDS[3:8], "validation": RECORDS[:2], "test": RECORDS[1:2]}
    if saved == "dict":
        found = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
        found.save_to_disk(str(folder))
    else:
        (folder / "data").mkdir(parents=True)
        (folder / "README.md").write_text("# About the data\n")
        for name, rows in parts.items():
            one = datasets.Dataset.from_list(rows)
            if saved == "parquet":
                one.to_parquet(str(folder / "data" / f"{name}-00000-of-00001.parquet"))
            else:
                one.to_json(str(folder / "data" / f"{name}.jsonl"))
    config = prepared(raw_yaml(train=str(folder), validation=str(folder)))
    assert [TokenStore(path).num_documents for path in (*config.data.stores.values(),)] == [5]
    assert [TokenStore(path).num_documents for path in (*config.data.held_out_stores.values(),)] == [2]
    shutil.rmtree(folder / ("train" if saved == "dict" else "data"))
    if saved == "dict":
        (folder / "dataset_dict.json").write_text('{"splits": ["validation", "test"]}')
        assert "has the splits validation, test, but none is called train" in refused(raw_yaml(train=str(folder)))


def test_texts_are_packed_end_to_end_and_mixtures_take_raw_data(raw_yaml, tiny_corpus, tiny_store, alpaca, cache):
    texts = tiny_corpus / "train"  # text files, and JSON Lines with the field text
    by_sequences = ["objective.type=sft", "objective.loss=sequences"]
    assert "set data.packing to best_fit" in refused(raw_yaml(train=str(texts)), *by_sequences)
    assert prepared(raw_yaml(train=str(texts), packing="best_fit"), *by_sequences).data.document_attention
    assert "best_fit" in refused(raw_yaml(train=str(texts), packing="concatenate"), *by_sequences)
    config = prepared(raw_yaml(train=str(texts)))
    assert (config.data.packing, config.data.document_attention) == ("concatenate", False)
    store, reference = store_of(config), TokenStore(tiny_store)
    assert store.tokens.tolist() == reference.tokens.tolist()
    sources = [{"store": str(texts), "weight": 3}, {"store": str(alpaca), "weight": 1, "name": "chats"}]
    config = prepared(raw_yaml(train=sources))
    assert config.data.packing == "best_fit"
    data = open_data(config, start_world(config.parallel))
    assert set(data.digests) == {"train/train", "train/chats"}
    weight = sum(float(data.source.batch(step).weight.sum()) for step in range(3))
    assert 0 < weight < 3 * 4 * LENGTH


class Rows:
    """A custom dataset."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"tokens": [index] * LENGTH}


def test_conversations_for_validation_are_kept_apart_without_stores_for_training(raw_yaml, alpaca, cache):
    packed = store_of(prepared(raw_yaml(train=str(alpaca)))).path
    rows = {"type": "test_raw_data:Rows"}
    for train_on, held_out in ((None, alpaca), (rows, alpaca), (None, packed), (rows, packed)):
        for stated in ({}, {"packing": "best_fit"}):  # as in the saved config
            config = prepared(raw_yaml(train=train_on, validation=str(held_out), **stated))
            assert (config.data.packing, config.data.document_attention) == ("best_fit", True)
    (one,) = open_data(config, start_world(config.parallel)).held_out
    assert next(iter(one.full)).segments is not None


def test_a_batch_without_learned_tokens_has_loss_zero_and_is_a_warning(raw_yaml, alpaca, tmp_path, cache, capsys):
    file = raw_yaml(train=str(alpaca))
    mask = store_of(prepared(file)).path / "loss_mask.bin"
    mask.write_bytes(bytes(mask.stat().st_size))
    described = mask.with_name("store.json")  # without the digest that would show the change
    content = json.loads(described.read_text())
    described.write_text(json.dumps({key: value for key, value in content.items() if key != "sample_sha256"}))
    assert train(file, "training.steps=2") == 0
    assert "all tokens of the batch are masked, so the loss is 0; check the masks" in capsys.readouterr().err
    assert losses(tmp_path / "runs" / "demo") == [(1, 0.0, 0.0), (2, 0.0, 0.0)]


def test_a_template_writes_the_only_bos_token(raw_yaml, alpaca, hf_folder, tmp_path, cache):
    """A tokenizer whose post-processor adds a BOS token too must not add a second one."""
    from tokenizers import Tokenizer, processors

    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    bos = tokenizer.token_to_id(eos)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{eos} $A", special_tokens=[(eos, bos)])
    assert tokenizer.encode("a").ids[0] == bos
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(f"{{{{ '{eos}' }}}}" + NAMED["chatml"].source)
    store = store_of(prepared(raw_yaml(train=str(alpaca)), f"model.from={folder}"))
    for number in range(store.num_documents):
        ids = store.document(number).tolist()
        assert [place for place, token in enumerate(ids) if token == bos] == [0, len(ids) - 1]


def test_learned_tokens_are_shown(raw_yaml, alpaca, tmp_path, hf_folder, cache, capsys, monkeypatch):
    assert train(raw_yaml(train=str(alpaca)), "training.steps=1") == 0
    store = store_of(prepared(raw_yaml(train=str(alpaca)))).path
    report = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert 'assistant\n<span class="prompt">Kalo mi.&lt;|im_end|&gt;</span>' in report
    capsys.readouterr()
    assert main(["data", "show", str(store), "--masks", "--document", "0"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].startswith("--- document 0 (")
    assert "<|im_start|>user\nVo shi 0?<|im_end|>\n<|im_start|>assistant\n{+Kalo mi.<|im_end|>+}" in said
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["data", "show", str(store), "--masks", "--tokenizer", str(hf_folder), "--samples", "2"]) == 0
    assert "assistant\n\x1b[1;32mKalo mi.<|im_end|>\x1b[0m" in capsys.readouterr().out


@pytest.mark.parametrize("adapter", [None, {"r": 2}], ids=["export", "merge"])
def test_an_exported_model_stops_where_its_answers_end(raw_yaml, alpaca, hf_folder, tmp_path, cache, adapter):
    from transformers import AutoModelForCausalLM, GenerationConfig

    base, template = tmp_path / "base", tmp_path / "own.jinja"
    shutil.copytree(hf_folder, base)
    (base / "chat_template.jinja").unlink()
    content = json.loads((base / "tokenizer.json").read_text())
    stop = next(text for text, id in content["model"]["vocab"].items() if id == 400)
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 400, "content": stop})
    (base / "tokenizer.json").write_text(json.dumps(content))
    template.write_text(NAMED["chatml"].source.replace("<|im_end|>", stop))
    overrides = [f"model.from={base}", "training.steps=1", *([f"adapter={json.dumps(adapter)}"] if adapter else [])]
    assert train(raw_yaml(train=str(alpaca), chat_template=str(template)), *overrides) == 0
    words = ["merge"] if adapter else ["export", "--to", "hf"]
    assert main([*words, str(tmp_path / "runs" / "demo"), str(tmp_path / "out")]) == 0
    before = GenerationConfig.from_pretrained(base).eos_token_id if adapter else content["added_tokens"][0]["id"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [400, before]


def test_the_recipe_is_one_command(alpaca, hf_folder, tmp_path, cache):
    recipe = ROOT / "configs" / "sft.yaml"
    assert len(recipe.read_text().splitlines()) < 25
    assert train(recipe, f"data.train={alpaca}", f"model.from={hf_folder}", f"run.directory={tmp_path / 'runs'}") == 0
    assert losses(tmp_path / "runs" / "sft")


def test_truncated_conversations_are_counted_and_a_date_does_not_pack_again(
    raw_yaml, alpaca, hf_folder, tmp_path, cache, capsys
):
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}" + NAMED["chatml"].source)
    file, found = raw_yaml(train=str(alpaca), overlong="truncate"), []
    for day in ("2031-05-06", "2032-05-06"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("weft.data.raw.detect.date", SimpleNamespace(today=lambda day=day: date.fromisoformat(day)))
            config = RunConfig.load(file, [f"model.from={folder}"])
            found.append(store_of(pack_sources(config, Console())))
        assert "data.train: the chat template can write the current date: 2031-05-06 is used" in capsys.readouterr().err
    assert found[0].path == found[1].path
    info = found[0].info
    assert info.documents == len(RECORDS)
    assert info.notes == {f"truncated to {LENGTH} tokens": 1}
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert tokenizer.decode(found[0].document(0)).startswith("2031<|im_start|>user")


def test_every_format_gives_the_same_store(raw_yaml, alpaca, tmp_path, cache):
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (tmp_path / "my.json.gz").write_bytes(gzip.compress(alpaca.read_bytes()))
    with open(tmp_path / "my.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(RECORDS[0]))
        writer.writeheader()
        writer.writerows(RECORDS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part-1.jsonl").write_text(lines)
    expected = store_of(prepared(raw_yaml(train=str(alpaca)))).info.digest
    for name in ("my.json.gz", "my.csv", "folder", "folder/part-*.jsonl"):
        assert store_of(prepared(raw_yaml(train=str(tmp_path / name)))).info.digest == expected, name
