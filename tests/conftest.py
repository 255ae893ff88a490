"""What all tests share: their threads, what needs a GPU, and a tiny corpus with its tokenizer and store."""

import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest


def _cores() -> int:
    """The cores this process may use: its affinity, or less where a container has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


sys.path.append(str(Path(__file__).parent / "parallel"))  # for `pool`
gc.disable()  # until all tests are collected: no module or test is garbage, and looking takes a fifth of that time

# Before torch is imported anywhere, also in the processes that tests start: threads that spin while they wait for work
# starve the other workers, and more threads than cores are slower than one.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, max(1, _cores() // _workers)) if _workers > 1 else 1))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Inductor would start processes of its own, each of which imports torch, beside as many workers as there are cores.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Tests of compiled decoding steps ask for them; other tests do not run the C compiler.
os.environ.setdefault("WEFT_COMPILE", "0")
# Nothing a test does reaches a hub or a tracker's server.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="offline")


# What a test wrote is read by processes of the same test, and need not survive a loss of power: to wait for the disk
# would take a tenth of the time of a short run. (tests/chaos counts the real calls, in processes of their own.)
os.fsync = lambda file: None


# A suite in the background has SIGINT ignored, and whatever it starts inherits that; tests of Ctrl-C need the default.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """`-n auto`: one worker a core, at most 8 (each holds a torch of its own)."""
    return min(_cores(), 8)


def pytest_collection_modifyitems(config, items):
    if getattr(config.option, "loadgroup", False):
        _group_by_file(items)
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _group_by_file(items):
    """Has one worker run all tests of a file with the mark `xdist_group` or a fixture of its module: made once.

    pytest-xdist hands groups on as the end of a test's id, which it can no longer change since pytest 9.2
    (https://github.com/pytest-dev/pytest-xdist/issues/1386): without a word, `--dist loadgroup` knew no groups.
    """
    for item in items:
        fixtures = itertools.chain.from_iterable(item._fixtureinfo.name2fixturedefs.values())
        shared = item.get_closest_marker("xdist_group") or any(fixture.scope == "module" for fixture in fixtures)
        if shared and hasattr(item, "_id"):
            item._id = type(item._id).parse(f"{item.nodeid}@{item.path.stem}")


def pytest_collection_finish():
    """Imported modules and collected tests are never garbage: a look through them takes a third of a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Half characters that a test logs on purpose must not break the pipe between pytest's worker and its master."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode("utf-8")) for title, text in report.sections
    ]
    return report


# Functions that hold what `torch.compile` returned, with its backend, for the rest of a process. Tests replace it.
COMPILED = {
    "weft.kernels.attention": "_compiled_flex",
    "weft.kernels.cross_entropy": "_compiled",
    "weft.kernels.masks": "_compiled_create_block_mask",
}


def _in_a_group() -> bool:
    """Whether this process has a process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


@pytest.fixture(autouse=True)
def _same_start():
    """Every test starts from the same seed, measures no device, and leaves neither compiled code nor a process group.

    More than 8 compiled variants of one function in a process fall back to eager with only a warning. What is
    measured before a run's first step is made up (`no_measuring`), also in this process.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "weft.train.recorder" in sys.modules:
        from pool import no_measuring

        no_measuring()
    before = _in_a_group()  # of a fixture that other tests share
    yield
    if _in_a_group() and not before:  # a later test in this process would fail
        from weft.torch_private import forget_groups

        sys.modules["torch.distributed"].destroy_process_group()
        forget_groups()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
    for name, function in COMPILED.items():
        if (module := sys.modules.get(name)) is not None:
            getattr(module, function).cache_clear()


# --- A corpus of made-up words, its tokenizer and its token stores: made once per worker, by the public commands. ---


