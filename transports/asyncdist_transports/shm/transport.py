"""The shared-memory transport of one rank: its local peers, its control block, and the slot tables of its groups.

`asyncdist.kernel.transport.registry` loads `ShmTransport`; the engine's endpoint drives it through the `Transport`
contract.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from time import monotonic
from typing import Any, ClassVar

from asyncdist.errors import AsyncdistError, PeerLostError, SharedMemoryError, ranks
from asyncdist.kernel.algorithms import tree
from asyncdist.kernel.algorithms.schedule import CROWD
from asyncdist.kernel.memory import shared_arena as shared
from asyncdist.kernel.memory.shared_arena import Arena
from asyncdist.kernel.transport.awaited_link import AwaitedLink
from asyncdist.kernel.transport.base import Address, Host, Link, Outgoing, Sleep, Transport, Wait
from asyncdist.kernel.transport.native import Native
from asyncdist_transports.shm import deferred_free
from asyncdist_transports.shm.byte_ring import NBYTES as RING_NBYTES
from asyncdist_transports.shm.collectives.native import ShmNative
from asyncdist_transports.shm.collectives.slot_table import SlotTable
from asyncdist_transports.shm.control_block import BEATS, ControlBlock, OwnControlBlock
from asyncdist_transports.shm.local_listener import (
    Introduction,
    LocalListener,
    unreachable_reason,
)
from asyncdist_transports.shm.local_peer import READABLE, LocalPeer, PeerGone
from asyncdist_transports.shm.meetings import FirstMeetings, Meetings
from asyncdist_transports.shm.memory_order import Fence

log = logging.getLogger("asyncdist.shm")

# Seconds within which ranks that have all published their addresses are expected to connect.
_PATIENCE = 10.0
# Address space that the arenas of the peers of a host may take: three quarters of that of a process.
_MOST_MAPPED_NBYTES = 3 << 45
# How often, and every how many seconds, a rank checks whether its peers have left a group that it has left.
_MOST_CHECKS, _CHECK_EVERY = 10, 0.2
# Bytes of a registered tensor that are read and reduced at a time.
_MOST_READ_NBYTES = 256 << 10


class ShmTransport(Transport):
    """Mapped memory between ranks of one host and one user."""

    name: ClassVar[str] = "shm"
    preference: ClassVar[int] = 50
    is_local: ClassVar[bool] = True
    beats: ClassVar[bool] = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._arena: Arena = shared.arena()
        self._fence = Fence()
        self._control = OwnControlBlock(self._arena, host.world_size, self._fence)
        self.asleep = self._control.asleep
        self._listener: LocalListener | None = None
        self._cores: dict[int, set[int]] = {}
        self._same_process = False
        self._beats_heard: dict[int, int] = {}
        self.local_peers: dict[int, LocalPeer] = {}
        """All peers that have connected, also those that have gone and whose memory may still be needed."""
        self._connected: dict[int, LocalPeer] = {}
        # The peers that the world reaches over this transport; the loss of other peers is not reported.
        self._used: set[int] = set()
        self._by_descriptor: dict[int, LocalPeer] = {}
        self._slot_tables: dict[int, SlotTable] = {}
        # Of a crowded host; None if all peers have met at the start.
        self._meetings: Meetings | None = None
        # Links to peers that have not met, by peer.
        self._awaited: dict[int, AwaitedLink] = {}
        self._closed = False

    @classmethod
    def probe(cls) -> str | None:
        if not hasattr(socket, "SOCK_SEQPACKET") or not hasattr(socket, "recv_fds"):
            return "this system cannot pass descriptors over a Unix socket"
        reason = shared.unavailable()
        if reason is not None:
            return reason
        try:
            shared.arena().allocate(RING_NBYTES).free()
        # Not using shared memory is better than failing later.
        except SharedMemoryError as error:
            return error.summary
        return None

    # -- connecting ----------------------------------------------------------------------------

    def listen(self, where: str) -> dict[str, Any]:
        self._listener = LocalListener(self.host)
        return {**self._listener.address(), "cores": sorted(os.sched_getaffinity(0))}

    def reaches(self, address: Address) -> bool:
        # `probe_peers` decides.
        return True

    async def probe_peers(self, addresses: Mapping[int, Address | None], timeout: float) -> list[int]:
        listener, own = self._listener, addresses[self.host.rank]
        assert listener is not None
        assert own is not None
        local: dict[int, Address] = {}
        first = FirstMeetings(self.host, listener, self._arena, self._control.block.offset, self._add_peer)
        refused = first.refused
        for peer, address in addresses.items():
            if address is None:
                refused[peer] = "it offers none"
            elif peer != self.host.rank and address["host"] == own["host"]:
                reason = unreachable_reason(own, address)
                if reason is None:
                    local[peer] = address
                else:
                    refused[peer] = reason
        self._cores = {peer: set(local[peer]["cores"]) for peer in local} | {self.host.rank: set(own["cores"])}
        # Of a crowd each rank meets those of its small calls, which proves that memory can be passed, and the rest when it
        # needs them.
        near = local
        if self._is_crowded and len(local) * self._arena.nbytes <= _MOST_MAPPED_NBYTES:
            here = sorted(self._cores)
            joined = tree.neighbours(here.index(self.host.rank), len(here))
            near = {peer: local[peer] for peer in map(here.__getitem__, joined)}
        try:
            if any(address["net"] != own["net"] for peer, address in local.items() if peer > self.host.rank):
                # A peer that cannot connect reports it.
                with contextlib.suppress(OSError):
                    listener.listen_by_descriptor()
            await first.meet(near, min(timeout, _PATIENCE))
            if self.local_peers and (unmet := {peer: local[peer] for peer in local.keys() - near.keys()}):
                self._meetings = Meetings(
                    self.host, listener, unmet, self._arena, self._control.block.offset, self._meet, self._cannot_meet
                )
        finally:
            if self._meetings is None:
                listener.close()
        for reason in dict.fromkeys(refused.values()):
            peers = ranks(sorted(peer for peer in refused if refused[peer] == reason))
            log.warning(
                "rank %d shares no memory with %s, and uses the next transport: %s", self.host.rank, peers, reason
            )
        reached = sorted([*self.local_peers, *(self._meetings.unmet if self._meetings is not None else ())])
        self._cores = {peer: self._cores[peer] for peer in [*reached, self.host.rank]}
        self._same_process = any(local[peer]["pid"] == own["pid"] for peer in reached)
        return reached

    def _meet(self, sock: socket.socket, introduction: Introduction) -> None:
        """Go on with a peer that has met after the start."""
        self._add_peer(sock, introduction)
        local_peer = self.local_peers[introduction[0]]
        # It may have slept already when this rank did not see yet that it sleeps.
        local_peer.signal()
        if (link := self._awaited.pop(local_peer.peer, None)) is not None:
            link.continue_over(ShmLink(local_peer))

    def _begin_to_meet(self, peer: int) -> None:
        """Begin to meet a peer of a crowd, unless it has met."""
        if self._meetings is not None:
            self._meetings.begin(peer)

    def _cannot_meet(self, peer: int, reason: str) -> None:
        if peer in self._used:
            self.host.suspect(peer, reason)

    def _await(self, link: AwaitedLink) -> None:
        """Let a link continue when its peer has met."""
        assert self._meetings is not None
        if (local_peer := self.local_peers.get(link.peer)) is not None:
            self.host.post(functools.partial(link.continue_over, ShmLink(local_peer)))
        else:
            self._awaited[link.peer] = link
            self._meetings.begin(link.peer)

    def _add_peer(self, sock: socket.socket, introduction: Introduction) -> None:
        peer, mapping, offset = introduction
        control = ControlBlock(mapping, offset, self.host.world_size)
        local_peer = LocalPeer(peer, sock, mapping, control, self._control, self.host, self._arena, self._fence)
        self.local_peers[peer] = self._connected[peer] = self._by_descriptor[sock.fileno()] = local_peer

    def spin_policy(self, local_size: int) -> tuple[float, bool]:
        # A spinning thread keeps the interpreter from a peer in the same process.
        return 0.0 if self._same_process else self.host.config.spin_us * 1e-6, self._oversubscribed

    @property
    def _oversubscribed(self) -> bool:
        """Whether ranks outnumber the cores, so that work of one rank delays the others."""
        return self._same_process or len(self._cores) > len(set().union(*self._cores.values()))

    @property
    def _is_crowded(self) -> bool:
        """Whether this host has many ranks, several for each core. All ranks of the host get the same answer."""
        return len(self._cores) > max(CROWD, 2 * len(set().union(*self._cores.values())) - 1)

    def peer_cores(self, core: int) -> Iterable[tuple[int, int, bool]]:
        # Only one of the ranks of a process runs at a time.
        if self._same_process:
            return ()
        self._control.core = core
        peers = list(self._connected.values())
        return [(peer.peer, peer.control.core, bool(peer.asleep[0])) for peer in peers]

    # -- groups --------------------------------------------------------------------------------

    def native(self, number: int, members: Sequence[int], waits: Sequence[int]) -> Native | None:
        known = {self.host.rank, *self.local_peers, *(self._meetings.unmet if self._meetings is not None else ())}
        if not known.issuperset(members):
            return None  # a member has ended, and the group fails
        self._used.update(members)
        config = self.host.config
        slots = SlotTable(
            number, members.index(self.host.rank), members, self.local_peers, self._arena, self._fence,
            config.shm_area_nbytes, waits, self.host.difference,
            meet=self._begin_to_meet, oversubscribed=self._oversubscribed,
        )  # fmt: skip
        try:
            place = self._control.reserve_entry()
        except SharedMemoryError:
            slots.block.free()
            raise
        piece_nbytes = min(config.piece_nbytes, _MOST_READ_NBYTES)
        publish = functools.partial(self._publish_slots, slots, place)
        return ShmNative(slots, piece_nbytes, publish, functools.partial(self._withdraw_slots, slots))

    def _publish_slots(self, slots: SlotTable, place: int) -> None:
        """Show the members of a group this rank's slot table."""
        self._slot_tables[slots.number] = slots
        self._control.publish_group(place, slots.number, slots.block.offset)
        for local_peer in self._connected.values():
            # It may wait for this group.
            local_peer.wake_if_asleep()

    def _withdraw_slots(self, slots: SlotTable) -> None:
        """Hide this rank's slot table, and free it once no member reads it."""
        if self._slot_tables.pop(slots.number, None) is not None and self._arena.pid == os.getpid():
            deferred_free.release_slots(slots, self._control)
            self._free_unused(_MOST_CHECKS)

    def _free_unused(self, checks: int) -> None:
        """Free what no peer reads any more, and check again a few times if something is left.

        Peers that have ended and are in no group are dropped: their memory lasts as long as a process maps it.
        """
        pending = deferred_free.free_unused(self._control)
        used = {member for slots in self._slot_tables.values() for member in slots.world_ranks}
        for peer, local_peer in list(self.local_peers.items()):
            if peer not in self._connected and peer not in used and local_peer.has_left():
                del self.local_peers[peer]
                local_peer.release()
                local_peer.free_ring()
                deferred_free.expect_unmapped(local_peer.mapping)
        if checks and (pending or self.local_peers.keys() - self._connected.keys()):
            again = functools.partial(self._free_unused, checks - 1)
            self.host.timers.schedule(self, monotonic() + _CHECK_EVERY, again)
            # A driver must run the timer, also if no operation is pending.
            self.host.post(_nothing)

    # -- links ---------------------------------------------------------------------------------

    def link(self, peer: int, address: Address) -> Link:
        self._used.add(peer)
        if peer not in self.local_peers and self._meetings is not None:
            return AwaitedLink(peer, self.host.rank, self._await, "has no answer at the Unix socket")
        return ShmLink(self.local_peers[peer])

    # -- driving -------------------------------------------------------------------------------

    def advance(self, ready: Iterable[int] | None) -> bool:
        self.asleep[0] = 0
        moved = False
        for descriptor in ready or ():
            moved = self._read(descriptor) or moved
        return self._pump() or moved

    def _read(self, descriptor: int) -> bool:
        """Read from a socket of this transport; return whether the descriptor is one."""
        local_peer = self._by_descriptor.get(descriptor)
        if local_peer is not None:
            self._read_socket(local_peer)
            return True
        return self._meetings is not None and self._meetings.advance(descriptor)

    def _pump(self) -> bool:
        moved = False
        for local_peer in list(self._connected.values()):
            try:
                moved = local_peer.move_messages() or moved
            except AsyncdistError as error:
                self._lose_peer(local_peer, error.summary)
            if local_peer.end_reason is not None and local_peer.drained and local_peer.peer in self._connected:
                self._lose_peer(local_peer, local_peer.end_reason)
        return moved

    def _read_socket(self, local_peer: LocalPeer) -> None:
        try:
            local_peer.flush_control()
            local_peer.receive_packets()
            return
        except PeerGone as gone:
            reason = str(gone)
        except AsyncdistError as error:
            reason = error.summary
        self._by_descriptor.pop(local_peer.sock.fileno(), None)
        local_peer.mark_ended(reason)
        # Messages that the peer sent before its end are still in the ring, and are read first.
        self._pump()
        if local_peer.peer in self._connected and local_peer.peer in self._used:
            self.host.lost(local_peer.peer, reason)

    def _lose_peer(self, local_peer: LocalPeer, reason: str) -> None:
        """Disconnect a peer, and report it as lost if the world reaches it over this transport."""
        self._disconnect(local_peer)
        if local_peer.peer in self._used:
            self.host.lost(local_peer.peer, reason)

    def _disconnect(self, local_peer: LocalPeer) -> None:
        if self._connected.pop(local_peer.peer, None) is not None:
            self._by_descriptor.pop(local_peer.sock.fileno(), None)
            if local_peer.end_reason is None:
                local_peer.shut_down()
                local_peer.mark_ended("")
            local_peer.queue.clear()

    def waits(self) -> list[Wait] | None:
        self.asleep[0] = 1
        # Before this thread and its caller check once more: see `memory_order`.
        self._fence.full()
        if self._pump():
            return None
        waits = [(descriptor, local_peer.poll_events()) for descriptor, local_peer in self._by_descriptor.items()]
        return waits if self._meetings is None else waits + self._meetings.waits()

    def sleep(self, peer: int) -> Sleep | None:
        if peer not in self._connected:
            return None
        self.asleep[0] = 1
        self._fence.full()
        # A signal of any peer clears the flag, and the awaited peer then signals no more.
        waits = list(zip(self._by_descriptor, repeat(READABLE)))
        return Sleep(waits if self._meetings is None else waits + self._meetings.waits(), self._wake_up)

    def _wake_up(self, ready: Iterable[int] | None) -> bool:
        """Read the signals of peers and their control messages, after `sleep`."""
        self.asleep[0] = 0
        for descriptor in ready or ():
            self._read(descriptor)
        return True

    # -- heartbeats ----------------------------------------------------------------------------

    def pulse(self) -> None:
        self._control.words[BEATS] += 1

    def beat(self) -> dict[int, bool]:
        heard = {}
        for peer, local_peer in self._connected.items():
            # A peer that has not begun to beat has not opened its world yet.
            if peer in self._used and (beats := local_peer.control.words[BEATS]):
                heard[peer] = beats != self._beats_heard.get(peer)
                self._beats_heard[peer] = beats
        return heard

    def busy(self) -> bool:
        # Called without the driver lock too, hence the copy.
        for local_peer in list(self._connected.values()):
            if local_peer.queue:
                return True
        return bool(self._awaited)

    def may_receive_from(self, peer: int) -> bool:
        # A peer stays connected until it has gone and everything that it sent has been read.
        return peer in self._connected

    # -- closing -------------------------------------------------------------------------------

    def disconnect(self, peer: int) -> None:
        self._awaited.pop(peer, None)
        if self._meetings is not None:
            self._meetings.forget(peer)
        local_peer = self._connected.get(peer)
        if local_peer is not None:
            if isinstance(self.host.gone(peer), PeerLostError):
                # A peer that is alive reads here why it was excluded.
                local_peer.send_control(self.host.closing_frames(peer))
            self._disconnect(local_peer)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for slots in list(self._slot_tables.values()):
            self._withdraw_slots(slots)
        if self._closed:
            return
        self._closed = True
        self.host.timers.cancel(self)
        if self._meetings is not None:
            self._meetings.close()
        for local_peer in self._connected.values():
            local_peer.send_control(self.host.closing_frames(local_peer.peer))
        self._connected.clear()
        self._by_descriptor.clear()
        for local_peer in self.local_peers.values():
            local_peer.release()
        # A thread that drives late must not write into freed memory.
        self.asleep = memoryview(bytearray(8)).cast("q")
        deferred_free.release_world(self._control, list(self.local_peers.values()))


def _nothing() -> None:
    """Do nothing: the driver that runs this also sees a new timer."""


class ShmLink(Link):
    """The link to one local peer, which has met this rank."""

    def __init__(self, local_peer: LocalPeer) -> None:
        super().__init__(local_peer.peer)
        self._local_peer = local_peer

    def send(self, message: Outgoing) -> bool:
        return self._local_peer.send(message)
