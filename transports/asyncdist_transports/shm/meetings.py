"""How two ranks of a host meet: at the start, or in a crowd when one of them first needs the other.

If each of P ranks of a crowd met all others at the start, P² / 2 handshakes would take most of its time where a core has
many ranks. So a rank keeps listening, and the drivers of the world run the handshakes of `local_listener`. Either rank may
dial. If both do, the connection of the higher one counts. `transport` owns the meetings of a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Mapping
from time import monotonic

from asyncdist.base.backoff import Backoff
from asyncdist.base.descriptors import ClosingOnError, is_transient
from asyncdist.kernel.memory.shared_arena import Arena
from asyncdist.kernel.transport.base import Address, Host, Wait
from asyncdist.net.admission import EvictingQueue
from asyncdist_transports.shm.local_listener import (
    CROSSED,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Handshake,
    Introduction,
    LocalListener,
    PeerRefused,
    accept_peer,
    connect_peer,
    dialling_socket,
    on_loop,
)
from asyncdist_transports.shm.local_peer import READABLE

log = logging.getLogger("asyncdist.shm")

# Connections that may be in their handshake in addition to those of the peers; a further one evicts the oldest.
_MOST_STRANGERS = 256


class FirstMeetings:
    """The handshakes of one rank at the start, on the running loop.

    Args:
        host: The rank's endpoint.
        listener: The listener for this rank's peers.
        arena: The memory of this rank, with the control block at ``control_offset``.
        met: Called with the socket and the memory of a peer.

    Attributes:
        refused: Why a rank shares no memory.
    """

    def __init__(
        self,
        host: Host,
        listener: LocalListener,
        arena: Arena,
        control_offset: int,
        met: Callable[[socket.socket, Introduction], None],
    ) -> None:
        self._host, self._listener, self._arena, self._control_offset = host, listener, arena, control_offset
        self._met = met
        self.refused: dict[int, str] = {}

    async def meet(self, peers: Mapping[int, Address], timeout: float) -> None:
        """Connect to the lower ones of some ranks, and accept the higher ones."""
        expected = {peer for peer in peers if peer > self._host.rank}
        async with asyncio.TaskGroup() as tasks:
            for peer, address in peers.items():
                if peer < self._host.rank:
                    tasks.create_task(self._connect_to(peer, address, timeout))
            if expected:
                tasks.create_task(self._accept_peers(expected, timeout))

    async def _connect_to(self, peer: int, address: Address, timeout: float) -> None:
        try:
            sock = dialling_socket()
            with ClosingOnError(sock):
                async with asyncio.timeout(timeout):
                    introduction = await on_loop(
                        connect_peer(sock, peer, address, self._host, self._arena, self._control_offset)
                    )
        except PeerRefused as refusal:
            self.refused[peer] = str(refusal)
        except TimeoutError:
            self.refused[peer] = "it did not answer at its Unix socket"
        except OSError as cause:
            self.refused[peer] = _too_few_sockets(cause)
        else:
            self._met(sock, introduction)

    async def _accept_peers(self, missing: set[int], timeout: float) -> None:
        """Accept the ``missing`` peers. Handshakes run concurrently: a connection that sends nothing delays no other."""
        unproven: EvictingQueue[asyncio.Task[bool]] = EvictingQueue(len(missing) + _MOST_STRANGERS, asyncio.Task.cancel)

        def refusal_of(rank: int) -> str:
            return "" if rank in missing else f"it claims to be rank {rank}"

        def end() -> None:
            """End the loop below, and cancel the handshakes with processes that are not peers."""
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

        async def handshake(sock: socket.socket) -> bool:
            try:
                introduction = await on_loop(
                    accept_peer(sock, self._listener.name, self._host, self._arena, self._control_offset, refusal_of)
                )
            except PeerRefused as refusal:
                log.debug("rank %d refused a connection: %s", self._host.rank, refusal)
                if refusal.rank in missing:
                    missing.discard(refusal.rank)
                    self.refused[refusal.rank] = str(refusal)
                is_peer = False
            else:
                missing.discard(introduction[0])
                self._met(sock, introduction)
                is_peer = True
            if not missing:
                end()
            return is_peer

        def ended(sock: socket.socket, task: asyncio.Task[bool]) -> None:
            """Close a socket that belongs to no peer. A task that is cancelled before it begins executes no line."""
            unproven.discard(task)
            if task.cancelled() or task.exception() is not None or not task.result():
                sock.close()

        reason = "it did not connect to this rank's Unix socket"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout) as limit, asyncio.TaskGroup() as handshakes:
                while True:
                    try:
                        sock = await self._listener.accept()
                    except OSError as cause:
                        if is_transient(cause):
                            continue
                        reason = _too_few_sockets(cause)
                        end()
                        break
                    task = handshakes.create_task(handshake(sock))
                    task.add_done_callback(functools.partial(ended, sock))
                    unproven.add(task)
        self.refused.update(dict.fromkeys(missing, reason))


class _Meeting:
    """A handshake that runs. ``peer`` is its rank: of one that was accepted, once the rank has introduced itself to it."""

    handshake: Handshake

    def __init__(self, sock: socket.socket, peer: int | None) -> None:
        self.sock, self.peer = sock, peer
        self.dials = peer is not None
        self.pauses = Backoff(FIRST_PAUSE, LONGEST_PAUSE)


class Meetings:
    """The handshakes of one rank after the start. Called under the world's lock.

    Args:
        host: The rank's endpoint.
        listener: The listener, which is closed with this.
        addresses: The addresses of the peers that have not met.
        arena: The memory of this rank, with the control block at ``control_offset``.
        met: Called with the socket and the memory of a peer.
        failed: Called with a peer that cannot be met, and the reason.
    """

    def __init__(
        self,
        host: Host,
        listener: LocalListener,
        addresses: Mapping[int, Address],
        arena: Arena,
        control_offset: int,
        met: Callable[[socket.socket, Introduction], None],
        failed: Callable[[int, str], None],
    ) -> None:
        self._host, self._listener, self._arena, self._control_offset = host, listener, arena, control_offset
        self._met, self._failed = met, failed
        self.unmet = dict(addresses)
        """The peers that have not met, and are not lost."""
        self._known = frozenset(addresses)
        self._with: dict[int, _Meeting] = {}
        """The handshake with a peer that is unmet: one that this rank dials, or that has introduced itself."""
        self._running: dict[int, _Meeting] = {}
        """By the descriptor that a handshake waits for."""
        self._accepted: EvictingQueue[_Meeting] = EvictingQueue(len(addresses) + _MOST_STRANGERS, self._end)

    def begin(self, peer: int) -> None:
        """Begin to meet a peer, unless it has met or does so already."""
        if peer not in self.unmet or peer in self._with:
            return
        try:
            sock = dialling_socket()
        except OSError as cause:
            self._report(peer, f"this process gets no more sockets: {cause.strerror}")
            return
        meeting = self._with[peer] = _Meeting(sock, peer)
        address, offset = self.unmet[peer], self._control_offset
        meeting.handshake = connect_peer(sock, peer, address, self._host, self._arena, offset)
        self._go_on(meeting)

    def forget(self, peer: int) -> None:
        """Meet a lost peer no more."""
        self.unmet.pop(peer, None)
        if (meeting := self._with.pop(peer, None)) is not None:
            self._end(meeting)

    def waits(self) -> list[Wait]:
        """Return the descriptors to sleep on."""
        listening = [sock.fileno() for sock in self._listener.sockets]
        return [(descriptor, READABLE) for descriptor in [*self._running, *listening]]

    def advance(self, descriptor: int) -> bool:
        """Go on with what waits for a descriptor; return whether anything does."""
        if (meeting := self._running.pop(descriptor, None)) is not None:
            self._go_on(meeting)
            return True
        if not any(sock.fileno() == descriptor for sock in self._listener.sockets):
            return False
        while True:
            try:
                sock = self._listener.accept_pending()
            except OSError as cause:
                if is_transient(cause):
                    continue
                log.error("rank %d cannot accept the connections of its peers: %s", self._host.rank, cause)
                self._close_listener()
                return True
            if sock is None:
                return True
            meeting = _Meeting(sock, None)
            refusal_of = functools.partial(self._refusal_of, meeting)
            meeting.handshake = accept_peer(
                sock, self._listener.name, self._host, self._arena, self._control_offset, refusal_of
            )
            self._accepted.add(meeting)
            self._go_on(meeting)

    def _refusal_of(self, meeting: _Meeting, peer: int) -> str:
        """Return why a peer that dials is refused; empty if it is not."""
        other = self._with.get(peer)
        if peer in self.unmet and (other is None or (other.dials and peer > self._host.rank)):
            if other is not None:
                self._end(other)
            self._with[peer], meeting.peer = meeting, peer
            return ""
        if (error := self._host.gone(peer)) is not None:
            return str(error)
        return CROSSED if peer in self._known else f"it claims to be rank {peer}"

    def _go_on(self, meeting: _Meeting) -> None:
        """Run a handshake until it waits, or ends."""
        try:
            waits_for = meeting.handshake.send(None)
        except StopIteration as end:
            self._succeed(meeting, end.value)
        except (PeerRefused, OSError) as refusal:
            self._end(meeting)
            # The peer connects. This rank does not try again.
            if isinstance(refusal, PeerRefused) and refusal.is_crossed:
                return
            if meeting.peer is None:
                log.debug("rank %d refused a connection: %s", self._host.rank, refusal)
            else:
                self._report(meeting.peer, str(refusal))
        else:
            if waits_for is None:
                again = monotonic() + meeting.pauses.next_pause()
                self._host.timers.schedule(meeting, again, functools.partial(self._go_on, meeting))
            else:
                self._running[waits_for.fileno()] = meeting

    def _succeed(self, meeting: _Meeting, introduction: Introduction) -> None:
        peer = introduction[0]
        self._accepted.discard(meeting)
        del self._with[peer], self.unmet[peer]
        self._met(meeting.sock, introduction)
        if not self.unmet:
            self._close_listener()

    def _report(self, peer: int, reason: str) -> None:
        """Report that a peer cannot be met, but not to a caller that sends."""
        if peer in self.unmet:
            self._host.post(functools.partial(self._failed, peer, reason))

    def _end(self, meeting: _Meeting) -> None:
        """Close the socket of a handshake. Idempotent."""
        self._accepted.discard(meeting)
        self._host.timers.cancel(meeting)
        if meeting.sock.fileno() >= 0:
            self._running.pop(meeting.sock.fileno(), None)
            self._host.retire(meeting.sock)
        meeting.handshake.close()

    def _close_listener(self) -> None:
        self._listener.retire(self._host.retire)

    def close(self) -> None:
        """Stop listening, and end all handshakes. A peer that knows this rank already reads its goodbye."""
        self._close_listener()
        self.unmet.clear()
        for meeting in {*self._running.values(), *self._with.values()}:
            # The socket of one that has ended is closed.
            if meeting.peer is not None and not meeting.dials:
                with contextlib.suppress(OSError):
                    meeting.sock.send(self._host.closing_frames(meeting.peer))
            self._end(meeting)


def _too_few_sockets(cause: OSError) -> str:
    return f"this process gets no more sockets: {cause.strerror}"
