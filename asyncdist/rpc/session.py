"""A session: this process's part in the remote calls of one job. `serve` and `connect` of `asyncdist.rpc` make it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import weakref
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from math import inf
from typing import Any, Self

from asyncdist.base.background_loop import cancel_all, running_loop
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.errors import AsyncdistError, UsageError
from asyncdist.kernel import DeviceLending, whole_number_of
from asyncdist.net import ChannelPort
from asyncdist.rendezvous import JobDirectory, JobSearch, PeerRecord, RecordChange
from asyncdist.rpc.caller import current_deadline
from asyncdist.rpc.conversation import CREDITS, WINDOW_NBYTES, ConversationHandler, conversation_of
from asyncdist.rpc.errors import NameNotFoundError
from asyncdist.rpc.objects import ServedObjects
from asyncdist.rpc.references import REFERENCES, ReferenceService, ReferenceTable, RemoteReference
from asyncdist.rpc.remote import RemoteObject, RemoteObjects
from asyncdist.rpc.values import Carrier
from asyncdist.rpc.wire import VERSION
from asyncdist.store import AsyncStoreBase

SERVICE = "rpc"
_IDLE_THREAD = 5.0
_VALUE_THREADS = 2
_RETURNED_WITHIN = 2.0

_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[RpcSession]] = weakref.WeakKeyDictionary()
_session_of_context: ContextVar[RpcSession | None] = ContextVar("session_of_context", default=None)
"""In a method that a call runs: the session that runs it."""


class RpcSession(ProcessBound):
    """Serves objects, and finds those of other processes, on one event loop. Use it in an ``async with`` statement.

    The functions `find` and `find_all` of `asyncdist.rpc` use the session that was opened last on their loop.
    """

    _elsewhere = "the other process enters one of its own: send the URL of the job instead"

    def __init__(
        self,
        objects: Mapping[str, Any],
        job: str | AsyncStoreBase,
        *,
        rank: int | None = None,
        threads: int = 16,
        max_calls: int = 16384,
        references: bool = True,
        timeout: Timeout = None,
        config: Config | None = None,
    ) -> None:
        if max_calls < 1 or threads < 1:
            raise UsageError(f"a session has at least one thread and one call, not {threads} and {max_calls}")
        self._config = Config.from_environment() if config is None else config
        self.call_timeout = seconds(timeout, self._config.timeout)
        self._job = job
        self._offers_attributes = references
        self._rank = Launch.from_environment().rank if rank is None else rank
        self.objects = ServedObjects(objects)
        self.threads = DaemonThreadPool("asyncdist-rpc", threads, idle_timeout=_IDLE_THREAD)
        self.value_threads = DaemonThreadPool("asyncdist-rpc-values", _VALUE_THREADS, idle_timeout=_IDLE_THREAD)
        self.num_calls, self.most_calls = 0, max_calls
        self.is_closing = False
        self._records: list[PeerRecord] = []
        self._resources = contextlib.AsyncExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False

    # -- opening and closing -----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise UsageError("a session is entered once: make another one")
        self._loop = running_loop("a session for remote calls")
        self.references = ReferenceTable(self.objects)
        self.lending = DeviceLending(self._config.transport)
        self.carrier = Carrier(
            allow_pickle=self._config.allow_pickle, references=self.references, place=self.lending.place
        )
        self.objects.unpublished[REFERENCES] = ReferenceService(self.references, self._offers_attributes)
        async with contextlib.AsyncExitStack() as stack:
            directory = self._directory = await JobDirectory.open(
                self._job, SERVICE, config=self._config, timeout=self.call_timeout
            )
            stack.push_async_callback(directory.close)
            stack.push_async_callback(self.lending.close)
            stack.callback(self.value_threads.shutdown, wait=False, cancel_futures=True)
            self._port = contextvars.copy_context().run(self._open_port)
            stack.push_async_callback(self._port.close, "its session has ended")
            stack.push_async_callback(self._await_returns)
            self.references.open(self._port)
            # From here on others may call methods, which use the session.
            self._is_open = True
            stack.push_async_callback(self.references.close)
            stack.callback(self.threads.shutdown, wait=False, cancel_futures=True)
            for name, count in self.objects.counts.items():
                record = PeerRecord(name, self._port.address, {"rank": self._rank, "count": count})
                await directory.publish(record)
                self._records.append(record)
            stack.push_async_callback(self._withdraw)
            stack.push_async_callback(cancel_all, self._loop.create_task(directory.keep(self._port.use_token)))
            sessions = _sessions.setdefault(self._loop, [])
            sessions.append(self)
            stack.callback(sessions.remove, self)
            self._resources = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.is_closing = True
        try:
            await self._resources.aclose()
        finally:
            self._is_open = False

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.objects.counts)) or "nothing"
        return f"<RpcSession of {self._job!r}, serves {names}{'' if self._is_open else ', not open'}>"

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError("the session for remote calls is not open: use it inside its `async with` block")

    def _open_port(self) -> ChannelPort:
        """Open the port, in a context of its own in which this session runs the methods."""
        _session_of_context.set(self)
        current_deadline.set(inf)
        return ChannelPort(
            ConversationHandler(self),
            host=self._directory.host,
            service=SERVICE,
            job=self._directory.job,
            token=self._directory.token,
            config=self._config,
            label="" if self._rank is None else f"rank {self._rank}",
            about={"version": VERSION, "credits": CREDITS, "window": WINDOW_NBYTES},
        )

    async def _await_returns(self) -> None:
        """Wait for peers that read device tensors of results: the end of the channels would end their calls."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETURNED_WITHIN):
                for channel in self._port.channels:
                    # A channel to a process of another version has no conversation.
                    if channel.context is not None:
                        await conversation_of(channel).loans.all_returned()

    async def _withdraw(self) -> None:
        # Without the store the records end with the lease.
        with contextlib.suppress(AsyncdistError):
            for record in self._records:
                await self._directory.withdraw(record)

    # -- finding -----------------------------------------------------------------------------------

    async def find(self, name: str, *, rank: int | None = None, timeout: Timeout = None) -> RemoteObject:
        """Return an object that a process of the job serves under a name; wait until there is one that answers.

        Args:
            name: The name.
            rank: The rank of the process; None for any.
            timeout: Seconds; None for ASYNCDIST_TIMEOUT.

        Raises:
            NameNotFoundError: The timeout passed.
            AuthenticationError: A process holds another token.
            StoreConnectionError: The store of the job cannot be reached any more.
        """
        self._check_open()
        limit = seconds(timeout, self.call_timeout)
        rank = None if rank is None else whole_number_of("rank", rank)
        search = _ObjectSearch(self._directory, self._port, name, rank=rank)
        try:
            async with asyncio.timeout(Deadline.after(limit).remaining_or_none()), search:
                return (await search.first())[0]
        except TimeoutError as error:
            found = "; ".join(search.seen.values())
            present = f"there are: {found}" if found else "no process has published it"
            wanted = name if rank is None else f"{name} of rank {rank}"
            raise NameNotFoundError(wanted, self._directory.where, limit, present) from error

    async def find_all(self, name: str, *, count: int = 1, timeout: Timeout = None) -> RemoteObjects:
        """Return all objects that processes of the job serve under a name, of those that answer.

        It waits for a process that does not answer for ASYNCDIST_HANDSHAKE_TIMEOUT, or the timeout if that is shorter.

        Args:
            name: The name.
            count: Wait until there are at least as many.
            timeout: Seconds; None for ASYNCDIST_TIMEOUT.

        Raises:
            NameNotFoundError: Fewer objects than ``count`` are served within the timeout.
            AuthenticationError: A process holds another token.
            StoreConnectionError: The store of the job cannot be reached any more.
        """
        self._check_open()
        limit = seconds(timeout, self.call_timeout)
        search = _ObjectSearch(self._directory, self._port, name, count=whole_number_of("count", count))
        try:
            async with asyncio.timeout(Deadline.after(limit).remaining_or_none()), search:
                await search.all()
        except TimeoutError as error:
            if not search.is_enough():
                seen = f"{len(search.objects)} objects answer, of {count}"
                raise NameNotFoundError(name, self._directory.where, limit, seen) from error
        found = sorted(search.objects, key=lambda each: (each.rank is None, each.rank or 0))
        return RemoteObjects(name, found, self.carrier, self.value_threads)

    def refer(self, target: Any) -> RemoteReference:
        """Return a reference to an object of this process; see `asyncdist.rpc.refer`."""
        self._check_open()
        return self.references.refer(target)

    def watch(self, name: str) -> contextlib.AbstractAsyncContextManager[AsyncIterator[RecordChange]]:
        """Watch who serves a name: ``async with session.watch("policy") as changes: async for change in changes: …``.

        A change has the ``id`` of a process, and its ``record``; None when it has withdrawn the name, left or died.
        """
        self._check_open()
        return self._directory.watch(name)

    async def names(self) -> list[str]:
        """Return the names under which processes of the job serve objects."""
        self._check_open()
        return await self._directory.names()


