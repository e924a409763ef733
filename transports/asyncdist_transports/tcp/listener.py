"""Where a rank is called: takes connections as they come, also when descriptors run out."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator

from asyncdist import lifetime
from asyncdist.errors import AddressError
from asyncdist.transport import Host

log = logging.getLogger("asyncdist.tcp")

_BACKLOG = 4096  # a whole world may call within a second; the kernel caps it


class Listener:
    """A listening socket at a free port of ``where``; AddressError if this machine has no such address."""

    def __init__(self, where: str) -> None:
        self._socket = sock = socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET, socket.SOCK_STREAM)
        lifetime.close_in_children(sock)
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

    def fileno(self) -> int:
        return self._socket.fileno()

    def take(self) -> Iterator[socket.socket]:
        """Yield every connection that waits to be taken."""
        while True:
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as cause:
                if cause.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # it was gone again before we took it
                if not self._turn_away():
                    return
                log.error("turned a connection away: %s; raise the limit on open files (ulimit -n)", cause)
            else:
                yield sock

    def _turn_away(self) -> bool:
        """Take a connection with the descriptor kept for this, and close it: left waiting, it would wake us for ever."""
        if self._spare is None:
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
        host.retire(self._socket)
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
