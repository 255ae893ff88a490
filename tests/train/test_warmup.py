"""A session's first step, which may compile, is told apart from the others."""

import json
import sys

from running import QUIET, metrics, train

FIRST_IS_SLOW = """
import time

class FirstIsSlow:
    def __init__(self, total_steps: int):
        self.called = False

    def __call__(self, step):
        if not self.called:
            time.sleep(1.3)
        self.called = True
        return 1.0
"""


def test_the_first_step_of_each_session_is_measured_apart(run_yaml, tmp_path, monkeypatch, capsys):
    (tmp_path / "first_is_slow.py").write_text(FIRST_IS_SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "first_is_slow", raising=False)
    path = run_yaml(
        schedule=None, samples=None, data={"validation": None}, log={**QUIET, "every": 2}, training={"steps": 4}
    )
    with path.open("a") as file:
        file.write('schedule: {"type": "first_is_slow:FirstIsSlow"}\n')
    assert train(path) == 0
    assert "warm-up: the first step took" in capsys.readouterr().err
    assert train(path, "training.steps=8") == 0
    lines = metrics(tmp_path / "runs" / "demo")
    assert [line["step"] for line in lines if "warmup_seconds" in line] == [2, 6]
    # Within the averages of its line, as ever; not within the next one's.
    assert all(1.3 <= lines[at]["warmup_seconds"] <= 2 * lines[at]["step_seconds"] for at in (0, 2))
    assert all(line["step_seconds"] < 1 for line in (lines[1], lines[3]))
    manifest = json.loads((tmp_path / "runs" / "demo" / "manifest.json").read_text())
    for session in manifest["sessions"]:
        assert session["warmup_seconds"] >= 1.3
        assert 0 < session["steady_step_seconds"] < 1
    page = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert "Warm-up" in page
