"""Agreements and successors of groups, among ranks of one process."""

import asyncio
import contextlib
import errno
import itertools

import pytest
import torch

import asyncdist
from asyncdist import Agreed
from asyncdist.errors import (
    ExcludedError,
    GroupAbortedError,
    NoQuorumError,
    NotInitializedError,
    OperationTimeoutError,
    PeerLostError,
    SharedMemoryError,
)
from asyncdist.kernel.engine import agreements
from asyncdist.kernel.engine.control_messages import MAX_CLOSING_FAILURES
from asyncdist.kernel.transport.base import Outgoing
from asyncdist.kernel.transport.wire_format import DATA, pack_key
from asyncdist.testing.cluster import run_ranks, world_of
from tests.support.faults import cancelled_at
from tests.support.ranks import sums

transports = pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])


async def regrouped(groups, **options):
    return await asyncio.gather(*(group.regroup(**options) for group in groups))


# -- agree --------------------------------------------------------------------------------------------


@transports
async def test_agree_returns_the_and_of_all_flags_to_everybody(transport):
    async with world_of(4, transport=transport) as groups:
        for flags in itertools.product([True, False], repeat=2):
            agreed = await asyncio.gather(*(group.agree(flags[rank % 2]) for rank, group in enumerate(groups)))
            assert agreed == [Agreed(all(flags), ())] * 4


async def test_agree_works_on_a_failed_group_and_names_the_members_that_have_left():
    async with world_of(4) as groups:
        groups[2].world.leave()
        rest = [group for group in groups if group is not groups[2]]
        failed = await asyncio.gather(*(group.barrier() for group in rest), return_exceptions=True)
        assert {type(error) for error in failed} == {PeerLostError}
        assert await asyncio.gather(*(group.agree() for group in rest)) == [Agreed(True, (2,))] * 3


@transports
async def test_members_of_a_group_with_relays_agree_and_regroup_without_those_that_have_left(monkeypatch, transport):
    monkeypatch.setattr(agreements, "DEGREE", 3)
    async with world_of(11, transport=transport) as groups:
        assert await asyncio.gather(*(group.agree() for group in groups)) == [Agreed(True, ())] * 11
        # Relays of the first level and of the second, the first coordinator, and others.
        for number in (0, 3, 7, 9):
            groups[number].world.leave()
        rest = [group for number, group in enumerate(groups) if number not in (0, 3, 7, 9)]
        assert await asyncio.gather(*(group.agree() for group in rest)) == [Agreed(True, (0, 3, 7, 9))] * 7
        successors = await regrouped(rest)
        assert [group.member_ids for group in successors] == [(1, 2, 4, 5, 6, 8, 10)] * 7
        assert await sums(successors) == [36.0] * 7


async def test_member_of_a_group_with_relays_whose_regroup_is_cancelled_gets_the_group_nevertheless(monkeypatch):
    monkeypatch.setattr(agreements, "DEGREE", 2)
    async with world_of(7) as groups:
        works = [group.regroup() for group in groups]
        for number in (0, 2, 5):
            waiter = asyncio.ensure_future(works[number])
            waiter.cancel()
        successors = await regrouped(groups)
        assert [group.rank() for group in successors] == list(range(7))


async def test_agree_without_a_member_times_out_and_names_it():
    async with world_of(3) as groups:
        works = [group.agree(timeout=0.1) for group in groups[:2]]
        for work in works:
            with pytest.raises(OperationTimeoutError, match=r"waiting for rank 2 to call agree\(\)"):
                await work
        assert (await asyncio.gather(*(group.agree() for group in groups[2:]))) == [Agreed(False, (0, 1))]


@transports
async def test_regroup_without_a_member_times_out_and_names_it(transport):
    async with world_of(3, transport=transport) as groups:
        assert await sums(groups) == [3] * 3
        for work in [group.regroup(timeout=0.2) for group in groups[:2]]:
            with pytest.raises(OperationTimeoutError, match=r"waiting for rank 2 to call regroup\(\)"):
                await work


