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

_WORDS = struct.Struct("<QQ")  # the number of a call, and its fingerprint
_TAG = 0
_KEPT = 1024
_FIRST, _LAST = 1.0, 300.0  # seconds until one tells, the longer the more often one has told already


class DesyncDetector:
    """One rank's calls, by number, and what it was told of others'. ``found(error)`` is told of a difference."""

    def __init__(self, site: DeviceContext, found: Callable[[Exception], object]) -> None:
        self._site, self._found = site, found
        self._changing = threading.Lock()
        self._calls: dict[int, int] = {}
        self._numbers: deque[int] = deque()
        self._ahead: dict[int, tuple[int, int]] = {}  # by number: who told of a call before we made ours, and what
        self._among = SideGroup(site.host, "roll call")
        self._ear: HostWork | None = None
        self._told = 0
        self._until, self._pause = 0.0, _FIRST

    def made(self, number: int, fingerprint: int) -> None:
        """Note a call of ours, and compare it with what was told of it."""
        with self._changing:
            self._calls[number] = fingerprint
            self._numbers.append(number)
            if len(self._numbers) > _KEPT:
                del self._calls[self._numbers.popleft()]
            early = self._ahead.pop(number, None) if self._ahead else None
        if early is not None:
            self._compare(number, *early)

    def listen(self) -> None:
        """Hear from now on what others tell, and of a peer's death: for that, something must be waited for."""
        if self._ear is not None or self._site.size == 1:
            return
        words = torch.empty(_WORDS.size, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(NotInitializedError):  # destroyed meanwhile
            self._ear = self._among.group().recv(words, None, _TAG, timeout=math.inf)
            self._ear.add_done_callback(lambda work: self._heard(work, words))

    def tell(self, number: int, fingerprint: int, since: float) -> None:
        """Tell our neighbours of a call in which we have been since then, if that is long enough; once."""
        now = monotonic()
        if number == self._told or now < max(self._until, since + _FIRST):
            return
        self._told, self._until, self._pause = number, now + self._pause, min(2 * self._pause, _LAST)
        words = torch.frombuffer(bytearray(_WORDS.pack(number, fingerprint)), dtype=torch.uint8)
        rank, size = self._site.rank, self._site.size
        for peer in {(rank + 1) % size, (rank - 1) % size} - {rank}:
            with contextlib.suppress(NotInitializedError):
                sent = self._among.group().send(words, peer, _TAG, timeout=math.inf)
                sent.add_done_callback(lambda work: work.exception())

    @property
    def error(self) -> Exception | None:
        """What came to our ears: None while somebody may still tell us something."""
        return self._among.error

    def close(self) -> None:
        """Tell and hear no more. Idempotent."""
        self._among.close()

    def _heard(self, work: HostWork, words: torch.Tensor) -> None:
        if work.exception() is not None:
            return  # the group has failed, or was destroyed
        number, fingerprint = _WORDS.unpack(bytes(words.numpy()))
        self._ear = None
        self.listen()
        self._compare(number, work.result(), fingerprint)

    def _compare(self, number: int, peer: int, theirs: int) -> None:
        with self._changing:
            ours = self._calls.get(number)
            if ours is None:
                if not self._numbers or number > self._numbers[-1]:
                    self._ahead[number] = peer, theirs
                return
        if ours != theirs:
            self._found(self._site.host.mesh.difference(peer, ours, theirs))
