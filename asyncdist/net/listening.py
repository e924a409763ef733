"""Listening sockets: where they listen, and how they accept when the process runs out of descriptors."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator

from asyncdist.base import lifecycle
from asyncdist.base.descriptors import ClosingOnError, is_exhausted, is_transient
from asyncdist.errors import AddressError

log = logging.getLogger("asyncdist")

ACCEPT_AGAIN = 1.0
"""Seconds to pause after an error that an immediate retry would most likely meet again."""
BACKLOG = 4096
"""Connections that may wait to be accepted: all ranks may connect within a second. The kernel caps it."""


def listen_tcp(host: str, what: str = "", advice: str = "") -> socket.socket:
    """Listen at a free port of an address. Raises AddressError, which says ``what`` for, without such an address."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        return listen(sock, (host, 0))
    except OSError as cause:
        raise AddressError(
            f"cannot listen on {host}{what}: {cause.strerror or cause}; choose an interface with "
            f"ASYNCDIST_SOCKET_IFNAME{advice}"
        ) from cause


def listen(sock: socket.socket, where: tuple[str, int] | tuple[str, int, int, int] | str) -> socket.socket:
    """Let a new socket listen, without blocking. Closes it, and raises OSError, if that fails."""
    lifecycle.close_in_children(sock)
    with ClosingOnError(sock):
        sock.setblocking(False)
        sock.bind(where)
        sock.listen(BACKLOG)
    return sock


class ListeningSocket:
    """A socket that accepts without blocking. One thread at a time uses it.

    ``make_room`` closes a connection, because the process has no free descriptor, and returns whether it has closed one.
    """

    def __init__(self, sock: socket.socket, what: str, make_room: Callable[[OSError], bool]) -> None:
        self.sock = sock
        self._what, self._make_room = what, make_room
        self._reported: int | None = None

    def pending(self, most: int) -> Iterator[socket.socket]:
        """Yield up to ``most`` connections that wait.

        Raises OSError, which has been logged, if it concerns all connections: pause for `ACCEPT_AGAIN` seconds.
        """
        for _ in range(most):
            try:
                sock, _ = self.sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if is_transient(error):
                    continue
                # A connection may be closed in the next turns of a loop.
                if is_exhausted(error) and self._make_room(error):
                    return
                self._report(error)
                raise
            self._reported = None
            lifecycle.close_in_children(sock)
            sock.setblocking(False)
            yield sock

    def _report(self, error: OSError) -> None:
        """Log an error that is not that of the last attempt."""
        if error.errno != self._reported:
            self._reported = error.errno
            where = self.sock.getsockname()
            log.error(
                "%s cannot accept connections at %s: %s; it tries again every %g s; check the limit on open files "
                "(ulimit -n), and the machine's memory and firewall",
                self._what,
                f"port {where[1]}" if isinstance(where, tuple) else "its Unix socket",
                error,
                ACCEPT_AGAIN,
            )
