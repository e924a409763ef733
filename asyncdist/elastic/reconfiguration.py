"""Make a group of exactly the processes whose handles a program names, also of processes that were in no world together.

`torch_backend` offers it as ``torch.distributed._reconfigure`` and ``shrink_group``. The program decides who is a member,
and passes the same handles to all members; `join` decides that by itself.

A handle is a text by which other processes reach the store that its process serves. The members of a group meet in the
store of the first one. If all of them are in one world already, they keep its connections instead. Either way they agree
at the end that all of them are there, so that the group exists on every member that is alive, or on none:

    first member            other members
    serves the world        join it                 in its store; skipped if all are in one world
    watches their stores    wait for ``failed/``    so that a process that ends fails all others at once
    ─────────────── agree that no rank is missing ───────────────
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from asyncdist.base.background_loop import cancel_all
from asyncdist.base.deadline import Deadline
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.errors import RendezvousError, StoreConnectionError, StoreError, UsageError
from asyncdist.groups import Group, World, discard_world, open_world
from asyncdist.rendezvous import OwnStore, probe, serve_own_store, url_of
from asyncdist.store import AsyncStore

_PREFIX = "asyncdist:"
_CONNECT_ATTEMPT = 2.0
"""Seconds after which a process that accepts connections and does not answer is looked at again."""
_LAST_WORD = 1.0
"""Seconds for telling the other members why this process gives up."""


class ProcessHandle(NamedTuple):
    """What a handle says about its process: the address of its store, and the world in which it is, empty without one."""

    process: str
    """The identity of the process, which no other process has."""
    host: str
    port: int
    token: str | None
    """The token of its store if it was generated; None if every process was configured with it."""
    world_id: str
    member_id: int
    """Its rank in that world."""
    lost: tuple[int, ...]
    """The ranks of that world that it holds lost."""

    def encode(self) -> str:
        return _PREFIX + base64.urlsafe_b64encode(msgpack.packb(self)).decode()

    @classmethod
    def decode(cls, text: Any) -> ProcessHandle:
        """Return the contents of a handle; raise UsageError if the text is not one."""
        try:
            process, host, port, token, world_id, member_id, lost = msgpack.unpackb(
                base64.b64decode(text.removeprefix(_PREFIX), altchars=b"-_", validate=True)
            )
        except (ValueError, TypeError, AttributeError, binascii.Error, msgpack.UnpackException):
            raise UsageError(
                f"{text!r} is not a handle of asyncdist: pass the texts that get_reconfigure_handle() has returned "
                "on the members"
            ) from None
        return cls(process, host, port, token, world_id, member_id, tuple(lost))

    def __str__(self) -> str:
        return url_of(self.host, self.port)


class Reconfiguration:
    """The part of one process in forming groups by handles. Its methods run on the background loop.

    The address of this process follows from ``shared``, a store that the processes of the job share; or None.
    """

    def __init__(self, shared: Any = None) -> None:
        self._shared = shared
        self._process = secrets.token_hex(8)
        self._own: OwnStore | None = None
        self._used: set[int] = set()
        self._abandoned = ""
        """The world in which the last group could not be formed. Its connections are not used again."""
        self._lock = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def handle(self, group: Group | None, timeout: float) -> str:
        """Return the handle of this process; it changes with the present group, and when a peer is lost.

        ``timeout`` limits in seconds the search for the address of this process.
        """
        async with self._lock:
            return (await self._handle(group, timeout)).encode()

    async def _handle(self, group: Group | None, timeout: float) -> ProcessHandle:
        if self._own is None:
            self._own = await serve_own_store(
                self._shared, timeout=timeout, config=Config.from_environment(), launch=Launch.from_environment()
            )
        own = self._own
        token = own.token if own.is_generated else None
        world_id, member_id = "", 0
        lost: tuple[int, ...] = ()
        if group is not None and group.endpoint.world_id != self._abandoned:
            world_id, member_id, lost = group.endpoint.world_id, group.endpoint.rank, tuple(group.endpoint.lost_peers)
        return ProcessHandle(self._process, own.host, own.port, token, world_id, member_id, lost)

    async def form(self, group: Group | None, uuid: int, handles: Iterable[str], timeout: float) -> Group:
        """Form the group of the processes that have these handles. All of them call it.

        The present group is untouched; `retire` ends it. After an error no member has the new group, and new handles
        are needed.

        Args:
            group: The present group of this process; None without one.
            uuid: A number that these processes use once.
            handles: The handles. A sequence is in order of rank; for a set the order is that of the texts.
            timeout: Seconds within which all members must have called it.

        Raises:
            UsageError: ``uuid`` was used before, or the handles are not usable.
            RendezvousError: A process has ended, or has not called it in time.
            GroupError: The members do not reach each other.
        """
        async with self._lock:
            deadline = Deadline.after(timeout)
            texts = sorted(handles) if isinstance(handles, set | frozenset) else list(handles)
            members = [ProcessHandle.decode(text) for text in texts]
            own = await self._handle(group, timeout)
            rank = _rank_of(own, members)
            if uuid in self._used:
                raise UsageError(f"the uuid {uuid} was already used by this process: pass a new one on every member")
            joint = _joint_world(members)
            if joint and joint != own.world_id:
                raise UsageError(
                    "the handle of this process is from before its last reconfiguration: exchange the handles again"
                )
            self._used.add(uuid)
            # Members that were given other handles never meet.
            name = f"reconfiguration {uuid} ({hashlib.sha256(''.join(texts).encode()).hexdigest()[:8]})"
            try:
                if joint and group is not None:
                    formed = group.world.group_of_members([each.member_id for each in members], name, group.timeout)
                    return await completed_group(formed, [str(each) for each in members], deadline)
                return await self._form_world(name, members, rank, deadline)
            except BaseException:
                if group is not None:
                    self._abandoned = group.endpoint.world_id
                raise

    async def _form_world(self, name: str, members: Sequence[ProcessHandle], rank: int, deadline: Deadline) -> Group:
        assert self._own is not None
        config = Config.from_environment().with_(token=members[0].token or self._own.token)
        watch = _FailureWatch(name, members, rank, config)
        size, timeout = len(members), deadline.remaining()
        opening = asyncio.create_task(
            open_world(
                init_method=str(members[0]), rank=rank, world_size=size, timeout=timeout, name=name, config=config
            )
        )
        watching = asyncio.create_task(watch.run())
        try:
            await asyncio.wait([opening, watching], return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise RendezvousError(
                    f"{name}: {watching.result()}; exchange the handles of the members that are there, and call this again"
                )
            world = await opening
            async with ClosingOnError(world):
                return await completed_group(world.group, [str(each) for each in members], deadline)
        except BaseException as error:
            await discard_world(opening)
            await watch.report(describe_error(error))
            raise
        finally:
            await cancel_all(watching)
            await watch.close()

    def retire(self, group: Group, successor: Group | None, world: World | None) -> None:
        """End a group that ``successor`` has replaced, and with it its ``world``, which is None if others use it."""
        kept = set() if successor is None or successor.world is not group.world else set(successor.member_ids)
        if group.error is None and set(group.member_ids) - kept:
            group.abort(f"rank {group.endpoint.rank} goes on in another group")
        group.close()
        if world is not None:
            # Not awaited: the first rank of a world waits for the others, some of which stay in it.
            task = asyncio.get_running_loop().create_task(world.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Stop serving the store of this process, once the worlds that it has left are closed."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        own, self._own = self._own, None
        if own is not None:
            await own.close()


async def completed_group(group: Group, members: Sequence[str], deadline: Deadline) -> Group:
    """Agree before the deadline that all members have made a group; otherwise destroy it, and raise on all of them.

    ``members`` are their names in messages, in group order.
    """
    with ClosingOnError(group):
        agreed = await group.agree(True, timeout=deadline.remaining())
        if agreed.lost or not agreed.flag:
            missing = " and ".join(
                f"rank {rank} ({members[rank]})"
                for rank, member in enumerate(group.member_ids)
                if member in agreed.lost
            )
            raise RendezvousError(
                f"{group.name}: {missing or 'a member'} was lost before the group was complete; leave it out, and "
                "call this again on the other members"
            )
    return group


class _FailureWatch:
    """Notices that a member gives up or ends before the world is complete.

    Every member waits for the key ``failed/`` in the store of the first member. That one also keeps a connection to the
    store of each other member, whose end is the end of its process.
    """

    def __init__(self, name: str, members: Sequence[ProcessHandle], rank: int, config: Config) -> None:
        self._key = f"failed/{name}"
        self._members, self._rank, self._config = members, rank, config.with_(store_reconnect=0.0)
        self._first: AsyncStore | None = None

    async def run(self) -> str:
        """Return why the world cannot be complete; never if nothing happens."""
        others = range(1, len(self._members)) if self._rank == 0 else []
        # First this connection: what the first member finds out about another must reach all.
        self._first, reason = await self._reach(0)
        if self._first is not None:
            failed = asyncio.create_task(self._failure(0, self._first))
            watching = [failed, *(asyncio.create_task(self._end_of(rank)) for rank in others)]
            try:
                done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
                reason = done.pop().result()
            finally:
                await cancel_all(*watching)
            await self.report(reason)
        return reason

    async def _end_of(self, rank: int) -> str:
        """Return when the process of a member has ended, with a text that says so."""
        client, reason = await self._reach(rank)
        if client is None:
            return reason
        try:
            return await self._failure(rank, client)
        finally:
            await client.close()

    async def _failure(self, rank: int, client: AsyncStore) -> str:
        """Return what a member reports in its store, or that its process has ended."""
        try:
            return (await client.get(self._key, timeout=math.inf)).decode()
        except StoreError:
            return self._ended(rank)

    def _ended(self, rank: int) -> str:
        return f"rank {rank} ({self._members[rank]}) has ended, or has destroyed its process group"

    async def _reach(self, rank: int) -> tuple[AsyncStore | None, str]:
        """Connect to the store of a member; return None and the reason if its process has ended."""
        member, config = self._members[rank], self._config
        host, port, token = member.host, member.port, member.token or config.token
        while True:
            try:
                # The store is there for as long as its process, so a refused connection is final.
                await probe(host, port, None)
                with contextlib.suppress(StoreConnectionError):
                    attempt = AsyncStore.connect(host, port, token=token, timeout=_CONNECT_ATTEMPT, config=config)
                    return await attempt, ""
            except ConnectionError:
                return None, self._ended(rank)
            except OSError:
                # The way there may be closed in this direction only.
                await asyncio.Event().wait()

    async def report(self, reason: str) -> None:
        """Tell the other members why this one gives up, unless another has told them before."""
        if self._first is None:
            return
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_LAST_WORD):
                await self._first.compare_set(self._key, b"", f"rank {self._rank} gave up: {reason}".encode())

    async def close(self) -> None:
        if self._first is not None:
            await self._first.close()


def _rank_of(own: ProcessHandle, members: Sequence[ProcessHandle]) -> int:
    processes = [member.process for member in members]
    if len(set(processes)) != len(processes):
        raise UsageError("two of the handles are of one process: pass one handle of each member")
    if own.process not in processes:
        raise UsageError(
            f"none of the {len(members)} handles is of this process: only the members call reconfigure(), and pass the "
            "handle that get_reconfigure_handle() returns to each other"
        )
    return processes.index(own.process)


def _joint_world(members: Sequence[ProcessHandle]) -> str:
    """Return the id of the world in which all members reach each other; empty if there is none."""
    worlds = {member.world_id for member in members}
    ids = {member.member_id for member in members}
    if len(worlds) != 1 or any(ids.intersection(member.lost) for member in members):
        return ""
    return worlds.pop()
