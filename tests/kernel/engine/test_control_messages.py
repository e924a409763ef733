"""Who is told of a failure."""

import random
from collections import deque

import pytest

from asyncdist.kernel.engine.control_messages import ranks_to_notify


def reached_by_notices(size: int, lost: set[int], first: int) -> dict[int, int]:
    """Return after how many steps each rank knows of a failure that ``first`` has detected."""
    steps = {first: 0}
    notices = deque([(first, None)])
    while notices:
        rank, notified_by = notices.popleft()
        for peer in ranks_to_notify(range(size), rank, notified_by):
            if peer not in lost and peer not in steps:
                steps[peer] = steps[rank] + 1
                notices.append((peer, rank))
    return steps


def test_one_rank_of_a_small_group_tells_all():
    assert ranks_to_notify(range(3, 67), 5, None) == [rank for rank in range(3, 67) if rank != 5]


@pytest.mark.parametrize("size", [65, 1000, 10_000])
def test_notices_reach_a_large_group_in_few_steps_of_few_messages(size):
    assert len(ranks_to_notify(range(size), 7, None)) <= size.bit_length()
    steps = reached_by_notices(size, set(), first=7)
    assert len(steps) == size
    assert max(steps.values()) <= size.bit_length()


@pytest.mark.parametrize("size", [65, 200, 1000])
def test_notices_reach_all_survivors_of_lost_hosts_and_of_scattered_losses(size):
    random.seed(size)
    scattered = [set(random.sample(range(1, size), size.bit_length() - 1)) for _ in range(20)]
    for lost in (set(range(1, 33)), set(range(size - 40, size)), *scattered):
        assert reached_by_notices(size, lost, first=0).keys() == set(range(size)) - lost
