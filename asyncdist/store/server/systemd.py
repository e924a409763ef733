"""systemd's protocols: take over the sockets of a .socket unit, and send sd_notify messages. Called by `daemon`."""

from __future__ import annotations

import contextlib
import os
import socket

from asyncdist.environment import Service
from asyncdist.errors import AddressError

_FIRST_FD = 3


def inherited(service: Service) -> list[socket.socket]:
    """Return the listening sockets that systemd opened for this process. Raises AddressError for other descriptors."""
    if service.listen_pid != os.getpid():
        return []
    sockets = []
    for fd in range(_FIRST_FD, _FIRST_FD + service.listen_fds):
        try:
            sock = socket.socket(fileno=fd)
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise AddressError(
                f"descriptor {fd} of LISTEN_FDS is not a socket ({error.strerror}): check the .socket unit"
            ) from None
        if not listening or sock.type != socket.SOCK_STREAM:
            raise AddressError(
                f"descriptor {fd} of LISTEN_FDS does not listen: the .socket unit needs ListenStream= and no Accept="
            )
        os.set_inheritable(fd, False)
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def notify(service: Service, state: str) -> None:
    """Send systemd a state such as ``READY=1`` if NOTIFY_SOCKET is set. Errors are ignored."""
    address = service.notify_socket
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
