"""Groups of some ranks: who is in them, in which order, what they are called, and that they do not meet."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from asyncdist import api
from asyncdist.errors import NotInitializedError, OperationTimeoutError, UsageError
from asyncdist.testing.cluster import world_of


@pytest.fixture
def as_rank(monkeypatch):
    """``with as_rank(group):`` makes that rank's world the process's default one, as if it had the process to itself."""

    @contextlib.contextmanager
    def entered(group):
        with monkeypatch.context() as patch:
            patch.setattr(api, "_world", group.world)
            yield

    return entered


def on_every_rank(as_rank, groups, call):
    results = []
    for group in groups:
        with as_rank(group):
            results.append(call())
    return results


async def totals(groups, among):
    """Sum the global ranks in every group that a rank is in; None where it is in none."""

    async def total(rank, group):
        if not isinstance(group, type(groups[0])):
            return None
        tensor = torch.tensor([rank])
        await group.all_reduce(tensor)
        return tensor.item()

    async with asyncio.timeout(10):
        return await asyncio.gather(*(total(rank, group) for rank, group in enumerate(among)))


# -- new_group ---------------------------------------------------------------------------------------


async def test_members_and_others(transport, as_rank):
    async with world_of(4, transport=transport) as groups:
        among = on_every_rank(as_rank, groups, lambda: api.new_group([2, 0, 3]))
        assert among[1] is api.GroupMember.NON_GROUP_MEMBER
        assert [api.get_rank(group) for group in among] == [0, -1, 1, 2]  # sorted, as torch does it
        assert [api.get_world_size(group) for group in among] == [3, -1, 3, 3]
        assert api.get_process_group_ranks(among[0]) == [0, 2, 3]
        assert await totals(groups, among) == [5, None, 5, 5]
        everyone = on_every_rank(as_rank, groups, api.new_group)
        assert await totals(groups, everyone) == [6] * 4


async def test_ranks_in_the_order_given(transport, as_rank):
    async with world_of(3, transport=transport) as groups:
        among = on_every_rank(as_rank, groups, lambda: api.new_group([2, 0, 1], sort_ranks=False))
        assert [group.rank() for group in among] == [1, 2, 0]
        for rank, group in enumerate(among):
            assert api.get_group_rank(group, rank) == group.rank()
            assert api.get_global_rank(group, group.rank()) == rank
            with pytest.raises(UsageError, match="global rank 5 is not in group"):
                api.get_group_rank(group, 5)
            with pytest.raises(UsageError, match="rank 3 is not in a group of 3"):
                api.get_global_rank(group, 3)
        rows = [[torch.zeros(1) for _ in range(3)] for _ in range(3)]
        await asyncio.gather(
            *(group.all_gather(rows[rank], torch.tensor([float(rank)])) for rank, group in enumerate(among))
        )
        assert [[tensor.item() for tensor in row] for row in rows] == [[2, 0, 1]] * 3


async def test_what_is_no_group(as_rank):
    async with world_of(2) as groups:
        with as_rank(groups[0]):
            for ranks in ([], [0, 0], [0, 2], [-1], range(3)):
                with pytest.raises(UsageError, match="it needs distinct ranks from 0 to 1"):
                    api.new_group(ranks)
            with pytest.raises(ValueError, match="a timeout"):
                api.new_group([0], timeout=-3)
        assert await totals(groups, groups) == [1, 1]


async def test_equal_groups_do_not_meet(transport):
    """The same ranks, made twice: calls on the one are nothing to the other, in whatever order they are issued."""
    async with world_of(2, transport=transport) as groups:
        first = [group.world.new_group([0, 1]) for group in groups]
        second = [group.world.new_group([0, 1]) for group in groups]
        assert first[0].name != second[0].name
        tensors = [torch.tensor([float(number)]) for number in (1, 2, 10, 20)]
        works = [second[0].all_reduce(tensors[2]), first[0].all_reduce(tensors[0])]
        works += [first[1].all_reduce(tensors[1]), second[1].all_reduce(tensors[3])]
        await asyncio.gather(*works)
        assert [tensor.item() for tensor in tensors] == [3, 3, 30, 30]
        room = torch.zeros(1)
        sent = first[0].send(tensors[0], 1), second[0].send(tensors[2], 1)
        await second[1].recv(room, 0)
        assert room.item() == 30
        await first[1].recv(room, 0)
        assert room.item() == 3
        await asyncio.gather(*sent)


async def test_names_and_descriptions(as_rank):
    async with world_of(2) as groups:
        with as_rank(groups[0]):
            named = api.new_group([0], group_desc="mine")
            plain, again = api.new_group([0, 1]), api.new_group([0, 1])
        assert named.name == "mine"
        assert plain.name == "group of ranks [0, 1]"
        assert again.name == "group of ranks [0, 1] (2)"
        assert repr(named) == "<Group 'mine' rank 0 of 1, open>"
        named.close()
        assert repr(named) == "<Group 'mine' rank 0 of 1, destroyed>"
        plain.abort("enough")
        assert "failed: " in repr(plain)
        assert "enough" in repr(plain)
        assert groups[0].name == "world"


async def test_a_groups_own_timeout(transport):
    async with world_of(2, transport=transport, timeout=30) as groups:
        hasty = groups[0].world.new_group(None, timeout=0.05)
        with pytest.raises(
            OperationTimeoutError, match=r"timed out after 0\.05 s, waiting for data from rank 1"
        ) as late:
            await hasty.barrier()
        assert (late.value.peers, late.value.timeout, late.value.op) == ((1,), 0.05, "barrier")
        with pytest.raises(OperationTimeoutError, match="all_reduce #2"):
            await hasty.all_reduce(torch.ones(1))
        other = groups[1].world.new_group(None, timeout=0.05)
        with pytest.raises(RuntimeError, match="rank 0 timed out"):
            await other.barrier()
        patient = groups[0].world.new_group(None)
        with pytest.raises(OperationTimeoutError, match=r"after 0\.02 s"):
            await patient.all_reduce(torch.ones(1), timeout=0.02)
        assert await totals(groups, groups) == [1, 1]


# -- several at once ---------------------------------------------------------------------------------


async def test_subgroups_of_neighbours(transport, as_rank):
    async with world_of(6, transport=transport) as groups:
        made = on_every_rank(as_rank, groups, lambda: api.new_subgroups(2))
        assert await totals(groups, [ours for ours, _ in made]) == [1, 1, 5, 5, 9, 9]
        for rank, (ours, every) in enumerate(made):
            assert len(every) == 3
            assert every[rank // 2] is ours
            assert sum(group is api.GroupMember.NON_GROUP_MEMBER for group in every) == 2
        with as_rank(groups[0]):
            for size in (None, 0, 4, 7):
                with pytest.raises(UsageError, match="does not divide the 6 ranks"):
                    api.new_subgroups(size)


async def test_subgroups_of_a_group(transport, as_rank):
    async with world_of(6, transport=transport) as groups:
        parents = on_every_rank(as_rank, groups, lambda: api.new_group([1, 2, 4, 5]))
        made = {
            rank: on_every_rank(as_rank, [groups[rank]], lambda: api.new_subgroups(2, parents[rank]))[0]  # noqa: B023
            for rank in (1, 2, 4, 5)
        }
        among = [made[rank][0] if rank in made else None for rank in range(6)]
        assert await totals(groups, among) == [None, 3, 3, None, 9, 9]


async def test_subgroups_by_enumeration(transport, as_rank):
    async with world_of(5, transport=transport) as groups:
        made = on_every_rank(as_rank, groups, lambda: api.new_subgroups_by_enumeration([[4, 1], [0, 2]]))
        assert await totals(groups, [ours for ours, _ in made]) == [2, 5, 2, None, 5]
        assert made[3][0] is api.GroupMember.NON_GROUP_MEMBER
        with as_rank(groups[0]), pytest.raises(UsageError, match="overlap"):
            api.new_subgroups_by_enumeration([[0, 1], [1, 2]])


async def test_split(transport, as_rank):
    async with world_of(5, transport=transport) as groups:
        parents = on_every_rank(as_rank, groups, lambda: api.new_group([0, 2, 3, 4]))

        def split(rank):
            with as_rank(groups[rank]):
                return api.split_group(parents[rank], [[0, 3], [1]])

        among = [split(rank) if rank != 1 else None for rank in range(5)]
        assert among[3] is None
        assert await totals(groups, among) == [4, None, 2, None, 4]
        whole = on_every_rank(as_rank, groups, lambda: api.split_group(split_ranks=[[1, 2], [3, 4, 0]]))
        assert await totals(groups, whole) == [7, 3, 3, 7, 7]
        with as_rank(groups[0]):
            for wrong, words in ((None, "at least one list"), ([[0, 9]], "rank 9 is not"), ([[0], [0]], "overlap")):
                with pytest.raises(UsageError, match=words):
                    api.split_group(None, wrong)


# -- the end of a group ------------------------------------------------------------------------------


async def test_a_destroyed_group_harms_no_other(transport):
    async with world_of(2, transport=transport) as groups:
        for _ in range(3):
            among = [group.world.new_group(None) for group in groups]
            early = among[0].send(torch.ones(100_000), 1), among[0].all_reduce(torch.ones(4))
            for group in among:
                group.close()
                group.close()
            await asyncio.gather(*early, return_exceptions=True)
            with pytest.raises(NotInitializedError, match="was destroyed: make a new one for all_reduce"):
                among[0].all_reduce(torch.ones(1))
            assert await totals(groups, groups) == [1, 1]


async def test_many_groups_come_and_go(transport):
    """What a group leaves behind in the tables of its world is little, and not its buffers."""
    async with world_of(2, transport=transport) as groups:
        for _ in range(50):
            among = [group.world.new_group(None) for group in groups]
            assert await totals(groups, among) == [1, 1]
            for group in among:
                group.close()
        world = groups[0].world
        assert len(world.mesh._channels) == 2
        assert world.groups == [groups[0]]


async def test_a_failed_group_says_why_and_the_others_go_on(transport):
    async with world_of(3, transport=transport) as groups:
        among = [group.world.new_group(None) for group in groups]
        assert among[0].error is None
        among[2].abort("the third has had enough")
        async with asyncio.timeout(10):
            for group in among:
                with pytest.raises(RuntimeError, match="the third has had enough"):
                    await group.barrier()
        assert all("the third has had enough" in str(group.error) for group in among)
        assert await totals(groups, groups) == [3, 3, 3]


async def test_a_group_that_one_rank_makes_late(transport):
    """Messages and a failure that come before the group is made wait for it."""
    async with world_of(2, transport=transport) as (zero, one):
        first = zero.world.new_group(None)
        tensors = torch.ones(5), torch.ones(5)
        work = first.all_reduce(tensors[0])
        sent = first.send(torch.full((3,), 4.0), 1)
        await asyncio.gather(zero.barrier(), one.barrier())
        late = one.world.new_group(None)
        room = torch.zeros(3)
        await asyncio.gather(late.recv(room, 0), late.all_reduce(tensors[1]), work, sent)
        assert room.eq(4).all()
        assert tensors[1].eq(2).all()
        failed = zero.world.new_group(None)
        failed.abort("before you came")
        await asyncio.gather(zero.barrier(), one.barrier())
        late = one.world.new_group(None)
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="before you came"):
                await late.barrier()
