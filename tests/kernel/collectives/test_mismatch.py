"""Ranks that issue different calls: each rank gets a mismatch error, other groups continue, and no rank hangs."""

from __future__ import annotations

import asyncio
import itertools
import re

import pytest
import torch

from asyncdist.base.ops import ReduceOp, premul_sum
from asyncdist.errors import GroupError, MismatchError, UsageError
from asyncdist.testing.cluster import world_of
from tests.support.pairs import each_pair


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def rooted(group, call, count):
    own = ones(count, dtype=torch.uint8)
    return getattr(group, call)(own, [own] * 3 if group.rank() == 0 else None, 0)


# A fingerprint has the count modulo this number.
COUNTS = 1 << 24


# The call of one rank of three, the call of the others, and a pattern of the message.
DIFFERENT = {
    "count": (lambda g: g.all_reduce(ones(3)), lambda g: g.all_reduce(ones(4)), "3 x float32.*4 x float32|count"),
    "large": (lambda g: g.all_reduce(ones(300_000)), lambda g: g.all_reduce(ones(300_001)), "300000 x float32|count"),
    "large gathered counts": (
        lambda g: rooted(g, "gather", 4 + COUNTS),
        lambda g: rooted(g, "gather", 4),
        "different shapes",
    ),
    "large scattered counts": (
        lambda g: rooted(g, "scatter", 4 + COUNTS),
        lambda g: rooted(g, "scatter", 4),
        "different shapes",
    ),
    "empty": (lambda g: g.all_reduce(ones(0)), lambda g: g.all_reduce(ones(4)), "0 x float32|count"),
    "shape": (lambda g: g.all_reduce(ones(2, 3)), lambda g: g.all_reduce(ones(3, 2)), "different shapes"),
    "no dimension": (lambda g: g.all_reduce(ones()), lambda g: g.all_reduce(ones(1)), "different shapes"),
    "dtype": (lambda g: g.all_reduce(ones(4, dtype=torch.int32)), lambda g: g.all_reduce(ones(4)), "int32"),
    "op": (lambda g: g.all_reduce(ones(4), ReduceOp.MAX), lambda g: g.all_reduce(ones(4)), "MAX"),
    "factor": (lambda g: g.all_reduce(ones(4), premul_sum(2)), lambda g: g.all_reduce(ones(4)), "PREMUL_SUM"),
    "collective": (lambda g: g.broadcast(ones(4), 0), lambda g: g.all_reduce(ones(4)), "broadcast"),
    "with a barrier": (lambda g: g.barrier(), lambda g: g.all_reduce(ones(4)), "barrier"),
    "two barriers": (lambda g: g.barrier(), lambda g: g.monitored_barrier(), "monitored_barrier"),
    "root": (lambda g: g.scatter(ones(4), [ones(4)] * 3, g.rank()), lambda g: g.broadcast(ones(4), 0), "scatter"),
    "gathered sizes": (
        lambda g: g.all_gather([ones(2), ones(3), ones(4)], ones(2 + g.rank())),
        lambda g: g.all_gather([ones(4), ones(3), ones(2)], ones(4 - g.rank())),
        "different shapes",
    ),
    "coalesced sizes": (
        lambda g: g.all_reduce_coalesced([ones(2), ones(3)]),
        lambda g: g.all_reduce_coalesced([ones(3), ones(2)]),
        "different shapes",
    ),
    "coalesced number": (
        lambda g: g.all_reduce_coalesced([ones(2), ones(3)]),
        lambda g: g.all_reduce_coalesced([ones(5)]),
        "different shapes",
    ),
    "coalesced dtypes": (
        lambda g: g.all_gather_coalesced([[ones(1), ones(1)]] * 3, [ones(1)] * 2),
        lambda g: g.all_gather_coalesced(
            [[ones(1), ones(1, dtype=torch.int32)]] * 3, [ones(1), ones(1, dtype=torch.int32)]
        ),
        "different shapes",
    ),
    "scattered sizes": (
        lambda g: g.reduce_scatter(ones((1, 2, 3)[g.rank()]), [ones(1), ones(2), ones(3)]),
        lambda g: g.reduce_scatter(ones((3, 2, 1)[g.rank()]), [ones(3), ones(2), ones(1)]),
        "different shapes",
    ),
    "split sizes": (
        lambda g: g.all_to_all_single(ones(3), ones(3)),
        lambda g: g.all_to_all_single(ones(6), ones(6)),
        "sent (4|8) bytes where (4|8) were expected",
    ),
    "objects and tensors": (lambda g: g.all_gather_object([0] * 3, 1), lambda g: g.all_reduce(ones(4)), "object"),
}


async def outcomes(works, limit=10):
    async with asyncio.timeout(limit):
        return await asyncio.gather(*works, return_exceptions=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DIFFERENT)
