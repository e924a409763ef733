"""The heartbeats of the channels of one port, which tell a peer that has stopped from one that is busy.

Beats are sent on a thread that runs whatever the loop does. `asyncdist.net.detector` looks for those of the
peers, on the loop. A silent process of this host that works is spared, as ranks spare each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from time import monotonic

from asyncdist.base.daemon_threads import periodic_calls
from asyncdist.net.connection.channel import PeerChannel
from asyncdist.net.detector import BEATS, Detector, Liveness
from asyncdist.net.process_identity import process_identity, process_state


class ChannelLiveness:
    """Beats over the open channels, and ends those of silent peers.

    A peer is lost after ``timeout`` seconds of silence; 0 stands for no heartbeats.
    """

    def __init__(self, timeout: float, host_name: str | None, channels: Set[PeerChannel]) -> None:
        self._timeout, self._channels = timeout, channels
        self._identity = process_identity(host_name)
        self._detector = Detector(timeout)
        self._loop = asyncio.get_running_loop()
        self._is_running = self._look_pending = False

    def start(self) -> None:
        """Begin to beat, with the first channel. Idempotent."""
        if self._timeout and not self._is_running:
            self._is_running = True
            periodic_calls.start(self._beat, self._timeout / BEATS)

    def stop(self) -> None:
        """Stop beating. Idempotent."""
        if self._is_running:
            self._is_running = False
            periodic_calls.stop(self._beat)

    def _beat(self) -> None:
        for channel in list(self._channels):
            channel.pulse()
        if self._is_running and not self._look_pending:
            self._look_pending = True
            try:
                self._loop.call_soon_threadsafe(self.look)
            # The loop has ended.
            except RuntimeError:
                self.stop()

    def look(self) -> None:
        """Look for the beats of the peers since the last look."""
        self._look_pending = False
        by_number = {channel.number: channel for channel in list(self._channels)}
        heard = {number: channel.take_heard() for number, channel in by_number.items()}
        for verdict in self._detector.look(monotonic(), heard):
            if verdict.liveness is Liveness.LOST:
                self._lost(by_number[verdict.peer], verdict.silence)
        for number in self._detector.suspects:
            self._investigate(number, by_number[number])

    def _investigate(self, number: int, channel: PeerChannel) -> None:
        # Its beats may have arrived while this loop was busy.
        channel.read_now()
        state = process_state(channel.peer.identity, self._identity)
        if state is not None and (state.is_working or state.is_traced):
            self._detector.excuse(number, without_limit=state.is_traced)

    def _lost(self, channel: PeerChannel, silence: float) -> None:
        state = process_state(channel.peer.identity, self._identity)
        why = state.text if state is not None and state.text else "its process is stopped, or its host is unreachable"
        channel.fail(f"no heartbeat for {silence:.1f} s: {why}", last_heard=silence)
