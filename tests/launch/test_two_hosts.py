"""Two machines, as far as a network can tell: two namespaces, a cable between them, and torchrun on each.

Each has its own interfaces and name; they share files and cores. All of it lives inside one `unshare`, whose end takes
every process, namespace and interface with it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import QUIET, assert_same_weights, losses, train

NAMESPACES = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
CABLE = "ip link add here type veth peer name there"
SCRIPT = """
set -eu
printf '127.0.0.1 localhost\\n10.99.0.1 one\\n10.99.0.2 two\\n' > hosts
mount --bind hosts /etc/hosts
hostname one
unshare --net --uts sleep 600 & two=$!
until [ "$(readlink /proc/$two/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
inside() { nsenter --target $two --net --uts "$@"; }
CABLE netns $two
ip addr add 10.99.0.1/24 dev here && ip link set here up && ip link set lo up
inside hostname two
inside ip addr add 10.99.0.2/24 dev there && inside ip link set there up && inside ip link set lo up
inside COMMAND > two.out 2>&1 & other=$!
code=0; COMMAND > one.out 2>&1 || code=$?
wait $other || code=$?
ip -json -statistics link show here > here.json
kill $two
exit $code
"""
PAGE = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def unshare():
    """The command that makes namespaces; skips where there are none to be had."""
    if missing := [name for name in ("unshare", "nsenter", "ip", "mount", "hostname") if shutil.which(name) is None]:
        pytest.skip(f"no network namespaces: {', '.join(missing)} not found")
    command = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *NAMESPACES]
    tried = subprocess.run([*command, *CABLE.split()], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network namespaces: {tried.stderr.strip() or tried.returncode}")
    return command


def interfaces():
    return sorted(os.listdir("/sys/class/net"))


def test_two_hosts_train_together(unshare, run_yaml, tmp_path):
    present = interfaces()
    sections = {
        "training": {"steps": 2, "batch_tokens": 512, "micro_batch_size": 2, "dtype": "float64"},
        "schedule": {"warmup_steps": 0},
        "log": QUIET,
    }
    two = run_yaml("two.yaml", run={"name": "two"}, parallel={"dp_shard": 2, "tp": 2}, **sections)
    (command,) = re.findall(r"^\$ (torchrun .*)$", PAGE, re.M)
    changes = {"torchrun ": f"{sys.executable} -m torch.distributed.run ", "node 8": "node 2", "run.yaml": str(two)}
    for before, after in changes.items():
        assert before in command
        command = command.replace(before, after)
    script = SCRIPT.replace("COMMAND", command).replace("CABLE", CABLE)
    process = subprocess.Popen(
        [*unshare, "bash", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    alone = run_yaml("alone.yaml", run={"name": "alone"}, **sections)
    assert train(alone) == 0
    try:
        _, errors = process.communicate(timeout=180)
    finally:
        process.kill()  # what is inside dies with it
    said = [file.read_text() for file in sorted(tmp_path.glob("*.out"))]
    assert process.returncode == 0, "\n".join([errors, *said])

    runs = tmp_path / "runs"
    for mine, theirs in zip(losses(runs / "alone"), losses(runs / "two"), strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=1e-9)
    assert_same_weights(runs / "alone", runs / "two", within=1e-9)
    (cable,) = json.loads((tmp_path / "here.json").read_bytes())
    assert all(cable["stats64"][way]["bytes"] > 1e6 for way in ("rx", "tx")), cable["stats64"]
    assert interfaces() == present
