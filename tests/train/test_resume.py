"""A run that was killed or stopped goes on as if nothing had happened, to the last bit."""

import resource
import shutil
import signal

import pytest
from forked import Forked
from running import QUIET, assert_same_weights, finish, losses, train

from weft.checkpoint.load import checkpoints
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.train.run_directory import RunDirectory, claim
from weft.train.trainer import Trainer

SIGNALS = """
import os, signal

class Signals:
    def step(self, state):
        at, _, number = os.environ.get("SIGNALS", "0 0").partition(" ")
        if state.step == int(at):
            os.system(f"kill -{number} -{os.getpgrp()}")  # its worker hears it too, of another process
"""


def test_a_killed_and_a_stopped_run_go_on_to_the_same_bits(run_yaml, tmp_path, monkeypatch):
    (tmp_path / "signals_for_resume.py").write_text(SIGNALS)
    monkeypatch.chdir(tmp_path)
    common = {
        "model": {"attention_dropout": 0.1, "hidden_dropout": 0.1, "embedding_dropout": 0.1},
        "data": {"workers": 1},
        "training": {"steps": 12, "batch_tokens": 512, "threads": 1},
        "schedule": {"warmup_steps": 2},
        "callbacks": [{"type": "signals_for_resume:Signals"}],
        "validation": {"every": 5, "tokens": 256},
        "checkpoint": {"every": 4},
        "log": QUIET,
    }
    assert train(run_yaml("straight.yaml", **common, run={"name": "straight"})) == 0
    straight, run = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"
    file = run_yaml("broken.yaml", **common, run={"name": "broken"})

    process = Forked("train", file, cwd=tmp_path, SIGNALS=f"6 {int(signal.SIGKILL)}")
    assert finish(process)[0] == -signal.SIGKILL
    killed_at = losses(run)[-1][0]
    assert 4 < killed_at <= 6
    assert [c.name for c in (run / "checkpoints").glob("step-*")] == ["step-00000004"]

    # It goes on from step 4, and on its way is asked to leave; its worker is needed until the checkpoint is there.
    process = Forked("train", file, cwd=tmp_path, SIGNALS=f"9 {int(signal.SIGTERM)}")
    code, errors = finish(process)
    assert code == 128 + signal.SIGTERM, errors
    left_at = losses(run)[-1][0]
    assert killed_at < left_at < 12
    assert (run / "checkpoints" / f"step-{left_at:08}").is_dir()
    assert f"stopped after step {left_at}, saved" in errors
    assert "Traceback" not in errors
    assert losses(run) == losses(straight)[:left_at]

    assert train(file) == 0
    assert [step for step, *_ in losses(run)] == list(range(1, 13))
    assert losses(run) == losses(straight)
    assert_same_weights(straight, run)