async def test_mismatched_call_raises_on_every_rank(transport, name):
    other, usual, words = DIFFERENT[name]
    async with world_of(3, transport=transport) as groups:
        for odd in range(3):
            among = [group.world.new_group(None) for group in groups]
            works = [(other if group.rank() == odd else usual)(group) for group in among]
            first = await outcomes(works)
            # A rank may complete its part before the other ranks call; its next call then fails.
            second = await outcomes([group.barrier() for group in among])
            for rank, errors in enumerate(zip(first, second, strict=True)):
                seen = [error for error in errors if isinstance(error, GroupError)]
                assert [type(error) for error in seen] == [MismatchError] * len(seen), seen
                assert second[rank] in seen
                assert seen[0].rank == rank
            texts = [str(error) for error in first + second if isinstance(error, MismatchError)]
            with pytest.raises(MismatchError, match=words):
                raise next(error for error in first + second if isinstance(error, MismatchError))
            assert all("every rank must issue the same operations" in text for text in texts)
            assert all(f"rank {odd}" in text for text in texts)
            assert not [text for text in texts if re.search(r"rank (\d+) found that rank \1 called", text)]
            assert await outcomes([group.all_reduce(ones(1)) for group in groups]) == [3, 3, 3]


MESSAGES = {
    "count": (
        lambda g: g.send(ones(3), 0, tag=7),
        r"recv\(5 x float32\) .* rank 1 called send\(3 x float32\) \(different count",
    ),
    "dtype": (lambda g: g.send(ones(5, dtype=torch.int32), 0, tag=7), r"recv\(5 x float32\) .* send\(5 x int32\)"),
    "objects": (lambda g: g.send_object_list([1], 0), r"recv\(5 x float32\) .* rank 1 called send\(objects\)"),
}


@pytest.mark.parametrize("sent", MESSAGES)
@pytest.mark.parametrize("source", [1, None])
async def test_receive_that_differs_from_the_send_is_a_mismatch(transport, sent, source):
    send, words = MESSAGES[sent]
    tag = 0 if sent == "objects" else 7
    async with world_of(2, transport=transport) as (receiver, sender):
        received, _ = await outcomes([receiver.recv(ones(5), source, tag=tag), send(sender)])
        with pytest.raises(
            MismatchError, match=rf"recv with tag {tag} on group 'world', rank 0, .* rank 0 called {words}"
        ):
            raise received
        assert "both ends of a message must match" in str(received)


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", ["broadcast", "scatter", "reduce", "gather"])
async def test_different_roots_are_a_mismatch(transport, call):
    """A rank that only sends completes before the receiver detects the mismatch; its next call fails at the latest."""

    def start(group):
        rank = group.rank()
        lists = {"scatter": [ones(3)] * 2, "gather": [ones(3) for _ in "12"]}
        return getattr(group, call)(ones(3), *([lists[call]] if call in lists else []), rank)

    async with world_of(2, transport=transport) as groups:
        among = [group.world.new_group(None) for group in groups]
        first = await outcomes([start(group) for group in among])
        second = await outcomes([group.barrier() for group in among])
        assert all(isinstance(error, MismatchError) for error in second)
        assert "root 0" in str(second[0])
        assert "root 1" in str(second[0])
        # Both ranks wait for each other, until a rank asks its peer for its call.
        if call in ("reduce", "gather"):
            assert all(isinstance(error, MismatchError) for error in first)
        assert await outcomes([group.all_reduce(ones(1)) for group in groups]) == [2, 2]


async def test_ranks_that_wait_for_each_other_in_different_calls(transport):
    async with world_of(2, transport=transport) as groups:
        zero, one = (group.world.new_group(None) for group in groups)
        errors = await outcomes([zero.reduce(ones(3), 0), one.broadcast(ones(3), 0)])
        assert [type(error) for error in errors] == [MismatchError] * 2
        assert all("reduce(3 x float32" in str(error) and "broadcast(3 x float32" in str(error) for error in errors)


# Calls in which rank 1 of three gives data to the others, as rank 0 does in a broadcast from there.
GIVES_DATA = {
    "broadcast": lambda g, tensor: g.broadcast(tensor, 1),
    "scatter": lambda g, tensor: g.scatter(tensor.clone(), [tensor] * 3, 1),
    "gather": lambda g, tensor: g.gather(tensor, None, 0),
    "reduce": lambda g, tensor: g.reduce(tensor, 0),
}


