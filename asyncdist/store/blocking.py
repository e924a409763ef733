"""TCPStore: the blocking client of a store, with torch's name and arguments, and the server too where it is master.

No thread serves it. All threads share one connection: each sends its request and then waits, and of those who wait one
at a time, the *leader*, reads from the socket and hands answers to the others. When the leader has its own answer it
goes, and the first of the others leads. So a thread that waits for a key blocks nobody, and nobody's call hops through
another thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import weakref
from typing import Any

from asyncdist.config import Config
from asyncdist.deadline import Deadline, Timeout, seconds
from asyncdist.errors import (
    AddressError,
    ProtocolError,
    StoreConnectionError,
    StoreTimeoutError,
    UsageError,
)
from asyncdist.handshake import NONCE_NBYTES, dial
from asyncdist.store.conversation import Conversation
from asyncdist.store.desk import Desk, DeskSubscription, Ticket
from asyncdist.store.dialling import Persistence, broken, closed, describe, tune
from asyncdist.store.embedded import Embedded
from asyncdist.store.faces import Store, Subscription
from asyncdist.store.operations import Command

_READ_NBYTES, _LONG_READ_NBYTES = 64 << 10, 1 << 20
_WORD_TIMEOUT = 1.0
_WORKERS, _WORKERS_COMPLETE = "init/", "init/complete"


class Wire:
    """A connected socket with deadlines. One thread may send while another one receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._read_nbytes = _READ_NBYTES

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send all of it. Raises TimeoutError, when part of it may have gone, or ConnectionError."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                _poll(self._writable, deadline)

    def receive(self, deadline: Deadline) -> bytes:
        """Return what has come, waiting for it. Raises TimeoutError or ConnectionError."""
        while True:
            _poll(self._readable, deadline)
            try:
                data = self._sock.recv(self._read_nbytes)
            except BlockingIOError:  # the kernel took its word back, as it may
                continue
            if not data:
                raise ConnectionResetError("it hung up")
            self._read_nbytes = _LONG_READ_NBYTES if len(data) == self._read_nbytes else _READ_NBYTES
            return data

    def wake(self) -> None:
        """Make threads that wait in here come back with ConnectionError."""
        with contextlib.suppress(OSError):  # it is down already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def _poll(poll: select.poll, deadline: Deadline) -> None:
    left = deadline.remaining_or_none()
    if not poll.poll(None if left is None else int(left * 1000) + 1):
        raise TimeoutError


class Connection(Desk):
    """A connection to a store that many threads use at once."""

    def __init__(self, wire: Wire, where: str, conversation: Conversation) -> None:
        super().__init__()
        self.where = where
        self._wire = wire
        self._conversation = conversation
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._led = False
        self._followers: dict[Ticket, None] = {}
        self._over: StoreConnectionError | None = None
        self._closed = False

    @classmethod
    def open(cls, host: str, port: int, token: str | None, timeout: Timeout) -> Connection:
        """Connect, trying again while nothing answers, for ``timeout`` seconds; raises what AsyncStore.connect does."""
        persistence = Persistence(host, port, timeout)
        pause = threading.Event()
        while True:
            try:
                return cls._attempt(host, port, token, persistence)
            except OSError as error:
                pause.wait(persistence.pause_after(error))

    @classmethod
    def _attempt(cls, host: str, port: int, token: str | None, persistence: Persistence) -> Connection:
        deadline = persistence.attempt()
        try:
            sock = socket.create_connection((host, port), timeout=max(deadline.remaining(), 0.001))
        except UnicodeError as error:  # a label that no name can have
            raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
        try:
            tune(sock)
            wire, conversation = Wire(sock), Conversation()
            _greet(wire, conversation, token, deadline)
            return cls(wire, persistence.where, conversation)
        except BaseException:
            sock.close()
            raise

    # -- asking -----------------------------------------------------------------------------------

    def begin(self, command: Command, ticket: Ticket, deadline: Deadline) -> int:
        if self._pid != os.getpid():
            raise UsageError("this TCPStore was made before a fork, and its connection is the parent's: make a new one")
        with self.lock:
            if self._over is not None:
                raise StoreConnectionError(*self._over.args)
            number, frame = self._conversation.ask(command, ticket)
        try:
            self._send(frame, deadline)
        except BaseException:
            with self.lock:
                self._conversation.give_up(number)  # it never went, or the connection is broken
            raise
        return number

    def give_up(self, number: int) -> None:
        with self.lock:
            frame = self._conversation.give_up(number) if self._over is None and number else b""
        self._send_word(frame)

    def confirm(self, number: int) -> None:
        with self.lock:
            frame = self._conversation.confirm(number) if self._over is None else b""
        self._send_word(frame)

    def _send_word(self, frame: bytes) -> None:
        """Send something that has no answer, and that nobody misses if the connection is over."""
        if frame:
            with contextlib.suppress(TimeoutError, StoreConnectionError):  # then it is broken, which says the same
                self._send(frame, Deadline.after(_WORD_TIMEOUT))

    def _send(self, frame: bytes, deadline: Deadline) -> None:
        left = deadline.remaining_or_none()
        if not self._sending.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX)):
            raise TimeoutError
        try:
            if not self._closed:
                self._wire.send(frame, deadline)
        except BaseException as error:
            # Nobody knows how much has gone: after half a request, the store could not read another one.
            over = self._break(broken(self.where, f"a request could not be sent: {describe(error)}"))
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise StoreConnectionError(*over.args) from error
            raise
        finally:
            self._sending.release()

    # -- waiting: one leads, the others follow ------------------------------------------------------

    def wait_for(self, ticket: Ticket, deadline: Deadline) -> None:
        try:
            while True:
                with self.lock:
                    if ticket.ready:
                        return
                    leads = not self._led
                    if leads:
                        self._led = True
                    else:
                        ticket.event = ticket.event or threading.Event()
                        ticket.event.clear()
                        self._followers[ticket] = None
                if leads:
                    self._lead(ticket, deadline)
                    return
                ticket.sleep(deadline.remaining_or_none())
                if deadline.expired() and not ticket.ready:
                    raise TimeoutError
        finally:
            with self.lock:
                self._followers.pop(ticket, None)
                self._promote()

    def _lead(self, ticket: Ticket, deadline: Deadline) -> None:
        try:
            while not ticket.ready:
                data = self._wire.receive(deadline)
                with self.lock:
                    self._conversation.receive(data)
        except TimeoutError:
            raise
        except (OSError, ProtocolError) as error:
            self._break(broken(self.where, describe(error)))
        finally:
            with self.lock:
                self._led = False
                if self._closed:
                    self._wire.close()

    def _promote(self) -> None:
        """Wake one of those who wait, to lead if nobody does. The lock is held."""
        if self._led:
            return
        for ticket in self._followers:
            if not ticket.ready and ticket.event is not None:
                ticket.event.set()
                return

    # -- ends -------------------------------------------------------------------------------------

    def _break(self, error: StoreConnectionError) -> StoreConnectionError:
        """End the connection for everyone and return why it ended, which may have been something earlier."""
        with self.lock:
            over = self._over = self._over or error
            self._conversation.end(over)
        self._wire.wake()
        return over

    def close(self) -> None:
        if self._pid != os.getpid():
            self._wire.close()  # our copy of it only
            return
        self._break(closed(self.where))
        with self._sending, self.lock:
            self._closed = True
            if not self._led:
                self._wire.close()


