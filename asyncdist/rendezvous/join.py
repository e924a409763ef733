"""Join a world: rank 0 hosts its store (`host_world`), the other ranks join it (`join_world`).

`rendezvous.meet` calls it. Rank 0 starts a store, claims rank 0 there, and publishes the store's address. Every other rank
reads the address, connects, and claims its own rank. The address is stale if nothing answers there, if the store has
another token, if the store does not hold the world, or if rank 0 has left the world. The rank then reads it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Deadline
from asyncdist.base.descriptors import ClosingOnError, is_exhausted
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
from asyncdist.rendezvous.record_store import AddressRecord, AsyncStoreRecords, RecordStore
from asyncdist.rendezvous.session import FIRST_NOTICE, RendezvousSession, TimeLimit
from asyncdist.store.client.aio import AsyncStore
from asyncdist.store.protocol.operations import Command, Op

if TYPE_CHECKING:
    from asyncdist.store.server.server import StoreServer

log = logging.getLogger("asyncdist")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.2
_FIRST_TRY, _LONGEST_TRY = 0.4, 8.0
_PREDECESSOR_TRIES = (1.0, 10.0)
_REFUSAL_GRACE = 3.0
_WITHDRAW_TIMEOUT = 1.0


@dataclass(frozen=True, slots=True)
class WorldSpec:
    name: str
    rank: int
    world_size: int
    config: Config
    limit: TimeLimit

    @property
    def key(self) -> str:
        """The key of the world's record in rank 0's own store."""
        return f"world-of/{self.name}"

    async def connect(self, host: str, port: int, token: str | None, patience: float | None = None) -> AsyncStore:
        """Connect to the world's store before the deadline of the rendezvous, and within ``patience`` seconds."""
        left = self.limit.deadline.remaining()
        timeout = left if patience is None else min(left, patience)
        client = await AsyncStore.connect(host, port, token=token, timeout=timeout, config=self.config)
        # A suspended store must not delay this rank past the deadline.
        client.set_timeout(left)
        return client

    def open_session(
        self,
        record: AddressRecord,
        client: AsyncStore,
        token: str | None,
        where: str,
        server: StoreServer | None = None,
    ) -> RendezvousSession:
        """Return the session of this rank. Raises AddressError without an address to advertise."""
        listen_host = advertised(client.host, self.config)
        session = RendezvousSession(record, self.rank, client, token, listen_host, where, self.limit, server)
        session.store.set_timeout(self.config.timeout)
        return session


@dataclass(eq=False)
class RetryLater(Exception):
    """An attempt did not find rank 0's store; a later one may."""

    seen: str
    """The reason, for the message of a timeout."""
    refusal: AsyncdistError | None = None
    """The error to raise if all attempts of `_REFUSAL_GRACE` seconds fail with one."""
    slow: bool = False
    """Whether nothing answered, so that a longer attempt may succeed."""
    cut_short: bool = False
    """Whether the deadline of the rendezvous ended the attempt."""


# -- rank 0 ---------------------------------------------------------------------------------------


async def host_world(
    stack: AsyncExitStack,
    world: WorldSpec,
    host: str,
    port: int,
    *,
    token: str | None,
    records: RecordStore | None,
    known_as: str,
    note: str = "",
) -> RendezvousSession:
    """Serve the world's store on rank 0, and publish its address.

    Args:
        stack: Owns what is opened, until the returned session does.
        records: Where to publish the address; None if every rank knows it as ``known_as:port``.
        known_as: The host that the other ranks were given.
        note: A remark for error messages that name the address.

    Raises:
        AddressError: The port is in use.
        RendezvousError: Another process hosts the world as rank 0.
        RendezvousTimeoutError: The deadline passed.
    """
    handle = ServerHandle()
    stack.push_async_callback(handle.close)
    # Each rank has a connection, and may open another one after a lost one before the store has noticed the loss.
    most = max(world.config.store_max_connections, 2 * world.world_size)
    config = world.config.with_(store_max_connections=most)
    server = await handle.open(host, port, token=token, config=config)
    shown = known_as if known_as not in ("0.0.0.0", "::") else advertised(host, world.config)
    where = records.where if records is not None else url_of(shown, server.port) + note
    try:
        client = await world.connect(host, server.port, token)
        stack.push_async_callback(client.close)
        published_token = token if records is not None and world.config.token is None else None
        record = AddressRecord(host, server.port, published_token, secrets.token_hex(8), world.world_size)
        records = records or AsyncStoreRecords(client, world.key, where)
        session = world.open_session(record, client, token, where, server)
        keys = session.keys
        await client.multi_set([keys("size"), keys("joined", 0)], [str(world.world_size), _this_process()])
        await _publish(world, records, record)
    except StoreError as error:
        if not world.limit.deadline.expired():
            raise
        if isinstance(error.__cause__, OSError) and is_exhausted(error.__cause__):
            raise error.__cause__ from None
        raise RendezvousTimeoutError((), range(world.world_size), world.limit.timeout, where) from error
    session.adopt(stack, records)
    return session