class _ObjectSearch(JobSearch[list[RemoteObject]]):
    """A search for ``count`` objects of one name, of the process with that rank, or of any."""

    def __init__(
        self, directory: JobDirectory, port: ChannelPort, name: str, *, rank: int | None = None, count: int = 1
    ) -> None:
        super().__init__(directory, name)
        self._port, self._rank, self._count = port, rank, count

    @property
    def objects(self) -> list[RemoteObject]:
        """The objects of the processes that have answered."""
        return [each for several in self.found.values() for each in several]

    def is_wanted(self, record: PeerRecord) -> bool:
        return self._rank is None or bool(record.about["rank"] == self._rank)

    def is_enough(self) -> bool:
        return len(self.objects) >= self._count

    async def connect(self, record: PeerRecord) -> list[RemoteObject]:
        # The handshake has its own limit, and its caller another one.
        channel = await self._port.connect(record.address, inf)
        caller = conversation_of(channel).caller
        rank, count = record.about["rank"], record.about["count"]
        return [RemoteObject(caller, record.name, index, rank, count) for index in range(count)]


def current_session() -> RpcSession:
    """Return the session that runs this method; outside of one, the session that was opened last on the running loop.

    Raises:
        UsageError: No session is open.
    """
    session = _session_of_context.get()
    if session is not None and not session.is_closing:
        return session
    sessions = _sessions.get(running_loop("a remote call"))
    if not sessions:
        raise UsageError("no session for remote calls is open on this loop: enter rpc.serve(...) or rpc.connect(...)")
    return sessions[-1]
