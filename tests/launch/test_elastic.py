"""`--nodes N --rendezvous HOST:PORT`: a fixed number of hosts, mistakes, and the choice of the mesh."""

import pytest
from elastic_hosts import meshes, sections
from running import losses, train


def test_a_fixed_number_of_hosts_and_a_mistake_that_no_restart_mends(run_yaml, tmp_path, hosts):
    (tmp_path / "breaks.py").write_text(
        "class Breaks:\n    def step(self, state):\n        if state.step == 2: raise ValueError('my mistake')\n"
    )
    file = run_yaml(**sections(callbacks=[{"type": "breaks:Breaks"}]))
    both = [hosts(file, "--max-restarts", "3", nodes="2") for _ in range(2)]
    codes = [process.wait(timeout=90) for process in both]
    said = [(tmp_path / f"host-{number}.txt").read_text() for number in range(2)]
    assert 2 in codes, said
    assert all(codes), said
    assert any("my mistake" in text for text in said)
    assert len(meshes(tmp_path / "runs" / "demo")) == 1
    assert [step for step, *_ in losses(tmp_path / "runs" / "demo")] == [1]


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
