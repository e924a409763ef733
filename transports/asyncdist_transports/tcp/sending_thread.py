"""Sends large messages in threads, one for each connection, while the driver of the world receives and reduces.

The setting `send_threads` turns them on. The call that sends releases the interpreter, so one rank keeps a larger share of
cores for which other processes compete. The driver lends the first message of a connection's queue to a thread. Until the
thread has sent it, the driver neither writes to the connection nor waits for room in it. Then the thread posts to the
driver, which completes the message and goes on with the queue.

The thread touches the message only while it holds a lock, for one call that does not block. `ThreadedSend.stop` takes the
lock, and so gives the memory back at once: the driver then completes the message from a copy.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import threading
from collections.abc import Callable

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.transport.base import Host, Outgoing
from asyncdist.transport.wire_format import HEADER_NBYTES
from asyncdist_transports.byte_stream import Writer

LEAST_NBYTES = 1 << 20
"""Unsent bytes of the smallest message for which a thread is woken."""
_MOST_THREADS = 8
"""Threads of one rank that send at the same time. The driver sends further messages itself."""
_IDLE_TIMEOUT = 5.0
"""Seconds after which a thread without a message ends."""
_LOOK_EVERY_MS = 100
"""Milliseconds after which a thread that waits for room in a connection finds out that it was stopped."""


class ThreadedSend:
    """A message that a thread sends.

    Args:
        writer: The connection's writer; the message is the first one of its queue.
        sock: The connection's socket.
        returned: Called in the thread at the end, also after an error of the socket, unless `stop` was called before.
        stopped: Called in `stop`.
    """

    def __init__(
        self,
        writer: Writer,
        sock: socket.socket,
        returned: Callable[[ThreadedSend], None],
        stopped: Callable[[ThreadedSend], object],
    ) -> None:
        self.message: Outgoing = writer.queue[0]
        self._writer, self._sock = writer, sock
        self._returned, self._stopped = returned, stopped
        self._lock = threading.Lock()
        self._is_stopped = False
        self._pid = os.getpid()
        self.message.sender = self

    def stop(self) -> None:
        """Return when the thread does not touch the message any more. The driver may then send the rest."""
        # A forked child has no such thread. It may have a copy of a lock that the thread holds in the parent.
        if os.getpid() == self._pid:
            with self._lock:
                self._is_stopped = True
        self.message.sender = None
        self._stopped(self)

    def run(self) -> None:
        """Send the message, in a thread."""
        poll: select.poll | None = None
        descriptor = self._sock.fileno()
        try:
            while self._send_some():
                if poll is None:
                    poll = select.poll()
                    poll.register(descriptor, select.POLLOUT)
                poll.poll(_LOOK_EVERY_MS)
        # The driver sends the rest, and gets the same error.
        except OSError:
            pass
        finally:
            if not self._is_stopped:
                self._returned(self)

    def _send_some(self) -> bool:
        """Send until the kernel takes no more; return whether bytes are left."""
        message, whole = self.message, HEADER_NBYTES + len(self.message.body)
        while True:
            with self._lock:
                if self._is_stopped or message.sent == whole:
                    return False
                try:
                    self._writer.send_some(message)
                except BlockingIOError:
                    return True


class SendingThreads:
    """The threads of one rank that send. They start with the first message that is worth one.

    Args:
        host: The rank.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._pool: DaemonThreadPool | None = None
        self._at_work = 0

    def begin(
        self,
        writer: Writer,
        sock: socket.socket,
        take_back: Callable[[ThreadedSend], object],
        go_on: Callable[[], object],
    ) -> ThreadedSend | None:
        """Let a thread send the first message of a queue; return None if the driver should.

        Args:
            writer: The writer with the queue.
            sock: The socket of the connection.
            take_back: Called under the driver's lock when the driver may send again.
            go_on: Called after that, unless the thread was stopped.
        """
        message = writer.queue[0]
        unsent = HEADER_NBYTES + len(message.body) - message.sent
        if unsent < LEAST_NBYTES or message.done or self._at_work >= _MOST_THREADS:
            return None
        if not self._host.config.send_threads:
            return None

        def stopped(sender: ThreadedSend) -> None:
            self._at_work -= 1
            take_back(sender)

        def end(sender: ThreadedSend) -> None:
            # It was not stopped between the end of the thread and now.
            if message.sender is sender:
                message.sender = None
                stopped(sender)
                go_on()

        def returned(sender: ThreadedSend) -> None:
            self._host.post(functools.partial(end, sender))

        sender = ThreadedSend(writer, sock, returned, stopped)
        self._pool = self._pool or DaemonThreadPool("asyncdist-send", _MOST_THREADS, idle_timeout=_IDLE_TIMEOUT)
        self._at_work += 1
        try:
            self._pool.submit(sender.run)
        # No thread can be started: the process has too many, or ends.
        except RuntimeError:
            message.sender = None
            self._at_work -= 1
            return None
        return sender

    def close(self) -> None:
        """Let the threads end. Every connection has stopped its thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