async def _publish(world: WorldSpec, records: RecordStore, record: AddressRecord) -> None:
    """Replace a stale record by this rank's record, unless the rank 0 that published it still hosts its world."""
    encoded = record.encode()
    try:
        while True:
            seen = await records.read()
            old = AddressRecord.decode(seen)
            holder = await _current_host(world, old) if old is not None else None
            if holder is not None:
                raise RendezvousError(_claimed_twice(0, holder, records.where))
            if await records.swap(seen, encoded) == encoded:
                return
    except BaseException:
        with contextlib.suppress(AsyncdistError, TimeoutError):
            async with asyncio.timeout(_WITHDRAW_TIMEOUT):
                await records.withdraw(encoded)
        raise


async def _current_host(world: WorldSpec, old: AddressRecord) -> bytes | None:
    """Return the process that hosts the world of an old record, or None if that world has ended.

    A host that does not answer may be stalled, so there is a second, longer attempt. It may also be dead, so both
    attempts together take less than the time limit of this rendezvous.
    """
    for longest in _PREDECESSOR_TRIES:
        try:
            return await _claimant(world, old, min(longest, world.limit.deadline.remaining() / 2))
        except (OSError, StoreError, AuthenticationError, ProtocolError) as error:
            if not isinstance(error, TimeoutError) and not _is_slow(error):
                break
    return None


async def _claimant(world: WorldSpec, old: AddressRecord, patience: float) -> bytes | None:
    """Return the process that claims rank 0 in the store of a record; None if that world has ended."""
    token = old.token if old.token is not None else world.config.token
    # A single attempt: `WorldSpec.connect` would retry a refused connection.
    await probe(old.host, old.port, patience)
    client = await world.connect(old.host, old.port, token, patience)
    try:
        client.set_timeout(patience)
        joined, left = old.key("joined", 0), old.key("left", 0)
        if await client.check([joined]) and not await client.check([left]):
            return await client.get(joined)
        return None
    finally:
        await client.close()


# -- other ranks ----------------------------------------------------------------------------------

Found = tuple[AsyncStore, AddressRecord, str | None]
"""A client of rank 0's store, the record of the world, and the token of the store."""
Locate = Callable[[float], Awaitable[Found]]
"""Connect to rank 0's store within a number of seconds; raises `RetryLater`."""


async def by_address(world: WorldSpec, host: str, port: int, token: str | None, patience: float) -> Found:
    """Locate rank 0's store by the address that every rank was given."""
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
        async with ClosingOnError(client):
            try:
                record = AddressRecord.decode(await client.get(world.key))
            except StoreError as failed:
                raise RetryLater(f"rank 0's store answers, and does not hold the world {world.name!r}") from failed
            if record is None:
                raise RetryLater("the world that was served there has ended")
            return client, record, token
    raise RetryLater(_why(error), slow=_is_slow(error))


async def by_record(world: WorldSpec, records: RecordStore, patience: float) -> Found:
    """Locate rank 0's store by the record that rank 0 publishes."""
    record = AddressRecord.decode(await records.read())
    if record is None:
        raise RetryLater("rank 0 has not published its address there")
    token, where = _token(record, world.config), f"{record.host}:{record.port}"
    try:
        return await world.connect(record.host, record.port, token, patience), record, token
    except AuthenticationError as refusal:
        raise RetryLater(f"the store at {where} refused the token of this rank", refusal) from None
    except (StoreError, ProtocolError, AddressError) as failed:
        why = f"the published address {where} cannot be used: {_why(failed)}"
        raise RetryLater(why, slow=_is_slow(failed)) from None


