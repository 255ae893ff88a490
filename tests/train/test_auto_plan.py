"""`parallel: auto`: the planner chooses the mesh of a run, and the losses are those of one process."""

import json
from pathlib import Path

import pytest

import weft
from weft.cli.main import main
from weft.config.dump import read_saved
from weft.errors import UserError
from weft.train.auto_plan import planned_facts

SHORT = {
    "training": {"steps": 2, "micro_batch_size": None},
    "data": {"validation": None},
    "schedule": {"type": "constant", "warmup_steps": 0},
}


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.xdist_group("ranks")
def test_two_ranks_train_by_a_plan_as_one_process_does(run_yaml, tmp_path, ranks):
    one = run_yaml(**SHORT, run={"name": "one"})
    assert main(["train", str(one)]) == 0
    ranks.run(run_yaml(**SHORT, run={"name": "two"}, parallel="auto"), 2)
    run = tmp_path / "runs" / "two"
    assert losses(run) == pytest.approx(losses(tmp_path / "runs" / "one"), abs=1e-4)
    saved = read_saved(run / "config.yaml")["parallel"]
    sizes = [saved[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    product = 1
    for size in sizes:
        product *= size
    assert (saved["auto"], product) == (True, 2)


def test_a_resumed_run_keeps_its_plan(run_yaml, tmp_path, capsys):
    path = run_yaml(**SHORT, parallel="auto")
    assert main(["train", str(path)]) == 0
    first = read_saved(tmp_path / "runs" / "demo" / "config.yaml")
    assert isinstance(first["training"]["micro_batch_size"], int)
    capsys.readouterr()
    assert main(["train", str(path), "training.steps=3", "parallel={auto: true, hardware: nosuch}"]) == 0
    assert "as in the last session" in capsys.readouterr().err
    assert read_saved(tmp_path / "runs" / "demo" / "config.yaml")["training"] == first["training"] | {"steps": 3}
    assert len(losses(tmp_path / "runs" / "demo")) == 3


def test_short_and_long_form_are_the_same(run_yaml):
    short = weft.RunConfig.load(run_yaml("a.yaml", **SHORT, parallel="auto"))
    long = weft.RunConfig.load(run_yaml("b.yaml", **SHORT, parallel={"auto": True}))
    assert short == long
    assert short.parallel.auto


def test_a_plan_that_cannot_be_made_is_one_line(run_yaml, capsys):
    assert main(["train", str(run_yaml(**SHORT, parallel={"auto": True, "hardware": "h100-sxmm"}))]) == 2
    message = capsys.readouterr().err
    assert "h100-sxm" in message
    with pytest.raises(UserError, match=r"parallel\.auto: true"):
        weft.RunConfig.load(run_yaml(**SHORT, parallel={"hardware": "h100-sxm"}))
    with pytest.raises(UserError, match="parallel"):
        weft.RunConfig.load(run_yaml(**SHORT, parallel="automatic"))


def test_keys_beside_auto_are_kept(run_yaml, capsys):
    given = {"auto": True, "tp": 2, "reshard_after_forward": False}
    training = SHORT["training"] | {"micro_batch_size": 1, "activation_checkpointing": "full"}
    path = run_yaml(**SHORT | {"training": training}, parallel=given)
    assert main(["plan", str(path), "--devices", "4", "--hardware", "h100-sxm", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert len(plans) > 1
    for plan in plans:
        found = {"reshard_after_forward": False} | plan["parallel"]
        assert (found["tp"], found["reshard_after_forward"]) == (2, False)
        assert plan["training"] == {"micro_batch_size": 1, "activation_checkpointing": "full"}
    path = run_yaml(**SHORT, parallel={"auto": True, "tp": 4, "pp": 2})
    assert main(["plan", str(path), "--devices", "4", "--hardware", "h100-sxm", "--json"]) == 2
    assert "tp: 4" in capsys.readouterr().err


def test_a_plan_written_to_a_file_is_not_planned_again(run_yaml, tmp_path):
    path, out = run_yaml(**SHORT, parallel={"auto": True, "hardware": "h100-sxm"}), tmp_path / "plan.yaml"
    assert main(["plan", str(path), "--devices", "2", "--hardware", "h100-sxm", "--apply", str(out)]) == 0
    parallel = weft.RunConfig.load(out, ranks=2).parallel
    assert (parallel.auto, parallel.hardware) == (False, None)


def test_a_run_is_reproduced_with_its_plan(run_yaml, tmp_path, capsys):
    """The hardware file is gone, so no plan can be made."""
    hardware = tmp_path / "mine.yaml"
    hardware.write_text((Path(weft.__file__).parent / "planner" / "devices" / "cpu-generic.yaml").read_text())
    path = run_yaml(**SHORT, parallel={"auto": True, "hardware": str(hardware)})
    assert main(["train", str(path)]) == 0
    hardware.unlink()
    assert main(["reproduce", str(tmp_path / "runs" / "demo")]) == 0
    assert "planned for" not in capsys.readouterr().err.partition("reproduce")[2]


def test_the_config_of_a_planned_run_is_planned_for_other_ranks(run_yaml):
    """It has all axes, for the ranks of its last session."""
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert weft.RunConfig.load(run_yaml(**SHORT, parallel={"auto": True, **axes}), ranks=1).parallel.auto
    with pytest.raises(UserError, match="dp_shard"):
        weft.RunConfig.load(run_yaml(**SHORT, parallel=axes), ranks=1)


def test_given_batches_are_not_planned(run_yaml):
    config = weft.RunConfig.load(run_yaml(**SHORT, parallel="auto"))
    with pytest.raises(UserError, match=r"parallel: auto.*set the mesh"), weft.Trainer(config, batches="global"):
        pass


def test_ranks_compare_their_plans(run_yaml):
    """Different devices lead to different plans, which the ranks report as a difference."""
    config = weft.RunConfig.load(run_yaml(**SHORT, parallel="auto"))
    other = config.model_copy(update={"parallel": config.parallel.model_copy(update={"pp_schedule": "gpipe"})})
    differ = set(planned_facts(config).items()) ^ set(planned_facts(other).items())
    assert {key for key, _ in differ} == {"parallel.pp_schedule (of parallel.auto)"}
