"""Ports for those who must be told one before anybody listens at it."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 20_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL = 32_768


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this machine that nobody uses, and that the kernel will give to nobody who asks for any.

    One that it had chosen itself may be the next that it chooses: for a connection of another program, or for that of
    who dials this very port before anybody listens there.
    """
    anywhere = random.SystemRandom()  # whatever a test has seeded
    for _ in range(1000):
        port = anywhere.randrange(_LOWEST, _first_of_the_kernels())
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port found at {host}")


def _first_of_the_kernels() -> int:
    """Return the first port of those that the kernel gives away."""
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _USUAL
    return first if first > _LOWEST else _USUAL
