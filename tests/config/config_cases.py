"""Files that the tests of config/ write, and how they read what is wrong with them."""

import json
import re
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from weft.config.run import RunConfig
from weft.errors import ConfigError

RUN = """\
run: {name: demo, directory: runs, seed: 7}
model: {preset: llama-tiny, vocab_size: 512}
tokenizer: tok
data: {train: store, validation: heldout, sequence_length: 64}
objective: {type: pretrain}
optimizer: {type: adamw, lr: 3e-3, weight_decay: 0.1, betas: [0.9, 0.95]}
schedule: {type: cosine, warmup_steps: 5}
training: {steps: 30, batch_tokens: 1024, micro_batch_size: 4, dtype: float32, compile: false, grad_clip: 1.0}
parallel: {dp_shard: -1}
checkpoint: {every: 10, keep_last: 2}
log: {every: 1}
"""
SHORT = "model: llama-tiny\ndata: {train: store}\ntraining: {steps: 10}\n"
# For meshes: 8 query heads, 4 of keys and values; 8 layers; 32 sequences a step, 2 at a time.
DENSE = """\
model: {vocab_size: 512, hidden_size: 64, num_hidden_layers: 8, num_attention_heads: 8, num_key_value_heads: 4,
        intermediate_size: 96}
data: {train: store, sequence_length: 64}
training: {steps: 10, batch_tokens: 2048, micro_batch_size: 2}
parallel:
  dp_shard: -1
"""


def write(text: str, name: str = "run.yaml") -> str:
    """A file in the working directory."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return name


def load(text: str | None = None, *overrides: str, name: str = "run.yaml", data: bool = False) -> RunConfig:
    if text is not None:
        write(text, name)
    return RunConfig.load(name, overrides, check_data=data, for_fit=True)


def problems(text: str | None = None, *overrides: str, name: str = "run.yaml", data: bool = False) -> list[str]:
    """The lines that a user sees."""
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides, name=name, data=data)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems)
    return lines


def shows(found: str | list[str], expected: str | list[str]) -> bool:
    """Whether a message has all parts of `expected`, which "..." separates, in this order; for lists, each message."""
    if isinstance(found, list):
        assert len(found) == len(expected), found
        return all(shows(line, part) for line, part in zip(found, expected, strict=True))
    parts = re.split(r"\s*\.\.\.(?=\s|$)\s*", str(expected))
    assert re.search(".*".join(map(re.escape, parts)), found), f"{found!r} does not show {expected!r}"
    return True


def check_without_torch_and_numpy() -> str:
    """What `weft config check run.yaml` says, in a process that fails if either library comes in."""
    program = (
        "import sys; from weft.cli.main import main; code = main(['config', 'check', 'run.yaml']); "
        "sys.exit(code or bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_store(name: str, tokens: int, digest: str | None = "one", vocabulary: int = 300, **changes) -> None:
    """A token store of one document, byte by byte; `changes` of its store.json."""
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / "tokens.bin").write_bytes(b"\1\0" * tokens)
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1, 2) + struct.pack("<iqqq", tokens, 0, 0, 1)
    (folder / "tokens.idx").write_bytes(index)
    info = {
        "tokens": tokens,
        "documents": 1,
        "vocab_size": vocabulary,
        "tokenizer_digest": digest,
        "eod_id": 0,
        "bytes": 9,
        "dtype": "uint16",
    }
    (folder / "store.json").write_text(json.dumps(info | changes))
