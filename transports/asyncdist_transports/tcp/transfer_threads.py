"""Sends and receives large messages in threads, one for each connection, while the driver of the world goes on.

Their calls release the interpreter, so one rank uses several cores, or keeps a larger share of cores for which other
programs compete. The setting `tcp_threads` says when they are used. The driver lends a thread the first message of a
connection's queue, or the receive whose body a connection reads next. Until the thread has moved all bytes, the driver
neither uses the connection in this direction nor waits for it. Then the thread posts to the driver, which completes the
message.

The thread touches the message only while it holds a lock, for one call that does not block and the reduction of one piece.
`Lender.stop` takes the lock, and so gives the memory back at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import threading

from asyncdist.base.callables import Callback, Predicate
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.kernel.transport.base import Host, Outgoing, Receive
from asyncdist.kernel.transport.wire_format import HEADER_NBYTES
from asyncdist_transports.byte_stream import LENT_NBYTES, Ended, Reader, Writer

_MOST_THREADS = 16
"""Threads of one rank that are at work at the same time. The driver moves further messages itself."""
_IDLE_TIMEOUT = 5.0
"""Seconds after which a thread without a message ends."""
_LOOK_EVERY_MS = 100
"""Milliseconds after which a thread that waits for a connection finds out that it was stopped."""


class TransferThreads:
    """The threads of one rank that send and receive. They start with the first message that is worth one."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._pool = DaemonThreadPool("asyncdist-tcp", _MOST_THREADS, idle_timeout=_IDLE_TIMEOUT)
        self.at_work = 0

    @property
    def is_free(self) -> bool:
        """Whether another thread may be at work."""
        if self.at_work >= _MOST_THREADS:
            return False
        setting = self.host.config.tcp_threads
        return setting == "always" or (setting == "auto" and self.host.others_compete())

    def begin(self, transfer: Callback) -> bool:
        """Let a thread move a message; return False if the process can start no thread."""
        try:
            self._pool.submit(transfer)
        # No thread can be started: the process has too many, or ends.
        except RuntimeError:
            return False
        self.at_work += 1
        return True

    def close(self) -> None:
        """Let the threads end. Every connection has stopped its thread."""
        self._pool.shutdown(wait=False)


class Lender:
    """Lends the messages of one direction of a connection to threads, one after the other: the `Mover` of these messages.

    Args:
        go_on: Called under the driver's lock after a thread has ended, unless it was stopped.

    Attributes:
        message: The message that a thread moves now; None if the driver may move messages.
    """

    def __init__(self, threads: TransferThreads, go_on: Callback) -> None:
        self._threads, self._go_on = threads, go_on
        self.message: Outgoing | Receive | None = None
        self._move: Predicate | None = None
        """Moves some bytes of the message; returns whether any are left. Raises BlockingIOError, and OSError or Ended."""
        self._turn = 0
        """Changes when a message is lent and taken back. A thread of an earlier turn may wait for the connection for some
        time, and keeps no memory alive."""
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def lends_send(self, writer: Writer, sock: socket.socket) -> bool:
        """Let a thread send the first message of a writer's queue if that gains; return whether."""
        message = writer.queue[0]
        left = HEADER_NBYTES + len(message.body) - message.sent
        if message.done or left < LENT_NBYTES or not self._threads.is_free:
            return False
        return self._begin(message, functools.partial(writer.send_some, message), sock, select.POLLOUT)

    def lends_receive(self, reader: Reader, sock: socket.socket) -> bool:
        """Let a thread receive the body that a reader reads next, which is large, if that gains; return whether."""
        receive = reader.lendable
        if receive is None or receive.done or not self._threads.is_free:
            return False
        return self._begin(receive, reader.receive_some, sock, select.POLLIN)

    def _begin(self, message: Outgoing | Receive, move: Predicate, sock: socket.socket, events: int) -> bool:
        self.message, self._move, message.transfer = message, move, self
        self._turn += 1
        if not self._threads.begin(functools.partial(self._run, self._turn, sock, events)):
            self.message = self._move = message.transfer = None
        return self.message is not None

    def stop(self) -> bool:
        """Take the message back; return when the thread does not touch it any more, and whether there was one."""
        message = self.message
        if message is None:
            return False
        # A forked child has no such thread. It may have a copy of a lock that the thread holds in the parent.
        with self._lock if os.getpid() == self._pid else contextlib.nullcontext():
            self._take_back(message)
        return True

    def _take_back(self, message: Outgoing | Receive) -> None:
        """Let the driver move messages again."""
        self.message = self._move = message.transfer = None
        self._turn += 1
        self._threads.at_work -= 1

    def _run(self, turn: int, sock: socket.socket, events: int) -> None:
        """Move the message, in a thread."""
        poll: select.poll | None = None
        error: Exception | None = None
        descriptor = sock.fileno()
        try:
            while self._move_some(turn):
                if poll is None:
                    poll = select.poll()
                    poll.register(descriptor, events)
                poll.poll(_LOOK_EVERY_MS)
        # The driver goes on with the connection, and gets the same error.
        except (OSError, Ended):
            pass
        # That of the reduction of a piece.
        except Exception as cause:
            error = cause
        with self._lock:
            is_stopped = turn != self._turn
        if not is_stopped:
            self.return_soon(turn, error)

    def _move_some(self, turn: int) -> bool:
        """Move bytes until the kernel takes or has no more; return whether bytes are left."""
        while True:
            with self._lock:
                if turn != self._turn or self._move is None:
                    return False
                try:
                    if not self._move():
                        return False
                except BlockingIOError:
                    return True

    def return_soon(self, turn: int, error: Exception | None) -> None:
        """Let the driver take the message back. Called in the thread, at its end."""
        self._threads.host.post(functools.partial(self._return, turn, error))

    def _return(self, turn: int, error: Exception | None) -> None:
        # It was not stopped between the end of the thread and now.
        if turn == self._turn and self.message is not None:
            self._take_back(self.message)
            if error is not None:
                raise error
            self._go_on()
