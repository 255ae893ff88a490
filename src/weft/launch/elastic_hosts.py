"""Defines `ElasticHosts`, the hosts on which a run trains together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElasticHosts:
    """The hosts of a run whose hosts can change.

    Attributes:
        least, most: number of hosts.
        endpoint: HOST:PORT, at which all hosts meet. The agent on HOST listens there.
        restarts: maximum number of restarts after failures on each host. A host that joins does not count.
    """

    least: int
    most: int
    endpoint: str
    restarts: int