def _greet(wire: Wire, conversation: Conversation, token: str | None, deadline: Deadline) -> None:
    """Shake hands and read the server's hello."""
    handshake = dial(token, "store", os.urandom(NONCE_NBYTES))
    received = bytearray()
    try:
        step = next(handshake)
        while True:
            if isinstance(step, bytes):
                wire.send(step, deadline)
                step = next(handshake)
                continue
            while len(received) < step:
                received += wire.receive(deadline)
            piece = bytes(received[:step])
            del received[:step]
            step = handshake.send(piece)
    except StopIteration:
        pass
    conversation.receive(bytes(received))
    while not conversation.greeted:
        conversation.receive(wire.receive(deadline))


class TCPStore(Store):
    """A store over TCP, with torch's name and arguments; with ``is_master``, also its server, in this process.

    ``host_name`` and ``port`` say where the store is, or for the master where it is to be: port 0 takes any free one
    (read ``.port``), and a host other than loopback has the master listen on every interface, which needs
    ASYNCDIST_TOKEN. With ``world_size`` and ``wait_for_workers``, the master returns when so many have connected.
    ``timeout`` is for connecting and for operations that name none. With ``multi_tenant``, a master that finds the
    port served already (by another master in this process, say) becomes its client. ``master_listen_fd`` is a bound
    socket to listen on. ``use_libuv`` is accepted and means nothing here.

    Raises AddressError, UsageError, AuthenticationError, StoreConnectionError, and StoreTimeoutError when not all
    workers came. `close` it in the end, or let it be collected.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = 300.0,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        token: str | None = None,
        config: Config | None = None,
    ) -> None:
        super().__init__(timeout)
        config = config or Config.from_environment()
        self._token = config.token if token is None else token
        self._host = host_name
        self._server: Embedded | None = None
        if is_master:
            try:
                self._server = Embedded(host_name, port, token=self._token, config=config, fd=master_listen_fd)
                port = self._server.port
            except AddressError:
                if not multi_tenant or port == 0:
                    raise
        self._port = port
        try:
            reached = self._server.reachable_host if self._server is not None else host_name
            self._connection = Connection.open(reached, port, self._token, timeout)
            self._finalizer = weakref.finalize(self, Connection.close, self._connection)
            if world_size is not None and world_size > 0 and wait_for_workers:
                self._meet(world_size, is_master)
        except BaseException:
            self.close()
            raise

    def _meet(self, world_size: int, is_master: bool) -> None:
        """Count ourselves; the last one tells the master."""
        if self.add(_WORKERS, 1) == world_size:
            self.set(_WORKERS_COMPLETE, b"")
        if is_master:
            try:
                self.wait([_WORKERS_COMPLETE])
            except StoreTimeoutError as error:
                came = self.add(_WORKERS, 0)
                raise StoreTimeoutError(
                    f"TCPStore ({came} of {world_size} workers connected)", (_WORKERS,), error.timeout
                ) from None

    @property
    def host(self) -> str:
        return self._host

    @property
    def port(self) -> int:
        return self._port

    def request(self, command: Command, timeout: Timeout = None) -> Any:
        return self._connection.perform(command, self._timeout if timeout is None else seconds(timeout))

    def subscribe(self, channel: str) -> Subscription:
        """Start to listen to a channel, over a connection of its own: messages not yet read hold up nothing else."""
        connection = Connection.open(self._connection_host, self._port, self._token, self._timeout)
        try:
            return DeskSubscription(connection, channel, self._timeout, store=self, owned=True)
        except BaseException:
            connection.close()
            raise

    @property
    def _connection_host(self) -> str:
        return self._server.reachable_host if self._server is not None else self._host

    def close(self) -> None:
        """Hang up, and stop the server if it is ours; whoever waits in this store gets StoreConnectionError."""
        if hasattr(self, "_finalizer"):
            self._finalizer()
        if self._server is not None:
            self._server.close()

    def __repr__(self) -> str:
        return f"<TCPStore {self._host}:{self._port}{' (master)' if self._server is not None else ''}>"
