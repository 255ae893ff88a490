"""`weft profile` on one process and on two: what it leaves, and that it leaves nothing else."""

import json
import re
import signal
import time

import pytest
from forked import Forked

from weft.cli.main import main
from weft.observe.trace import read_trace


def check(found, steps):
    for report in found["per_rank"]:
        assert [times["step"] for times in report["steps"]] == steps
        for times in report["steps"]:
            parts = times["compute"] + times["exposed"] + times["idle"]
            assert parts == pytest.approx(times["seconds"], rel=1e-6)
            assert 0 < times["compute"] < times["seconds"]
            assert times["exposed"] <= times["communication"]
            # The trace's step is the one that tokens/s is counted by.
            assert times["seconds"] == pytest.approx(report["step_seconds"][times["step"] - 1], rel=0.1, abs=2e-3)
        assert any("mm" in work["name"] for work in report["operators"])


def test_one_process_leaves_a_profile_and_nothing_else(run_yaml, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = run_yaml(samples={"prompts": ["ka"]}, training={"batch_tokens": 512})
    before = set(tmp_path.iterdir())
    assert main(["profile", str(path), "--warmup", "2", "--steps", "2"]) == 0
    said = capsys.readouterr()
    assert "2 recorded steps of 512 tokens, float32 on 1 x cpu" in said.err
    assert "profiles/demo/profile.html" in said.out
    assert "aten::mm" in said.out
    assert set(tmp_path.iterdir()) - before == {tmp_path / "profiles"}
    folder = tmp_path / "profiles" / "demo"
    names = {"trace-rank-00000.json.gz", "memory-rank-00000.svg", "profile.json", "profile.html"}
    assert {file.name for file in folder.iterdir()} == names
    found = json.loads((folder / "profile.json").read_text())
    check(found, [3, 4])
    assert list(read_trace(folder / "trace-rank-00000.json.gz").steps) == [3, 4]
    assert len(found["per_rank"][0]["step_seconds"]) == 4
    memory = found["per_rank"][0]["memory"]["at_peak_bytes"]
    assert memory["parameters"] >= 4 * found["parameters"]  # and buffers
    assert memory["parameters"] < 4.1 * found["parameters"]
    assert memory["optimizer state"] == pytest.approx(8 * found["parameters"], rel=0.01)
    assert memory["activations"] > 0
    assert "<svg" in (folder / "profile.html").read_text()
    # Again: beside it.
    assert main(["profile", str(path), "--warmup", "0", "--steps", "1"]) == 0
    assert (tmp_path / "profiles" / "demo-2" / "profile.json").exists()


@pytest.mark.xdist_group("ranks")
def test_two_processes_show_their_communication(run_yaml, tmp_path, ranks):
    from pool import weft_command

    words = ["profile", str(run_yaml(training={"batch_tokens": 512})), "--warmup", "1", "--steps", "2", "--out", "two"]
    for rank, (code, errors) in enumerate(ranks.call(weft_command, 2, tmp_path, words)):
        assert code == 0, errors
        assert "USDT" not in (ranks.folder / f"log-{rank}").read_text()
    found = json.loads((tmp_path / "two" / "profile.json").read_text())
    check(found, [2, 3])
    assert [report["rank"] for report in found["per_rank"]] == [0, 1]
    assert not (tmp_path / "runs").exists()
    for report in found["per_rank"]:
        assert (tmp_path / "two" / report["trace"]).exists()
        given = {work["name"]: work["bytes"] / 2 for work in report["collectives"]}
        # gloo sums whole gradients, once a step; the rest are losses and the like.
        assert given["gloo:all_reduce"] == pytest.approx(4 * found["parameters"], rel=0.02)
        assert given["gloo:all_gather"] >= 2 * found["parameters"]
        assert all(times["communication"] > 0 for times in report["steps"])
    halves = [report["memory"]["at_peak_bytes"]["optimizer state"] for report in found["per_rank"]]
    assert sum(halves) == pytest.approx(8 * found["parameters"], rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "5"], "--ranks: there is no rank 5; give ranks from 0 to 0"),
        (["--ranks", "one"], "--ranks one: use all, or numbers"),
        (["--steps", "0"], "--steps 0: use at least 1"),
        (["--steps", "40"], "--warmup 5 and --steps 40 are 45 steps, but this run has 30; lower --steps"),
        (["--out", "taken"], "taken: already exists; choose another --out"),
        (["--out", "taken/file/below"], "no folder can be created here; choose another --out"),
    ],
)
def test_mistakes_are_one_line(run_yaml, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    path = run_yaml()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("here")
    assert main(["profile", str(path), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "profiles").exists()


def test_a_signal_leaves_no_folder(run_yaml, tmp_path):
    words = ("profile", run_yaml(training={"steps": 90000}), "--warmup", "80000")
    process = Forked(*words, cwd=tmp_path, TMPDIR=str(tmp_path))
    while "\nstep 1/" not in process.stderr and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "no profile was written" in errors
    assert not list(tmp_path.glob("profiles*"))
    assert not list(tmp_path.glob("weft-profile-*"))


@pytest.mark.long
def test_the_cost_of_determinism_is_that_of_measured_steps(run_yaml, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.cli.profile.TURNS", 1)
    path = run_yaml(training={"batch_tokens": 512})
    before = set(tmp_path.iterdir())
    assert main(["profile", str(path), "--determinism", "--nproc", "1"]) == 0
    said = capsys.readouterr().out
    assert set(tmp_path.iterdir()) == before
    cost, exact, order = re.search(r"costs ([+-][\d.]+)% of a step: ([\d.e-]+) s, order ([\d.e-]+) s", said).groups()
    assert float(exact) > 0
    assert float(cost) == pytest.approx(100 * (float(exact) / float(order) - 1), abs=0.2)


def test_the_cost_of_determinism_takes_no_options_of_a_recording(run_yaml, capsys):
    assert main(["profile", str(run_yaml()), "--determinism", "--steps", "9"]) == 2
    assert "--steps has no effect with --determinism" in capsys.readouterr().err
