"""The shared-memory transport of one rank: its neighbours, its board, and the windows of its groups."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from asyncdist.errors import AsyncdistError, SharedMemoryError, ranks
from asyncdist.memory import shared_arena as shared
from asyncdist.memory.shared_arena import Arena, ArenaBlock
from asyncdist.transport.base import Address, Host, Link, Outgoing, Transport, Wait
from asyncdist.transport.native import Native
from asyncdist.transport.wire_format import DATA
from asyncdist_transports.shm import deferred_free
from asyncdist_transports.shm.byte_ring import NBYTES as RING_NBYTES
from asyncdist_transports.shm.collectives.native import ShmNative
from asyncdist_transports.shm.collectives.slot_table import PeerHandle, SlotTable
from asyncdist_transports.shm.control_block import ControlBlock, OwnControlBlock
from asyncdist_transports.shm.core_placement import CorePlacement
from asyncdist_transports.shm.local_listener import (
    Introduction,
    LocalListener,
    PeerRefused,
    accept_peer,
    connect_peer,
    out_of_reach,
)
from asyncdist_transports.shm.local_peer import LocalPeer, PeerGone
from asyncdist_transports.shm.memory_order import Fence

log = logging.getLogger("asyncdist.shm")

_PATIENCE = 10.0  # seconds within which ranks that have all been heard of are expected to meet


class ShmTransport(Transport):
    """Mapped memory between ranks of one host and user."""

    name: ClassVar[str] = "shm"
    preference: ClassVar[int] = 50

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._arena: Arena = shared.arena()
        self._fence = Fence()
        self._board = OwnControlBlock(self._arena, host.world_size, self._fence)
        self._asleep = self._board.asleep
        self._spread = CorePlacement(host.rank, self._board)
        self._porch: LocalListener | None = None
        self._cores: dict[int, set[int]] = {}
        self._same_process = False
        self._neighbours: dict[int, LocalPeer] = {}
        """All whom we have met, also those that have gone: what they have left behind may still be wanted."""
        self._living: dict[int, LocalPeer] = {}
        self._used: set[int] = set()  # whom the world reaches by us; who has refused us too late is of no interest
        self._by_descriptor: dict[int, LocalPeer] = {}
        self._rings: list[ArenaBlock] = []
        self._windows: dict[int, SlotTable] = {}
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
        except SharedMemoryError as error:  # better no use of it than none that lasts
            return str(error)
        return None

    # -- coming --------------------------------------------------------------------------------

    def listen(self, where: str) -> dict[str, Any]:
        self._porch = LocalListener(self.host)
        return {**self._porch.address(), "cores": sorted(os.sched_getaffinity(0))}

    def reaches(self, address: Address) -> bool:
        return True  # whom we have not met is not asked about

    async def settle(self, addresses: Sequence[Address | None], timeout: float) -> list[int]:
        porch, own = self._porch, addresses[self.host.rank]
        assert porch is not None
        assert own is not None
        here: dict[int, Address] = {}
        refused: dict[str, list[int]] = {}
        for peer, address in enumerate(addresses):
            if peer == self.host.rank or (address is not None and address["host"] != own["host"]):
                continue
            reason = "it offers none" if address is None else out_of_reach(own, address)
            if address is None or reason is not None:
                refused.setdefault(str(reason), []).append(peer)
            else:
                here[peer] = address
        try:
            if any(address["net"] != own["net"] for peer, address in here.items() if peer > self.host.rank):
                with contextlib.suppress(OSError):  # who does not find it says so
                    porch.open_door()
            await self._meet(porch, here, min(timeout, _PATIENCE), refused)
        finally:
            porch.close()
        for reason, peers in refused.items():
            log.warning(
                "rank %d shares no memory with %s, and uses the next transport: %s",
                self.host.rank,
                ranks(peers),
                reason,
            )
        self._cores = {peer: set(here[peer]["cores"]) for peer in self._neighbours} | {
            self.host.rank: set(own["cores"])
        }
        self._same_process = any(here[peer]["pid"] == own["pid"] for peer in self._neighbours)
        return sorted(self._neighbours)

    async def _meet(
        self, porch: LocalListener, here: Mapping[int, Address], timeout: float, refused: dict[str, list[int]]
    ) -> None:
        """Visit the lower ranks, and receive the higher ones."""
        expected = {peer for peer in here if peer > self.host.rank}
        async with asyncio.TaskGroup() as tasks:
            for peer, address in here.items():
                if peer < self.host.rank:
                    tasks.create_task(self._visit(peer, address, timeout, refused))
            if expected:
                tasks.create_task(self._receive(porch, expected, timeout, refused))

    async def _visit(self, peer: int, address: Address, timeout: float, refused: dict[str, list[int]]) -> None:
        try:
            async with asyncio.timeout(timeout):
                sock, introduction = await connect_peer(address, self.host, self._arena, self._board.block.offset)
        except PeerRefused as refusal:
            refused.setdefault(str(refusal), []).append(peer)
        except TimeoutError:
            refused.setdefault("it did not answer at its Unix socket", []).append(peer)
        except OSError as cause:
            refused.setdefault(_short_of_sockets(cause), []).append(peer)
        else:
            self._welcome(sock, introduction)

    async def _receive(
        self, porch: LocalListener, expected: set[int], timeout: float, refused: dict[str, list[int]]
    ) -> None:
        """Receive visitors, strangers among them, side by side: who says nothing keeps nobody waiting."""
        missing = set(expected)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), asyncio.TaskGroup() as tasks:
                visitors: set[asyncio.Task[None]] = set()

                async def receive_one(sock: socket.socket) -> None:
                    try:
                        introduction = await accept_peer(
                            sock, self.host, self._arena, self._board.block.offset, missing
                        )
                    except PeerRefused as refusal:
                        log.debug("rank %d turned a visitor away: %s", self.host.rank, refusal)
                        if refusal.rank in missing:
                            missing.discard(refusal.rank)
                            refused.setdefault(str(refusal), []).append(refusal.rank)
                    else:
                        missing.discard(introduction[0])
                        self._welcome(sock, introduction)
                    if not missing:
                        entrance.cancel()

                def part_with(sock: socket.socket, visitor: asyncio.Task[None]) -> None:
                    visitors.discard(visitor)
                    if visitor.cancelled():  # perhaps before it began
                        sock.close()

                async def stand_open() -> None:
                    while True:
                        try:
                            sock = await porch.visitor()
                        except OSError as cause:
                            refused.setdefault(_short_of_sockets(cause), []).extend(sorted(missing))
                            missing.clear()
                            return
                        visitor = tasks.create_task(receive_one(sock))
                        visitors.add(visitor)
                        visitor.add_done_callback(functools.partial(part_with, sock))

                entrance = tasks.create_task(stand_open())
                await asyncio.wait([entrance])
                for visitor in visitors:
                    visitor.cancel()
        if missing:
            refused.setdefault("it did not come to our Unix socket", []).extend(sorted(missing))

    def _welcome(self, sock: socket.socket, introduction: Introduction) -> None:
        peer, mapping, offset = introduction
        board = ControlBlock(mapping, offset, self.host.world_size)
        neighbour = LocalPeer(peer, sock, mapping, board, self._board, self.host, self._fence)
        self._neighbours[peer] = self._living[peer] = self._by_descriptor[sock.fileno()] = neighbour

    def spin(self, here: int) -> tuple[float, bool]:
        # Who spins keeps the interpreter from a peer in the same process.
        return 0.0 if self._same_process else self.host.config.spin_us * 1e-6, self._crowded

    @property
    def _crowded(self) -> bool:
        """Whether ranks outnumber what they run on: what one does, others wait for."""
        return self._same_process or len(self._cores) > len(set().union(*self._cores.values()))

    def spread(self) -> None:
        if not self._same_process:  # of whose ranks only one has the interpreter
            self._spread([(neighbour.peer, neighbour.board) for neighbour in list(self._living.values())])

    # -- groups --------------------------------------------------------------------------------

    def native(self, number: int, members: Sequence[int]) -> Native:
        sharers = [None if member == self.host.rank else self._sharer(member) for member in members]
        config = self.host.config

        def difference(member: int, ours: int, theirs: int) -> Exception:
            return self.host.difference(members[member], ours, theirs)

        window = SlotTable(
            number, members.index(self.host.rank), members, sharers, self._arena, self._fence, config.shm_area_nbytes,
            difference, crowded=self._crowded,
        )  # fmt: skip
        try:
            show = functools.partial(self._show, window, self._board.claim())
        except SharedMemoryError:
            window.block.free()
            raise
        return ShmNative(window, config.piece_nbytes, show, functools.partial(self._hide, window))

    def _sharer(self, peer: int) -> PeerHandle:
        neighbour = self._neighbours[peer]
        self._used.add(peer)
        return PeerHandle(neighbour.mapping, neighbour.board.window, neighbour.asleep, neighbour.ring, neighbour.gone)

    def _show(self, window: SlotTable, place: int) -> None:
        self._windows[window.number] = window
        self._board.show(place, window.number, window.block.offset)
        for neighbour in self._living.values():
            neighbour.wake()  # it may wait for this very group

    def _hide(self, window: SlotTable) -> None:
        if self._windows.pop(window.number, None) is not None and self._arena.pid == os.getpid():
            deferred_free.leave(window, self._board)

    # -- links ---------------------------------------------------------------------------------

    def link(self, peer: int, address: Address) -> ShmLink:
        self._used.add(peer)
        return ShmLink(self._neighbours[peer], self)

    def send(self, neighbour: LocalPeer, message: Outgoing) -> bool:
        """Send a message of ours: through the ring, or beside it if it is a notice."""
        if unpack_kind(message) == DATA:
            return neighbour.send(message, self._make_ring, self._arena)
        neighbour.tell(message.header + bytes(message.body))
        message.done = True
        return True

    def _make_ring(self) -> int:
        block = self._arena.allocate(RING_NBYTES)
        self._rings.append(block)
        return block.offset

    # -- driving -------------------------------------------------------------------------------

    def advance(self, ready: Iterable[int] | None) -> bool:
        self._asleep[0] = 0
        moved = False
        if ready is not None:
            for descriptor in ready:
                neighbour = self._by_descriptor.get(descriptor)
                if neighbour is not None:
                    self._listen(neighbour)
                    moved = True
        return self._pump() or moved

    def _pump(self) -> bool:
        moved = False
        for neighbour in list(self._living.values()):
            try:
                moved = neighbour.pump() or moved
            except AsyncdistError as error:
                self._lose(neighbour, str(error))
            if neighbour.ended is not None and neighbour.silent and neighbour.peer in self._living:
                self._lose(neighbour, neighbour.ended)
        return moved

    def _listen(self, neighbour: LocalPeer) -> None:
        try:
            neighbour.flush_notices()
            neighbour.listen()
            return
        except PeerGone as gone:
            reason = str(gone)
        except AsyncdistError as error:
            reason = str(error)
        self._by_descriptor.pop(neighbour.sock.fileno(), None)
        neighbour.end(reason)
        self._pump()  # what it had sent before is there still, and is read first
        if neighbour.peer in self._living and neighbour.peer in self._used:
            self.host.lost(neighbour.peer, reason)

    def _lose(self, neighbour: LocalPeer, reason: str) -> None:
        """Have no more to do with a peer, nor the world either if it reaches it by us."""
        self._part(neighbour)
        if neighbour.peer in self._used:
            self.host.lost(neighbour.peer, reason)

    def _part(self, neighbour: LocalPeer) -> None:
        if self._living.pop(neighbour.peer, None) is not None:
            self._by_descriptor.pop(neighbour.sock.fileno(), None)
            if neighbour.ended is None:
                neighbour.hang_up()
                neighbour.end("")
            neighbour.queue.clear()

    def waits(self) -> list[Wait] | None:
        self._asleep[0] = 1
        self._fence.full()  # before we, and whoever asks us, look once more: see `order`
        if self._pump():
            return None
        return [(descriptor, neighbour.waits()) for descriptor, neighbour in self._by_descriptor.items()]

    def busy(self) -> bool:
        for neighbour in list(self._living.values()):  # asked without the lock too
            if neighbour.queue:
                return True
        return False

    def hears(self, peer: int) -> bool:
        return peer in self._living  # until it has gone and all is read that it has sent

    # -- going ---------------------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        neighbour = self._living.get(peer)
        if neighbour is not None:
            self._part(neighbour)

    def close(self) -> None:
        if self._porch is not None:
            self._porch.close()
        for window in list(self._windows.values()):
            self._hide(window)
        if self._closed:
            return
        self._closed = True
        for neighbour in self._living.values():
            neighbour.tell(self.host.last_words)
        self._living.clear()
        self._by_descriptor.clear()
        for neighbour in self._neighbours.values():
            neighbour.leave()
        deferred_free.leave_board(self._board, self._rings, list(self._neighbours.values()))


class ShmLink(Link):
    """The way to one neighbour."""

    def __init__(self, neighbour: LocalPeer, transport: ShmTransport) -> None:
        super().__init__(neighbour.peer)
        self._neighbour = neighbour
        self._transport = transport

    def send(self, message: Outgoing) -> bool:
        return self._transport.send(self._neighbour, message)

    def open(self) -> None:
        """There is nothing to open: neighbours have met before the world was complete."""

    def close(self) -> None:
        """Neighbours part when the transport closes."""


def _short_of_sockets(cause: OSError) -> str:
    return f"this process gets no more sockets: {cause.strerror}"


def unpack_kind(message: Outgoing) -> int:
    """Return the kind of a message: data or a notice."""
    return message.header[32]
