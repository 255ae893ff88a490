"""The order in which ranks send each other files of checkpoints."""

import itertools
import random

import pytest

from weft.checkpoint.hosts import Hosts, Transfer, in_rounds


def steps_needed(transfers: list[Transfer]) -> int:
    """Plays the ranks, each of which does its transfers in order and waits for its partner; fails if all wait."""
    left = {
        rank: [one for one in transfers if rank in (one.source, one.target)]
        for rank in {rank for one in transfers for rank in (one.source, one.target)}
    }
    for step in itertools.count(1):
        ready = {one for mine in left.values() for one in mine[:1] if left[one.source][0] is left[one.target][0] is one}
        assert ready, "all ranks wait"
        for one in ready:
            left[one.source].pop(0)
            left[one.target].pop(0)
        if not any(left.values()):
            return step


def test_the_hosts_of_a_ring_copy_at_the_same_time():
    """In a naive order, the second host receives before it sends, then the third one, and so on."""
    ring = [Transfer(f"of {host}", host, (host + 1) % 64) for host in range(64)]
    assert steps_needed(in_rounds(ring)) == 2
    assert steps_needed(in_rounds([*ring[:2], Transfer("of 2", 2, 0)])) == 3  # an odd ring


@pytest.mark.parametrize("seed", range(20))
def test_no_order_makes_ranks_wait_in_a_circle(seed):
    chooser = random.Random(seed)
    pairs = [chooser.sample(range(6), 2) for _ in range(40)]
    transfers = [Transfer(str(number), source, target) for number, (source, target) in enumerate(pairs)]
    ordered = in_rounds(transfers)
    assert sorted(one.name for one in ordered) == sorted(one.name for one in transfers)
    busiest = max(sum(rank in pair for pair in pairs) for rank in range(6))
    assert busiest <= steps_needed(ordered) <= 2 * busiest


def test_the_ring_of_hosts():
    hosts = Hosts((0, 0, 1, 2, 2), copies=1)
    assert [hosts.keepers(host) for host in range(3)] == [[0, 1], [1, 2], [2, 0]]
    assert Hosts((0, 0, 1), copies=5).keepers(1) == [1, 0]  # no more copies than hosts
    assert Hosts((0, 0, 1), copies=0).keepers(0) == [0]
    assert Hosts((0, 0, 0), copies=1).keepers(0) == [0]