@each_pair(transport=["inproc", "shm", "tcp"], call=list(GIVES_DATA), registered=[False, True])
async def test_ranks_that_wait_for_each_other_to_read(transport, call, registered):
    """The tensors do not fit into what a rank stages ahead, so that each rank waits for its readers."""
    async with world_of(3, transport=transport) as groups:
        among = [group.world.new_group(None) for group in groups]
        tensors = [ones(2_500_000) for _ in among]
        for group, tensor in zip(among, tensors, strict=True):
            if registered:
                group.register(tensor)
        starts = (
            lambda: among[0].broadcast(tensors[0], 0),
            lambda: GIVES_DATA[call](among[1], tensors[1]),
            lambda: among[2].broadcast(tensors[2], 0),
        )
        errors = await outcomes([start() for start in starts])
        if transport != "shm":  # what a rank sends may have left before the others call
            errors = await outcomes([group.barrier() for group in among])
        assert [type(error) for error in errors] == [MismatchError] * 3
        assert f"{call}(2500000 x float32" in str(errors[0])
        assert "broadcast(2500000 x float32, root 0" in str(errors[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["inproc", "tcp"])  # in shared memory a call publishes its fingerprint
@pytest.mark.parametrize("alike", [True, False], ids=["the same", "another"])
async def test_mismatch_is_found_when_the_peer_calls_later(transport, alike, eventually):
    async with world_of(2, transport=transport) as groups:
        zero, one = (group.world.new_group(None) for group in groups)
        waiting = asyncio.ensure_future(zero.reduce(ones(3), 0))
        await eventually(lambda: one.endpoint.checker.early_calls)
        late = one.reduce(ones(3), 0) if alike else one.broadcast(ones(3), 0)
        first, second = await outcomes([waiting, late])
        if alike:
            assert first.tolist() == [2.0] * 3
        else:
            assert [type(first), type(second)] == [MismatchError] * 2
        assert one.endpoint.checker.early_calls == {}


async def test_omitted_call_is_a_mismatch(transport):
    """The next call of the rank that omitted one meets the omitted call of the others."""
    async with world_of(3, transport=transport) as groups:
        works = [group.all_reduce(ones(5)) for group in groups[:2]]
        works += [group.broadcast(ones(5), 0) for group in groups]
        first = await outcomes(works)
        # Rank 0 may have completed its second call.
        assert [type(first[place]) for place in (0, 1, 4)] == [MismatchError] * 3
        second = await outcomes([group.barrier() for group in groups])
        assert [type(error) for error in second] == [MismatchError] * 3


async def test_call_refused_on_one_rank_can_be_repeated(transport):
    async with world_of(2, transport=transport) as (zero, one):
        waiting = one.all_gather([ones(2), ones(2)], ones(2))
        for wrong in (lambda: zero.all_gather([ones(2)], ones(2)), lambda: zero.all_reduce(ones(2), ReduceOp.BAND)):
            with pytest.raises(UsageError):
                wrong()
        results = await outcomes([zero.all_gather([ones(2), ones(2)], ones(2)), waiting])
        assert [len(result) for result in results] == [2, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sent", "room"),
    [(ones(4), ones(3)), (ones(3), ones(4)), (ones(2), ones(2, dtype=torch.float64)), (ones(0), ones(1))],
    ids=["longer", "shorter", "another dtype", "empty"],
)
@pytest.mark.parametrize("posted", [True, False], ids=["posted before", "posted after"])
@pytest.mark.parametrize("source", [0, None])
async def test_message_that_does_not_fit_is_a_mismatch(transport, sent, room, posted, source):
    async with world_of(2, transport=transport) as groups:
        zero, one = (group.world.new_group(None) for group in groups)
        if posted:
            received, sending = one.recv(room, source), zero.send(sent, 1)
        else:
            sending = zero.send(sent, 1)
            received = one.recv(room, source)
        error, _ = await outcomes([received, sending])
        assert isinstance(error, MismatchError)
        assert error.peer == 0
        assert "send(" in str(error)
        # All later calls on the group fail on both ranks.
        later = [
            *await outcomes([zero.barrier(), one.barrier()]),
            *await outcomes([zero.send(sent, 1), one.recv(room, 0)]),
        ]
        assert [type(error) for error in later] == [MismatchError] * 4
        assert await outcomes([group.all_reduce(ones(1)) for group in groups]) == [2, 2]


@pytest.mark.parametrize("transport", ["inproc", "tcp"])  # in shared memory the numbers have 64 bits
async def test_numbers_of_calls_wrap_around(transport):
    async with world_of(2, transport=transport) as groups:
        last = 2**32 - 3
        for group in groups:
            group.channel.numbers = itertools.count(last + 1)
            group.channel.started = group.channel.highest = last
        for turn in range(8):
            assert await outcomes([group.all_reduce(ones(1) * turn) for group in groups]) == [2 * turn] * 2
        works = [group.all_reduce(ones(2 + group.rank())) for group in groups]
        assert all(isinstance(error, MismatchError) for error in await outcomes(works))
