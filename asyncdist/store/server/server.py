"""The store as an asyncio server: it runs on any event loop, with no task per connection and without torch.

One port serves two formats over one state machine. A new connection is a `PendingConnection` until its first bytes show
its format. It continues as a `Session`, which has authenticated, or as a `C10dSession` of torch's TCPStore. Each read is
decoded into requests, the state machine executes all of them, and each connection concerned is written to once. The
server logs and drops a client that breaks the protocol, fails to authenticate, or reads too slowly; other clients are not
affected. Called by `daemon` and `embedded`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from asyncdist.base import lifecycle
from asyncdist.base.daemon_threads import run_in_daemon_thread
from asyncdist.base.release import VERSION
from asyncdist.config import Config
from asyncdist.errors import AddressError
from asyncdist.net.busy_poll import AdaptiveBusyPoll
from asyncdist.net.listening import BACKLOG
from asyncdist.net.network import is_address
from asyncdist.net.refusals import RefusalLog
from asyncdist.net.security.tls import server_context
from asyncdist.store.persistence.group_commit import Fsync, GroupCommit
from asyncdist.store.protocol.c10d import RequestCache
from asyncdist.store.protocol.codec import message_limit, packer
from asyncdist.store.protocol.operations import OperationKind, Reason, Reply
from asyncdist.store.server import listener
from asyncdist.store.server.accept import Admission, C10d, PendingConnection, SniffingListener
from asyncdist.store.server.c10d_session import cached_answers, handlers_of
from asyncdist.store.server.connection import ServerConnection
from asyncdist.store.server.fast_path import EpollFastPath
from asyncdist.store.server.session import Session
from asyncdist.store.state.change_log import ChangeLog
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import MemoryQuota, RequestRefused, SizeLimits
from asyncdist.store.state.sessions import SessionTable

logger = logging.getLogger(__name__)

_STOPPED = 0.5
"""Seconds after which a timer is so late that the server's process or machine must have been stopped."""