def _prose(seed: int, documents: int) -> list[str]:
    """Seeded documents of a few sentences; some words are common and some rare, as in a language."""
    chooser = random.Random(seed)
    syllables = ["ka", "lo", "mi", "ren", "sta", "tu", "vo", "shi", "pra", "el"]
    words = ["".join(random.Random(i).choices(syllables, k=1 + i % 3)) for i in range(400)]
    frequency = [1 / (rank + 2) for rank in range(len(words))]
    texts = []
    for _ in range(documents):
        sentences = (chooser.choices(words, frequency, k=chooser.randint(4, 14)) for _ in range(chooser.randint(3, 9)))
        texts.append(" ".join(" ".join(sentence).capitalize() + "." for sentence in sentences) + "\n")
    return texts


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Raw data of runs is packed into a folder of this test session, also by processes that tests start."""
    cache, base = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp()
    # Compiled code is that of all workers: Inductor's tests of the processor alone take each of them 5 seconds.
    code = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    code.mkdir(exist_ok=True)
    (cache / "compiled").symlink_to(code)
    os.environ["WEFT_CACHE"] = str(cache)


def _weft(*command: str | Path) -> None:
    from weft.cli.main import main

    code = main([str(part) for part in command])
    assert code == 0, f"weft {' '.join(map(str, command))}: exit code {code}"


@pytest.fixture(scope="session")
def ranks():
    """Trains on several ranks, without `weft train`'s start of processes that import everything: `ranks.run(file, 2)`.

    Tests with it are in the group "ranks": one worker has them all, and the fork server.
    """
    from pool import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory) -> Path:
    """A folder with `train/` (150 text files and 150 JSON lines) and `heldout/` (30 text files)."""
    corpus = tmp_path_factory.mktemp("corpus")
    for part, seed, documents in (("train", 1, 150), ("heldout", 2, 30)):
        (corpus / part).mkdir()
        for number, text in enumerate(_prose(seed, documents)):
            (corpus / part / f"{number:03}.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps({"text": text}) for text in _prose(3, 150)]
    (corpus / "train" / "more.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return corpus


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_corpus, tmp_path_factory) -> Path:
    """The folder of a byte-level BPE tokenizer with 512 entries."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tok"
    _weft("data", "train-tokenizer", tiny_corpus / "train", "--vocab-size", "512", "--out", folder)
    return folder


@pytest.fixture(scope="session")
def tiny_store(tiny_corpus, tiny_tokenizer, tmp_path_factory) -> Path:
    """The folder of the training token store."""
    folder = tmp_path_factory.mktemp("store") / "store"
    _weft("data", "pack", tiny_corpus / "train", "--tokenizer", tiny_tokenizer, "--out", folder)
    return folder


@pytest.fixture(scope="session")
def tiny_heldout(tiny_corpus, tiny_tokenizer, tmp_path_factory) -> Path:
    """The folder of the held-out token store."""
    folder = tmp_path_factory.mktemp("heldout") / "heldout"
    _weft("data", "pack", tiny_corpus / "heldout", "--tokenizer", tiny_tokenizer, "--out", folder)
    return folder


@pytest.fixture(scope="session")
def hf_folder(tiny_tokenizer, tmp_path_factory) -> Path:
    """The folder of a tiny Hugging Face model with tokenizer and chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from weft.data.conversations.named_templates import NAMED

    folder = tmp_path_factory.mktemp("hf") / "hf"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # the same weights in every worker and session
        model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=128, **sizes))
    model.save_pretrained(folder)
    for file in tiny_tokenizer.iterdir():
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(NAMED["chatml"].source)
    return folder


@pytest.fixture(scope="session")
def chat_model(tiny_tokenizer, tmp_path_factory) -> Path:
    """The folder of a tiny Hugging Face model that learned one conversation by heart (`chat_model.py`)."""
    from chat_model import make_chat_model

    return make_chat_model(tiny_tokenizer, tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def run_yaml(tmp_path, tiny_tokenizer, tiny_store, tiny_heldout):
    """Writes a run's YAML file into `tmp_path`: `run_yaml(training={"steps": 3}, samples=...) -> Path`.

    A mapping is merged into the section of that name; anything else replaces it, and None leaves it out. The run
    directory is `tmp_path/runs/demo`.
    """

    def write(name: str = "run.yaml", **changes) -> Path:
        sections = {
            "run": {"name": "demo", "directory": str(tmp_path / "runs"), "seed": 7},
            "model": {"preset": "llama-tiny", "vocab_size": 512},
            "tokenizer": str(tiny_tokenizer),
            "data": {"train": str(tiny_store), "validation": str(tiny_heldout), "sequence_length": 64},
            "objective": {"type": "pretrain"},
            "optimizer": {"type": "adamw", "lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]},
            "schedule": {"type": "cosine", "warmup_steps": 5},
            "training": {
                "steps": 30,
                "batch_tokens": 1024,
                "micro_batch_size": 4,
                "dtype": "float32",
                "compile": False,
                "grad_clip": 1.0,
                "threads": int(os.environ["OMP_NUM_THREADS"]),
            },
            "parallel": {"dp_shard": -1},
            "checkpoint": {"every": 10, "keep_last": 2},
            "log": {"every": 1},
        }
        for section, change in changes.items():
            old = sections.get(section)
            sections[section] = old | change if isinstance(old, dict) and isinstance(change, dict) else change
        path = tmp_path / name
        # One section a line, so that messages with file:line can be checked; JSON is YAML.
        lines = [f"{section}: {json.dumps(value)}\n" for section, value in sections.items() if value is not None]
        path.write_text("".join(lines))
        return path

    return write
