"""docs/multi-token-prediction.md: its run trains, on small data with a smaller model."""

import json
import shlex
from pathlib import Path

from tutorial import DOCS, commands, files

from weft.cli.main import main

SMALL = (
    "model.preset=llama-tiny training.tokens=null training.steps=2 training.batch_tokens=256 data.sequence_length=64 "
    "log.trackers=[]"
)


def test_the_pages_run_trains(tmp_path, tiny_store, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.store").symlink_to(tiny_store)
    page = (DOCS / "multi-token-prediction.md").read_text(encoding="utf-8")
    for path, body in files(page).items():
        Path(path).write_text(body)
    (command,) = [command.text for command in commands(page)]
    assert main(["config", "check", "mtp.yaml"]) == 0
    assert main([*shlex.split(command)[1:], *SMALL.split()]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in Path("runs/mtp/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["mtp_loss"] > 1