class StoreServer(lifecycle.ProcessBound):
    """A store that listens at ``host`` and ``port``. Create it with `start`, and `close` it.

    ``host`` is the host that `start` was called with; ``address`` is its first address.
    """

    _elsewhere = "connect to it in the other process: send its address instead"

    def __init__(self, config: Config, token: str | None, *, stays: bool = False, polls: bool = False) -> None:
        self.host = ""
        self.address = ""
        self.port = 0
        self.config = config
        self.token = token
        self.c10d = C10d.of(config, token)
        """From where clients of torch's TCPStore are accepted."""
        self.quota = MemoryQuota(config.store_max_nbytes)
        self.change_log = ChangeLog()
        limits = SizeLimits(config.store_max_value_nbytes, config.store_max_key_nbytes)
        self.state = StoreState(limits, self.quota, self.change_log)
        self.durability: GroupCommit | None = None
        self.tls = server_context(config)
        self.limit = message_limit(config.store_max_value_nbytes, config.store_max_key_nbytes)
        self._loop = asyncio.get_running_loop()
        self.busy_poll = AdaptiveBusyPoll.where_it_pays(self._loop, config) if polls else None
        self._servers: list[asyncio.Server | SniffingListener] = []
        self.refusals = RefusalLog(logger, "the store")
        self.admission = Admission(self)
        self.halted = False
        """Whether reading is paused, and no further request is executed."""
        self.started = time.monotonic()
        self.num_requests = 0
        self.pack = packer()
        self._scoped_stores: set[StoreServer] = set()
        self._scoped_tasks: set[asyncio.Task[None]] = set()
        self.c10d_handlers = handlers_of(self.state)
        cache = RequestCache(cached_answers(self.state, self.c10d_handlers))
        self.fast_path = EpollFastPath(self._loop, cache, self.answered)
        self.sessions = SessionTable(self.quota, self.change_log)
        self.lineage = secrets.token_hex(8)
        """The name of the data set: successive servers with one journal share it."""
        self.stays = stays
        """Whether clients may expect another server here after this one."""
        self._lease_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        *,
        token: str | None = None,
        config: Config | None = None,
        sockets: Sequence[socket.socket] = (),
        data: Path | None = None,
        fsync: Fsync = Fsync.ALWAYS,
        stays: bool = False,
        polls: bool = False,
        of_rank: bool = False,
    ) -> StoreServer:
        """Listen at ``host`` ("" is every interface) and ``port`` (0 is any free one) on the running loop.

        ``sockets`` are bound sockets to listen on instead; the server closes them in the end. With ``data``, a folder,
        the store restores its contents from there, and acknowledges a change once it is written there according to
        ``fsync``. ``stays`` tells clients that another server may follow at this address. With ``polls`` the server has
        a process of its own, and polls without sleeping where that pays. ``of_rank`` refuses torch's clients by default.

        Raises AddressError if the port is in use or the host does not resolve, UsageError beyond loopback without a
        token, JournalError if the data cannot be used.
        """
        config = config or Config()
        if of_rank and config.store_c10d == "auto":
            config = config.with_(store_c10d=C10d.OFF)
        server = cls(config, token, stays=stays, polls=polls)
        bound = list(sockets)
        try:
            if bound:
                hosts = [each.getsockname()[0] for each in bound if _is_tcp(each)]
                listener.check_guarded(hosts, token, server.config)
            else:
                addresses = await _resolve(host, port)
                listener.check_guarded([address for _, address in addresses], token, server.config)
                bound = listener.listening_sockets(host, port, addresses)
            server._know_address(host, bound)
            if data is not None:
                server.durability = await GroupCommit.open(server, data, fsync)
            for each in bound:
                await server._listen(each)
            server._watch_leases()  # of an earlier server's clients
        except BaseException:
            await server.close()
            for each in bound:
                each.close()
            raise
        logger.info("store listens at %s:%d%s", server.host, server.port, "" if token else " without a token")
        return server

    def _know_address(self, host: str, bound: list[socket.socket]) -> None:
        tcp = [each for each in bound if _is_tcp(each)]
        if tcp:
            self.address, self.port = tcp[0].getsockname()[:2]
            self.host = host or self.address
        else:
            self.address = self.host = bound[0].getsockname()

    async def _listen(self, sock: socket.socket) -> None:
        lifecycle.close_in_children(sock)
        sock.setblocking(False)
        if self.tls is not None and _is_tcp(sock):
            sock.listen(BACKLOG)
            self._servers.append(SniffingListener(self, sock, self.tls))
            return
        listen = self._loop.create_server if _is_tcp(sock) else self._loop.create_unix_server
        self._servers.append(await listen(lambda: PendingConnection(self), sock=sock, backlog=BACKLOG))

    async def close(self) -> None:
        """Stop listening, drop all connections, and return when they have ended. May be called again."""
        self.admission.close()
        while self._scoped_tasks:
            await asyncio.wait(self._scoped_tasks)
        for store in list(self._scoped_stores):
            await self._close_scoped(store)
        for server in self._servers:
            server.close()
        self.drop_all()
        await self.admission.empty.wait()
        self.fast_path.close()
        if self._lease_timer is not None:  # a later server starts each lease again
            self._lease_timer.cancel()
            self._lease_timer = None
        servers, self._servers = self._servers, []
        for server in servers:
            await server.wait_closed()
        if self.durability is not None:
            await self.durability.close()
            self.durability = None

    async def drain(self, timeout: float) -> None:
        """Accept no connection and execute no request any more; return when every reply has been sent.

        It returns after ``timeout`` seconds even if some have not.
        """
        self.admission.close()
        for server in self._servers:
            server.close()
        self.pause_reading()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                if self.durability is not None:
                    await self.durability.flush()
                for connection in list(self.admission.connections):
                    connection.finish()
                await self.admission.empty.wait()

    async def __aenter__(self) -> StoreServer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def pause_reading(self) -> None:
        self.halted = True
        for connection in self.admission.connections:
            connection.pause_reading()

    def resume_reading(self) -> None:
        self.halted = False
        for connection in list(self.admission.connections):
            connection.resume_reading()

    def drop_all(self) -> None:
        for connection in list(self.admission.connections):
            connection.abort()

    def figures(self) -> dict[str, float]:
        """Return the figures by name; `metrics` has the meaning of each."""
        values: dict[str, float] = {
            "uptime_seconds": time.monotonic() - self.started,
            "connections": len(self.admission.connections),
            "connections_limit": self.config.store_max_connections,
            "connections_total": self.admission.num_admitted,
            "refusals_total": self.refusals.count,
            "requests_total": self.num_requests,
            "clients": len(self.sessions),
            "keys": len(self.state.keys),
            "queue_items": self.state.queues.num_items,
            "waiting": self.state.num_open,
            "stored_bytes": self.quota.nbytes,
        }
        if self.config.store_max_nbytes:
            values["stored_bytes_limit"] = self.config.store_max_nbytes
        if self.durability is not None:
            values["log_bytes"] = self.durability.journal.nbytes
            values["commits_total"] = self.durability.num_commits
            values["snapshots_total"] = self.durability.num_snapshots
        return values

    @property
    def num_connections(self) -> int:
        return len(self.admission.connections)

    # -- for connections --------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return what ``asyncdist store status`` shows: the figures, and texts."""
        durability = self.durability
        texts = {
            "version": VERSION,
            "pid": os.getpid(),
            "data": str(durability.journal.folder) if durability is not None else "",
            "fsync": str(durability.policy) if durability is not None else "",
        }
        return {**texts, **self.figures()}

    def dismiss(self, connection: ServerConnection) -> None:
        if connection not in self.admission.connections:
            return
        self.admission.remove(connection)
        self.deliver(self.state.leave(connection), None)
        if isinstance(connection, Session) and connection.client_session is not None:
            self.sessions.disconnect(connection.client_session, connection, time.monotonic())
            self._watch_leases()

    def heard(self, client: object) -> None:
        """Tell the busy poll that a client, or several (None), has sent something."""
        if self.busy_poll is not None:
            self.busy_poll.heard(client)

    def answered(self, client: object, count: int) -> None:
        """Like `heard`, after the fast path has answered ``count`` requests without a session."""
        self.num_requests += count
        if self.state.requests.due:
            self.deliver(self.state.requests.collect(), None)
        if self.busy_poll is not None:  # not `heard`: a call less on the hot path
            self.busy_poll.heard(client)

    # -- client sessions --------------------------------------------------------------------------

    def _watch_leases(self) -> None:
        end = self.sessions.next_end()
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        self._lease_timer = None
        if end < math.inf and self._servers:
            self._lease_timer = self._loop.call_later(max(0.0, end - time.monotonic()), self._end_leases)

    def _end_leases(self) -> None:
        now = time.monotonic()
        if now - self.sessions.next_end() > _STOPPED:
            self.sessions.restart_leases(now)
        for session in self.sessions.expire(now):
            self.deliver(self.state.expire(session.identity), None)
        self._watch_leases()

    # -- replies ----------------------------------------------------------------------------------

    def deliver(self, replies: list[Reply], asking: ServerConnection | None) -> None:
        """Queue replies at their connections. Each connection but ``asking``, which executes requests, sends at once."""
        others = set()
        for reply in replies:
            connection: ServerConnection = reply.client
            connection.answer(reply)
            if connection is not asking:
                others.add(connection)
        for connection in others:
            connection.flush()
            connection.drop_slow_reader()

    # -- scoped ports -------------------------------------------------------------------------------
    # The protocol of torch's TCPStore has no namespaces, so that the keys of two jobs would collide. The launcher of a
    # job opens a scoped port, which serves an empty store, and gives its workers that port.

    def open_scoped_store(self, connection: ServerConnection, identity: bytes, request: int, prefix: str) -> None:
        """Open a port until the client's lease on ``prefix`` ends; the reply, the port's number, follows."""
        self._spawn(self._open_scoped_store(connection, identity, request, prefix))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._scoped_tasks.add(task)
        task.add_done_callback(self._scoped_tasks.discard)

    async def _open_scoped_store(
        self, connection: ServerConnection, identity: bytes, request: int, prefix: str
    ) -> None:
        try:
            store = await type(self).start(self.host, 0, token=self.token, config=self.config)
            self._scoped_stores.add(store)
            reply = Reply(connection, request, OperationKind.RESULT, store.port)
            try:
                self.state.leases.at_end(identity, prefix, lambda: self._spawn(self._close_scoped(store)))
            except RequestRefused as refused:
                await self._close_scoped(store)
                reply = refused.reply(connection, request)
        except AddressError as error:
            text = f"the daemon cannot open another port: {error}"
            reply = RequestRefused(Reason.INVALID, text).reply(connection, request)
        if connection in self.admission.connections:
            self.deliver([reply], None)

    async def _close_scoped(self, store: StoreServer) -> None:
        if store in self._scoped_stores:
            self._scoped_stores.remove(store)
            await store.close()


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)


async def _resolve(host: str, port: int) -> listener.Addresses:
    """Return the addresses of a host; look up a name in a thread, because that may take time."""
    if not host or is_address(host):
        return listener.resolve_listen_address(host, port)
    return await run_in_daemon_thread(lambda: listener.resolve_listen_address(host, port))
