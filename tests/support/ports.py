"""Ports for programs that need a port number before they listen, and listening sockets that fail."""

import os
import random
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_LOWEST = 20_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST = 32_768


def free_port(host: str = "127.0.0.1") -> int:
    """Return an unused port of this machine, outside the range from which the kernel assigns ports.

    The kernel could assign a port of its own range to a connection of another program before the test uses it.
    """
    ports = random.SystemRandom()  # independent of seeds in tests
    for _ in range(1000):
        port = ports.randrange(_LOWEST, _first_port_of_the_kernel())
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port found at {host}")


def _first_port_of_the_kernel() -> int:
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _USUAL_FIRST
    return first if first > _LOWEST else _USUAL_FIRST


class FailingListener:
    """A listening socket whose ``accept`` fails with each of ``codes`` before it succeeds."""

    def __init__(self, sock: socket.socket, codes: Iterable[int] = ()) -> None:
        self._sock, self.codes, self.calls = sock, iter(codes), 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.calls += 1
        assert self.calls < 1000, "the listener does not pause"
        if (code := next(self.codes, None)) is not None:
            raise OSError(code, os.strerror(code))
        return self._sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def refuses(port: int) -> bool:
    """Return whether no process listens at a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
