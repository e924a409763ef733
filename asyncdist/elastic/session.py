"""`join`: be a member of a job whose processes come and go. Exported by `asyncdist` and `asyncdist.sync`.

The processes of a job share a store that outlives them, such as a store daemon. The store's compare-and-set decides which
members form a generation, so that of two parts of a divided network at most one goes on. A member whose lease at the store
may have ended commits no step (`presence`); it goes on once the store has recorded a generation with it.

    waiting ──record names it──▶ meets the others ──▶ member of the generation
       ▲                              │ fails                │ a member is lost, or a process waits
       └──────────────────────────────┘                      ▼
                                         survivors agree (`Group.regroup`), and admit who waits

A generation that only loses members keeps the connections of the one before. One that admits newcomers opens a new world,
and the survivors keep the old one until they have agreed that the new one is complete. A member that the others went on
without, or that is cut off from them, joins again with the state that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

from asyncdist.base.background_loop import background_loop, cancel_all, running_loop
from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.config import Config
from asyncdist.elastic import founding
from asyncdist.elastic.job import GenerationRecord, Job
from asyncdist.errors import ExcludedError, GroupError, NoQuorumError, NotInitializedError, UsageError
from asyncdist.groups import BackgroundCall, Group, State, World, discard_world, open_world
from asyncdist.kernel import Work, completed, whole_number_of
from asyncdist.rendezvous import daemon_address
from asyncdist.store import AsyncStore, AsyncStoreBase

log = logging.getLogger("asyncdist")

_LEASE = 2.0
"""Seconds after which a process that has disconnected from the store counts as gone."""


class JobSession(ProcessBound):
    """This process's part in a job. `join` makes it.

    Attributes:
        state: The state that newcomers receive; None without one.
        group: The group of the present generation; None before the first.
    """

    _elsewhere = "the other process enters one of its own: send the URL of the job instead"

    def __init__(
        self,
        job: str | AsyncStoreBase,
        min_size: int,
        start_size: int | None,
        state: State | None,
        backend: str | None,
        timeout: Timeout,
    ) -> None:
        self._where, self._backend = job, backend
        self._min_size = whole_number_of("min_size", min_size)
        if min_size < 1:
            raise UsageError(f"min_size is {min_size}: a generation has at least one member")
        self._start_size = max(min_size, 0 if start_size is None else whole_number_of("start_size", start_size))
        self._config = Config.from_environment()
        self._timeout = seconds(timeout, self._config.timeout)
        self.state = state
        self.group: Group | None = None
        self._world: World | None = None
        self._names: tuple[int, ...] = ()
        """The ids of the members of the present world, by world rank."""
        self._resources = contextlib.AsyncExitStack()
        self._home: asyncio.AbstractEventLoop | None = None
        self._moving = asyncio.Lock()
        """Held while this process goes from one generation to the next."""
        self._next_call: asyncio.Task[Group | None] | None = None
        """What `next_group` waits for, or has waited for when it was cancelled."""

    @property
    def id(self) -> int:
        """The id of this process in the job, which no other process ever gets. Known once the session is entered."""
        self._check_open()
        return self._job.id

    def _check_open(self) -> None:
        if not hasattr(self, "_job"):
            raise UsageError("the session of the job is not open: use it inside its (async) with block")

    # -- entering and leaving ------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._home = running_loop("async with dist.join(...)")
        return await self._open()

    async def __aexit__(self, *error: object) -> None:
        await self._close()

    def __enter__(self) -> Self:
        return background_loop().run(self._open())

    def __exit__(self, *error: object) -> None:
        background_loop().run(self._close())

    async def _open(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            store, self._name = await self._store(stack)
            self._job = Job(store, self._name, self._tell_group, self._leave_superseded)
            self._founding = founding.Founding(self._job, self._min_size, self._start_size)
            stack.push_async_callback(self._job.close)
            await self._job.open()
            self._resources = stack.pop_all()
        return self

    async def _store(self, stack: contextlib.AsyncExitStack) -> tuple[AsyncStoreBase, str]:
        if isinstance(self._where, AsyncStoreBase):
            return self._where, "job"
        host, port, name = daemon_address(self._where)
        config = self._config.with_(store_lease=_LEASE)
        store = await AsyncStore.connect(host, port, token=config.token, timeout=self._timeout, config=config)
        stack.push_async_callback(store.close)
        return store, name or "job"

    async def _close(self) -> None:
        async with self._resources:
            try:
                if self._next_call is not None:
                    await cancel_all(self._next_call)
            finally:
                await self._leave_world()

    async def _leave_world(self) -> None:
        world, self._world, self.group = self._world, None, None
        if world is not None:
            await world.close()

    # -- generations ---------------------------------------------------------------------------

    def generations(self) -> Generations:
        """Return an iterator, awaited or blocking, over the groups of which this process is a member.

        It yields the next group when the body of the loop ends with `Group.changed` set, and stops when it ends without.
        A body that calls `Group.regroup` itself goes on with the group that this returns, whose `changed` then counts.

        Raises:
            JobTimeoutError: Fewer than ``min_size`` processes were present for longer than the timeout, or the members have
                not admitted this one.
            StoreConnectionError: The store cannot be reached any more.
        """
        return Generations(self)

    async def next_group(self) -> Group | None:
        """Return the group of the next generation; None if the present one has not changed.

        If the caller is cancelled, the process goes on to the next generation, whose group the next call returns.
        """
        self._check_open()
        if self._next_call is None:
            self._next_call = asyncio.create_task(self._advance())
        call = self._next_call
        await asyncio.wait([call])
        if self._next_call is call:
            self._next_call = None
        return call.result()

    async def _advance(self) -> Group | None:
        async with self._moving:
            self._job.begin_wait()
            if self.group is None:
                return await self._join()
            if not self.group.changed and self.group.error is None:
                return None
            return await self._next(Deadline.after(self._timeout), self._min_size)

    def _regroup(self, group: Group, min_size: int, timeout: Timeout) -> Work[Group]:
        deadline = Deadline.after(seconds(timeout, self._timeout))
        return BackgroundCall(self._regrouped(group, max(min_size, self._min_size), deadline), self._home)

    async def _regrouped(self, group: Group, min_size: int, deadline: Deadline) -> Group:
        async with self._moving:
            self._job.begin_wait()
            if group is not self.group:
                raise NotInitializedError(
                    "this group is not the present one of the job: use the group that followed it"
                )
            if group.error is None:
                self.group = await group._regroup_members(timeout=deadline.remaining())
                self._entered(self.group).changed = True
            return await self._next(deadline, min_size)

    async def _next(self, deadline: Deadline, min_size: int) -> Group:
        while self._has_state:
            try:
                return await self._continue(deadline, min_size)
            except (ExcludedError, NoQuorumError) as error:
                log.warning("member %d joins the job again: %s", self._job.id, error.summary)
                break
            except GroupError as error:
                if deadline.expired():
                    raise
                log.info("member %d: a generation could not begin: %s", self._job.id, error.summary)
        await self._leave_world()
        return await self._join()

    @property
    def _has_state(self) -> bool:
        return self.group is not None and (self.state is None or self.state.is_shared)

    def _entered(self, group: Group) -> Group:
        self.group = group
        group._watches.candidates = self._job.candidates
        group._show_membership = self._show_membership
        group._regroup_in_job = functools.partial(self._regroup, group)
        return group

    def _tell_group(self, process: int) -> None:
        if self.group is not None:
            self.group._watches.note_waiting(process)

    def _show_membership(self) -> Work[bool]:
        return completed(True) if self._job.is_shown else BackgroundCall(self._job.show(), self._home)

    def _leave_superseded(self) -> None:
        """Make the group fail if the job went on without this process, so that its members join again at once."""
        if self.group is not None and self._job.is_superseded:
            number = self._job.record.number
            self.group.revoke(f"the job has begun generation {number} without this process, which had lost the store")

    # -- as a process that waits ---------------------------------------------------------------

    async def _join(self) -> Group:
        """Wait to be named in a generation, and meet its members."""
        job, deadline = self._job, Deadline.after(self._timeout)
        seen = job.record.number
        while True:
            # A process that names the next generation passes over a process that has not seen the one before.
            await job.wait_to_join(seen)
            record = await self._founding.next_record(seen, deadline)
            seen = record.number
            world = await self._meet(record, None) if job.id in record.members else None
            if world is not None:
                try:
                    return await self._enter_world(world, record)
                except GroupError as error:
                    log.info("member %d: generation %d did not begin: %s", job.id, seen, error.summary)
                    await self._leave_world()

    # -- as a member ---------------------------------------------------------------------------

    async def _continue(self, deadline: Deadline, min_size: int) -> Group:
        """Agree with the survivors, admit the processes that wait, and return the group of the next generation."""
        while True:
            group = self.group
            assert group is not None
            if group.error is not None:
                group = self._entered(await group._regroup_members(timeout=deadline.remaining()))
                group.changed = True  # until the generation has begun
            ids = tuple(self._names[member] for member in group.member_ids)
            record = await self._next_record(group, ids, deadline, min_size)
            if record.members == ids:
                self._job.claim(record.number)
                group.generation, group.changed = record.number, False
                return group
            world = await self._meet_newcomers(group, record, deadline)
            if world is None:
                continue
            async with ClosingOnError(world):
                await self._leave_world()
            return await self._enter_world(world, record)

    async def _meet_newcomers(self, group: Group, record: GenerationRecord, deadline: Deadline) -> World | None:
        """Open the world of a generation with newcomers; return None if the survivors agree that it is not complete."""
        meeting = asyncio.create_task(self._meet(record, group))
        try:
            world = await meeting
            complete, _ = await group.agree(world is not None, timeout=deadline.remaining())
        except BaseException:
            await discard_world(meeting)
            raise
        if complete:
            return world
        if world is not None:
            await world.close()
        return None

    async def _next_record(
        self, group: Group, ids: tuple[int, ...], deadline: Deadline, min_size: int
    ) -> GenerationRecord:
        """Return the record of the next generation, which rank 0 writes."""
        job = self._job
        # A record that is written after all are present is lost to every process that has found one of them missing.
        await job.presence.announce_again()
        await group.barrier(timeout=deadline.remaining())
        answer: list[Any] = [None]
        if group.rank() == 0:
            begun = False
            while not begun:
                await self._job.until_present(lambda: len(ids) + len(job.candidates()) >= min_size, deadline, min_size)
                members, before = (*ids, *job.candidates()), job.record
                if job.id not in before.members:
                    break
                number = max(before.number + 1, group.generation)
                last = number if members == ids else before.begun
                begun = await job.begin_generation(before, number, members, last)
                if not begun:
                    # A record that names this process is that of an earlier rank 0, which was lost.
                    await self._job.until_present(functools.partial(job.has_replaced, before), deadline, min_size)
            answer = [[number, members, last] if begun else []]
        await group.broadcast_object_list(answer, 0, timeout=deadline.remaining())
        if not answer[0]:
            raise ExcludedError("the job has begun a generation without this process, which its members did not reach")
        number, members, last = answer[0]
        return GenerationRecord(number, tuple(members), last)

    # -- meeting -------------------------------------------------------------------------------

    async def _meet(self, record: GenerationRecord, survivors: Group | None) -> World | None:
        """Open the world of a generation; return None if a member vanished, the job went on, or the time is up."""
        job = self._job
        opening = asyncio.create_task(self._open_world(record))
        gone = asyncio.create_task(
            job.until(lambda: job.record.number > record.number or not all(map(job.is_present, record.members)))
        )
        lost = asyncio.create_task(_first_loss(survivors))
        try:
            await asyncio.wait(
                [opening, gone, lost], timeout=founding.MEETING_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
            )
        except BaseException:
            await discard_world(opening)
            raise
        finally:
            await cancel_all(gone, lost)
        if not opening.done() or opening.exception() is not None:
            await discard_world(opening)
            return None
        return opening.result()

    async def _open_world(self, record: GenerationRecord) -> World:
        world = await open_world(
            backend=self._backend,
            store=self._job.meeting_point(record),
            rank=record.members.index(self._job.id),
            world_size=len(record.members),
            timeout=self._timeout,
            name=self._name,
            config=self._config,
            home=self._home,
            reports_dropped_works=True,
        )
        async with ClosingOnError(world):
            await world.group.barrier()
        return world

    async def _enter_world(self, world: World, record: GenerationRecord) -> Group:
        """Enter a world in which all members have met, once the survivors have agreed that they use it."""
        self._world, self._names = world, record.members
        group = self._entered(world.group)
        group.generation = record.number
        try:
            await group.barrier()
            await self._job.become_member(world.status_record())
            await self._confirm(group, record)
        except GroupError:
            raise
        except BaseException:
            # The program has not had this group, which the next call would take for the present one.
            await self._leave_world()
            raise
        return group

    async def _confirm(self, group: Group, record: GenerationRecord) -> None:
        """Let rank 0 record that all have announced themselves, so that no process founds that has not heard of them."""
        await group.barrier()
        answer = [await self._job.confirm_generation(record) if group.rank() == 0 else None]
        await group.broadcast_object_list(answer, 0)
        if not answer[0]:
            raise ExcludedError("the job has begun another generation before the members of this one had met")
        self._job.claim(record.number)


class Generations:
    """The groups of a session, one after the other; for ``async for``, and for ``for`` in a program without a loop."""

    def __init__(self, session: JobSession) -> None:
        self._session = session

    def __aiter__(self) -> AsyncIterator[Group]:
        return self

    async def __anext__(self) -> Group:
        self._check_face(is_awaited=True)
        group = await self._session.next_group()
        if group is None:
            raise StopAsyncIteration
        return group

    def __iter__(self) -> Iterator[Group]:
        return self

    def __next__(self) -> Group:
        self._check_face(is_awaited=False)
        group = background_loop().run(self._session.next_group())
        if group is None:
            raise StopIteration
        return group

    def _check_face(self, *, is_awaited: bool) -> None:
        """Raise UsageError in a blocking loop over an awaited session, and the other way round."""
        self._session._check_open()
        if is_awaited is (self._session._home is None):
            right, wrong = ("for", "async for") if is_awaited else ("async for", "for")
            raise UsageError(
                f"this session was entered with `{'with' if is_awaited else 'async with'}`: write "
                f"`{right} group in session.generations()` instead of `{wrong}`"
            )


async def _first_loss(group: Group | None) -> None:
    """Return when a member of a group is lost; never for None."""
    if group is None:
        await asyncio.Event().wait()
        return
    async for change in group.watch_members():
        if change.change == "lost":
            return


def join(
    job: str | AsyncStoreBase,
    *,
    min_size: int = 1,
    start_size: int | None = None,
    state: State | None = None,
    backend: str | None = None,
    timeout: Timeout = None,
) -> JobSession:
    """Return a session in which this process is a member of a job, founder or newcomer alike.

    Args:
        job: ``asyncdist://host:port/name`` of a job at a store daemon; or an awaited store that all processes share.
        min_size: The smallest number of members with which the job goes on. With fewer, the members wait for newcomers.
        start_size: The number of processes with which the job begins; None means ``min_size``. A job that has begun, and
            whose members have all ended or cannot go on, begins again with ``min_size``.
        state: The state that newcomers receive, by `Group.adopt`. A member that has not adopted it yet when its group
            fails joins again as a newcomer. Without a state, every member may go on.
        backend: Names of the transports; None takes the configured ones.
        timeout: Limit of each wait for members, and default limit of every operation, in seconds or as a timedelta.

    Example:
        >>> async def train(state):
        ...     async with join("asyncdist://10.0.0.1:29500/digits", min_size=2, state=state) as session:
        ...         async for group in session.generations():
        ...             await group.adopt(state)
        ...             while state.step < 1000 and not group.changed:
        ...                 async with group.step() as step:
        ...                     await group.all_reduce(state.gradient)
        ...                 if step.committed:
        ...                     state.step += 1
    """
    return JobSession(job, min_size, start_size, state, backend, timeout)
