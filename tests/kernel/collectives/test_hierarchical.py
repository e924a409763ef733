"""Collectives of ranks on several hosts: shared memory inside a host, links between hosts."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
import torch

import asyncdist
from asyncdist.base.ops import PremulSum, ReduceOp
from asyncdist.config import Config
from asyncdist.errors import GroupError, MismatchError, PeerLostError
from asyncdist.groups.group import Group
from asyncdist.kernel.algorithms import hierarchy
from asyncdist.kernel.algorithms.hierarchy import batches, contiguous, gather_runs, layout, part_count, travels_whole
from asyncdist.kernel.algorithms.schedule import Recv, Send
from asyncdist.kernel.algorithms.selection import DEFAULT, Model
from asyncdist.kernel.algorithms.sharing import Sharing
from asyncdist.kernel.collectives.hierarchical import HierarchicalCollectives
from asyncdist.kernel.collectives.node import NodeCollectives
from asyncdist.kernel.memory.buffers import dtype_number
from asyncdist.kernel.transport import registry
from asyncdist.kernel.transport.wire_format import shape_checksum
from asyncdist.testing.cluster import world_of
from asyncdist.testing.collective_cases import collective_cases, moving, reducing
from asyncdist_transports.tcp.transport import TcpLink
from tests.support.placing import Placing
from tests.support.ranks import run_at_once, run_cases

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

every_layout = pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
small_layouts_first = pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(hosts, id=name, marks=[pytest.mark.exhaustive] if len(hosts) > 5 else [])
        for name, hosts in HOSTS.items()
    ],
)
"""Each layout; the essential tests leave out those of more than five ranks, which share the cores of one process."""
typical_layouts = pytest.mark.parametrize("hosts", ["aabb", "baabb", "aab"], ids=["2 x 2", "3 + 2", "2 + 1"])


@pytest.fixture(autouse=True)
def _without_inproc(monkeypatch):
    """Let the ranks, which are in one process, choose between shared memory and TCP only."""
    monkeypatch.setattr(registry, "names", lambda: ["shm", "tcp"])


@pytest.fixture
def many_parts(monkeypatch):
    """Let tensors of some kilobytes travel in several parts."""
    monkeypatch.setattr(hierarchy, "_MIN_SLICE_NBYTES", 4096)
    monkeypatch.setattr(hierarchy, "_MIN_BLOCK_NBYTES", 1024)


def world(hosts, **how):
    return world_of(len(hosts), transport="auto", hosts=hosts, **how)


# -- layouts ----------------------------------------------------------------------------------------


def sharing_of(reached):
    """Return what ranks know together, each of which has reached a set of ranks."""
    return Sharing.joined(Sharing.of(rank, peers) for rank, peers in enumerate(reached))


def layout_of(hosts, own=0):
    return layout(
        range(len(hosts)), own, sharing_of([{r for r, each in enumerate(hosts) if each == host} for host in hosts])
    )


def test_nodes_are_ranks_that_share_memory():
    found = layout_of("abbab", own=4)
    assert found.nodes == ((0, 3), (1, 2, 4))
    assert (found.node, found.place, found.rails, found.members) == (1, 2, 2, (1, 2, 4))
    assert not found.carries
    assert [found.rail(number) for number in range(2)] == [(0, 1), (3, 2)]
    assert found.carried(1, 0) == (1, 4)
    assert list(found.turns(1)) == [(1, 2), (4,)]
    assert [found.rail_leader(0, rank) for rank in (1, 2, 4)] == [0, 3, 0]


@pytest.mark.parametrize("hosts", ["aaaa", "abcd"])
def test_no_hierarchy_if_all_ranks_share_memory_or_none(hosts):
    assert layout_of(hosts) is None


def test_no_hierarchy_if_sharing_is_not_transitive():
    sharing = sharing_of([{0, 1}, {0, 1, 2}, {1, 2}, {3, 4}, {3, 4}])
    assert {layout(range(5), own, sharing) for own in range(5)} == {None}


def test_ranks_that_are_reached_and_do_not_reach_back_are_on_other_nodes():
    sharing = sharing_of([{0, 1, 2}, {0, 1}, {2}, {3}])
    assert layout(range(4), 0, sharing).nodes == ((0, 1), (2,), (3,))
    assert layout((3, 1, 0), 0, sharing).nodes == ((0,), (1, 2))


@pytest.mark.parametrize("hosts", HOSTS.values())
def test_all_ranks_agree_on_nodes_and_rail_leaders(hosts):
    layouts = [layout_of(hosts, own) for own in range(len(hosts))]
    assert len({each.nodes for each in layouts}) == 1
    for sender, receiver in itertools.product(layouts, layouts):
        if sender.node != receiver.node:
            (turn,) = (turn for turn in sender.turns(receiver.node) if receiver.rank in turn)
            sends = turn.index(receiver.rank) == sender.place
            assert sends == (receiver.rail_leader(sender.node, receiver.rank) == sender.rank)


def test_gather_runs_sends_around_a_ring():
    runs = [["a", "b"], ["c"], []]
    assert [list(gather_runs(place, 3, runs)) for place in range(3)] == [
        [(Send(1, "a"), Send(1, "b")), (Recv(2, "c"),)],
        [(Send(2, "c"), Recv(0, "a"), Recv(0, "b")), (Send(2, "a"), Send(2, "b"))],
        [(Recv(1, "c"),), (Send(0, "c"), Recv(1, "a"), Recv(1, "b"))],
    ]


def test_part_count():
    assert part_count(0, 2, 2, 1 << 20) == 1
    assert part_count(1 << 16, 2, 2, 1 << 20) == 1
    assert part_count(4 << 20, 2, 2, 1 << 20) == 8
    assert part_count(100 << 20, 2, 2, 1 << 20) == 50
    # Eight hosts: a part has a block for each of them.
    assert part_count(4 << 20, 2, 8, 1 << 20) == 2
    assert part_count(100 << 20, 2, 8, 1 << 20) == 25
    # The blocks of a part overlap.
    assert [part_count(size << 20, 2, 8, 1 << 20, overlaps=True) for size in (1, 4, 25, 100)] == [1, 2, 2, 6]
    assert [part_count(25 << 20, 2, hosts, 1 << 20, overlaps=True) for hosts in (2, 4, 8, 32)] == [13, 6, 2, 2]


def test_batches_overlap_with_each_other():
    assert list(batches("abcdefg", smallest=1)) == [(4, "abcd"), (6, "ef"), (7, "g")]
    assert list(batches("abcdefgh", smallest=2, growing=True)) == [(2, "ab"), (4, "cd"), (8, "efgh")]
    assert list(batches("abc", smallest=1)) == [(2, "ab"), (3, "c")]
    assert list(batches("ab", smallest=2, growing=True)) == [(2, "ab")]
    assert list(batches("a", smallest=1)) == [(1, "a")]
    assert [size for size, _ in batches(range(64), smallest=1)] == [32, 48, 64]


def test_contiguous_blocks_are_one_range():
    assert contiguous([6, 5, 4]) == [(4, 7)]
    assert contiguous([1, 0, 7, 6]) == [(0, 2), (6, 8)]
    assert contiguous([3]) == [(3, 4)]


def test_only_small_tensors_travel_whole_on_the_first_rail():
    sizes = 4, 4096, 1 << 20, 25 << 20
    for collective in ("all_reduce", "all_gather"):
        whole = [travels_whole(collective, nbytes, layout_of("aabb"), DEFAULT) for nbytes in sizes]
        assert whole == [True, True, False, False]
    # On a single rail nothing is saved by parts.
    for collective in ("all_reduce", "all_gather"):
        assert all(travels_whole(collective, nbytes, layout_of("aab"), DEFAULT) for nbytes in sizes)


def test_bytes_on_slow_links_are_not_saved_by_parts():
    """The rails of a host share its link."""
    slow = Model(alpha=50e-6, beta=8e-9, overhead=20e-6)
    eight = layout_of("aabbccddeeffgghh")
    sizes = 1 << 10, 256 << 10, 512 << 10, 4 << 20
    assert [travels_whole("all_gather", nbytes, eight, slow) for nbytes in sizes] == [True, True, True, False]
    assert [travels_whole("all_reduce", nbytes, eight, slow) for nbytes in sizes] == [True, True, False, False]


async def test_small_calls_of_one_signature_may_overlap():
    """Only one of them uses the recorded steps."""
    async with world("aabb") as groups:
        works = [group.all_reduce(torch.full((3,), value)) for group in groups for value in (1.0, 2.0, 3.0)]
        assert [(await work)[0].item() for work in works] == [4, 8, 12] * 4


# -- results ----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@every_layout
async def test_every_collective(hosts):
    async with world(hosts) as groups:
        for count in (0, 1, len(hosts) + 1, 1000):
            await run_cases(groups, collective_cases(len(hosts), count, torch.float32))


@pytest.mark.parametrize(
    "hosts", ["aab", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("aabb", "baa"))]
)
async def test_node_without_shared_memory_uses_tcp_inside(monkeypatch, hosts):
    """As on a host that passes no descriptors: all its ranks have TCP alone."""
    usable, kinds = iter(hosts), registry.selected
    monkeypatch.setattr(registry, "selected", lambda _: kinds("shm,tcp" if next(usable) == "a" else "tcp"))
    async with world_of(len(hosts), transport="auto", hosts=hosts) as groups:
        assert all(group.context.hierarchical is not None for group in groups)
        await run_cases(groups, collective_cases(len(hosts), 1000, torch.float32))


def lanes(number):
    return Config(segment_nbytes=20_000, lanes=number, stripe_nbytes=100, piece_nbytes=1000)


SMALL_SEGMENTS = Config(segment_nbytes=10_000)


@pytest.mark.exhaustive
@typical_layouts
@pytest.mark.parametrize(
    ("config", "dtype", "op"),
    [
        (lanes(2), torch.float32, ReduceOp.SUM),
        (lanes(3), torch.float32, ReduceOp.SUM),
        *((SMALL_SEGMENTS, dtype, ReduceOp.SUM) for dtype in (torch.float8_e5m2, torch.uint16, torch.int64)),
        (SMALL_SEGMENTS, torch.complex64, ReduceOp.SUM),
        *(
            (SMALL_SEGMENTS, dtype, op)
            for dtype in (torch.float32, torch.bfloat16)
            for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT, PremulSum(2.0))
        ),
    ],
    ids=lambda value: f"{value.lanes} lanes" if isinstance(value, Config) else str(getattr(value, "name", value)),
)
@pytest.mark.usefixtures("many_parts")
async def test_reductions_in_several_parts(hosts, config, dtype, op):
    async with world(hosts, config=config) as groups:
        for count in (3, 20_011):
            await run_cases(groups, reducing(len(hosts), count, dtype, op))


@small_layouts_first
@pytest.mark.usefixtures("many_parts")
async def test_large_tensors_in_several_parts(hosts):
    async with world(hosts, config=Config(segment_nbytes=45_000)) as groups:
        await run_cases(groups, collective_cases(len(hosts), 30_001, torch.float32))


@small_layouts_first
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.bfloat16], ids=str)
@pytest.mark.usefixtures("many_parts")
async def test_sums_and_averages_in_several_parts(hosts, dtype):
    async with world(hosts, config=SMALL_SEGMENTS) as groups:
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            await run_cases(groups, reducing(len(hosts), 20_011, dtype, op))


@pytest.mark.usefixtures("many_parts")
async def test_nodes_copy_blocks_while_others_travel(monkeypatch):
    """Of a part with blocks of four hosts, three arrive: the node copies two of them before the last one has come."""
    copied, plain = [], NodeCollectives.all_gather

    def all_gather(self, number, call, rows):
        copied.append(len(rows))
        return plain(self, number, call, rows)

    monkeypatch.setattr(NodeCollectives, "all_gather", all_gather)
    async with world("abcdabcd") as groups:
        rows = [torch.zeros(8 * 65_536) for _ in groups]
        works = [group.all_gather_single(row, torch.ones(65_536)) for group, row in zip(groups, rows, strict=True)]
        await asyncio.gather(*works)
        assert all(row.eq(1).all() for row in rows)
    # The first batch also has the blocks of this rank's own node.
    assert len(copied) % (2 * len(groups)) == 0
    assert sorted(set(copied)) == [1, 3]


@pytest.mark.exhaustive
@typical_layouts
async def test_more_operations_in_flight_than_a_node_has_slots(hosts):
    """The test awaits the last operation first."""
    async with world(hosts, config=Config(segment_nbytes=4096)) as groups:
        cases = [case for count in (0, 5, 6000) for case in collective_cases(len(hosts), count, torch.float32)]
        await run_at_once(groups, cases)


async def test_small_call_after_a_large_one_that_has_not_started():
    """Another thread drives rank 0, so that its large call starts only after its small call has been made."""
    async with world("aab") as groups:
        large, small = ([torch.ones(count) for _ in groups] for count in (100_000, 4))
        works = []

        def call_rank_zero():
            works.extend(groups[0].all_reduce(tensors[0]) for tensors in (large, small))

        caller = threading.Thread(target=call_rank_zero)
        with groups[0].endpoint.progress.turns.lock:
            caller.start()
            caller.join()
        works += [group.all_reduce(tensors[group.rank()]) for tensors in (large, small) for group in groups[1:]]
        await asyncio.gather(*works)
        assert all(tensor.eq(3).all() for tensor in (*large, *small))


@small_layouts_first
@pytest.mark.usefixtures("many_parts")
async def test_every_rank_gets_the_same_bits(hosts):
    """The bits of these sums depend on the order of the additions."""
    async with world(hosts, config=Config(segment_nbytes=50_000)) as groups:
        for count in (7, 3000, 100_003):
            generator = torch.Generator().manual_seed(count)
            tensors = [torch.randn(count, generator=generator) for _ in hosts]
            await asyncio.gather(*(group.all_reduce(tensors[group.rank()]) for group in groups))
            for tensor in tensors[1:]:
                assert torch.equal(tensor.view(torch.int32), tensors[0].view(torch.int32))


@typical_layouts
@pytest.mark.parametrize("count", [3, 200_003])
async def test_narrow_floats_are_rounded_once(hosts, count):
    async with world(hosts) as groups:
        values = [torch.full((count,), 1.0 + rank / 128, dtype=torch.bfloat16) for rank in range(len(hosts))]
        expected = torch.stack([value.float() for value in values]).sum(0).to(torch.bfloat16)
        await asyncio.gather(*(group.all_reduce(values[group.rank()]) for group in groups))
        for value in values:
            assert torch.equal(value, expected)


@typical_layouts
@pytest.mark.usefixtures("many_parts")
async def test_registered_tensors(hosts):
    """The members of a node read and write them in place while a rail carries other parts of them."""
    async with world(hosts, config=Config(segment_nbytes=200_000)) as groups:
        placed = [Placing(group, lambda count, dtype: asyncdist.empty(count, dtype=dtype)) for group in groups]
        await run_cases(placed, reducing(len(hosts), 60_000, torch.float32))
        await run_cases(placed, moving(len(hosts), 60_000, torch.float32))


async def test_groups_of_some_hosts_and_some_ranks():
    async with world("aabbc") as groups:
        for ranks in ([0, 1], [3, 0, 2], [4, 1, 0], [0, 2, 4], [3, 2, 1, 0]):
            members = [groups[rank].world.new_group(ranks) for rank in ranks]
            await run_cases(members, collective_cases(len(ranks), 1000, torch.float32))


def test_blocking_calls(together):
    cases = [case for count in (0, 1, 30_000) for case in collective_cases(4, count, torch.float64)]

    def rank(group):
        for number, case in enumerate(cases):
            for work in case.start(group, background=number % 3 == 0):
                work.wait()

    together(4, rank, transport="auto", hosts="abab")
    for case in cases:
        case.check()


async def test_forced_schedule_uses_links_only(monkeypatch):
    monkeypatch.setattr(HierarchicalCollectives, "_numbered", lambda *_: pytest.fail("a hierarchical collective"))
    async with world("aabb", config=Config(algorithm="all_reduce=ring")) as groups:
        await run_cases(groups, [next(reducing(4, 1000, torch.float32))])


# -- bytes between hosts ----------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch):
    """The numbers of bytes of the tensors that are sent over sockets, one entry for each message, without heartbeats."""
    nbytes, send, send_now = [], TcpLink.send, TcpLink.send_now

    def counting(link, message):
        nbytes.append(len(message.body))
        return send(link, message)

    def counting_now(link, header, body):
        nbytes.append(len(body))
        return send_now(link, header, body)

    monkeypatch.setattr(TcpLink, "send", counting)
    monkeypatch.setattr(TcpLink, "send_now", counting_now)
    return nbytes


@pytest.mark.parametrize(("hosts", "messages"), [("aabb", 2), ("abab", 2), ("aab", 2), ("aabbcc", 6), ("abcdabcd", 8)])
async def test_small_blocks_are_gathered_by_one_rank_of_each_host(hosts, messages, sent):
    ranks = range(len(hosts))
    async with world(hosts) as groups:
        for _ in range(2):
            sent.clear()
            blocks = [[torch.zeros(3) for _ in ranks] for _ in ranks]
            await asyncio.gather(*(g.all_gather(blocks[g.rank()], torch.full((3,), float(g.rank()))) for g in groups))
            expected = torch.arange(float(len(hosts))).repeat_interleave(3)
            assert all(torch.cat(own).equal(expected) for own in blocks)
            assert len(sent) == messages
        # In place, in one tensor, with several calls in flight.
        wholes = [[torch.full((3 * len(hosts),), float(rank)) for rank in ranks] for _ in range(3)]
        parts = [[whole[3 * rank : 3 * rank + 3] for rank, whole in enumerate(each)] for each in wholes]
        works = [
            group.all_gather_single(whole[group.rank()], part[group.rank()])
            for whole, part in zip(wholes, parts, strict=True)
            for group in groups
        ]
        await asyncio.gather(*works)
        assert all(whole.equal(expected) for each in wholes for whole in each)


async def test_calls_that_look_alike_do_not_share_their_steps():
    """Fingerprints have 12 bits of the sizes of blocks, and the blocks of this rank have one size in both calls."""
    number = dtype_number(torch.float32)
    count, less = next(
        (count, less)
        for count in range(1, 1000)
        for less in range(1, count)
        if shape_checksum((number, *[count] * 3)) == shape_checksum((number, count, count - less, count + less))
    )
    async with world("aab") as groups:
        for counts in ([count] * 3, [count, count - less, count + less]) * 2:
            outputs = [[torch.zeros(each) for each in counts] for _ in groups]
            inputs = [torch.full((each,), float(rank + 1)) for rank, each in enumerate(counts)]
            await asyncio.gather(*map(Group.all_gather, groups, outputs, inputs))
            assert all(torch.equal(block, due) for row in outputs for block, due in zip(row, inputs, strict=True))


async def test_small_blocks_of_different_sizes_use_all_rails(sent):
    async with world("aabb") as groups:
        blocks = [[torch.zeros(count) for count in (1, 2, 0, 3)] for _ in groups]
        await asyncio.gather(
            *(g.all_gather(own, torch.ones_like(own[g.rank()])) for g, own in zip(groups, blocks, strict=True))
        )
        assert all(torch.cat(own).equal(torch.ones(6)) for own in blocks)
        assert sum(sent) == 4 * 6


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaabbb", "aabbcc"])
async def test_bytes_between_hosts_fall_by_the_number_of_ranks_a_host(hosts, sent):
    """Of H hosts each sends the least possible: 2 (H-1)/H of the tensor in an all-reduce, (H-1)/H in the others."""
    size, other_hosts, count = len(hosts), len(set(hosts)) - 1, 60_000
    # A flat ring, in which each neighbour is on another host, sends 2 (P-1)/P of the tensor from each of P ranks.
    assert 2 * other_hosts <= 2 * (size - 1) / hosts.count("a")
    calls = {
        "all_reduce": lambda group, whole, part: group.all_reduce(whole),
        "reduce_scatter": lambda group, whole, part: group.reduce_scatter_single(part, whole),
        "all_gather": lambda group, whole, part: group.all_gather_single(whole, part),
        "broadcast": lambda group, whole, part: group.broadcast(whole, 1),
        "reduce": lambda group, whole, part: group.reduce(whole, 1),
    }
    async with world(hosts) as groups:
        for name, call in calls.items():
            sent.clear()
            await asyncio.gather(*(call(group, torch.ones(count), torch.ones(count // size)) for group in groups))
            assert sum(sent) == other_hosts * 4 * count * (2 if name == "all_reduce" else 1), name


# -- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", range(5))
@pytest.mark.usefixtures("many_parts")
async def test_every_rank_names_a_lost_rank(lost):
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
async def test_different_calls_are_a_mismatch(other):
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
