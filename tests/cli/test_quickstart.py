"""The quickstart, on a part of the standard library that runs this test, with a smaller model that is not compiled."""

import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

from weft.cli import quickstart
from weft.cli.main import main
from weft.config.run import RunConfig


class Command:
    """The started command, run in this process."""

    def __init__(self, words):
        assert words[:3] == [sys.executable, "-m", "weft"]
        self.code = main(words[3:])

    def wait(self):
        return self.code


def test_from_the_standard_library_to_a_model_that_writes(tmp_path, monkeypatch, capfd):
    library = tmp_path / "library"
    library.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        (library / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "sysconfig", SimpleNamespace(get_paths=lambda: {"stdlib": str(library)}))
    monkeypatch.setattr(quickstart, "subprocess", SimpleNamespace(Popen=Command))
    monkeypatch.setattr(quickstart, "TRIAL_STEPS", 21)
    yaml = quickstart.RUN_YAML
    for before, after in (
        ("size: 96", "size: 64"),
        ("compile: true", "compile: false"),
        ("tokens: 65536", "tokens: 8192"),
    ):
        assert before in yaml
        yaml = yaml.replace(before, after)
    monkeypatch.setattr(quickstart, "RUN_YAML", yaml)
    assert main(["quickstart", "--minutes", "0.05"]) == 0
    printed, progress = capfd.readouterr()
    assert "gzip -9" in printed
    assert "this model" in printed
    assert "def " in printed
    for verb in ("data train-tokenizer", "data pack", "train", "generate", "report"):
        assert f"$ weft {verb}" in progress
    assert RunConfig.load(tmp_path / "quickstart" / "run.yaml").training.steps >= 20
    held_out = (tmp_path / "quickstart" / "heldout.txt").read_text().splitlines()
    train = (tmp_path / "quickstart" / "train.txt").read_text().splitlines()
    assert not set(held_out) & set(train)
    assert 0.02 < len(held_out) / (len(train) + len(held_out)) < 0.09
