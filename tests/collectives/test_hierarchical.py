"""Ranks on several hosts: shared memory inside, links between, in one collective."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest
import torch

import asyncdist
from asyncdist.algorithms.hierarchy import gather_runs, layout, part_count, slices_pay
from asyncdist.algorithms.schedule import Recv, Send
from asyncdist.algorithms.selection import DEFAULT
from asyncdist.base.ops import PremulSum, ReduceOp
from asyncdist.collectives.hierarchical import HierarchicalCollectives
from asyncdist.config import Config
from asyncdist.errors import GroupError, MismatchError, PeerLostError
from asyncdist.testing.cluster import world_of
from asyncdist.testing.collective_cases import collective_cases, reducing
from asyncdist.transport import registry
from asyncdist_transports.byte_stream import Writer

HOSTS = {
    "2 x 2": "aabb",
    "2 x 2, in turns": "abab",
    "2 x 3": "aaabbb",
    "3 x 2": "aabbcc",
    "2 + 3": "aabbb",
    "3 + 2": "baabb",
    "2 + 1": "aab",
    "1 + 2 + 4": "abbcccc",
    "4 x 2": "abcdabcd",
}

lie = pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
lie_well = pytest.mark.parametrize("hosts", ["aabb", "baabb", "aab"], ids=["2 x 2", "3 + 2", "2 + 1"])


@pytest.fixture(autouse=True)
def _no_way_through_the_process(monkeypatch):
    """Ranks on several hosts have shared memory and TCP."""
    monkeypatch.setattr(registry, "names", lambda: ["shm", "tcp"])


def world(hosts, **how):
    return world_of(len(hosts), transport="auto", hosts=hosts, **how)


async def run(groups, drill):
    await asyncio.gather(*(work for group in groups for work in drill.start(group)))
    drill.check()


# -- how ranks lie ----------------------------------------------------------------------------------


def lies(hosts, own=0):
    return layout(range(len(hosts)), own, lambda one, other: hosts[one] == hosts[other])


def test_nodes_are_ranks_that_share_memory():
    where = lies("abbab", own=4)
    assert where.nodes == ((0, 3), (1, 2, 4))
    assert (where.node, where.place, where.rails, where.members) == (1, 2, 2, (1, 2, 4))
    assert (where.carries, where.even) == (False, False)
    assert [where.rail(number) for number in range(2)] == [(0, 1), (3, 2)]
    assert where.carried(1, 0) == (1, 4)
    assert list(where.turns(1)) == [(1, 2), (4,)]
    assert [where.rail_leader(0, rank) for rank in (1, 2, 4)] == [0, 3, 0]


@pytest.mark.parametrize("hosts", ["aaaa", "abcd"])
def test_no_hierarchy_where_all_share_or_none(hosts):
    assert lies(hosts) is None


def test_no_hierarchy_where_sharing_is_not_transitive():
    shared = {(0, 1), (1, 2), (3, 4)}
    for own in range(5):
        assert layout(range(5), own, lambda one, other: (min(one, other), max(one, other)) in shared) is None


@pytest.mark.parametrize("hosts", HOSTS.values())
def test_all_ranks_see_the_same(hosts):
    seen = [lies(hosts, own) for own in range(len(hosts))]
    assert len({where.nodes for where in seen}) == 1
    for one, other in itertools.product(seen, seen):
        if one.node != other.node:  # who sends to us is who believes that it does
            turns = [turn for turn in one.turns(other.node) if other.rank in turn]
            leader = other.rail_leader(one.node, other.rank)
            assert (turns[0].index(other.rank) == one.place) == (leader == one.rank)


def test_runs_go_around_a_ring():
    runs = [["a", "b"], ["c"], []]
    assert [list(gather_runs(place, 3, runs)) for place in range(3)] == [
        [(Send(1, "a"), Send(1, "b")), (Recv(2, "c"),)],
        [(Send(2, "c"), Recv(0, "a"), Recv(0, "b")), (Send(2, "a"), Send(2, "b"))],
        [(Recv(1, "c"),), (Send(0, "c"), Recv(1, "a"), Recv(1, "b"))],
    ]


def test_parts_are_as_large_as_segments_but_not_fewer_than_pipelining_needs():
    assert part_count(0, 2, 1 << 20) == 1
    assert part_count(1 << 16, 2, 1 << 20) == 1
    assert part_count(4 << 20, 2, 1 << 20) == 8
    assert part_count(100 << 20, 2, 1 << 20) == 50


def test_small_tensors_go_along_every_rail_whole():
    even, uneven = lies("aabb"), lies("aab")
    assert [slices_pay(nbytes, even, DEFAULT) for nbytes in (4, 4096, 1 << 20, 25 << 20)] == [False, False, True, True]
    assert all(
        slices_pay(nbytes, uneven, DEFAULT) for nbytes in (4, 25 << 20)
    )  # who is on no rail is to get it as well


# -- what comes out ---------------------------------------------------------------------------------


@pytest.mark.exhaustive
@lie
async def test_every_collective(hosts):
    async with world(hosts) as groups:
        for count in (0, 1, len(hosts) + 1, 1000):
            for drill in collective_cases(len(hosts), count, torch.float32):
                await run(groups, drill)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hosts", ["aab", "aabb", "baa"])
async def test_ranks_that_cannot_share_memory_see_where_the_others_do(monkeypatch, hosts):
    """As on a host where no descriptors are passed: its ranks have TCP alone."""
    usable, kinds = iter(hosts), registry.selected
    monkeypatch.setattr(registry, "selected", lambda _: kinds("shm,tcp" if next(usable) == "a" else "tcp"))
    async with world_of(len(hosts), transport="auto", hosts=hosts) as groups:
        assert all(group.context.hierarchical is not None for group in groups)
        for drill in collective_cases(len(hosts), 1000, torch.float32):
            await run(groups, drill)


@pytest.mark.exhaustive
@lie_well
async def test_large_tensors_in_several_parts(hosts):
    async with world(hosts, config=Config(segment_nbytes=20_000)) as groups:
        for drill in collective_cases(len(hosts), 30_001, torch.float32):
            await run(groups, drill)


@pytest.mark.exhaustive
@lie_well
@pytest.mark.parametrize("lanes", [2, 3])
async def test_several_lanes(hosts, lanes):
    config = Config(segment_nbytes=20_000, lanes=lanes, stripe_nbytes=100, piece_nbytes=1000)
    async with world(hosts, config=config) as groups:
        for drill in reducing(len(hosts), 20_001, torch.float32):
            await run(groups, drill)


@pytest.mark.exhaustive
@lie_well
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.uint16, torch.int64, torch.complex64])
async def test_dtypes(hosts, dtype):
    async with world(hosts, config=Config(segment_nbytes=10_000)) as groups:
        for count in (3, 20_011):
            for drill in reducing(len(hosts), count, dtype):
                await run(groups, drill)


@pytest.mark.exhaustive
@lie_well
@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT, PremulSum(2.0)], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_operations(hosts, op, dtype):
    async with world(hosts, config=Config(segment_nbytes=10_000)) as groups:
        for count in (5, 9001):
            for drill in reducing(len(hosts), count, dtype, op):
                await run(groups, drill)


@pytest.mark.exhaustive
@lie_well
async def test_all_at_once(hosts):
    """Many operations in flight, more than there are slots in a node's window, awaited the last first."""
    async with world(hosts, config=Config(segment_nbytes=4096)) as groups:
        started = [drill for count in (0, 5, 6000) for drill in collective_cases(len(hosts), count, torch.float32)]
        works = [work for drill in started for group in groups for work in drill.start(group)]
        await asyncio.gather(*reversed(works))
        for drill in started:
            drill.check()


