"""Defines `Hosts`, the hosts on which the ranks of a run are, and copies files of checkpoints between them.

As in Gemini (Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints", SOSP
2023), each host keeps what its ranks saved, and a copy of what the ranks of another host saved: hosts form a ring.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from weft.checkpoint.checkpoint_files import Digest
from weft.files import new_file
from weft.parallel import ranks

CHUNK = 32 * 2**20  # bytes that a rank sends at once, and holds in memory


@dataclass(frozen=True)
class Transfer:
    """A file that one rank reads from its host's folder and another writes to its own host's."""

    name: str
    source: int
    target: int


@dataclass(frozen=True)
class Hosts:
    """The hosts of the ranks. Ranks are on one host if they see the same folder.

    Attributes:
        of: the number of each rank's host, by rank. Hosts are numbered in the order of their first ranks.
        copies: number of other hosts that get a copy of what a host's ranks save.
    """

    of: tuple[int, ...]
    copies: int = 0

    @classmethod
    def shared(cls) -> Hosts:
        """Returns the hosts of a folder that all ranks see."""
        return cls((0,) * ranks.world_size())

    @classmethod
    def of_folder(cls, folder: Path, copies: int = 0) -> Hosts:
        """Finds out which ranks see the same folder. Every rank must call it with an existing folder.

        Raises:
            UserError or OSError: the folder cannot be written, on any rank.
        """
        if ranks.world_size() == 1:
            return cls.shared()
        token = ranks.broadcast_object(secrets.token_hex(8))
        mine = folder / f".{token}-{ranks.rank()}"
        ranks.agree(mine.touch)
        seen = ranks.agree(lambda: [int(path.name.partition("-")[2]) for path in folder.glob(f".{token}-*")])
        firsts = ranks.all_gather_object(min(seen))
        mine.unlink(missing_ok=True)
        numbers = {first: number for number, first in enumerate(sorted(set(firsts)))}
        return cls(tuple(numbers[first] for first in firsts), copies)

    @property
    def count(self) -> int:
        return max(self.of) + 1

    @property
    def here(self) -> int:
        """The number of this rank's host."""
        return self.of[ranks.rank()]

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one of its host, which makes, renames and deletes folders."""
        return self.members(self.here)[0] == ranks.rank()

    def members(self, host: int) -> list[int]:
        """Returns the ranks of a host."""
        return [rank for rank, number in enumerate(self.of) if number == host]

    def keepers(self, host: int) -> list[int]:
        """Returns the hosts that keep what the ranks of a host save: itself, and those after it in the ring."""
        return [(host + turn) % self.count for turn in range(min(self.copies, self.count - 1) + 1)]

    def kept(self, saved: Sequence[Iterable[str]]) -> set[str]:
        """Returns the names of the files that this rank's host keeps, given those of the files that each rank saves."""
        return {name for rank, names in enumerate(saved) if self.here in self.keepers(self.of[rank]) for name in names}

    def bytes(self, saved: Sequence[int]) -> int:
        """Returns the bytes that this rank's host keeps, given those that each rank saves."""
        return sum(size for rank, size in enumerate(saved) if self.here in self.keepers(self.of[rank]))

    def copy(
        self,
        folder: Path,
        saved: Sequence[Mapping[str, Digest]],
        common: Mapping[str, Digest],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Copies files to the hosts that keep copies. Every rank must call it.

        Args:
            folder: the folder with the files, on every host.
            saved: digests of the files that each rank has written, by rank.
            common: digests of files that rank 0 has written, of which every host gets a copy.
            group: a process group of all ranks (see `ranks.all_gather_object`).

        Raises:
            OSError: on all ranks: a file could not be read, sent or written.
        """
        leaders = [self.members(host)[0] for host in range(self.count)]
        transfers = [Transfer(name, 0, leader) for name in common for leader in leaders[1:]]
        for rank, names in enumerate(saved):
            number = self.members(self.of[rank]).index(rank)
            for host in self.keepers(self.of[rank])[1:]:
                members = self.members(host)
                transfers += [Transfer(name, rank, members[number % len(members)]) for name in names]
        exchange(folder, transfers, {**common, **{name: one for files in saved for name, one in files.items()}}, group)


def exchange(
    folder: Path, transfers: Sequence[Transfer], digests: Mapping[str, Digest], group: dist.ProcessGroup | None = None
) -> None:
    """Copies files between ranks, whose folders have the same path or not. Every rank must call it with the same list.

    Args:
        folder: this rank's folder.
        digests: the digest of each file. What arrives must have it.

    Raises:
        OSError: on all ranks: a file could not be read, sent or written.
    """
    problems: list[OSError] = []
    for transfer in in_rounds(transfers):
        digest = digests[transfer.name]
        if transfer.source == ranks.rank():
            problems += _send(folder / transfer.name, digest, transfer.target, group)
        elif transfer.target == ranks.rank():
            problems += _receive(folder / transfer.name, digest, transfer.source, group)

    def report() -> None:
        for problem in problems:
            raise problem

    if transfers:
        ranks.agree(report, group=group)


def in_rounds(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Orders transfers in rounds in which each rank sends or receives one file, so that pairs of ranks work at once.

    Ranks that do their transfers in this order never wait for each other in a circle.
    """
    busy: dict[int, set[int]] = {}
    rounds: list[list[Transfer]] = []
    for transfer in transfers:
        taken = busy.setdefault(transfer.source, set()) | busy.setdefault(transfer.target, set())
        number = next(number for number in range(len(rounds) + 1) if number not in taken)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(transfer)
        busy[transfer.source].add(number)
        busy[transfer.target].add(number)
    return [transfer for one in rounds for transfer in one]


def _send(path: Path, digest: Digest, target: int, group: dist.ProcessGroup | None) -> list[OSError]:
    """Sends a file. What cannot be read is sent as zeros, because the receiver waits; it finds them by the digest."""
    left, problems = digest.bytes, list[OSError]()
    chunk = torch.zeros(min(CHUNK, left), dtype=torch.uint8)
    try:
        with open(path, "rb", buffering=0) as file:
            while left:
                part = chunk[: min(CHUNK, left)]
                if file.readinto(part.numpy().data) != len(part):
                    raise OSError(errno.EIO, f"{path.name} is shorter than it was", str(path))
                dist.send(part, target, group)
                left -= len(part)
    except OSError as error:
        problems.append(error)
    while left:
        part = chunk[: min(CHUNK, left)]
        dist.send(part, target, group)
        left -= len(part)
    return problems


def _receive(path: Path, digest: Digest, source: int, group: dist.ProcessGroup | None) -> list[OSError]:
    """Receives and writes a file. What cannot be written is still received, because the sender waits."""
    left, problems, hashed = digest.bytes, list[OSError](), hashlib.sha256()
    chunk = torch.empty(min(CHUNK, left), dtype=torch.uint8)

    def receive() -> memoryview:
        nonlocal left
        part = chunk[: min(CHUNK, left)]
        dist.recv(part, source, group)
        left -= len(part)
        return part.numpy().data

    try:
        with new_file(path) as file:
            while left:
                data = receive()
                hashed.update(data)
                file.write(data)
            if hashed.hexdigest() != digest.sha256:
                raise OSError(errno.EIO, f"{path.name} arrived damaged from rank {source}", str(path))
    except OSError as error:
        problems.append(error)
    while left:
        receive()
    return problems
