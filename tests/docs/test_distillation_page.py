"""docs/tuning/distillation.md: the commands and the script run, in order, on small data."""

import json
import runpy
import shlex
from pathlib import Path

from tutorial import DOCS, commands, files

from weft.cli.main import main

SMALL = "training.epochs=null training.steps=2 training.batch_tokens=256 data.sequence_length=64 log.trackers=[]"


def test_the_pages_commands_run(tmp_path, hf_folder, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, path in {"configs": DOCS.parent / "configs", "SMALL_DIR": hf_folder, "LARGE_DIR": hf_folder}.items():
        (tmp_path / name).symlink_to(path)
    records = [{"instruction": f"Vo shi {n}?", "input": "", "output": "Kalo mi."} for n in range(20)]
    (tmp_path / "my.json").write_text(json.dumps(records))
    page = (DOCS / "tuning" / "distillation.md").read_text(encoding="utf-8")
    recipe = (DOCS.parent / "configs" / "distill.yaml").read_text()
    ran = [command.text for command in commands(page)]
    assert f"#   {ran[0]}\n" in recipe
    assert len(recipe.splitlines()) < 25
    for path, body in files(page).items():
        Path(path).write_text(body.replace("max_new_tokens=512", "max_new_tokens=3"))
    for command in ran:
        program, *words = shlex.split(command)
        if program == "python":
            runpy.run_path(words[0])
        else:
            assert main([*words, *SMALL.split()]) == 0, (command, capsys.readouterr().err)
    lines = [json.loads(line) for line in Path("runs/distill/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["divergence"] < 1e-6  # the teacher is the student
    assert lines[1]["cross_entropy"] > 1
    assert len(Path("answers.jsonl").read_text().splitlines()) == 20