async def test_late_member_decides_with_the_others():
    async with world_of(3) as groups:
        early = [groups[rank].agree() for rank in (0, 1)]
        await asyncio.gather(*(group.barrier() for group in groups))
        assert not any(work.is_completed() for work in early)
        late = groups[2].agree(False)
        assert await asyncio.gather(*early, late) == [Agreed(False, ())] * 3


async def test_cancelled_waiter_has_voted():
    async with world_of(2) as groups:
        task = asyncio.ensure_future(cancelled_at(0, awaited(groups[0].agree(False))))
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await groups[1].agree() == Agreed(False, ())
        assert await asyncio.gather(*(group.agree() for group in groups)) == [Agreed(True, ())] * 2


async def awaited(work):
    return await work


# -- regroup ------------------------------------------------------------------------------------------


@transports
@pytest.mark.parametrize("dead", [0, 1, 3])
async def test_survivors_get_dense_ranks_and_keep_their_ids(transport, dead):
    async with world_of(4, transport=transport) as groups:
        assert await sums(groups) == [6] * 4
        groups[dead].world.leave()
        rest = [group for group in groups if group is not groups[dead]]
        ids = tuple(group.endpoint.rank for group in rest)
        new = await regrouped(rest)
        for rank, group in enumerate(new):
            assert (group.rank(), group.size(), group.generation) == (rank, 3, 1)
            assert group.ranks == (0, 1, 2)
            assert group.member_ids == ids
            assert group.world.group is group
        assert await sums(new) == [6 - dead] * 3
        with pytest.raises(NotInitializedError):
            rest[0].all_reduce(torch.ones(1))


@transports
async def test_survivors_are_not_busy_with_a_failure_that_they_have_survived(transport, eventually):
    """With something pending, each call drives more than itself, so small calls would stay slower."""
    async with world_of(3, transport=transport) as groups:
        assert await sums(groups) == [3] * 3
        groups[2].world.leave()
        failed = await asyncio.gather(*(group.barrier() for group in groups[:2]), return_exceptions=True)
        assert {type(error) for error in failed} == {PeerLostError}
        assert all(group.endpoint.busy() for group in groups[:2])
        new = await regrouped(groups[:2])
        for group in new:
            await eventually(lambda group=group: not group.endpoint.busy())
            assert group.endpoint.only_receives()
        assert await sums(new) == [1] * 2


async def test_failed_groups_that_have_ended_leave_no_state_that_grows():
    async with world_of(2) as groups:
        for _ in range(MAX_CLOSING_FAILURES + 5):
            both = [group.world.new_group(None) for group in groups]
            both[0].abort()
            with pytest.raises(GroupAbortedError):
                await both[1].barrier()
            for group in both:
                group.close()
        for group in groups:
            failures = group.endpoint.failures
            assert len(failures.failed) == MAX_CLOSING_FAILURES
            assert not failures.failing
            assert not group.endpoint.busy()
        assert await sums(groups) == [1] * 2


@transports
async def test_regroup_of_a_group_that_works_fails_it_on_the_others_first(transport):
    async with world_of(3, transport=transport) as groups:
        pending = [group.all_reduce(torch.ones(1000)) for group in groups[1:]]
        first = groups[0].regroup()
        for work in pending:
            with pytest.raises(GroupAbortedError, match=r"rank 0 called regroup\(\)"):
                await work
        new = await asyncio.gather(first, *(group.regroup() for group in groups[1:]))
        again = await regrouped(new)
        assert [group.generation for group in again] == [2] * 3
        assert await sums(again) == [3] * 3


async def test_cancelled_regroup_is_called_again():
    async with world_of(3) as groups:
        task = asyncio.ensure_future(cancelled_at(0, awaited(groups[0].regroup())))
        with pytest.raises(asyncio.CancelledError):
            await task
        new = await regrouped(groups)
        assert await sums(new) == [3] * 3
        assert await groups[0].regroup() is new[0]


