"""Reads a non-blocking socket into an inbox, long messages straight into their memory, and the descriptors with them."""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence

from asyncdist.base.descriptors import describe_exhaustion
from asyncdist.net.connection.frames import MOST_DESCRIPTORS
from asyncdist.net.connection.inbox import Inbox
from asyncdist.net.security.tls import TlsSocket

_READ_NBYTES = 64 << 10
"""A read of this size has hundreds of short messages."""
_FIRST_NBYTES = 4 << 10
"""What is read while a long message is open: the header of its next part, whose rest is read into its memory."""
_ANCILLARY_NBYTES = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4) if hasattr(socket, "CMSG_SPACE") else 0


class StreamEnded(Exception):
    """The peer has closed the connection, or it broke; the message is the reason."""


class SocketReader:
    def __init__(self, sock: socket.socket | TlsSocket, inbox: Inbox, *, takes_descriptors: bool) -> None:
        self._sock, self._inbox, self._takes_descriptors = sock, inbox, takes_descriptors
        self._tls = sock if isinstance(sock, TlsSocket) else None

    def read(self) -> None:
        """Read what has arrived, once, and handle the complete frames. Raises StreamEnded and ProtocolError."""
        try:
            self._receive()
            while self._tls is not None and self._tls.unread and not self._inbox.is_closed:
                self._receive()
        except BlockingIOError:
            return
        except OSError as cause:
            raise StreamEnded(cause.strerror or str(cause)) from cause
        finally:
            self._inbox.return_slots()

    def _receive(self) -> None:
        inbox = self._inbox
        if inbox.room:
            if self._takes_descriptors:
                assert isinstance(self._sock, socket.socket)
                count, ancillary, flags, _ = self._sock.recvmsg_into(
                    inbox.room, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC
                )
                self._take_descriptors(ancillary, flags)
            else:
                count = self._sock.recvmsg_into(inbox.room)[0]
            if not count:
                raise StreamEnded("connection closed")
            inbox.filled(count)
            return
        nbytes = _FIRST_NBYTES if inbox.awaits_part else _READ_NBYTES
        if self._takes_descriptors:
            assert isinstance(self._sock, socket.socket)
            data, ancillary, flags, _ = self._sock.recvmsg(nbytes, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
            self._take_descriptors(ancillary, flags)
        else:
            data = self._sock.recv(nbytes)
        if not data:
            raise StreamEnded("connection closed")
        inbox.feed(data)

    def _take_descriptors(self, ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._inbox.add_descriptors(numbers)
        if flags & socket.MSG_CTRUNC:
            raise StreamEnded(f"descriptors of the peer were lost: this process {describe_exhaustion(OSError())}")
