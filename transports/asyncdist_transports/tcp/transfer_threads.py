"""Sends and receives large messages in threads, one for each connection, while the driver of the world goes on.

Their calls release the interpreter, so one rank uses several cores, or keeps a larger share of cores for which other
programs compete. The setting `tcp_threads` says when they are used. The driver lends a thread the first message of a
connection's queue, or the receive whose body a connection reads next. Until the thread has moved all bytes, the driver
neither uses the connection in this direction nor waits for it. Then the thread posts to the driver, which completes the
message.

The thread touches the message only while it holds a lock, for one call that does not block and the reduction of one piece.
`Transfer.stop` takes the lock, and so gives the memory back at once.
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


class Transfer:
    """A message that a thread sends or receives.

    Args:
        move: Moves some of its bytes and returns whether any are left. Raises BlockingIOError, and OSError or Ended at the
            end of the connection.
        events: The poll events on which the thread waits for the connection.
        lender: Gets the message back: from the thread at its end, also after an error of the socket, unless `stop` was
            called before.
    """

    def __init__(
        self, message: Outgoing | Receive, move: Predicate, sock: socket.socket, events: int, lender: Lender
    ) -> None:
        self.message: Outgoing | Receive | None = message
        """None after `stop`: the thread may wait for the connection for some time, and keeps no memory alive."""
        self.error: Exception | None = None
        """The error of the reduction of a piece."""
        self._move: Predicate | None = move
        self._sock, self._events = sock, events
        self._lender: Lender | None = lender
        self._lock = threading.Lock()
        self._pid = os.getpid()
        message.transfer = self

    def stop(self) -> None:
        """Return when the thread does not touch the message any more. The driver may then move the rest."""
        message, lender = self.message, self._lender
        # A forked child has no such thread. It may have a copy of a lock that the thread holds in the parent.
        with self._lock if os.getpid() == self._pid else contextlib.nullcontext():
            self.message = self._move = self._lender = None
        if message is not None and lender is not None:
            message.transfer = None
            lender.take_back()

    def run(self) -> None:
        """Move the message, in a thread."""
        poll: select.poll | None = None
        descriptor = self._sock.fileno()
        try:
            while self._move_some():
                if poll is None:
                    poll = select.poll()
                    poll.register(descriptor, self._events)
                poll.poll(_LOOK_EVERY_MS)
        # The driver goes on with the connection, and gets the same error.
        except (OSError, Ended):
            pass
        except Exception as error:
            self.error = error
        finally:
            with self._lock:
                message, lender = self.message, self._lender
            if message is not None and lender is not None:
                lender.return_soon(self, message)

    def _move_some(self) -> bool:
        """Move bytes until the kernel takes or has no more; return whether bytes are left."""
        while True:
            with self._lock:
                if self._move is None:
                    return False
                try:
                    if not self._move():
                        return False
                except BlockingIOError:
                    return True


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

    def begin(self, transfer: Transfer) -> bool:
        """Let a thread run a transfer; return False if the process can start no thread."""
        try:
            self._pool.submit(transfer.run)
        # No thread can be started: the process has too many, or ends.
        except RuntimeError:
            return False
        self.at_work += 1
        return True

    def close(self) -> None:
        """Let the threads end. Every connection has stopped its thread."""
        self._pool.shutdown(wait=False)


class Lender:
    """Lends the messages of one direction of a connection to threads, one after the other.

    Args:
        go_on: Called under the driver's lock after a thread has ended, unless it was stopped.

    Attributes:
        transfer: The message that a thread moves now; None if the driver may move messages.
    """

    def __init__(self, threads: TransferThreads, go_on: Callback) -> None:
        self._threads, self._go_on = threads, go_on
        self.transfer: Transfer | None = None

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
        self.transfer = Transfer(message, move, sock, events, self)
        if not self._threads.begin(self.transfer):
            self.transfer = message.transfer = None
        return self.transfer is not None

    def return_soon(self, transfer: Transfer, message: Outgoing | Receive) -> None:
        """Let the driver take the message back. Called in the thread, at its end."""
        self._threads.host.post(functools.partial(self._return, transfer, message))

    def _return(self, transfer: Transfer, message: Outgoing | Receive) -> None:
        # It was not stopped between the end of the thread and now.
        if message.transfer is transfer:
            message.transfer = None
            self.take_back()
            if transfer.error is not None:
                raise transfer.error
            self._go_on()

    def take_back(self) -> None:
        """Let the driver move messages again."""
        self.transfer = None
        self._threads.at_work -= 1

    def stop(self) -> bool:
        """Take the message back from the thread; return whether there was one."""
        transfer = self.transfer
        if transfer is not None:
            transfer.stop()
        return transfer is not None
