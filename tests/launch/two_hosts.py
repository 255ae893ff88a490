"""Two machines, as far as a network can tell: two namespaces, a cable between them, and torchrun on each.

Each has its own interfaces and name; they share files and cores. All of it lives inside one `unshare`, whose end takes
every process, namespace and interface with it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
HOSTS
MEANWHILE
code=0; wait $mine || code=$?
wait $other || code=$?
ip -json -statistics link show here > here.json
kill $two
exit $code
"""
HOSTS = """
inside COMMAND > two.out 2>&1 & other=$!
COMMAND > one.out 2>&1 & mine=$!
"""
TORCHRUN = f"{sys.executable} -m torch.distributed.run "
PAGE = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")


def namespaces() -> list[str]:
    """The command that makes namespaces; skips where there are none to be had."""
    if missing := [name for name in ("unshare", "nsenter", "ip", "mount", "hostname") if shutil.which(name) is None]:
        pytest.skip(f"no network namespaces: {', '.join(missing)} not found")
    command = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *NAMESPACES]
    tried = subprocess.run([*command, *CABLE.split()], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network namespaces: {tried.stderr.strip() or tried.returncode}")
    return command


def torchrun(file: Path, *options: str, processes: int = 2) -> str:
    """The manual's command for two hosts of so many processes, with `options` for torchrun."""
    (command,) = re.findall(r"^\$ (torchrun .*)$", PAGE, re.M)
    own = f"{TORCHRUN}{' '.join(options)} "
    for before, after in {"torchrun ": own, "node 8": f"node {processes}", "run.yaml": str(file)}.items():
        assert before in command
        command = command.replace(before, after)
    return command


def start(
    unshare: list[str], command: str, folder: Path, meanwhile: str = "", *, forks: bool = False
) -> subprocess.Popen:
    """Runs `command` on both hosts, and the script `meanwhile` beside them (`inside` begins its lines for host two).

    Args:
        forks: whether torchrun and ranks are forks of one process (`forked_hosts.py`), and not interpreters of their
            own, each of which imports torch.
    """
    words = f"{sys.executable} {Path(__file__).with_name('forked_hosts.py')} $two {command.removeprefix(TORCHRUN)}"
    hosts = f"{words} > both.out 2>&1 & mine=$! other=$!" if forks else HOSTS.replace("COMMAND", command)
    script = SCRIPT.replace("MEANWHILE", meanwhile).replace("HOSTS", hosts).replace("CABLE", CABLE)
    return subprocess.Popen(
        [*unshare, "bash", "-c", script],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, folder: Path, seconds: float) -> None:
    """Waits for the end of both hosts, which must succeed."""
    try:
        _, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()  # what is inside dies with it
    said = [file.read_text() for file in sorted(folder.glob("*.out"))]
    assert process.returncode == 0, "\n".join([errors, *said])