def _token(record: AddressRecord, config: Config) -> str | None:
    if (record.token is None) == (config.token is None):
        zero, own = ("with", "without") if config.token is None else ("without", "with")
        text = f"rank 0 was started {zero} ASYNCDIST_TOKEN, and this rank {own} one"
        raise RetryLater(text, AuthenticationError(text))
    return record.token or config.token


def _why(error: Exception | None) -> str:
    """Return the root cause of a failed connection in a few words."""
    return describe_error(error.__cause__ or error) if error is not None else "it has no address"


def _is_slow(error: Exception | None) -> bool:
    return error is not None and isinstance(error.__cause__, TimeoutError)


async def join_world(stack: AsyncExitStack, world: WorldSpec, locate: Locate, where: str) -> RendezvousSession:
    """Join the world that rank 0 hosts; retry until the world is found or the deadline passes.

    ``stack`` owns what is opened, until the returned session does. ``locate`` is `by_address` or `by_record`, and ``where``
    the name of the meeting point in messages.

    Raises:
        RendezvousTimeoutError: Rank 0 was not found in time.
        AuthenticationError: The tokens differ.
        RendezvousError: Another process claims the rank, or rank 0 has another world size.
    """
    patience, grace = _FIRST_TRY, Deadline.never()
    refusal: AsyncdistError | None = None
    seen = ""
    pause = FIRST_NOTICE
    notice = Deadline.after(pause)
    async for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, world.limit.deadline):
        try:
            client, record, token = await locate(patience)
            async with ClosingOnError(client):
                session = world.open_session(record, client, token, where)
                await _claim(world, record, client, session)
            stack.push_async_callback(client.close)
            session.adopt(stack)
            return session
        except RetryLater as failed:
            failure = failed
        except StoreError as error:  # the store ended during the attempt
            failure = RetryLater(_why(error))
        # The loop's clock may be milliseconds ahead of the deadline's, and end an attempt before the deadline.
        cut_short = failure.cut_short or world.limit.deadline.expired()
        if not cut_short or not seen:
            seen = failure.seen
        if failure.refusal is not None:
            if refusal is None:
                grace = Deadline.after(_REFUSAL_GRACE)
            elif grace.expired():
                raise failure.refusal
            refusal = failure.refusal
        elif not cut_short:
            refusal = None
        if failure.slow:
            patience = min(2 * patience, _LONGEST_TRY)
        if notice.expired():
            log.warning("rank %d is still waiting for rank 0 at %s: %s", world.rank, where, seen)
            pause *= 2
            notice = Deadline.after(pause)
    if refusal is not None:
        raise refusal
    raise RendezvousTimeoutError((world.rank,), (0,), world.limit.timeout, where, world.world_size, seen)


async def _claim(world: WorldSpec, record: AddressRecord, client: AsyncStore, session: RendezvousSession) -> None:
    """Claim this rank. The same round trip checks that the store holds the world and that rank 0 has not left it."""
    keys, rank, process = session.keys, world.rank, _this_process()
    claimed = keys("joined", rank)
    try:
        offer: Command[list[bytes]] = Command(Op.OFFER, (claimed, process, [claimed], [keys("size")]))
        holder, known = await client.request(offer)
        if not known or (holder != process and await client.check([keys("left", rank)])):
            raise RetryLater("the world whose address was published there has ended")
        if record.world_size != world.world_size:
            reason = (
                f"rank {rank} was started with world_size {world.world_size}, and rank 0 with {record.world_size}; "
                "start every rank with the same world_size"
            )
            await session.refuse(reason)
            raise RendezvousError(reason)
        if holder != process:
            raise RendezvousError(_claimed_twice(rank, holder, session.where))
    except BaseException:
        # Withdraw only the claim of this process: another process may hold the rank.
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_WITHDRAW_TIMEOUT):
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
        f"rank {rank} is taken at {where} by process {pid} on host {host}: two processes were started as rank {rank}; "
        "give each process its own RANK, and a second job another name or port (if that process has died, restart all "
        "ranks)"
    )
