"""Ports for programs that need a port number before they listen."""

import random
import socket
from pathlib import Path

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
