"""`checkpoint.local` on several hosts: whatever host is lost, the losses are those of an undisturbed run."""

import shutil
from pathlib import Path

import on_hosts
import pytest
from running import assert_same_weights, losses

pytestmark = pytest.mark.xdist_group("ranks")
SECTIONS = {
    "model": {"num_hidden_layers": 1},
    "training": {"steps": 6, "batch_tokens": 384, "micro_batch_size": 2},
    "schedule": {"warmup_steps": 0},
    "data": {"validation": None},
    "log": {"trackers": []},
}
LOCAL = {"steps": 1, "directory": "$NODE_DISK"}


def shards(disk: Path, step: int) -> set[int]:
    """The ranks of which a host has files of tensors."""
    return {int(path.name.split("-")[1]) - 1 for path in disk.glob(f"weft-*/*/checkpoints/step-{step:08}/shard-*")}


def flip(disk: Path, pattern: str) -> None:
    """Flips a bit in the middle of a file."""
    (file,) = disk.glob(f"weft-*/*/checkpoints/step-00000005/{pattern}")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose(case: str, disks: list[Path]) -> None:
    if case == "the first host":
        shutil.rmtree(disks[0])
    elif case == "the last host":
        shutil.rmtree(disks[2])
    elif case == "two bits of two files":
        flip(disks[2], "shard-00003-*")
        flip(disks[0], "index.json")
    elif case == "two hosts":
        shutil.rmtree(disks[1])
        shutil.rmtree(disks[2])
    elif case == "all hosts":
        for disk in disks:
            shutil.rmtree(disk)


QUICK = ["the first host", "two hosts"]
LONG = [
    "the first host",
    "the last host",
    "two bits of two files",
    "nothing",
    "all hosts",
    "two hosts",
]


@pytest.mark.parametrize(
    ("mode", "cases"),
    [
        ("sync", QUICK),
        pytest.param("sync", LONG, marks=pytest.mark.chaos),
        pytest.param("async", LONG, marks=pytest.mark.chaos),
    ],
)
def test_a_run_on_three_hosts_continues_from_what_survives(run_yaml, tmp_path, ranks, mode, cases):
    calm = tmp_path / "runs" / "calm"
    ranks.run(run_yaml("calm.yaml", run={"name": "calm"}, checkpoint={"every": 4, "mode": mode}, **SECTIONS), 3)
    file = run_yaml(checkpoint={"every": 4, "mode": mode, "local": LOCAL}, **SECTIONS)
    disks = [tmp_path / f"disk-{number}" for number in range(3)]
    with pytest.raises(AssertionError, match="died with exit code -9"):
        ranks.call(on_hosts.fit, 3, file, disks, (), 5)
    assert [shards(disk, 5) for disk in disks] == [{0, 2}, {1, 0}, {2, 1}]
    for case in cases:
        place = tmp_path / case.replace(" ", "-")
        shutil.copytree(tmp_path / "runs" / "demo", place / "demo")
        copies = [Path(shutil.copytree(disk, place / disk.name)) for disk in disks]
        lose(case, copies)
        said = " ".join(ranks.call(on_hosts.fit, 3, file, copies, (f"run.directory={place}",))[0].split())
        assert losses(place / "demo") == losses(calm), case
        assert_same_weights(place / "demo", calm)
        assert ("resuming from the local checkpoint" in said) == (case not in ("two hosts", "all hosts")), said
        assert ("gone on all hosts" in said) == (case == "all hosts"), said
        if case == "all hosts":
            assert f"the run resumes from step 4, the last one in {place}" in said
        assert not list(place.glob("disk-*/weft-*/*"))
    assert "step 5 is not used: 1 of its 7 files (shard-00002-model-00001-of-00001.safetensors) is lost" in said
    assert "or damaged on all hosts; the run resumes from step 4" in said


@pytest.mark.chaos
def test_a_full_disk_that_receives_copies_ends_all_ranks(run_yaml, tmp_path, ranks):
    """The rank that sends waits for it, so it still receives what it cannot write."""
    file = run_yaml(checkpoint={"every": 4, "local": LOCAL}, **SECTIONS)
    disks = [tmp_path / f"disk-{number}" for number in range(3)]
    told = ranks.call(on_hosts.fit_on_full_disk, 3, file, disks, 1)
    assert len(told) == 3
    for text in told:
        assert "No space left on device; free space, set checkpoint.local.directory, or remove checkpoint.local" in text
    assert not [path for disk in disks for path in disk.glob("weft-*/*/checkpoints/*")]


@pytest.mark.chaos
def test_a_deadline_on_several_hosts_saves_locally_first(run_yaml, tmp_path, ranks):
    """The run directory's disk is stuck, so the last step is in the hosts' memory only; then a host is lost."""
    calm = tmp_path / "runs" / "calm"
    ranks.run(run_yaml("calm.yaml", run={"name": "calm"}, checkpoint={"every": 6}, **SECTIONS), 3)
    file = run_yaml(checkpoint={"every": 6, "local": {"directory": "$NODE_DISK"}}, **SECTIONS)
    disks = [tmp_path / f"disk-{number}" for number in range(3)]
    with pytest.raises(AssertionError, match="died with exit code"):
        ranks.call(on_hosts.fit_until_deadline, 3, file, disks, 8)
    assert [shards(disk, 3) for disk in disks] == [{0, 2}, {1, 0}, {2, 1}]
    shutil.rmtree(disks[1])
    said = " ".join(ranks.call(on_hosts.fit, 3, file, disks)[0].split())
    assert "resuming from the local checkpoint" in said
    assert "resumes after step 3" in said
    assert losses(tmp_path / "runs" / "demo") == losses(calm)
    assert_same_weights(tmp_path / "runs" / "demo", calm)
