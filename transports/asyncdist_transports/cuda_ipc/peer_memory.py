"""The memory that one process shares with its peers for the work of one stream, and its release.

The release waits until the device has completed the work that uses the memory. A stream that waits for an event of a
killed process never completes. The memory that its work may use then stays mapped until this process ends.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from asyncdist.errors import TransportUnavailableError
from asyncdist.kernel.transport.device_p2p import TransferRefused
from asyncdist.kernel.transport.device_streams import Streams, becomes_idle
from asyncdist_transports.cuda_ipc.driver import Driver
from asyncdist_transports.cuda_ipc.handles import EXPORTED_NBYTES, ExportedMemory, Exports, Imports, Peer

log = logging.getLogger("asyncdist")

_RANDOM_NBYTES = 16
PROBE_NBYTES = EXPORTED_NBYTES + _RANDOM_NBYTES
IDLE_TIMEOUT = 30.0
"""Seconds in which the device may complete queued work."""
_CLOSE_TIMEOUT = 5.0
_kept_events: deque[Any] = deque(maxlen=4096)
"""Events of closed backends: a peer may still open them or wait for them."""


class PeerMemory:
    """The exports and imports of one process.

    Attributes:
        exports: Memory of this process.
        imports: Mapped memory of its peers.
        probe: Location of some bytes of this process's device, and these bytes; `verify` checks it on peers.
    """

    def __init__(self, driver: Driver, streams: Streams) -> None:
        self._driver, self._streams = driver, streams
        self.exports = Exports(driver)
        self.imports = Imports(driver, self._wait_until_idle)
        self._verified: set[Peer] = set()
        # A stream of its own does not wait for peers. The copies from and to pageable memory block until they are done.
        self._probe_streams = streams.with_new_stream()
        self._probe_address = driver.allocate(_RANDOM_NBYTES)
        random = os.urandom(_RANDOM_NBYTES)
        memory = driver.bytes_at(self._probe_address, _RANDOM_NBYTES)
        with self._probe_streams.on_comm_stream():
            memory.copy_(torch.frombuffer(bytearray(random), dtype=torch.uint8))
        self.probe = self.exports.export(memory, 0)[1].pack() + random

    def verify(self, peer: Peer, probe: bytes) -> None:
        """Check once per peer that the memory mapped from it is its own. Raises TransferRefused.

        A handle may refer to other memory, as between containers that number their processes alike.
        """
        if peer in self._verified:
            return
        location, random = ExportedMemory.unpack(probe[:EXPORTED_NBYTES]), probe[EXPORTED_NBYTES:]
        try:
            with self._probe_streams.on_comm_stream():
                found = bytes(self.imports.open(peer, location).cpu().numpy())
        except RuntimeError as cause:
            raise TransferRefused(f"its device's memory cannot be read: {cause}") from cause
        if found != random:
            raise TransferRefused("the memory mapped from its device is not the sender's")
        self._verified.add(peer)

    def forget(self, peer: Peer) -> None:
        """Unmap the memory of a peer that has ended."""
        self._verified.discard(peer)
        self.imports.forget(peer)

    def _wait_until_idle(self) -> None:
        if not becomes_idle(self._streams, IDLE_TIMEOUT):
            raise TransportUnavailableError(
                f"{self._streams.device} has failed, or has not completed its queued work within {IDLE_TIMEOUT:.0f} s"
            )

    def close(self, events: Iterable[Any]) -> None:
        """Unmap and free all memory if the device becomes idle within 5 s; else keep it until the process ends.

        Args:
            events: Interprocess events of this process, which peers may still use.
        """
        _kept_events.extend(events)
        if not becomes_idle(self._streams, _CLOSE_TIMEOUT):
            log.warning(
                "%s has failed, or has not completed the work that uses other processes' memory: the memory stays mapped "
                "until this process ends",
                self._streams.device,
            )
            return
        self.imports.close()
        self.exports.close()
        self._driver.free(self._probe_address)
