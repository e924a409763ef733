"""The listening socket of a rank: accepts connections, also when the process runs out of descriptors. Used by
`transport`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from time import monotonic

from asyncdist.base.descriptors import ClosingOnError
from asyncdist.kernel.transport.base import Host
from asyncdist.net.listening import ACCEPT_AGAIN, ListeningSocket, listen_tcp

log = logging.getLogger("asyncdist.tcp")

# Accepts in one go, before existing connections and timers get their turn.
_AT_A_TIME = 256


class Listener:
    """A listening socket at a free port of the address ``where``; AddressError if this machine has no such address."""

    def __init__(self, where: str, host: Host) -> None:
        sock = listen_tcp(where)
        self.port: int = sock.getsockname()[1]
        self.listening = ListeningSocket(sock, f"rank {host.rank}", self._reject_one)
        with ClosingOnError(sock):
            self._spare_descriptor: int | None = os.open(os.devnull, os.O_RDONLY)
        self.paused = False
        """Whether the listener pauses after an error."""

    def fileno(self) -> int:
        return self.listening.sock.fileno()

    def accept_pending(self, host: Host) -> Iterator[socket.socket]:
        """Yield the pending connections; pause after an error that does not concern one connection alone."""
        if self.paused:
            return
        try:
            yield from self.listening.pending(_AT_A_TIME)
        except OSError:
            self.paused = True
            host.timers.schedule(self, monotonic() + ACCEPT_AGAIN, self._resume)

    def _resume(self) -> None:
        self.paused = False

    def _reject_one(self, error: OSError) -> bool:
        """Accept and close a connection with the spare descriptor; left pending, it would wake the poll each time."""
        if self._spare_descriptor is None:
            with contextlib.suppress(OSError):
                self._spare_descriptor = os.open(os.devnull, os.O_RDONLY)
            return False
        os.close(self._spare_descriptor)
        self._spare_descriptor = None
        try:
            self.listening.sock.accept()[0].close()
        # No connection was pending, or another thread took the descriptor.
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self._spare_descriptor = os.open(os.devnull, os.O_RDONLY)
        log.error("rejected a connection: %s; raise the limit on open files (ulimit -n)", error)
        return True

    def close(self, host: Host) -> None:
        """Stop listening."""
        host.timers.cancel(self)
        host.retire(self.listening.sock)
        if self._spare_descriptor is not None:
            os.close(self._spare_descriptor)
            self._spare_descriptor = None
