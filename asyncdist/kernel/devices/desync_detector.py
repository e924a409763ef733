"""Cross-rank check of device collectives that take long, like c10d's desync debug. `DeviceGroup` owns a detector.

Some backends (NCCL) do not compare calls: mismatched calls hang. A rank whose call lasts longer than one second reports
its sequence number and fingerprint to its two ring neighbours, which compare them with their own call. If any two ranks
differ, two neighbours differ. Calls that complete in time cost nothing.

A rank listens from its first slow call on. If the backend compares calls itself, it stops when no call is slow any more:
while a receive is pending, calls on the host take several times as long.

The reports use a side group of their own. It has a receive from any source pending, so it fails when all other ranks
have left in order. That failure must not affect operations that those ranks have completed.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
from collections.abc import Callable
from time import monotonic

import torch

from asyncdist.errors import NotInitializedError
from asyncdist.kernel.devices.cpu_group import SideGroup
from asyncdist.kernel.transport.device_collectives import DeviceContext
from asyncdist.kernel.transport.host_group import HostWork

# Sequence number and fingerprint of a call.
_REPORT = struct.Struct("<QQ")
_TAG = 0
_MAX_KEPT_CALLS = 1024
# Seconds between reports; doubles with each.
_MIN_INTERVAL, _MAX_INTERVAL = 1.0, 300.0


class DesyncDetector:
    """The calls of one rank, by sequence number, and the reports of its neighbours.

    Args:
        context: The device group's context.
        on_mismatch: Called with a `MismatchError` when a neighbour's call differs. May run in any thread.
    """

    def __init__(self, context: DeviceContext, on_mismatch: Callable[[Exception], object]) -> None:
        self._context, self._on_mismatch = context, on_mismatch
        self._lock = threading.Lock()
        self.calls: dict[int, int] = {}
        """The fingerprints of this rank's last calls by sequence number, in issue order."""
        self.early_reports: dict[int, tuple[int, int]] = {}
        """Reports of calls that this rank has not made yet: peer and fingerprint by sequence number."""
        self.last_reported = 0
        self._side_group = SideGroup(context.host, "desync detector")
        self._posted_receive: HostWork | None = None
        self._next_report_at, self._pause = 0.0, _MIN_INTERVAL

    def record_call(self, number: int, fingerprint: int) -> None:
        """Record a call of this rank and compare it with a report that came earlier."""
        with self._lock:
            self.calls[number] = fingerprint
            if len(self.calls) > _MAX_KEPT_CALLS:
                del self.calls[next(iter(self.calls))]
            early = self.early_reports.pop(number, None) if self.early_reports else None
        if early is not None:
            self._compare(number, *early)

    def listen(self) -> None:
        """Post the receive for reports. The pending receive also detects the death of a peer. Idempotent."""
        if self._posted_receive is not None or self._context.size == 1:
            return
        report = torch.empty(_REPORT.size, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(NotInitializedError):
            self._posted_receive = self._side_group.group().recv(report, None, _TAG, timeout=math.inf)
            self._posted_receive.add_done_callback(lambda work: self._on_report(work, report))

    def rest(self) -> None:
        """Stop to listen until the next `listen`: no call is slow any more."""
        if self._posted_receive is not None:
            self._posted_receive = None
            self._side_group.rest()

    def report_call(self, number: int, fingerprint: int, since: float) -> None:
        """Report a call to both neighbours, once, if it has lasted long enough since ``since`` (monotonic seconds).

        The interval between reports doubles from 1 s to 300 s.
        """
        now = monotonic()
        if number == self.last_reported or now < max(self._next_report_at, since + _MIN_INTERVAL):
            return
        self.last_reported = number
        self._next_report_at = now + self._pause
        self._pause = min(2 * self._pause, _MAX_INTERVAL)
        report = torch.frombuffer(bytearray(_REPORT.pack(number, fingerprint)), dtype=torch.uint8)
        rank, size = self._context.rank, self._context.size
        for peer in {(rank + 1) % size, (rank - 1) % size} - {rank}:
            with contextlib.suppress(NotInitializedError):
                sent = self._side_group.group().send(report, peer, _TAG, timeout=math.inf)
                sent.add_done_callback(lambda work: work.exception())

    @property
    def error(self) -> Exception | None:
        """The failure of the side group; None while at least one peer can still report."""
        return self._side_group.error

    def close(self) -> None:
        """Stop reporting and listening. Idempotent."""
        self._side_group.close()

    def _on_report(self, work: HostWork, report: torch.Tensor) -> None:
        # The receive of a rank that rests, or is closed, fails.
        if work.exception() is not None or work is not self._posted_receive:
            return
        number, fingerprint = _REPORT.unpack(bytes(report.numpy()))
        self._posted_receive = None
        self.listen()
        self._compare(number, work.result(), fingerprint)

    def _compare(self, number: int, peer: int, reported: int) -> None:
        with self._lock:
            own = self.calls.get(number)
            if own is None:
                if number > next(reversed(self.calls), 0):
                    self.early_reports[number] = peer, reported
                return
        if own != reported:
            self._on_mismatch(self._context.host.endpoint.difference(peer, own, reported))
