"""A config that is tried with real steps beside its run directory."""

import json

import forked
import pytest

from weft.config.run import RunConfig
from weft.errors import UserError
from weft.launch.try_config import try_config


def test_plans_are_measured_beside_the_run(run_yaml, tmp_path):
    file = run_yaml(training={"micro_batch_size": 2})
    options = ["--devices", "1", "--hardware", "cpu-generic", "--keep-mesh", "--try", "1", "--json"]
    done = forked.run("plan", file, *options, ranks=True)
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)["plans"]
    assert plan["training"]["micro_batch_size"] == 2
    assert plan["measured_seconds"] > 0
    assert plan["measured_bytes"] > 1 << 20
    assert "predicted for CPU, two threads, but this machine has " in done.stderr
    assert not (tmp_path / "runs").exists()


def test_more_processes_than_the_machine_can_start_are_refused(run_yaml):
    with pytest.raises(UserError, match="--devices 5000: this machine has"):
        try_config(RunConfig.load(run_yaml()), 5000)
