"""Which ranks reach which, in a few bytes."""

import itertools
import random

import msgpack
import pytest

from asyncdist.kernel.algorithms.sharing import Sharing, as_ranges, contains


def joined_in_pairs(parts):
    """Join as a tree does, with data that travels between the levels."""
    while len(parts) > 1:
        pairs = [parts[first : first + 2] for first in range(0, len(parts), 2)]
        parts = [Sharing.unpacked(msgpack.unpackb(msgpack.packb(Sharing.joined(pair).packed()))) for pair in pairs]
    return parts[0]


def nbytes(sharing):
    return len(msgpack.packb(sharing.packed()))


@pytest.mark.parametrize("ranks", [[], [3], [0, 1, 2], [0, 4, 8, 12], [0, 1, 2, 5, 9], [7, 9, 10, 11, 30]])
def test_ranges_have_the_ranks_of_a_set(ranks):
    ranges = as_ranges(ranks)
    assert [rank for each in ranges for rank in each] == ranks
    assert [rank for rank in range(40) if contains(ranges, rank)] == ranks


def test_equal_hosts_one_after_the_other_take_three_numbers():
    sharing = joined_in_pairs([Sharing.of(rank, range(rank // 8 * 8, rank // 8 * 8 + 8)) for rank in range(4096)])
    assert nbytes(sharing) < 16
    assert sharing.reached(4095) == (range(4088, 4096),)
    assert sharing.reached(4096) == ()
    assert sharing.connects(8, 15)
    assert not sharing.connects(7, 8)


def test_hosts_with_interleaved_ranks_take_an_entry_each():
    sharing = joined_in_pairs([Sharing.of(rank, range(rank % 16, 1024, 16)) for rank in range(1024)])
    assert nbytes(sharing) < 16 * 24
    assert sharing.reached(17) == (range(1, 1010, 16),)
    assert sharing.connects_all([1, 17, 1009])
    assert not sharing.connects_any(range(16))


@pytest.mark.parametrize("seed", range(20))
def test_any_relation_survives_the_way_through_the_tree(seed):
    chance, size = random.Random(seed), 24
    reached = {rank: {rank, *range(rank // 6 * 6, rank // 6 * 6 + 6)} for rank in range(size)}
    for _ in range(chance.randrange(4)):
        rank = chance.randrange(size)
        reached[rank] = {rank, *chance.sample(range(size), chance.randrange(6))}
    silent = {chance.randrange(size)} if seed % 3 == 0 else set()
    sharing = joined_in_pairs([Sharing.of(rank, reached[rank]) for rank in range(size) if rank not in silent])

    def connected(one, other):
        return not {one, other} & silent and other in reached[one] and one in reached[other]

    for one, other in itertools.product(range(size), repeat=2):
        assert sharing.connects(one, other) == connected(one, other)
    for ranks in (range(6), range(6, 12), chance.sample(range(size), 5), [0, 7, 13, 19]):
        pairs = list(itertools.combinations(ranks, 2))
        assert sharing.connects_all(ranks) == all(
            connected(*pair) for pair in [*pairs, *((each, each) for each in ranks)]
        )
        assert sharing.connects_any(ranks) == any(connected(*pair) for pair in pairs)
