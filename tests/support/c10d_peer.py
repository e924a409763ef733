"""A client with the format of torch's TCPStore for tests that choose its bytes: whole, concurrent or partial requests.

with Peer(port) as peer:
    peer.send(Code.WAIT, [b"/k"])           # the test reads the reply later
    peer.settle()                           # 0: the server has handled all requests and released no wait
    other.ask(Code.SET, b"/k", b"value")
    peer.settle()                           # 1: it has released the wait
"""

import contextlib
import socket
import struct
from typing import Any, Self

from asyncdist.store.protocol.c10d import MAGIC, Code

PATIENCE = 60.0
"""Seconds after which a missing reply is an error."""

_NONCE = b"\xff\xee\xdd\xcc"  # the first byte is not a release of a wait


def encode(code: int, *arguments: Any) -> bytes:
    """Return a request. Arguments are keys and values as bytes, numbers as int, lists of keys, and dicts of pairs."""
    return bytes([code]) + b"".join(_field(code, argument) for argument in arguments)


def _field(code: int, argument: Any) -> bytes:
    if isinstance(argument, int):
        return struct.pack("<I" if code in (Code.VALIDATE, Code.PING) else "<q", argument)
    if isinstance(argument, bytes):
        return struct.pack("<Q", len(argument)) + argument
    items = [each for pair in argument.items() for each in pair] if isinstance(argument, dict) else argument
    return struct.pack("<Q", len(argument)) + b"".join(_field(code, item) for item in items)


class Peer:
    """A connection after the greeting, for one thread at a time."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.sock = socket.create_connection((host, port), PATIENCE)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.send(Code.VALIDATE, MAGIC)
            self.settle()
        except BaseException:
            self.close()
            raise

    def send(self, code: int, *arguments: Any) -> None:
        """Send a request without reading the reply."""
        self.sock.sendall(encode(code, *arguments))

    def ask(self, code: int, *arguments: Any) -> Any:
        """Send a request and return its reply. If it has no reply, wait until the server has handled it."""
        self.send(code, *arguments)
        return self.reply(code, *arguments)

    def reply(self, code: int, *arguments: Any) -> Any:
        """Read the reply to a request that was sent."""
        match code:
            case Code.COMPARE_SET | Code.GET:
                return self.vector()
            case Code.ADD | Code.GETNUMKEYS | Code.DELETE_KEY | Code.QUEUE_LEN:
                return self.number()
            case Code.CHECK | Code.WAIT | Code.CANCEL_WAIT | Code.BARRIER:
                return self.exactly(1)[0]
            case Code.MULTI_GET:
                return [self.vector() for _ in arguments[0]]
            case Code.QUEUE_POP:
                length = self.number()
                return (length, self.vector() if length > 0 else b"")
            case Code.LIST_KEYS:
                return sorted(self.vector() for _ in range(self.number()))
            case _:
                self.settle()
                return None

    def settle(self) -> int:
        """Wait until the server has handled all requests; return how many waits it has released until then."""
        self.sock.sendall(bytes([Code.PING]) + _NONCE)
        released = 0
        while (byte := self.exactly(1)) == b"\x00":
            released += 1
        if byte + self.exactly(3) != _NONCE:
            raise AssertionError(f"{byte!r} instead of a release or the nonce")
        return released

    def number(self) -> int:
        """Read an i64."""
        return int(struct.unpack("<q", self.exactly(8))[0])

    def vector(self) -> bytes:
        """Read a value."""
        return self.exactly(self.number())

    def exactly(self, nbytes: int) -> bytes:
        """Read ``nbytes`` bytes. Raises ConnectionError at the end of the stream, TimeoutError after `PATIENCE`."""
        data = bytearray()
        while len(data) < nbytes:
            piece = self.sock.recv(min(nbytes - len(data), 1 << 20))
            if not piece:
                raise ConnectionResetError("the server has closed the connection")
            data += piece
        return bytes(data)

    def ended(self) -> bool:
        """Read until the server has closed the connection, and return True."""
        with contextlib.suppress(ConnectionError):
            while self.sock.recv(1 << 16):
                pass
        return True

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
