"""How a rank comes into a world: rank 0 leads, the others follow.

Rank 0 starts a store, claims its own rank there, and publishes the store's address. The others read the address, go
there, and claim theirs. What they read may be stale, and is known to be so when nothing answers there, when what
answers holds another token, or when it has never heard of that world or was left by its rank 0: then they read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from asyncdist.base.deadline import Deadline
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.errors import (
    AddressError,
    AsyncdistError,
    AuthenticationError,
    LookUpTimeoutError,
    ProtocolError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreError,
)
from asyncdist.rendezvous.addresses import advertised, probe, reachable
from asyncdist.rendezvous.host_store import ServerHandle
from asyncdist.rendezvous.init_method import url_of
from asyncdist.rendezvous.record_store import AddressRecord, OwnedStoreRecords, RecordStore
from asyncdist.rendezvous.session import Keys, RendezvousSession, TimeLimit
from asyncdist.store.client.aio import AsyncStore

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.2
_FIRST_TRY, _LONGEST_TRY = 0.4, 8.0
_PREDECESSOR_TRIES = (1.0, 10.0)
_REFUSAL_GRACE = 3.0
_TAKE_BACK_TIMEOUT = 1.0


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """The world that a rank wants to come into."""

    name: str
    rank: int
    world_size: int
    config: Config
    limit: TimeLimit

    @property
    def key(self) -> str:
        """The key of its record in rank 0's own store."""
        return f"world-of/{self.name}"

    async def connect(self, host: str, port: int, token: str | None, patience: float | None = None) -> AsyncStore:
        """Connect to its store within what is left of the rendezvous, or ``patience`` seconds of that."""
        left = self.limit.deadline.remaining()
        timeout = left if patience is None else min(left, patience)
        client = await AsyncStore.connect(host, port, token=token, timeout=timeout, config=self.config)
        client.set_timeout(left)  # a store that is stopped must not hold us past the deadline
        return client

    def meeting(self, record: AddressRecord, client: AsyncStore, token: str | None, where: str) -> RendezvousSession:
        """Make its meeting. Raises AddressError when there is no address to advertise."""
        listen_host = advertised(client.host, self.config)
        meeting = RendezvousSession(
            record, self.rank, client, token=token, listen_host=listen_host, where=where, limit=self.limit
        )
        meeting.store.set_timeout(self.config.timeout)
        return meeting


class RetryLater(Exception):
    """What was read leads nowhere, or there was nothing to read; another look may find more.

    ``refusal`` is the error to end with if it stays so for some seconds; ``slow`` says that nothing answered at all,
    neither yes nor no, so that more patience may help; ``cut_short``, that the deadline of all came first.
    """

    def __init__(
        self, seen: str, refusal: AsyncdistError | None = None, *, slow: bool = False, cut_short: bool = False
    ) -> None:
        super().__init__(seen)
        self.seen = seen
        self.refusal = refusal
        self.slow = slow
        self.cut_short = cut_short


# -- rank 0 ---------------------------------------------------------------------------------------


async def host_world(
    stack: AsyncExitStack,
    world: WorldSpec,
    host: str,
    port: int,
    *,
    token: str | None,
    place: RecordStore | None,
    known_as: str,
    note: str = "",
) -> RendezvousSession:
    """Serve the world's store at ``host:port`` and publish it in ``place``; None: all know it as ``known_as:port``.

    ``note`` is what errors have to add to that.

    What is opened is left to the meeting, or on failure to ``stack``. Raises AddressError for a port in use,
    RendezvousError where another rank 0 leads already, and RendezvousTimeoutError.
    """
    lease = ServerHandle()
    stack.push_async_callback(lease.close)
    server = await lease.open(host, port, token=token, config=world.config)
    shown = known_as if known_as not in ("0.0.0.0", "::") else advertised(host, world.config)
    where = place.where if place is not None else url_of(shown, server.port) + note
    try:
        client = await world.connect(host, server.port, token)
        stack.push_async_callback(client.close)
        passed_on = token if place is not None and world.config.token is None else None
        record = AddressRecord(host, server.port, passed_on, secrets.token_hex(8), world.world_size)
        place = place or OwnedStoreRecords(client, world.key, where)
        meeting = world.meeting(record, client, token, where)
        meeting.server = server
        keys = meeting.keys
        await client.multi_set([keys("size"), keys("joined", 0)], [str(world.world_size), _this_process()])
        await _publish(world, place, record)
    except StoreError as error:
        if not world.limit.deadline.expired():
            raise
        raise RendezvousTimeoutError((), range(world.world_size), world.limit.timeout, where) from error
    meeting.own(stack, place)
    return meeting


