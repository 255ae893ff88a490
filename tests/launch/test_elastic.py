"""`--nodes N --rendezvous HOST:PORT`: the options, and the mesh for a number of hosts (runs: tests/chaos)."""

import pytest
from running import train

from weft.config.legal_mesh import elastic_mesh
from weft.config.run import RunConfig


@pytest.mark.parametrize(
    ("configured", "ranks", "mesh"),
    [
        ({"dp_replicate": 4, "dp_shard": 2}, 4, {"dp_replicate": 2, "dp_shard": 2}),  # two of four replicas are lost
        ({"dp_replicate": 4, "dp_shard": 2}, 6, {"dp_replicate": 3, "dp_shard": 2}),
        ({"dp_replicate": 2, "dp_shard": 2}, 3, {"dp_shard": 3}),
        ({"dp_shard": 2, "tp": 2}, 2, {"tp": 2}),
        ({"dp_shard": -1, "tp": 2}, 6, {"dp_shard": 3, "tp": 2}),
        ({"dp_shard": 2, "tp": 2}, 3, {"dp_shard": 3}),  # tp cannot stay
    ],
)
def test_the_data_axes_follow_the_number_of_ranks(run_yaml, configured, ranks, mesh):
    config = RunConfig.load(run_yaml(parallel=configured))
    found = elastic_mesh(config, ranks)
    assert {axis: size for axis, size in found.items() if size > 1} == mesh


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nodes", "2"], "--nodes and --rendezvous belong together"),
        (["--rendezvous", "one:29400"], "--nodes and --rendezvous belong together"),
        (["--nodes", "3:2", "--rendezvous", "one:29400"], "--nodes 3:2: use a number of hosts, or MIN:MAX"),
        (["--nodes", "2", "--rendezvous", "one"], "--rendezvous one: use HOST:PORT"),
        (["--nodes", "2", "--rendezvous", "one:29400", "--fresh"], "--fresh: each host would start over"),
    ],
)
def test_wrong_options_are_refused(run_yaml, capsys, arguments, text):
    assert train(run_yaml(), *arguments) == 2
    assert text in capsys.readouterr().err