async def test_too_few_survivors_fail_alike_and_the_largest_min_size_counts():
    async with world_of(4) as groups:
        groups[3].world.leave()
        results = await asyncio.gather(
            *(group.regroup(min_size=size) for group, size in zip(groups[:3], (1, 4, 2), strict=True)),
            return_exceptions=True,
        )
        for error in results:
            assert isinstance(error, NoQuorumError)
            assert "3 of 4 members are left, fewer than min_size=4" in str(error)
            assert error.present == (0, 1, 2)


@pytest.mark.parametrize(("rank", "is_late"), [(0, False), (2, True)])
async def test_member_that_regroups_leaves_the_agreements_of_the_others(rank, is_late):
    """It has seen a failure that the others have not: these agree without it, and see that it takes no part."""
    async with world_of(3) as groups:
        others = [group for group in groups if group is not groups[rank]]
        regrouping = [groups[rank].regroup()] if is_late else []
        agreeing = [group.agree() for group in others]
        regrouping = regrouping or [groups[rank].regroup()]
        assert await asyncio.gather(*agreeing) == [Agreed(False, (rank,))] * 2
        new = await asyncio.gather(*regrouping, *(group.regroup() for group in others))
        assert await sums(new) == [3] * 3


async def test_two_groups_of_the_same_ranks_regroup_at_once():
    async with world_of(4) as groups:
        others = [group.world.new_group([3, 1, 0]) for group in groups]
        groups[1].world.leave()
        living = [0, 2, 3]
        works = [groups[rank].regroup() for rank in living]
        works += [others[rank].regroup() for rank in (3, 0)]
        *whole, third, zeroth = await asyncio.gather(*works)
        assert await sums(whole) == [5] * 3
        assert await sums([third, zeroth]) == [3] * 2
        assert third.member_ids == zeroth.member_ids == (3, 0)


async def test_regrouped_subgroup_keeps_its_global_ranks():
    async with world_of(4) as groups:
        parts = {rank: groups[rank].world.new_group([1, 2, 3]) for rank in (1, 2, 3)}
        groups[2].world.leave()
        one, three = await regrouped([parts[1], parts[3]])
        assert one.ranks == one.member_ids == (1, 3)
        assert groups[1].world.group is groups[1]
        tensor = torch.zeros(1)
        receiving = one.recv(tensor)
        await three.send(torch.ones(1), 0)
        assert await receiving == 3


async def test_global_ranks_are_those_of_the_default_groups_successor():
    async with world_of(4) as groups:
        groups[0].world.leave()
        new = await regrouped(groups[1:])
        parts = [group.world.new_group([0, 2]) for group in new]
        assert parts[1] is None
        assert parts[0].ranks == (0, 2)
        assert parts[0].member_ids == (1, 3)
        tensor = torch.zeros(1)
        receiving = parts[0].recv(tensor)
        await parts[2].send(torch.ones(1), 0)
        assert await receiving == 2
        from_any = new[1].recv(tensor, 2)
        await new[2].send(torch.ones(1), 1)
        assert await from_any == 2


async def test_error_of_a_regrouped_group_names_the_id_of_the_member():
    async with world_of(4) as groups:
        groups[0].world.leave()
        new = await regrouped(groups[1:])
        groups[2].world.leave()
        with pytest.raises(PeerLostError, match="rank 2 was lost") as caught:
            await new[0].barrier()
        assert caught.value.peer == 2
        assert caught.value.rank == 1


async def test_destroyed_group_does_not_hold_up_the_others():
    async with world_of(3) as groups:
        part = [group.world.new_group([0, 1, 2]) for group in groups]
        waiting = [group.regroup() for group in part[:2]]
        part[2].close()
        new = await asyncio.gather(*waiting)
        assert [group.member_ids for group in new] == [(0, 1)] * 2
        assert await sums(new) == [1] * 2
        with pytest.raises(NotInitializedError):
            part[2].regroup()


