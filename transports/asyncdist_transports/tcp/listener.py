"""The listening socket of a rank: accepts connections, also when the process runs out of descriptors. Used by
`transport`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from time import monotonic

from asyncdist.base import lifecycle
from asyncdist.base.descriptors import is_exhausted, is_transient
from asyncdist.errors import AddressError
from asyncdist.kernel.transport.base import Host

log = logging.getLogger("asyncdist.tcp")

# All ranks of a world may connect within a second; the kernel caps the value.
_BACKLOG = 4096
# Accepts in one go, before existing connections and timers get their turn.
_AT_A_TIME = 256
# Seconds to pause after an error that an immediate retry would most likely meet again.
_PAUSE = 1.0


class Listener:
    """A listening socket at a free port of the address ``where``; AddressError if this machine has no such address."""

    def __init__(self, where: str) -> None:
        self.sock = sock = socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET, socket.SOCK_STREAM)
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
        try:
            self._spare_descriptor: int | None = os.open(os.devnull, os.O_RDONLY)
        except BaseException:
            sock.close()
            raise
        self.paused = False
        """Whether the listener pauses after an error."""
        self._reported: int | None = None

    def fileno(self) -> int:
        return self.sock.fileno()

    def accept_pending(self, host: Host) -> Iterator[socket.socket]:
        """Yield the pending connections; pause after an error that does not concern one connection alone."""
        if self.paused:
            return
        for _ in range(_AT_A_TIME):
            try:
                sock, _ = self.sock.accept()
            except BlockingIOError:
                return
            except OSError as cause:
                if is_transient(cause):
                    continue
                if not (is_exhausted(cause) and self._reject_one()):
                    self._pause(host, cause)
                    return
                log.error("rejected a connection: %s; raise the limit on open files (ulimit -n)", cause)
            else:
                self._reported = None
                yield sock

    def _pause(self, host: Host, cause: OSError) -> None:
        self.paused = True
        host.timers.schedule(self, monotonic() + _PAUSE, self._resume)
        if cause.errno != self._reported:
            self._reported = cause.errno
            log.error(
                "rank %d cannot accept connections at port %d: %s; it tries again every %g s; check the machine's "
                "memory, limits and firewall",
                host.rank,
                self.port,
                cause,
                _PAUSE,
            )

    def _resume(self) -> None:
        self.paused = False

    def _reject_one(self) -> bool:
        """Accept and close a connection with the spare descriptor; left pending, it would wake the poll each time."""
        if self._spare_descriptor is None:
            with contextlib.suppress(OSError):
                self._spare_descriptor = os.open(os.devnull, os.O_RDONLY)
            return False
        os.close(self._spare_descriptor)
        self._spare_descriptor = None
        try:
            self.sock.accept()[0].close()
        # No connection was pending, or another thread took the descriptor.
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self._spare_descriptor = os.open(os.devnull, os.O_RDONLY)
        return True

    def close(self, host: Host) -> None:
        """Stop listening."""
        host.timers.cancel(self)
        host.retire(self.sock)
        if self._spare_descriptor is not None:
            os.close(self._spare_descriptor)
            self._spare_descriptor = None
