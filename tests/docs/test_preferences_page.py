"""docs/tuning/preferences.md: its run file loads, and its commands train, evaluate and export tiny models."""

import json
import shlex
from pathlib import Path

from tutorial import DOCS, commands, files

from weft.cli.main import main
from weft.config.run import RunConfig

PAGE = DOCS / "tuning" / "preferences.md"
SMALL = ["training.steps=1", "training.epochs=null", "training.batch_tokens=256", "data.sequence_length=128"]


def test_the_pages_file_and_commands(tmp_path, hf_folder, monkeypatch, capsys):
    page = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(DOCS.parent / "configs")
    (tmp_path / "HF_DIR").symlink_to(hf_folder)
    record = {"prompt": "Vo shi?", "chosen": "Kalo mi.", "rejected": "Mi."}
    (tmp_path / "prefs.jsonl").write_text("".join(json.dumps(record | {"prompt": f"Vo {n}?"}) + "\n" for n in range(8)))
    for path, body in files(page).items():
        Path(path).write_text(body)
        RunConfig.load(path, ["model.from=HF_DIR", "data.train=prefs.jsonl"])
    pack = [
        "prefs.jsonl",
        "--conversations",
        "--tokenizer",
        "HF_DIR",
        "--chat-template",
        "plain",
        "--out",
        "heldout-prefs",
    ]
    assert main(["data", "pack", *pack]) == 0
    more = [*SMALL, "log.trackers=[]", "data.chat_template=plain"]
    ran = [command.text for command in commands(page)]
    for name in ("dpo", "simpo", "reward"):
        command = next(one for one in ran if f"configs/{name}.yaml" in one)
        assert main([*shlex.split(command)[1:], *more]) == 0, capsys.readouterr().err
    capsys.readouterr()
    for command in (one for one in ran if "configs/" not in one):
        assert main(shlex.split(command)[1:]) == 0, (command, capsys.readouterr().err)
    assert json.loads((tmp_path / "reward-for-transformers" / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]
    assert capsys.readouterr().out.count("accuracy") >= 3
