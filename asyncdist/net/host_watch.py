"""Detects that the host at the other end of a store's connection has vanished: it sends neither an end nor a reset.

The kernel probes an idle connection (`tune`). While bytes wait for an acknowledgement it does not, and sends them again
for a quarter of an hour; `HostWatch` looks then. Both ends use both, and channels use `tune`.
"""

from __future__ import annotations

import math
import socket
import struct
import time

SLOWEST_DETECTION = 120.0
"""The limit in seconds where there are no heartbeats (ASYNCDIST_HEARTBEAT=0), and for clients of torch's TCPStore."""
CLIENT_LOOKS, SERVER_LOOKS = 10, 4
"""How often within the limit each side looks. A client that is cut off must notice it before its lease ends."""
_TCP_INFO = struct.Struct("=2xBB20xI28xI84xI")
"""Of Linux's `struct tcp_info`: unanswered retransmissions, unanswered probes, packets that are not acknowledged,
milliseconds since the last acknowledgement, and bytes that are not sent."""


_LONGEST_KEEPALIVE = 32767.0
"""Seconds that the kernel accepts."""


def keepalive(limit: float) -> tuple[tuple[str, int], ...]:
    """Return the options with which the kernel ends an idle connection whose other host is silent for ``limit`` s.

    At most `_LONGEST_KEEPALIVE`, also for a limit of infinity.
    """
    limit = min(limit, _LONGEST_KEEPALIVE)
    idle, interval = max(1, int(limit / 2)), max(1, int(limit / 8))
    count = max(1, int((limit - idle) / interval))
    return ("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", count)


def tune(sock: socket.socket, limit: float = 0.0) -> None:
    """Send small requests at once, and let the kernel end an idle connection whose other host is down for ``limit`` s.

    A limit of 0 stands for `SLOWEST_DETECTION`.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in keepalive(limit or SLOWEST_DETECTION):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def tune_strict(sock: socket.socket) -> None:
    """Change a tuned connection of strict requests and replies, whose client cannot connect again, to `SLOWEST_DETECTION`.

    The kernel then ends it, idle or not. Such a client never reads late, so TCP_USER_TIMEOUT does no harm.
    """
    if sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SLOWEST_DETECTION / 2))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SLOWEST_DETECTION * 1000))


class HostWatch:
    """The looks at one connected socket that has been tuned.

    TCP_USER_TIMEOUT would also end the connections of processes that read late, whose hosts answer TCP's probes. ``limit``
    is in seconds without an acknowledgement; 0 stands for `SLOWEST_DETECTION`. ``is_waiting`` says whether bytes waited
    for an acknowledgement at the last look.
    """

    __slots__ = ("_silent_since", "_sock", "is_waiting", "limit")

    def __init__(self, sock: socket.socket, limit: float) -> None:
        self.limit = limit or SLOWEST_DETECTION
        self._sock = sock if sock.family != socket.AF_UNIX and hasattr(socket, "TCP_INFO") else None
        self._silent_since = math.inf
        self.is_waiting = False

    def has_vanished(self) -> bool:
        """Look; return whether the other host has been silent for the limit, also at a look some time before.

        At one look the answer to a probe, which a process that reads late gets now and then, may be on its way.
        """
        now = time.monotonic()
        self._silent_since = min(self._silent_since, now) if self._is_silent() else math.inf
        return now - self._silent_since >= look_interval(self.limit, CLIENT_LOOKS) / 2

    def _is_silent(self) -> bool:
        if self._sock is None:
            return False
        try:
            information = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # the socket is closed
            return False
        fields = _TCP_INFO.unpack(information.ljust(_TCP_INFO.size, b"\0"))
        retransmissions, probes, unacknowledged, silence, unsent = fields
        self.is_waiting = retransmissions + probes + unacknowledged + unsent > 0
        return bool(retransmissions + probes) and bool(silence >= self.limit * 1000)

    def why(self) -> str:
        return f"its host has acknowledged nothing for {self.limit:g} s"


def look_interval(limit: float, looks: int) -> float:
    """Return the seconds between two looks of a `HostWatch` with a limit."""
    return (limit or SLOWEST_DETECTION) / looks