async def _publish(world: WorldSpec, place: RecordStore, record: AddressRecord) -> None:
    """Put our record where an old one may be, unless the rank 0 that left it still leads."""
    encoded = record.encode()
    try:
        while True:
            seen = await place.read()
            old = AddressRecord.decode(seen)
            holder = await _leader(world, old) if old is not None else None
            if holder is not None:
                raise RendezvousError(_claimed_twice(0, holder, place.where))
            if await place.swap(seen, encoded) == encoded:
                return
    except BaseException:
        with contextlib.suppress(AsyncdistError, TimeoutError):
            async with asyncio.timeout(_TAKE_BACK_TIMEOUT):
                await place.withdraw(encoded)
        raise


async def _leader(world: WorldSpec, old: AddressRecord) -> bytes | None:
    """Return who leads the world of an old record, or None if nobody does any more.

    Silence may be no more than a stall, here or there, and has a second and longer try; but it is also all that comes of
    a host that is gone, so it has not all of our time.
    """
    for longest in _PREDECESSOR_TRIES:
        try:
            return await _holder(world, old, min(longest, world.limit.deadline.remaining() / 2))
        except (OSError, StoreError, AuthenticationError, ProtocolError) as error:
            if not isinstance(error, TimeoutError) and not _is_slow(error):
                break
    return None


async def _holder(world: WorldSpec, old: AddressRecord, patience: float) -> bytes | None:
    """Return who holds rank 0 in the store that a record leads to; None if that world has ended."""
    token = old.token if old.token is not None else world.config.token
    await probe(old.host, old.port, patience)  # the way of `WorldSpec.connect` would be to try on
    client = await world.connect(old.host, old.port, token, patience)
    try:
        client.set_timeout(patience)
        keys = Keys(old.world_id)
        joined, left = keys("joined", 0), keys("left", 0)
        if await client.check([joined]) and not await client.check([left]):
            return await client.get(joined)
        return None
    finally:
        await client.close()


# -- the others -----------------------------------------------------------------------------------

Find = Callable[[float], Awaitable[tuple[AsyncStore, AddressRecord, str | None]]]
"""Go where the record says, waiting for at most so many seconds; raises NotYet."""


def by_address(world: WorldSpec, host: str, port: int, token: str | None) -> Find:
    """Find rank 0's store by the address that everybody was told."""

    async def find(patience: float) -> tuple[AsyncStore, AddressRecord, str | None]:
        error: Exception | None = None
        try:
            addresses = await reachable(host, world.config, world.limit.deadline)
        except LookUpTimeoutError as late:
            raise RetryLater(str(late), cut_short=True) from None
        for address in addresses:
            try:
                client = await world.connect(address, port, token, patience)
            except StoreError as failed:
                error = failed
                continue
            try:
                record = AddressRecord.decode(await client.get(world.key))
                if record is None:
                    raise RetryLater("the world served there has ended")
                return client, record, token
            except StoreError as failed:
                await client.close()
                raise RetryLater(f"rank 0's store answers, but there is no world {world.name!r} in it") from failed
            except BaseException:
                await client.close()
                raise
        raise RetryLater(_why(error), slow=_is_slow(error))

    return find


def by_record(world: WorldSpec, place: RecordStore) -> Find:
    """Find rank 0's store by the record that it leaves in a place."""

    async def find(patience: float) -> tuple[AsyncStore, AddressRecord, str | None]:
        record = AddressRecord.decode(await place.read())
        if record is None:
            raise RetryLater("no address has been left there")
        token = _token(record, world.config)
        try:
            return await world.connect(record.host, record.port, token, patience), record, token
        except AuthenticationError as refusal:
            raise RetryLater(f"the store at {record.host}:{record.port} turned us away", refusal) from None
        except (StoreError, ProtocolError, AddressError) as failed:
            raise RetryLater(
                f"the address left there, {record.host}:{record.port}, leads nowhere: {_why(failed)}",
                slow=_is_slow(failed),
            ) from None

    return find


