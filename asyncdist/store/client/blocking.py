"""A store connection that many threads share: TCPStore's. No background thread serves it.

Each calling thread queues its request and waits for the answer. One waiting thread at a time, the *leader*, reads the
socket and completes the requests of all threads. The leader leaves with its own answer, and another thread takes over.
A thread that waits for a key therefore blocks no other thread, and no call hops through another thread.

Each thread appends to the socket's one outgoing queue, and the thread that holds the send lock
drains it. A thread that leaves while the socket is full hands the rest of the queue to a background thread.

When a socket breaks, a background thread connects again, and `ClientProtocol` resumes the session over the new socket.
A socket whose state is unknown, such as after an interrupt in the middle of a send, is therefore replaced.

Locks, in this order: the send lock, then the state lock ``lock``. Only the send lock is held during I/O.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from asyncdist.base.callables import AnyFunction, Supplier
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.base.deadline import Deadline, Timeout, wait_until_set
from asyncdist.base.error_text import describe_error
from asyncdist.base.interrupts import shorten_interrupts
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError, ProtocolError, StoreConnectionError, UsageError
from asyncdist.net.security.tls import client_context
from asyncdist.store.client.blocking_socket import BlockingSocket, open_blocking_socket, shake_hands
from asyncdist.store.client.connect import ConnectRetry, ReconnectPolicy, SilentServer, broken, closed
from asyncdist.store.client.pending import BlockingClient, PendingRequest, PendingStream, acquire
from asyncdist.store.protocol.client_protocol import IDENTITY_NBYTES, ClientProtocol
from asyncdist.store.protocol.operations import Command

T = TypeVar("T")
_GOODBYE_TIMEOUT = 1.0
"""Seconds within which `BlockingConnection.close` tries to end the session at the server."""


class BlockingConnection(BlockingClient):
    """One client session that many threads use, over one socket at a time."""

    def __init__(self, host: str, port: int, token: str | None, config: Config) -> None:
        self.where = f"{host}:{port}"
        super().__init__(f"the store at {self.where}")
        shorten_interrupts()
        self.host = host
        self._port, self._token, self._config = port, token, config
        self._tls: ssl.SSLContext | None = None
        self.protocol = ClientProtocol(self.where, config.store_lease, os.urandom(IDENTITY_NBYTES))
        self._pid = os.getpid()
        self._closing = threading.Event()
        self.send_lock = threading.RLock()
        self.sock: BlockingSocket | None = None
        self._connecting: BlockingSocket | None = None
        self._broken: list[BlockingSocket] = []
        """Sockets that a thread may still use."""
        self._reconnect_policy = ReconnectPolicy(self.protocol, host, port, config.store_reconnect, self._closing.wait)
        self._reconnected: threading.Event | None = None
        """Set while a background thread connects again; the event is set when that thread ends."""
        self._over: StoreConnectionError | None = None
        self._leader: PendingRequest[Any] | None = None
        self._followers: dict[PendingRequest[Any], None] = {}
        self._others: weakref.WeakSet[BlockingConnection] = weakref.WeakSet()
        self._threads = DaemonThreadPool("asyncdist-store", max_threads=4, idle_timeout=0.0)

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def connect(self, timeout: Timeout) -> None:
        """Connect, with retries for ``timeout`` seconds. Raises the errors of `AsyncStore.connect`."""
        self._tls = client_context(self._config)
        self.guard(self._connect, timeout)

    def another(self, timeout: Timeout) -> BlockingConnection:
        other = BlockingConnection(self.host, self._port, self._token, self._config)
        self.guard(self._add, other)
        other.connect(timeout)
        return other

    def _add(self, other: BlockingConnection) -> None:
        with self.lock:
            if self._closing.is_set():
                raise closed(self.where)
            self._others.add(other)

    def guard(self, call: Callable[..., T], *args: Any) -> T:
        """Make a call. Raises UsageError in a forked child, and in a signal handler that interrupts another call."""
        if self._pid != os.getpid():
            raise UsageError("this TCPStore was made before a fork and belongs to the parent process: make a new one")
        return super().guard(call, *args)

    def _start(self, call: AnyFunction, *args: Any) -> None:
        self._threads.submit(self.guard, call, *args)

    # -- sending ----------------------------------------------------------------------------------

    def begin(self, command: Command[Any], pending: PendingRequest[Any], deadline: Deadline) -> None:
        with self.lock:
            if self._over is not None:  # checked here too: a call less on the hot path
                self._raise_if_over()
            pending.command = command
            pending.number, message = self.protocol.ask(pending)
            sock = self.sock
            if sock is not None and message:
                if self.protocol.output:
                    self._queue_output(sock)
                sock.outbox.enqueue(message)
        if sock is not None and message:
            self._flush(sock, deadline, pending)

    def give_up(self, number: int) -> None:
        self._flush_soon(self._enqueue(lambda: self.protocol.give_up(number)))

    def confirm(self, number: int) -> None:
        self._flush_soon(self._enqueue(lambda: self.protocol.confirm(number)))

    def _enqueue(self, encode: Supplier[bytes]) -> BlockingSocket | None:
        """Queue a message that has no answer, and return its socket."""
        with self.lock:
            message = encode() if self._over is None else b""
            if self.sock is not None and message:
                self.sock.outbox.enqueue(message)
            return self.sock

    def _queue_output(self, sock: BlockingSocket) -> None:
        """Queue what the protocol has to send. The lock is held."""
        for message in self.protocol.data_to_send():
            sock.outbox.enqueue(message)

    def _flush(self, sock: BlockingSocket, deadline: Deadline, pending: PendingRequest[Any] | None = None) -> None:
        """Drain a socket's queue, unless another thread does; a broken socket is replaced.

        The calling thread leaves when ``pending`` is answered. Raises TimeoutError and StoreConnectionError.
        """
        # The thread that holds the send lock looks at the queue once more after it has released the lock.
        while sock is self.sock:
            if pending is not None and pending.ready:
                self._start(self._flush_in_background, sock)
                return
            try:
                if not self.send_lock.acquire(blocking=False):
                    return
                sock.drain(deadline, pending)
            except BaseException as error:
                if isinstance(error, TimeoutError) and deadline.expired():
                    raise
                # The socket may have taken any part of a message.
                self._lose(sock, f"a request could not be sent: {describe_error(error)}")
                if not isinstance(error, OSError):
                    raise
                self._raise_if_over()
            finally:
                # An interrupt could come after any call that precedes the release, such as suppress().
                try:  # noqa: SIM105
                    self.send_lock.release()
                except RuntimeError:
                    pass
            if sock.outbox.is_empty:
                return

    def _flush_soon(self, sock: BlockingSocket | None) -> None:
        """Send what the socket takes at once; a background thread sends the rest."""
        try:
            if sock is not None:
                self._flush(sock, Deadline.after(0))
        except StoreConnectionError:
            pass
        except TimeoutError:
            self._start(self._flush_in_background, sock)

    def _flush_in_background(self, sock: BlockingSocket) -> None:
        with contextlib.suppress(StoreConnectionError):
            self._flush(sock, Deadline.never())

    # -- receiving: one thread leads, the others follow ---------------------------------------------

    def wait_for(self, pending: PendingRequest[Any], deadline: Deadline) -> None:
        try:
            while True:
                with self.lock:
                    if pending.ready:
                        return
                    if self._leader is None:
                        self._leader = pending
                        break
                    pending.event = pending.event or threading.Event()
                    pending.event.clear()
                    self._followers[pending] = None
                wait_until_set(pending.event, deadline.remaining())
                if deadline.expired() and not pending.ready:
                    raise TimeoutError
            while not pending.ready:
                sock = self.sock
                if sock is None:
                    self._wait_for_reconnect(deadline)
                else:
                    self._read(sock, deadline)
                    if not pending.ready and deadline.expired():  # a long answer may always be readable
                        raise TimeoutError
        finally:
            interrupt: BaseException | None = None
            while True:
                try:
                    with self.lock:
                        if self._leader is pending:
                            self._leader = None
                        if self._over is not None and self._leader is None:
                            self._close_unused()
                        self._followers.pop(pending, None)
                        if self._followers:
                            self._promote()
                    break
                except BaseException as error:  # a signal handler raised: without a new leader all would wait in vain
                    interrupt = error
            if interrupt is not None:
                raise interrupt

    def _read(self, sock: BlockingSocket, deadline: Deadline) -> None:
        try:
            sock.wait(deadline)  # nearly every interrupt comes here, where it does no harm
        except ConnectionError as error:
            self._lose(sock, describe_error(error))
            return
        try:
            data = sock.take()
            with self.lock:
                if sock is not self.sock:
                    return
                self.protocol.receive(data)
                lost, more = self.protocol.lost, bool(self.protocol.output)
                if more:
                    self._queue_output(sock)
            if lost is not None:
                self._break(lost)
            elif more:
                self._flush_soon(sock)
        except OSError as error:
            self._lose(sock, describe_error(error))
        except ProtocolError as error:
            self._break(broken(self.where, describe_error(error)))
        except BaseException as error:  # the bytes that were read are lost
            self._lose(sock, f"reading was interrupted: {describe_error(error)}")
            raise

    def _promote(self) -> None:
        """Wake a follower to lead, if no thread leads. The lock is held."""
        if self._leader is not None:
            return
        for pending in self._followers:
            if not pending.ready and pending.event is not None:
                pending.event.set()
                return

    # -- connecting -------------------------------------------------------------------------------

    def _connect(self, timeout: Timeout) -> None:
        retry = ConnectRetry(self.host, self._port, timeout, sleep=self._closing.wait)
        for _ in retry:
            try:
                self._attempt(retry)
                return
            except OSError as error:
                if self._over is not None:
                    raise
                retry.failed(error)
        raise retry.overdue()

    def _attempt(self, retry: ConnectRetry) -> None:
        """Try once to connect. Raises OSError if another attempt may succeed."""
        self._raise_if_over()
        deadline = retry.attempt_deadline()
        heartbeat = self._config.heartbeat
        sock = open_blocking_socket(retry.host, retry.port, self._tls, deadline, heartbeat)
        try:
            with self.lock:
                self._raise_if_over()
                self._connecting = sock
                # An interrupt may have come between the loss of the socket before and this.
                self.protocol.interrupted()
            sock.secure(deadline)
            self._greet(sock, deadline)
            with self.lock:
                message = self.protocol.introduce()
            sock.outbox.enqueue(message)
            sock.drain(deadline)
            sock.watch_host(heartbeat)
            with self.lock:
                self._raise_if_over()
                self._connecting, self.sock = None, sock
                self._reconnect_policy.succeeded()
        except BaseException:
            with self.lock:
                self._connecting = None
                self.protocol.interrupted()
            sock.close()
            raise

    def _greet(self, sock: BlockingSocket, deadline: Deadline) -> None:
        try:
            shake_hands(sock, self._token, deadline)
        except TimeoutError as error:
            raise SilentServer from error
        while True:
            hello = sock.receive(deadline)
            with self.lock:
                self.protocol.receive(hello)
                if self.protocol.greeted:
                    return

    def _wait_for_reconnect(self, deadline: Deadline) -> None:
        """Wait until there is a new socket, or the connection is over. Raises TimeoutError."""
        acquire(self.send_lock, deadline)
        try:
            with self.lock:
                self._close_unused()
                if self._over is not None:  # the open requests have been rejected
                    return
                reconnected = self._reconnected
        finally:
            self.send_lock.release()
        if reconnected is None:
            reconnected = threading.Event()
            self._start(self._reconnect, reconnected)
        if not wait_until_set(reconnected, deadline.remaining()):
            raise TimeoutError

    def _reconnect(self, reconnected: threading.Event) -> None:
        """Connect again, in a background thread: the attempt continues when the call that began it times out."""
        with self.lock:
            # Two threads may have started a reconnect, if an interrupt came just after the first start.
            needed = self._reconnected is None and self.sock is None
            if needed:
                self._reconnected = reconnected
        try:
            if needed:
                self._connect_again()
        except StoreConnectionError as over:
            self._break(over)
        finally:
            with self.lock:
                if needed:
                    self._reconnected = None
            reconnected.set()

    def _connect_again(self) -> None:
        policy = self._reconnect_policy
        for _ in policy.retry:
            try:
                self._attempt(policy.retry)
                return
            except (OSError, AsyncdistError) as error:
                if self._over is not None:
                    return
                policy.failed(error)
        raise policy.overdue()

    # -- ends -------------------------------------------------------------------------------------

    def _raise_if_over(self) -> None:
        if self._over is not None:
            raise StoreConnectionError(*self._over.args)

    def _lose(self, sock: BlockingSocket, why: str) -> None:
        """Note that a socket is broken. The leader opens a new one if the policy allows it."""
        with self.lock:
            if self.sock is not sock:
                return
            self.sock = None
            self._broken.append(sock)
            self.protocol.interrupted()
            over = self._reconnect_policy.lost(why)
            if over is None:
                self._promote()
            else:
                self._end(over)
        sock.wake()

    def _break(self, error: StoreConnectionError) -> None:
        with self.lock:
            self._end(error)

    def _end(self, error: StoreConnectionError) -> None:
        """Reject the open requests. The first error of a connection stays its error. The lock is held."""
        over = self._over = self._over or error
        self.protocol.end(over)
        for sock in (self.sock, self._connecting):
            if sock is not None:
                sock.wake()
        if self._reconnected is not None:
            self._reconnected.set()

    def _close_unused(self) -> None:
        """Close the sockets on which no thread reads any more. The lock is held."""
        for sock in self._broken:
            sock.close()
        self._broken.clear()
        if self._over is not None and self.sock is not None:
            self.sock.close()
            self.sock = None

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # after a fork the sockets are closed, and the locks may be held by threads that do not exist
        if threading.get_ident() in self._calling_threads:  # this thread may hold the locks
            self._threads.submit(self.close)
        else:
            self.guard(self._close)

    def end_stream(self, stream: PendingStream[Any]) -> None:
        self.close()  # a stream has a connection of its own

    def drop_stream(self, stream: PendingStream[Any]) -> None:
        self.close()

    def _close(self) -> None:
        sock = self._enqueue(self.protocol.goodbye)
        if sock is not None:
            # If sending fails, the session ends with its lease.
            with contextlib.suppress(TimeoutError, StoreConnectionError):
                deadline = Deadline.after(_GOODBYE_TIMEOUT)
                acquire(self.send_lock, deadline)
                try:
                    self._flush(sock, deadline)
                finally:
                    self.send_lock.release()
        with self.lock:
            self._closing.set()
            self._end(closed(self.where))
        with self.send_lock, self.lock:
            if self._leader is None:
                self._close_unused()
            others = list(self._others)
        for other in others:
            other.close()