def test_what_changed_since_the_run_last_trained_is_printed_and_a_finished_run_is_left_alone(
    run_yaml, tiny_tokenizer, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    short = {"training": {"steps": 2}, "schedule": {"warmup_steps": 1}, "data": {"validation": None}}
    file, run = run_yaml(**short, log=QUIET), tmp_path / "runs" / "demo"
    assert train(file) == 0
    said = capsys.readouterr().err
    assert "(2.0k in all)" in said
    assert "0.0M" not in said

    # Nothing is to be done: nothing is written, and so nothing that was not trained with is taken for what was.
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert train(file, "optimizer.lr=1e-5", "run.seed=9") == 0
    said = capsys.readouterr().err
    assert "this run is finished: it has made 2 steps" in said
    assert train(file, "training.steps=1") == 0
    said += capsys.readouterr().err
    assert "this run is past its length: it has made 2 steps, and its length is 1" in said
    assert "step 2/" not in said
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before

    changed = ("run.seed=9", "data.sequence_length=32", "data.workers=1", "optimizer.lr=1e-3")
    changed_tokenizer = shutil.copytree(tiny_tokenizer, tmp_path / "changed")
    (changed_tokenizer / "chat_template.jinja").write_text("{{ messages[0].content }}")
    longer = ("training.steps=3", f"tokenizer={changed_tokenizer}", *changed)
    assert train(file, *longer) == 2
    said = capsys.readouterr().err
    assert "optimizer.lr: 0.003 -> 0.001" in said
    assert "(data.sequence_length, optimizer.lr, run.seed)" in said
    assert "--accept-changes" in said
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert train(file, *longer, "--accept-changes") == 0
    assert (run / "tokenizer" / "chat_template.jinja").exists()  # the run's copy is what generates and evaluates
    said = capsys.readouterr().err
    for words in ("run.seed: 7 -> 9", "data.sequence_length: 64 -> 32", "optimizer.lr: 0.003 -> 0.001"):
        assert f"changed since the run last trained: {words}" in said
    assert "data.workers" not in said  # it changes no result
    assert "data.sequence_length, run.seed changed and decide which samples a step takes" in said

    # Compared with the last training, not with the first; an earlier version had other names for some keys.
    saved = (run / "config.yaml").read_text()
    for old, new in (
        ("schedule", "pp_schedule"),
        ("context", "cp_method"),
        ("layers_per_unit", "layers_per_fsdp_unit"),
    ):
        assert f"  {new}: " in saved
        saved = saved.replace(f"  {new}: ", f"  {old}: ")
    (run / "config.yaml").write_text(saved)
    assert train(file, "training.steps=4", *changed) == 0
    said = capsys.readouterr().err
    assert "run.seed" not in said
    assert "parallel." not in said


def test_a_change_of_the_mesh_changes_no_result_but_compressed_gradients_do(run_yaml, tmp_path):
    file, run = run_yaml(), RunDirectory(tmp_path / "runs" / "demo")
    run.saved = RunConfig.load(file).as_dict()
    now = RunConfig.load(file, ["parallel.dp_replicate=2", "parallel.compress={rank: 3, start_step: 1}"])
    assert {key: new for key, (_, new) in run.changes(now).items()}["parallel.compress.rank"] == 3
    assert not [key for key in run.changes(now) if not key.startswith("parallel.compress")]


def test_what_was_chosen_for_the_last_session_is_kept_but_not_its_threads(run_yaml, tmp_path):
    config, run = RunConfig.load(run_yaml(training={"dtype": "auto", "threads": None})), RunDirectory(tmp_path)
    run.saved = {"training": {"dtype": "bfloat16", "threads": 64}}
    training = run.with_dtype(config).training
    assert (training.dtype, training.threads) == ("bfloat16", None)


def test_a_run_directory_that_nothing_was_begun_in_goes_again(tmp_path):
    refused, begun = tmp_path / "runs" / "refused", tmp_path / "runs" / "begun"
    RunDirectory(refused, claim(refused, fresh=False)).release()
    assert not refused.exists()
    run = RunDirectory(begun, claim(begun, fresh=False))
    (begun / "config.yaml").write_text("")
    run.release()
    assert (begun / "config.yaml").exists()


def test_a_damaged_newest_checkpoint_and_an_emptied_file_of_metrics(run_yaml, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = {
        "training": {"steps": 6, "batch_tokens": 256, "threads": 1},
        "schedule": {"warmup_steps": 0},
        "data": {"validation": None},
        "checkpoint": {"every": 2, "keep_last": 3},
        "log": QUIET,
    }
    assert train(run_yaml("straight.yaml", **common, run={"name": "straight"})) == 0
    file, straight, run = run_yaml(**common), tmp_path / "runs" / "straight", tmp_path / "runs" / "demo"
    assert train(file) == 0
    for step in (4, 6):
        tensors = next((run / "checkpoints" / f"step-{step:08}").glob("*.safetensors"))
        tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    (run / "metrics.jsonl").write_text("")
    capsys.readouterr()

    assert train(file) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run}/checkpoints/step-00000006/" in line
    assert "damaged" in line
    assert f"previous complete checkpoint, {run}/checkpoints/step-00000002;" in line
    assert "`weft train --from-last-good`" in line
    assert train(file, "--from-last-good", "--fresh") == 2
    assert "use only one of the two options" in capsys.readouterr().err
    with pytest.raises(UserError, match="use only one of the two options"):
        Trainer(RunConfig.load(file), fresh=True, from_last_good=True)

    assert train(file, "--from-last-good") == 0
    said = capsys.readouterr().err
    for step in (4, 6):
        assert f"step-{step:08} is damaged (" in said
        assert f"renamed to damaged-step-{step:08}; the run resumes from step-00000002" in said
        assert (run / "checkpoints" / f"damaged-step-{step:08}").is_dir()
    assert f"{run}/metrics.jsonl has no line, but the run resumes after step 2" in said
    assert losses(run) == losses(straight)[1:]  # the checkpoint has the metrics of its step
    assert_same_weights(straight, run)
    assert train(file, "--from-last-good", "training.steps=7") == 0  # nothing is damaged any more
    said = capsys.readouterr().err
    assert "resumes after step 6" in said
    assert "warning" not in said.replace("warning: changed since the run last trained: training.steps", "")
    assert "removed" not in said  # one goes for another: 2 for 7

    assert train(file, "training.steps=8", "checkpoint.keep_last=1") == 0
    told = "step 8: removed step-00000004, step-00000006, step-00000007, because checkpoint.keep_last is 1"
    assert told in capsys.readouterr().err
    assert [path.name for path in checkpoints(run)] == ["step-00000008"]
    assert (run / "checkpoints" / "damaged-step-00000004").is_dir()


@pytest.mark.parametrize("room", [100, 20_000])
def test_a_disk_that_is_full_when_a_run_starts_is_one_line(run_yaml, tmp_path, monkeypatch, capsys, room):
    """The kernel refuses the config, or the tokenizer's copy."""
    monkeypatch.chdir(tmp_path)
    file = run_yaml(training={"steps": 1}, schedule={"warmup_steps": 0}, data={"validation": None}, log=QUIET)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        code = train(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    run = tmp_path / "runs" / "demo"
    assert line == (
        f"{run}: cannot be written: File too large; free space or set run.directory, and run the same command again"
    )
    assert train(file) == 0
    assert (run / "tokenizer" / "tokenizer.json").stat().st_size > room