def _token(record: AddressRecord, config: Config) -> str | None:
    if record.token is not None and config.token is not None:
        text = "rank 0 was started without ASYNCDIST_TOKEN, and this rank with one"
        raise RetryLater(text, AuthenticationError(text))
    if record.token is None and config.token is None:
        text = "rank 0 was started with ASYNCDIST_TOKEN, and this rank without one"
        raise RetryLater(text, AuthenticationError(text))
    return record.token or config.token


def _why(error: Exception | None) -> str:
    """Return the root of a failure to connect in a few words."""
    return describe_error(error.__cause__ or error) if error is not None else "it has no address"


def _is_slow(error: Exception | None) -> bool:
    return error is not None and isinstance(error.__cause__, TimeoutError)


async def join_world(stack: AsyncExitStack, world: WorldSpec, find: Find, where: str) -> RendezvousSession:
    """Come into the world that rank 0 leads, looking again until there is one.

    Raises RendezvousTimeoutError, AuthenticationError, and RendezvousError where the rank is taken or rank 0 was
    told another world size. What is opened is left to the meeting, or on failure to ``stack``.
    """
    pause, patience, refused_until = _FIRST_PAUSE, _FIRST_TRY, Deadline.never()
    refusal: AsyncdistError | None = None
    seen = ""
    while True:
        try:
            client, record, token = await find(patience)
            try:
                meeting = world.meeting(record, client, token, where)
                await _claim(world, record, client, meeting)
            except BaseException:
                await client.close()
                raise
            stack.push_async_callback(client.close)
            meeting.own(stack)
            return meeting
        except RetryLater as failed:
            not_yet = failed
        except StoreError as error:  # it went away under our hands
            not_yet = RetryLater(_why(error))
        left = world.limit.deadline.remaining()
        # The loop's clock may run ahead of the deadline's by some milliseconds: it may have cut what the deadline did not.
        cut_short = not_yet.cut_short or left <= 0
        if not cut_short or not seen:  # otherwise it tells nothing new
            seen = not_yet.seen
        if not_yet.refusal is None and not cut_short:
            refusal, refused_until = None, Deadline.never()
        elif not_yet.refusal is not None:
            refused_until = Deadline.after(_REFUSAL_GRACE) if refusal is None else refused_until
            refusal = not_yet.refusal
        if refusal is not None and (refused_until.expired() or left <= 0):
            raise refusal
        if left <= 0:
            raise RendezvousTimeoutError((world.rank,), (0,), world.limit.timeout, where, world.world_size, seen)
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
        if not_yet.slow:
            patience = min(2 * patience, _LONGEST_TRY)


async def _claim(world: WorldSpec, record: AddressRecord, client: AsyncStore, meeting: RendezvousSession) -> None:
    """Claim our rank, in one flight with the questions whether the world is the one that was published and goes on."""
    keys, rank, process = meeting.keys, world.rank, _this_process()
    claimed = keys("joined", rank)
    try:
        known, left, led_out, holder = await asyncio.gather(
            client.check([keys("size")]),
            client.check([keys("left", rank)]),
            client.check([keys("left", 0)]),
            client.compare_set(claimed, b"", process),
        )
        if not known or left or led_out:
            raise RetryLater("the world whose address was left there has ended")
        if record.world_size != world.world_size:
            reason = (
                f"rank {rank} was started with world_size {world.world_size}, and rank 0 with {record.world_size}; "
                "start every rank with the same one"
            )
            await meeting.refuse(reason, min(rank, record.world_size - 1))
            raise RendezvousError(reason)
        if holder != process:
            raise RendezvousError(_claimed_twice(rank, holder, meeting.where))
    except BaseException:
        # Only what is ours is taken back: whoever has the rank by right keeps it.
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_TAKE_BACK_TIMEOUT):
                if await client.compare_set(claimed, process, process) == process:
                    await client.delete_key(claimed)
        raise


def _this_process() -> bytes:
    return json.dumps([socket.gethostname(), os.getpid(), secrets.token_hex(8)]).encode()


def _claimed_twice(rank: int, holder: bytes, where: str) -> str:
    try:
        host, pid, _ = json.loads(holder)
    except (ValueError, TypeError):
        host, pid = "unknown", "unknown"
    return (
        f"rank {rank} is taken at {where}, by process {pid} on host {host}: two processes were started as rank {rank}; "
        "give each its own RANK (if that process has died, start the whole world again)"
    )