@lie_well
async def test_the_same_bits_on_every_rank(hosts):
    """Sums whose bits depend on the order of the additions."""
    async with world(hosts, config=Config(segment_nbytes=50_000)) as groups:
        for count in (7, 3000, 100_003):
            generator = torch.Generator().manual_seed(count)
            tensors = [torch.randn(count, generator=generator) for _ in hosts]
            await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)))
            for tensor in tensors[1:]:
                assert torch.equal(tensor.view(torch.int32), tensors[0].view(torch.int32))


@lie_well
@pytest.mark.parametrize("count", [3, 200_003])
async def test_narrow_floats_are_rounded_once(hosts, count):
    async with world(hosts) as groups:
        values = [torch.full((count,), 1.0 + rank / 128, dtype=torch.bfloat16) for rank in range(len(hosts))]
        expected = torch.stack([value.float() for value in values]).sum(0).to(torch.bfloat16)
        await asyncio.gather(*(group.all_reduce(value) for group, value in zip(groups, values, strict=True)))
        for value in values:
            assert torch.equal(value, expected)


@lie_well
async def test_registered_tensors(hosts):
    """Tensors that node mates read, and write, where they lie, while a rail carries other parts of them."""
    size, count = len(hosts), 60_000 * len(hosts)
    async with world(hosts, config=Config(segment_nbytes=200_000)) as groups:
        tensors = [asyncdist.empty(count, shared=True) for _ in hosts]
        parts = [asyncdist.empty(count // size, shared=True) for _ in hosts]
        pattern = torch.arange(count) % 97
        for _ in range(3):
            for rank, tensor in enumerate(tensors):
                tensor.copy_(pattern + rank)
            await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)))
            expected = pattern * size + sum(range(size))
            assert all(torch.equal(tensor, expected.float()) for tensor in tensors)
            await asyncio.gather(
                *(
                    group.reduce_scatter_single(part, tensor)
                    for group, part, tensor in zip(groups, parts, tensors, strict=True)
                )
            )
            assert torch.equal(torch.cat(parts), expected.float() * size)
            await asyncio.gather(
                *(
                    group.all_gather_single(tensor, part)
                    for group, part, tensor in zip(groups, parts, tensors, strict=True)
                )
            )
            assert all(torch.equal(tensor, expected.float() * size) for tensor in tensors)
            tensors[1].copy_(pattern)
            await asyncio.gather(*(group.broadcast(tensor, 1) for group, tensor in zip(groups, tensors, strict=True)))
            assert all(torch.equal(tensor, pattern.float()) for tensor in tensors)
            await asyncio.gather(*(group.reduce(tensor, 0) for group, tensor in zip(groups, tensors, strict=True)))
            assert torch.equal(tensors[0], pattern.float() * size)
            assert all(torch.equal(tensor, pattern.float()) for tensor in tensors[1:])


