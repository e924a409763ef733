"""The sockets of a blocking store's connection, one after the other.

The first is made in the thread that opens the store. Where one breaks, a thread of its own makes the next, and whoever
needs that waits for it: who has no more time goes, and the next finds it under way. So what a store has time for does
not depend on the patience of those who ask it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from asyncdist.base.deadline import Deadline, Timeout
from asyncdist.base.tls import client_context
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError, StoreConnectionError
from asyncdist.store.client.blocking_socket import BlockingSocket, open_blocking_socket, shake_hands
from asyncdist.store.client.connect import ConnectRetry, ReconnectPolicy
from asyncdist.store.client.pending import BlockingClient
from asyncdist.store.protocol.client_protocol import IDENTITY_NBYTES, ClientProtocol
from asyncdist.store.protocol.codec import framed

T = TypeVar("T")


class Reconnecting(BlockingClient):
    """A desk whose conversation goes over one socket, and the next when that breaks."""

    def __init__(self, host: str, port: int, token: str | None, config: Config) -> None:
        super().__init__()
        self.where = f"{host}:{port}"
        self._host, self._port, self._token, self._config = host, port, token, config
        self._tls = client_context(config)
        self._conversation = ClientProtocol(self.where, config.store_lease, os.urandom(IDENTITY_NBYTES))
        self._wire: BlockingSocket | None = None
        self._half_made: BlockingSocket | None = None
        self._broken: list[BlockingSocket] = []  # which a thread may still be in
        self._redial = ReconnectPolicy(self._conversation, host, port, config.store_reconnect)
        self._redialled: threading.Event | None = None  # while a thread connects again
        self._sending = threading.RLock()
        self._over: StoreConnectionError | None = None
        self._closing = threading.Event()
        self._inside: set[int] = set()  # the threads in here that may have its locks

    def _within(self, call: Callable[..., T], *args: Any) -> T:
        """Make a call of ours; a signal handler, or what a collector calls, may come in the middle of it (`close`)."""
        thread = threading.get_ident()
        try:
            self._inside.add(thread)
            return call(*args)
        finally:
            self._inside.discard(thread)

    def _start(self, call: Callable[..., object], *args: Any) -> None:
        """Make a call of ours in a thread of its own."""
        threading.Thread(target=self._within, args=(call, *args), daemon=True).start()

    # -- the first ----------------------------------------------------------------------------------

    def reach(self, timeout: Timeout) -> None:
        """Connect, trying again while nothing answers."""
        persistence = ConnectRetry(self._host, self._port, timeout)
        while True:
            try:
                self._attempt(persistence)
                return
            except OSError as error:
                self._closing.wait(persistence.pause_after(error))

    def _attempt(self, persistence: ConnectRetry) -> None:
        """Try once to connect. Raises OSError where another attempt may do better."""
        self._go_on()
        deadline = persistence.attempt()
        wire = open_blocking_socket(persistence.host, persistence.port, self._tls, deadline)
        try:
            with self.lock:
                self._go_on()
                self._half_made = wire
            wire.secure(deadline)
            self._greet(wire, deadline)
            with self.lock:
                message = self._conversation.introduce()
            wire.send(framed([message]), deadline)
            with self.lock:
                self._go_on()
                self._half_made, self._wire = None, wire
        except BaseException:
            with self.lock:
                self._half_made = None
                self._conversation.interrupted()
            wire.close()
            raise

    def _greet(self, wire: BlockingSocket, deadline: Deadline) -> None:
        """Shake hands and read the server's hello."""
        hello = shake_hands(wire, self._token, deadline)
        while True:
            with self.lock:
                self._conversation.receive(hello)
                if self._conversation.greeted:
                    return
            hello = wire.receive(deadline)

    # -- the next -----------------------------------------------------------------------------------

    def _wait_for_another(self, deadline: Deadline) -> None:
        """Wait until there is another socket, or until there is no point in one. Raises TimeoutError."""
        with self._sending, self.lock:
            self._drop()
            if self._over is not None:  # what is open has been told so
                return
            redialled = self._redialled
        if redialled is None:
            redialled = threading.Event()
            self._start(self._redial_until, redialled)
        if not redialled.wait(deadline.remaining_or_none()):
            raise TimeoutError

    def _redial_until(self, redialled: threading.Event) -> None:
        """Connect again, in a thread of its own, until that succeeds or there is no point in it any more."""
        with self.lock:
            # An interrupt just after the start may have had somebody start another one.
            needed = self._redialled is None and self._wire is None
            if needed:
                self._redialled = redialled
        try:
            while needed and self._wire is None and self._over is None:
                self._closing.wait(self._redial.due.remaining())
                try:
                    self._attempt(self._redial.persistence)
                    self._redial.succeeded()
                except (OSError, AsyncdistError) as error:
                    over = self._redial.failed(error)
                    if over is not None:
                        self._break(over)
        finally:
            with self.lock:
                if needed:
                    self._redialled = None
            redialled.set()

    # -- ends ---------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Raise what has ended it, if something has."""
        if self._over is not None:
            raise StoreConnectionError(*self._over.args)

    def _break(self, error: StoreConnectionError) -> None:
        """End it for everyone, unless it has ended already."""
        with self.lock:
            self._end(error)

    def _end(self, error: StoreConnectionError) -> None:
        """The same where the lock is held."""
        over = self._over = self._over or error
        self._conversation.end(over)
        for wire in (self._wire, self._half_made):
            if wire is not None:
                wire.wake()
        if self._redialled is not None:
            self._redialled.set()

    def _drop(self) -> None:
        """Let go of sockets that nobody is in any more."""
        for wire in self._broken:
            wire.close()
        self._broken.clear()
        if self._over is not None and self._wire is not None:
            self._wire.close()
            self._wire = None
