"""Loads a config when the fork server imports it, so that no rank has to build pydantic's models of the sections."""

import contextlib
import tempfile
from pathlib import Path

from weft.config.run import RunConfig
from weft.errors import UserError

with tempfile.TemporaryDirectory() as _folder, contextlib.suppress(UserError):  # there is no such store
    _file = Path(_folder) / "run.yaml"
    _file.write_text(
        "run: {name: warm}\nmodel: {preset: llama-tiny, vocab_size: 512}\ntraining: {steps: 30, batch_tokens: 256}\n"
        "data: {train: store, sequence_length: 32}\nobjective: {type: sft}\nadapter: {r: 2}\nparallel: {dp_shard: 1}\n"
    )
    RunConfig.load(_file)
