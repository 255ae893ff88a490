"""Finds the newest local checkpoint of which every file survives on some host, and fetches missing files from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.checkpoint_files import Digest
from weft.checkpoint.hosts import Hosts, Transfer, exchange
from weft.checkpoint.local import Local
from weft.files import partial_path, publish, remove, report_write_errors
from weft.formatting import counted
from weft.parallel import ranks

SHOWN = 3  # names of missing files in a message


@dataclass(frozen=True)
class Part:
    """What a host has of a checkpoint.

    Attributes:
        digest: of the list of the checkpoint's files, which is equal on all hosts of one save.
        present: for each name of this list, in order: whether the file is there and has the expected size.
    """

    digest: str
    present: tuple[bool, ...]


@dataclass(frozen=True)
class Survivor:
    """A local checkpoint of which every file survives on some host, undamaged.

    Attributes:
        path: the checkpoint on this rank's host. Other hosts may have further files.
        digests: the digest of each file of the checkpoint.
        owners: name of each file -> the hosts that have it.
    """

    path: Path
    hosts: Hosts
    digests: dict[str, Digest]
    owners: dict[str, list[int]]

    def fetch(self, names: Iterable[str]) -> None:
        """Fetches files that this host lacks from others. Every rank must call it, each with what it needs.

        Raises:
            UserError: on all ranks: a file could not be sent or written.
        """
        wanted = ranks.all_gather_object(sorted(name for name in names if self.hosts.here not in self.owners[name]))
        lacking = sorted({(name, self.hosts.of[rank]) for rank, mine in enumerate(wanted) for name in mine})
        transfers = []
        for number, (name, host) in enumerate(lacking):
            owners = self.owners[name]
            sources, targets = self.hosts.members(owners[number % len(owners)]), self.hosts.members(host)
            transfers.append(Transfer(name, sources[number % len(sources)], targets[number % len(targets)]))
        try:
            exchange(self.path, transfers, self.digests)
        except OSError as error:
            raise ranks.error_on_all_ranks(
                f"{self.path}: the local checkpoint cannot be copied between hosts: {error.strerror or error}; free "
                "space, or delete this folder on all hosts to resume from the run directory"
            ) from error
        for name, host in lacking:
            self.owners[name] = [*self.owners[name], host]


def newest_survivor(local: Local, above: int) -> tuple[Survivor | None, list[str]]:
    """Returns the local checkpoint with the highest step that is whole on the hosts together. Every rank must call it.

    Args:
        above: only checkpoints of steps above this step are considered.

    Returns:
        The checkpoint; None if there is none. And for each newer one what is missing. Both are equal on all ranks.
    """
    hosts, listed, mine = local.hosts, dict[int, dict[str, Digest]](), dict[int, Part]()
    for path in local.checkpoints:
        step, digests = files.step_of(path) or 0, files.read_checksums(path)
        if step > above and not isinstance(digests, files.Damage):
            listed[step], mine[step] = digests, _part(path, digests)
    gathered = ranks.all_gather_object(mine if hosts.leads else {})
    parts = [gathered[hosts.members(host)[0]] for host in range(hosts.count)]
    problems = list[str]()
    for step in sorted({step for part in parts for step in part}, reverse=True):
        for digest in sorted({part[step].digest for part in parts if step in part}):  # one, unless a host was away
            has = [part[step] if step in part and part[step].digest == digest else None for part in parts]
            found = _verify(local, step, listed.get(step, {}), has)
            if isinstance(found, Survivor):
                return _complete(found, has), problems
            problems.append(found)
    return None, problems


def _part(path: Path, digests: Mapping[str, Digest]) -> Part:
    """Describes the files of a checkpoint that are in a folder."""
    listed = json.dumps({name: asdict(one) for name, one in digests.items()}, sort_keys=True)
    present = [files.check(path / name, digests[name], contents=False) is None for name in sorted(digests)]
    return Part(hashlib.sha256(listed.encode()).hexdigest(), tuple(present))


def _verify(local: Local, step: int, digests: dict[str, Digest], parts: Sequence[Part | None]) -> Survivor | str:
    """Hashes the files of a checkpoint on all hosts. Every rank must call it.

    Args:
        digests: the digests of the files, on hosts that have a part.
        parts: what each host has.

    Returns:
        What survives, or what is missing.
    """
    hosts, path = local.hosts, local.folder / files.FOLDER / files.checkpoint_name(step)
    first = hosts.members(next(host for host, part in enumerate(parts) if part is not None))[0]
    digests = ranks.all_gather_object(digests if ranks.rank() == first else {})[first]
    names = sorted(digests)
    owners = {
        name: [host for host, part in enumerate(parts) if part is not None and part.present[number]]
        for number, name in enumerate(names)
    }
    if all(owners.values()):
        members = hosts.members(hosts.here)
        mine = [name for name in names if hosts.here in owners[name]][members.index(ranks.rank()) :: len(members)]
        with ThreadPoolExecutor(files.threads()) as pool:
            checked = list(pool.map(lambda name: files.check(path / name, digests[name], contents=True), mine))
        bad = [name for name, damage in zip(mine, checked, strict=True) if damage is not None]
        for rank, damaged in enumerate(ranks.all_gather_object(bad)):
            for name in damaged:
                owners[name].remove(hosts.of[rank])
    missing = [name for name in names if not owners[name]]
    if not missing:
        return Survivor(path, hosts, digests, owners)
    shown = ", ".join(missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
    return (
        f"the local checkpoint of step {step:,} is not used: {len(missing)} of its {counted(len(names), 'file')} "
        f"({shown}) {'are' if len(missing) > 1 else 'is'} lost or damaged on all hosts"
    )


def _complete(found: Survivor, parts: Sequence[Part | None]) -> Survivor:
    """Gives every host the folder of the checkpoint and its JSON files, which all ranks read. Every rank calls it.

    Args:
        parts: what each host has.
    """
    hosts, path = found.hosts, found.path
    makes = hosts.leads and parts[hosts.here] is None
    partial = partial_path(path) if parts[hosts.here] is None else path

    def begin() -> None:
        if makes:
            with report_write_errors(partial):
                remove(partial)
                partial.mkdir(parents=True)

    def end() -> None:
        if makes:
            with report_write_errors(path):
                files.write_checksums(partial, found.digests)
                publish(partial, path, replace=True)

    ranks.agree(begin)
    small = [name for name in found.digests if not name.endswith(".safetensors")]
    replace(found, path=partial).fetch(small if hosts.leads else ())
    ranks.agree(end)
    return found
