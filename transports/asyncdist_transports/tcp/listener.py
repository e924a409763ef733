"""Where a rank is called: takes connections as they come, also when descriptors run out."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from time import monotonic

from asyncdist.base import lifecycle
from asyncdist.base.descriptors import is_exhausted, is_gone
from asyncdist.errors import AddressError
from asyncdist.transport.base import Host

log = logging.getLogger("asyncdist.tcp")

_BACKLOG = 4096  # a whole world may call within a second; the kernel caps it
_AT_A_TIME = 256  # tries, before connections that exist and deadlines have their turn
_PAUSE = 1.0  # seconds after an error that the next try would most likely meet too


class Listener:
    """A listening socket at a free port of ``where``; AddressError if this machine has no such address."""

    def __init__(self, where: str) -> None:
        self._socket = sock = socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET, socket.SOCK_STREAM)
        lifecycle.close_in_children(sock)
        try:
            sock.setblocking(False)
            sock.bind((where, 0))
            sock.listen(_BACKLOG)
        except OSError as cause:
            sock.close()
            raise AddressError(
                f"cannot listen on {where}: {cause.strerror or cause}; choose an interface with ASYNCDIST_SOCKET_IFNAME"
            ) from cause
        self.port: int = sock.getsockname()[1]
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self.paused = False
        """Whether an error keeps the listener from taking connections for a while."""
        self._reported: int | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    def take(self, host: Host) -> Iterator[socket.socket]:
        """Yield connections that wait to be taken; pause after an error that is not about one connection alone."""
        if self.paused:
            return
        for _ in range(_AT_A_TIME):
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as cause:
                if is_gone(cause):
                    continue
                if not (is_exhausted(cause) and self._turn_away()):
                    self._pause(host, cause)
                    return
                log.error("turned a connection away: %s; raise the limit on open files (ulimit -n)", cause)
            else:
                self._reported = None
                yield sock

    def _pause(self, host: Host, cause: OSError) -> None:
        self.paused = True
        host.timers.schedule(self, monotonic() + _PAUSE, self._resume)
        if cause.errno != self._reported:
            self._reported = cause.errno
            log.error(
                "rank %d cannot take connections at port %d: %s; it tries again every %g s, see to the machine's memory, "
                "limits and firewall",
                host.rank,
                self.port,
                cause,
                _PAUSE,
            )

    def _resume(self) -> None:
        self.paused = False

    def _turn_away(self) -> bool:
        """Take a connection with the descriptor kept for this, and close it: left waiting, it would wake us each time."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
            return False
        os.close(self._spare)
        self._spare = None
        try:
            self._socket.accept()[0].close()
        except OSError:  # there was none, or another thread took the descriptor
            return False
        finally:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        return True

    def close(self, host: Host) -> None:
        """Take no more connections."""
        host.timers.cancel(self)
        host.retire(self._socket)
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
