"""Steps that all surviving members commit, or none: with errors, deaths and cancellations in and after the block."""

import asyncio
import contextlib

import pytest
import torch
import trio

from asyncdist.errors import ExcludedError, GroupError
from asyncdist.kernel.engine.work import Work, completed
from asyncdist.testing.cluster import run_ranks, world_of
from tests.support.faults import cancelled_at


class Member:
    """A member that takes steps, and notes those that it commits."""

    def __init__(self, group):
        self.group, self.step, self.seen = group, None, []
        self.asks = False
        """Whether it has asked for the answer of the others at the end of a step."""
        agree = group.agree

        def agree_and_note(*flags):
            self.asks = True
            return agree(*flags)

        group.agree = agree_and_note

    async def take(self, error=None):
        """Take one step; ``error`` is raised at its end."""
        try:
            async with self.group.step() as self.step:
                await self.group.all_reduce(torch.ones(4))
                if error is not None:
                    raise error
        finally:
            self.seen.append(self.step.committed)


async def outcomes(*steps):
    return await asyncio.gather(*steps, return_exceptions=True)


async def test_step_is_committed_by_all():
    async with world_of(3) as groups:
        members = list(map(Member, groups))
        await asyncio.gather(*(member.take() for member in members))
        assert [member.seen for member in members] == [[True]] * 3
        assert not any(group.changed for group in groups)


@pytest.mark.parametrize("error", [RuntimeError("mine"), asyncio.CancelledError()])
async def test_error_of_one_member_fails_the_step_of_all_and_is_raised_there(error):
    async with world_of(3) as groups:
        members = list(map(Member, groups))
        raised = await outcomes(*(member.take(error if member is members[1] else None) for member in members))
        assert [type(one) for one in raised] == [type(None), type(error), type(None)]
        assert [member.seen for member in members] == [[False]] * 3
        assert all(group.changed for group in groups)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("messages", range(7))
async def test_member_that_ends_between_two_messages_of_the_answer_leaves_all_survivors_one(victim, messages):
    """The last message but one of the coordinator, which is rank 0, has told only some that all have succeeded."""
    async with world_of(4) as groups:
        members = list(map(Member, groups))
        world = groups[victim].world
        endpoint = world.endpoint
        send, left = endpoint.send_unordered, [messages]

        def send_or_end(*message):
            left[0] -= 1
            if left[0] < 0:
                endpoint.call_later(world.leave)
                endpoint.send_unordered = lambda *message: None
            else:
                send(*message)

        endpoint.send_unordered = send_or_end
        await outcomes(*(member.take() for member in members))
        survivors = [member for member in members if member.group is not groups[victim]]
        assert len({tuple(member.seen) for member in survivors}) == 1
        # A step whose end no survivor learned is decided by the survivors alone.
        assert survivors[0].seen == [True]


@pytest.mark.parametrize("cancelled", [0, 1])
@pytest.mark.parametrize("moment", range(5))
async def test_member_that_is_cancelled_anywhere_in_a_step_knows_what_the_others_have_decided(cancelled, moment):
    async with world_of(3) as groups:
        members = list(map(Member, groups))

        async def take(member, delay):
            for _ in range(delay):
                await asyncio.sleep(0)
            await member.take()

        # The others arrive at the end of the step earlier or later.
        for delay in (0, 20):
            tasks = [
                asyncio.ensure_future(
                    cancelled_at(moment, take(member, 0)) if rank == cancelled else take(member, delay)
                )
                for rank, member in enumerate(members)
            ]
            raised = await outcomes(*tasks)
            assert not [one for one in raised if not isinstance(one, asyncio.CancelledError | GroupError | None)]
            assert len({tuple(member.seen) for member in members}) == 1, (raised, [member.seen for member in members])
            if any(group.error for group in groups):
                break


async def test_second_cancellation_of_the_end_of_a_step_does_not_wait(eventually):
    async with world_of(2) as groups:
        members = list(map(Member, groups))
        alone = asyncio.ensure_future(members[0].take())
        other = groups[1].all_reduce(torch.ones(4))
        await other
        await eventually(lambda: members[0].asks)
        alone.cancel()
        await eventually(lambda: groups[1].error)
        assert not alone.done()
        alone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await alone
        assert alone.cancelled()
        assert members[0].seen == [False]


def test_step_in_trio_that_is_cancelled_at_its_end_knows_the_answer():
    def main(groups):
        late = trio.Event()

        async def first():
            with trio.CancelScope() as scope:
                members[0].scope = scope
                await members[0].take()

        async def second():
            async with groups[1].step() as step:
                await groups[1].all_reduce(torch.ones(4))
                await late.wait()
            members[1].seen.append(step.committed)

        async def both():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(first)
                nursery.start_soon(second)
                while not members[0].asks:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                members[0].scope.cancel()
                while groups[1].error is None:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                late.set()

        members = list(map(Member, groups))
        trio.run(both)
        assert members[0].scope.cancelled_caught
        return [member.seen for member in members]

    async def with_groups():
        async with world_of(2) as groups:
            return await asyncio.to_thread(main, groups)

    seen = asyncio.run(with_groups())
    assert seen[0] == seen[1]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_steps_of_blocking_ranks(transport):
    def rank_main(group):
        seen = []
        for failing in (None, 1):
            try:
                with group.step() as step:
                    group.all_reduce(torch.ones(4), background=False).result()
                    if group.rank() == failing:
                        raise ValueError
            except ValueError:
                pass
            seen.append(step.committed)
        return seen

    assert run_ranks(3, rank_main, transport=transport) == [[True, False]] * 3


def shows(group, *answers):
    """Let a member of a job be asked whether its generation is the present one."""
    answers = iter(answers)
    group._show_membership = lambda: completed(next(answers))


async def test_step_counts_only_if_each_member_of_a_job_can_show_its_membership():
    async with world_of(3) as groups:
        members = list(map(Member, groups))
        shows(groups[1], False)
        await asyncio.gather(*(member.take() for member in members))
        assert [member.seen for member in members] == [[False]] * 3
        assert not any(member.step.is_shown or member.step.excluded for member in members)
        assert all(group.changed and group.error is None for group in groups)


async def test_member_whose_lease_has_ended_before_the_answer_leaves_the_step_to_the_others():
    """Another member was stopped before it voted."""
    async with world_of(3) as groups:
        members = list(map(Member, groups))
        shows(groups[1], True, False)
        await asyncio.gather(*(member.take() for member in members))
        assert [member.seen for member in members] == [[True], [False], [True]]
        assert isinstance(members[1].step.excluded, ExcludedError)
        assert groups[1].changed
        # All of them regroup, and the member that lacks the step adopts it.
        after = await asyncio.gather(*(group.regroup() for group in groups))
        assert [group.size() for group in after] == [3, 3, 3]


@pytest.mark.parametrize("moment", range(2))
async def test_member_that_is_cancelled_while_it_asks_the_store_fails_the_step_of_all(moment):
    async with world_of(2) as groups:
        members = list(map(Member, groups))
        answers, waits = iter([completed(True)] * moment), asyncio.Event()

        def ask():
            answer = next(answers, None)
            if answer is None:
                waits.set()
            return answer or Work()

        groups[0]._show_membership = ask
        taking, other = (asyncio.create_task(member.take()) for member in members)
        await waits.wait()
        taking.cancel()
        await outcomes(taking, other)
        # The other one has the answer before.
        assert [member.seen for member in members] == [[False], [moment == 1]]
        assert all(member.step.is_shown for member in members)
