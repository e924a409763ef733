"""The heartbeats of one rank: they tell a peer that has stopped, or whose host has vanished, from one that is busy.

A broken connection reports most failures at once. It does not report a process that is stopped or whose interpreter is
held by a call, nor a network that drops packets. So each rank beats over its transports, on a thread that runs whatever
its event loops do, and `asyncdist.net.detector` looks for the beats of its peers.

Before this rank declares a suspect lost it looks at the suspect's process, or asks other ranks: those that share the
suspect's host can look at its process, and the others say whether they hear it. A process that works is only late.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Set
from time import monotonic

import msgpack

from asyncdist.base.daemon_threads import periodic_calls
from asyncdist.errors import GroupError, PeerLostError
from asyncdist.kernel.engine.executor import EngineHost
from asyncdist.kernel.engine.group_failures import GroupFailures
from asyncdist.kernel.engine.operation import named
from asyncdist.kernel.engine.progress import Progress
from asyncdist.kernel.transport.base import Transport
from asyncdist.kernel.transport.wire_format import HEARD, SUSPECT
from asyncdist.net.detector import BEATS, SUSPECTED_AFTER, Detector, Liveness, Verdict
from asyncdist.net.process_identity import ProcessState

log = logging.getLogger("asyncdist")

_MOST_WITNESSES = 8
"""The number of ranks that are asked about a suspect. Asking may open connections to them."""


class Heartbeat:
    """The heartbeats of one rank, and its detectors: one for each transport that carries heartbeats.

    Nothing is logged on the thread that beats: a log handler may take long.
    """

    def __init__(self, host: EngineHost, failures: GroupFailures) -> None:
        self._host, self._failures, self._rank, self._timeout = host, failures, host.rank, host.config.heartbeat
        selector = host.transport_selector
        beating = [transport for transport in selector.transports if transport.beats] if self._timeout else []
        self._detectors: dict[Transport, Detector] = {
            transport: Detector(self._timeout, selector.on_host_of) for transport in beating
        }
        self._progress: Progress | None = None
        # Held for a pulse, which must not write into the memory of a closed transport.
        self._pulse_lock = threading.Lock()
        self._pulsed_at = 0.0

    def start(self, progress: Progress) -> None:
        """Begin to beat, and to look for the beats of peers under the lock of the rank's ``progress``. Idempotent."""
        if self._detectors and self._progress is None:
            self._progress, self._pulsed_at = progress, monotonic()
            periodic_calls.start(self._beat, self._timeout / BEATS)

    def stop(self) -> None:
        """Stop beating, before the transports close. Idempotent."""
        periodic_calls.stop(self._beat)
        with self._pulse_lock:
            self._progress = None

    def after_fork_in_child(self) -> None:
        """Stop without waiting for a thread that does not exist here."""
        self._pulse_lock, self._progress = threading.Lock(), None

    def _beat(self) -> None:
        with self._pulse_lock:
            progress = self._progress
            if progress is None:
                return
            for transport in self._detectors:
                transport.pulse()
        pulsed_at, self._pulsed_at = self._pulsed_at, monotonic()
        progress.look(functools.partial(self._look, self._pulsed_at - pulsed_at))

    def silences(self) -> dict[int, float]:
        """Return the seconds since each watched peer was last heard. Any thread may call it."""
        now = monotonic()
        return {
            peer: now - heard_at
            for detector in list(self._detectors.values())
            for peer, heard_at in detector.last_heard().items()
        }

    def silence_of(self, peer: int) -> float | None:
        """Return the seconds since a peer was last heard; None if it is not watched."""
        return self.silences().get(peer)

    # -- the rest is called under the lock ------------------------------------------------------

    def hears(self, peer: int) -> bool:
        """Return whether this rank itself hears a peer."""
        return any(detector.hears(peer) for detector in self._detectors.values())

    def _look(self, passed: float) -> bool:
        """Beat, look for the beats of the peers, and return whether operations may go on or have failed.

        ``passed`` are the seconds since the last beat.
        """
        if self._progress is None:
            return False
        changed = passed > SUSPECTED_AFTER * self._timeout
        if changed:
            self._host.call_later(functools.partial(self._warn, passed))
        for transport, detector in self._detectors.items():
            changed |= self._look_at(transport, detector)
            for peer in detector.suspects:
                self._investigate(detector, peer)
                changed = True
        return changed

    def _warn(self, late: float) -> None:
        log.warning(
            "rank %d could not run for %.1f s: a call held the interpreter, or the process was stopped or got no "
            "processor; after %g s (ASYNCDIST_HEARTBEAT) its peers declare it lost",
            self._rank,
            late,
            self._timeout,
        )

    def _look_at(self, transport: Transport, detector: Detector, lost_elsewhere: Set[int] = frozenset()) -> bool:
        """Report what has changed, and return whether anything has."""
        heard = {peer: is_heard for peer, is_heard in transport.beat().items() if self._failures.accepts_notices(peer)}
        unanswered = {peer for peer in transport.unanswered() if self._failures.accepts_notices(peer)}
        verdicts = detector.look(monotonic(), heard, lost_elsewhere, unanswered)
        for verdict in verdicts:
            self._report(transport, verdict)
        return bool(verdicts)

    def on_loss_elsewhere(self, error: GroupError) -> None:
        """Look at once, and not at the next beat, if a notice says that another rank has lost a silent one."""
        lost = error.peer if isinstance(error, PeerLostError) and error.noticed == "heartbeat" else None
        if self._progress is not None and isinstance(lost, int):
            for transport, detector in self._detectors.items():
                self._look_at(transport, detector, {lost})

    def _report(self, transport: Transport, verdict: Verdict) -> None:
        if verdict.liveness is Liveness.LOST:
            self._failures.lost(verdict.peer, self._reason(transport, verdict), last_heard=verdict.silence)
        else:
            state = "recovered" if verdict.liveness is Liveness.RECOVERED else "become suspect"
            text = f"rank {verdict.peer} has {state}, after {verdict.silence:.1f} s without a heartbeat"
            self._host.call_later(functools.partial(log.info, "rank %d: %s", self._rank, text))
            self._failures.observe(verdict.peer, verdict.liveness, text)

    def _reason(self, transport: Transport, verdict: Verdict) -> str:
        said = f"no heartbeat for {verdict.silence:.1f} s"
        if state := self._host.processes.state_of(verdict.peer):
            return f"{said}: {state.text}"
        if verdict.heard_by:
            return (
                f"{said}, but {named(verdict.heard_by)} heard it: its packets to rank {self._rank} are lost on the way"
            )
        if verdict.is_alone:
            return (
                f"{said}, nor from any other rank over {transport.name}: the network of rank {self._rank} may be down"
            )
        nobody = f", and {named(verdict.unheard_by)} did not hear it either" if verdict.unheard_by else ""
        return f"{said}{nobody}: its process is stopped, a call holds its interpreter, or its host is unreachable"

    # -- suspects --------------------------------------------------------------------------------

    def _investigate(self, detector: Detector, peer: int) -> None:
        # A goodbye, or the end of the connection, may have arrived while no thread drove this rank.
        self._host.read_arrived(peer)
        if state := self._host.processes.state_of(peer):
            if state.is_working or state.is_traced:
                detector.excuse(peer, without_limit=state.is_traced)
            return
        heard = [other for other in detector.peers if other not in detector.suspects]
        witnesses = dict.fromkeys([*self._host.transport_selector.on_host_of(peer), *heard])
        for witness in [each for each in witnesses if each not in (peer, self._rank)][:_MOST_WITNESSES]:
            self._host.send_unordered(witness, SUSPECT, bytes(12), msgpack.packb(peer))

    def on_question(self, asker: int, body: bytes) -> None:
        """Tell a peer whether this rank hears a suspect, and what the suspect's process does if it can be seen."""
        suspect = _unpack(body)
        for detector in self._detectors.values():
            if isinstance(suspect, int) and suspect in detector.peers:
                state = self._host.processes.state_of(suspect) or ProcessState()
                answer = (suspect, suspect not in detector.suspects, state.is_working, state.is_traced)
                self._host.send_unordered(asker, HEARD, bytes(12), msgpack.packb(answer))
                return

    def on_answer(self, witness: int, body: bytes) -> None:
        """Note what another rank knows about a suspect."""
        match _unpack(body):
            case [int(suspect), bool(is_heard), bool(is_working), bool(is_traced)]:
                for detector in self._detectors.values():
                    detector.answer(suspect, witness, is_heard=is_heard)
                    # A process that others hear is not late: its packets to this rank are lost.
                    if not is_heard and (is_working or is_traced):
                        detector.excuse(suspect, without_limit=is_traced)


def _unpack(body: bytes) -> object:
    try:
        return msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException):
        return None