@pytest.mark.parametrize(
    ("end", "reason"), [("close", "rank 0 has destroyed the group"), ("leave", None)], ids=["group", "world"]
)
async def test_group_or_world_that_ends_during_regroup_fails_the_waiter(end, reason):
    async with world_of(2) as groups:
        waiting = groups[0].regroup()
        getattr(groups[0] if end == "close" else groups[0].world, end)()
        with pytest.raises(GroupAbortedError, match=reason):
            await waiting
        assert (await groups[1].regroup()).member_ids == (1,)


async def test_every_member_learns_how_a_loss_was_noticed_and_when_the_peer_was_last_heard():
    async with world_of(3) as groups:
        endpoint = groups[0].endpoint
        endpoint.silence_of = {2: 1.5}.get
        endpoint.progress.submit(lambda: endpoint.lost(2, "connection closed"))
        results = await asyncio.gather(*(group.barrier() for group in groups[:2]), return_exceptions=True)
        assert [(type(each), each.peer, each.noticed, each.last_heard) for each in results] == [
            (PeerLostError, 2, "connection", 1.5)
        ] * 2


@transports
async def test_one_of_two_members_that_hold_each_other_lost_is_left_out(transport):
    """Rank 0 reaches all. A group of all four would fail at once, again and again."""
    async with world_of(4, transport=transport) as groups:
        for one, other in ((1, 2), (2, 1)):
            endpoint = groups[one].endpoint
            endpoint.progress.submit(lambda endpoint=endpoint, other=other: endpoint.lost(other, "no heartbeat"))
        results = await asyncio.gather(*(group.regroup() for group in groups), return_exceptions=True)
        assert isinstance(results[2], ExcludedError)
        assert "go on without rank 2: rank 1 had lost it (no heartbeat)" in str(results[2])
        new = [group for group in results if group is not results[2]]
        assert [group.member_ids for group in new] == [(0, 1, 3)] * 3
        assert await sums(new) == [4] * 3


async def test_step_of_an_excluded_member_is_not_committed_and_not_raised():
    async with world_of(3) as groups:
        for one, other in ((0, 2), (1, 2), (2, 0), (2, 1)):
            endpoint = groups[one].endpoint
            endpoint.progress.submit(lambda endpoint=endpoint, other=other: endpoint.lost(other, "no heartbeat"))

        async def step_of(group):
            async with group.step() as step:
                await group.barrier()
            return step.committed, group.changed, type(step.excluded)

        steps = await asyncio.gather(*map(step_of, groups))
        assert steps[:2] == [(False, True, type(None))] * 2
        assert steps[2] == (False, True, NoQuorumError)


async def test_member_that_reaches_nobody_does_not_go_on_alone():
    async with world_of(3) as groups:
        for peer in (0, 1):
            groups[2].endpoint.progress.submit(lambda peer=peer: groups[2].endpoint.lost(peer, "no heartbeat"))
            groups[peer].endpoint.progress.submit(lambda peer=peer: groups[peer].endpoint.lost(2, "no heartbeat"))
        results = await asyncio.gather(*(group.regroup() for group in groups), return_exceptions=True)
        assert [group.member_ids for group in results[:2]] == [(0, 1)] * 2
        assert isinstance(results[2], NoQuorumError)
        assert results[2].present == (2,)


@transports
def test_blocking_ranks_agree_and_regroup(transport):
    def program(group):
        first = group.agree(group.rank() != 1, background=False).result()
        if group.rank() == 1:
            return first
        with contextlib.suppress(PeerLostError):
            group.barrier(background=False).result()
        new = group.regroup(background=False).result()
        tensor = torch.ones(100)
        new.all_reduce(tensor, background=False).result()
        return first, new.member_ids, tensor[0].item()

    assert run_ranks(3, program, transport=transport) == [
        (Agreed(False, ()), (0, 2), 2.0),
        Agreed(False, ()),
        (Agreed(False, ()), (0, 2), 2.0),
    ]


# -- generations --------------------------------------------------------------------------------------