async def test_groups_of_some_hosts_and_some_ranks():
    async with world("aabbc") as groups:
        for ranks in ([0, 1], [3, 0, 2], [4, 1, 0], [0, 2, 4], [3, 2, 1, 0]):
            some = [groups[rank].world.new_group(ranks) for rank in ranks]
            for drill in collective_cases(len(ranks), 1000, torch.float32):
                await run(some, drill)


def test_blocking_calls(together):
    started = [drill for count in (0, 1, 30_000) for drill in collective_cases(4, count, torch.float64)]

    def rank(group):
        for number, drill in enumerate(started):
            for work in drill.start(group, background=number % 3 == 0):
                work.wait()

    together(4, rank, transport="auto", hosts="abab")
    for drill in started:
        drill.check()


async def test_a_forced_schedule_goes_over_links_alone(monkeypatch):
    monkeypatch.setattr(HierarchicalCollectives, "_numbered", lambda *_: pytest.fail("it met inside a node"))
    async with world("aabb", config=Config(algorithm="all_reduce=ring")) as groups:
        await run(groups, next(reducing(4, 1000, torch.float32)))


# -- what goes between hosts ------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch):
    """Count the bytes of tensors that are handed to connections, by the message's receiver."""
    nbytes = Counter()
    send = Writer.send

    def counting(writer, message):
        if type(writer._sock).__name__ == "socket":
            nbytes[message.peer] += len(message.body)
        return send(writer, message)

    monkeypatch.setattr(Writer, "send", counting)
    return nbytes


@pytest.mark.asyncio(loop_factories=["asyncio-debug"])
@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaabbb", "aabbcc"])
async def test_bytes_between_hosts_fall_by_the_number_of_ranks_a_host(hosts, sent):
    """No way of reducing can do with fewer: 2 (H-1)/H of the tensor out of each host, (H-1)/H for the others."""
    size, names = len(hosts), sorted(set(hosts))
    count, ranks_a_host, others = 60_000, hosts.count("a"), len(names) - 1
    total = 4 * count

    def out_of_all_hosts():
        nbytes = sum(sent.values())
        sent.clear()
        return nbytes

    async with world(hosts) as groups:
        flat = size * 2 * (size - 1) / size * total  # of a ring in which each neighbour is on another host
        await asyncio.gather(*(group.all_reduce(torch.ones(count)) for group in groups))
        assert out_of_all_hosts() == 2 * others * total <= flat / ranks_a_host
        await asyncio.gather(
            *(group.reduce_scatter_single(torch.ones(count // size), torch.ones(count)) for group in groups)
        )
        assert out_of_all_hosts() == others * total
        await asyncio.gather(
            *(group.all_gather_single(torch.ones(count), torch.ones(count // size)) for group in groups)
        )
        assert out_of_all_hosts() == others * total
        await asyncio.gather(*(group.broadcast(torch.ones(count), 1) for group in groups))
        assert out_of_all_hosts() == others * total
        await asyncio.gather(*(group.reduce(torch.ones(count), 1) for group in groups))
        assert out_of_all_hosts() == others * total


# -- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", range(5))
async def test_the_loss_of_a_rank_is_named_on_every_host(lost):
    async with world("aabbb") as groups:
        left = [group for group in groups if group.rank() != lost]
        await asyncio.gather(*(group.barrier() for group in groups))
        works = [group.all_reduce(torch.ones(100_000)) for group in left]
        groups[lost].world.leave()
        for work in works:
            with pytest.raises(PeerLostError) as caught:
                await work
            assert caught.value.peer == lost


@pytest.mark.parametrize("other", range(4))
async def test_different_calls_are_told_apart(other):
    async with world("aabb", timeout=20) as groups:
        works = [
            group.broadcast(torch.ones(300), 0) if group.rank() == other else group.all_reduce(torch.ones(300))
            for group in groups
        ]
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        assert all(isinstance(outcome, GroupError) for outcome in outcomes)
        assert any(isinstance(outcome, MismatchError) for outcome in outcomes)


@pytest.mark.parametrize(("hosts", "waits", "missing"), [("aabb", 2, 3), ("abb", 1, 0)], ids=["inside", "across"])
async def test_timeout_names_the_missing_ranks(hosts, waits, missing):
    async with world(hosts) as groups:
        works = {
            group.rank(): group.all_reduce(torch.ones(1000), timeout=0.2 if group.rank() == waits else None)
            for group in groups
            if group.rank() != missing
        }
        outcomes = dict(zip(works, await asyncio.gather(*works.values(), return_exceptions=True), strict=True))
        assert all(isinstance(outcome, GroupError) for outcome in outcomes.values())
        assert f"waiting for data from rank {missing}" in str(outcomes[waits])
