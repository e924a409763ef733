"""What ranks tell one another when an operation lasts: that they are there, and what they are in.

Some ways between devices compare nothing (NCCL): calls that do not fit together just last. So who has been in one for
some time tells its neighbours which it is, and whoever was told compares. Where two ranks differ, so do two
neighbours; and what fits together never pays for it.

They speak in a group of the host's that is for this alone. Who listens there waits for anybody, and so that group fails
when all others have left, in order and with all done that we still wait for: nothing else may fail of that.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

import torch

from asyncdist.devices.side_group import SideGroup
from asyncdist.errors import NotInitializedError
from asyncdist.transport.device_collectives import DeviceContext
from asyncdist.transport.host_group import HostWork

_REPORT = struct.Struct("<QQ")  # the number of a call, and its fingerprint
_TAG = 0
_MAX_KEPT_CALLS = 1024
_MIN_INTERVAL, _MAX_INTERVAL = 1.0, 300.0  # seconds until one tells, the longer the more often one has told already


class DesyncDetector:
    """One rank's calls, by number, and what it was told of others'. ``on_mismatch(error)`` is told of a difference."""

    def __init__(self, context: DeviceContext, on_mismatch: Callable[[Exception], object]) -> None:
        self._context, self._on_mismatch = context, on_mismatch
        self._lock = threading.Lock()
        self._calls: dict[int, int] = {}
        self._numbers: deque[int] = deque()
        self._early_reports: dict[
            int, tuple[int, int]
        ] = {}  # by number: who told of a call before we made ours, and what
        self._side_group = SideGroup(context.host, "roll call")
        self._posted_receive: HostWork | None = None
        self._last_reported = 0
        self._next_report_at, self._pause = 0.0, _MIN_INTERVAL

    def record_call(self, number: int, fingerprint: int) -> None:
        """Note a call of ours, and compare it with what was told of it."""
        with self._lock:
            self._calls[number] = fingerprint
            self._numbers.append(number)
            if len(self._numbers) > _MAX_KEPT_CALLS:
                del self._calls[self._numbers.popleft()]
            early = self._early_reports.pop(number, None) if self._early_reports else None
        if early is not None:
            self._compare(number, *early)

    def listen(self) -> None:
        """Hear from now on what others tell, and of a peer's death: for that, something must be waited for."""
        if self._posted_receive is not None or self._context.size == 1:
            return
        report = torch.empty(_REPORT.size, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(NotInitializedError):  # destroyed meanwhile
            self._posted_receive = self._side_group.group().recv(report, None, _TAG, timeout=math.inf)
            self._posted_receive.add_done_callback(lambda work: self._on_report(work, report))

    def report_call(self, number: int, fingerprint: int, since: float) -> None:
        """Tell our neighbours of a call in which we have been since then, if that is long enough; once."""
        now = monotonic()
        if number == self._last_reported or now < max(self._next_report_at, since + _MIN_INTERVAL):
            return
        self._last_reported, self._next_report_at, self._pause = (
            number,
            now + self._pause,
            min(2 * self._pause, _MAX_INTERVAL),
        )
        report = torch.frombuffer(bytearray(_REPORT.pack(number, fingerprint)), dtype=torch.uint8)
        rank, size = self._context.rank, self._context.size
        for peer in {(rank + 1) % size, (rank - 1) % size} - {rank}:
            with contextlib.suppress(NotInitializedError):
                sent = self._side_group.group().send(report, peer, _TAG, timeout=math.inf)
                sent.add_done_callback(lambda work: work.exception())

    @property
    def error(self) -> Exception | None:
        """What came to our ears: None while somebody may still tell us something."""
        return self._side_group.error

    def close(self) -> None:
        """Tell and hear no more. Idempotent."""
        self._side_group.close()

    def _on_report(self, work: HostWork, report: torch.Tensor) -> None:
        if work.exception() is not None:
            return  # the group has failed, or was destroyed
        number, fingerprint = _REPORT.unpack(bytes(report.numpy()))
        self._posted_receive = None
        self.listen()
        self._compare(number, work.result(), fingerprint)

    def _compare(self, number: int, peer: int, theirs: int) -> None:
        with self._lock:
            ours = self._calls.get(number)
            if ours is None:
                if not self._numbers or number > self._numbers[-1]:
                    self._early_reports[number] = peer, theirs
                return
        if ours != theirs:
            self._on_mismatch(self._context.host.mesh.difference(peer, ours, theirs))