@transports
async def test_frames_of_earlier_generations_are_dropped_and_counted(transport):
    async with world_of(2, transport=transport) as groups:
        old = groups[0].channel.number
        new = await regrouped(groups)
        recorder = groups[1].endpoint.recorder
        before = recorder.dropped_frames
        endpoint = groups[0].endpoint

        def send_late():
            body = memoryview(b"late")
            endpoint.link(1).send(Outgoing(1, pack_key(old, 7, 0), 0, body, None, DATA))

        endpoint.progress.submit(send_late)
        assert await sums(new) == [1] * 2
        receiving = new[1].recv(torch.zeros(1))
        await new[0].send(torch.ones(1), 1)
        await receiving
        assert recorder.dropped_frames == before + 1


# -- watching -----------------------------------------------------------------------------------------


async def test_watch_reports_losses_before_and_after_it_began_and_ends_with_the_group():
    async with world_of(4) as groups:
        early = groups[0].watch_members()
        groups[3].world.leave()
        assert (await anext(early))[:2] == (3, "lost")
        waiting = asyncio.ensure_future(anext(early))
        await asyncio.sleep(0)
        groups[2].world.leave()
        assert (await waiting)[:2] == (2, "lost")
        late = groups[0].watch_members()
        await regrouped(groups[:2])
        assert [change.member async for change in late] == [2, 3]
        assert [change async for change in early] == []


async def test_functions_of_the_package_use_the_default_group():
    await asyncdist.init_process_group(store=asyncdist.HashStore(), rank=0, world_size=1)
    try:
        watch = asyncdist.watch_members()
        assert await asyncdist.agree() == Agreed(True, ())
        asyncdist.revoke("enough")
        with pytest.raises(GroupAbortedError, match="enough"):
            await asyncdist.barrier()
        new = await asyncdist.regroup()
        assert asyncdist.group.WORLD is new
        await asyncdist.barrier()
        assert [change async for change in watch] == []
    finally:
        await asyncdist.destroy_process_group()


# -- what goes wrong besides ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
async def test_agreement_ends_although_a_rank_had_no_descriptor_for_its_first_connections(rank):
    async with world_of(3, transport="tcp") as groups:
        endpoint, link, left = groups[rank].endpoint, groups[rank].endpoint.link, [3]

        def link_later(peer):
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return link(peer)

        endpoint.link = link_later
        assert await asyncio.gather(*(group.agree(timeout=20.0) for group in groups)) == [Agreed(True, ())] * 3
        assert left[0] < 0


async def test_member_that_cannot_make_the_successor_is_left_out_of_the_next_one():
    async with world_of(3) as groups:

        def no_memory(channel):
            raise SharedMemoryError("the segment is full")

        groups[1].endpoint.transport_selector.native = no_memory
        results = await asyncio.gather(*(group.regroup() for group in groups), return_exceptions=True)
        assert "the segment is full" in str(results[1])
        rest = [results[0], results[2]]
        failed = await asyncio.gather(*(group.barrier() for group in rest), return_exceptions=True)
        assert all("rank 1 cannot be in the group" in str(error) for error in failed)
        new = await regrouped(rest, timeout=5.0)
        assert [group.member_ids for group in new] == [(0, 2)] * 2
        assert await sums(new) == [2] * 2


async def test_members_regroup_into_one_channel_although_some_know_another_number_of_the_generation():
    """Rank 0 of a job knows the number of the store before the others, which miss it if the group fails then."""
    async with world_of(2) as groups:
        for turn in range(2):
            groups[0].generation += 4
            groups[0].revoke("the others have missed the number")
            groups = await asyncio.gather(*(group.regroup() for group in groups))
            assert groups[0].channel.prefix == groups[1].channel.prefix
            assert groups[0].name == groups[1].name
            assert [group.generation for group in groups] == [5 * (turn + 1), turn + 1]
            await asyncio.gather(*(group.barrier(timeout=5.0) for group in groups))
