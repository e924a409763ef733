"""A peer on this host: its mapped memory, and the Unix socket for wake-ups, control messages and the end of the peer.

The socket keeps packets apart (SOCK_SEQPACKET). A packet is a wake-up (one byte) or control messages, framed as on any
stream. Its end means that the peer has gone: in order if it has sent a goodbye before. `transport` owns one `LocalPeer` per
connected rank.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque

from asyncdist.base import lifecycle
from asyncdist.errors import ProtocolError
from asyncdist.kernel.memory.shared_arena import Arena, ArenaBlock, ArenaMapping
from asyncdist.kernel.transport.base import Host, Outgoing
from asyncdist.kernel.transport.wire_format import DATA, HEADER_NBYTES, KEY_NBYTES, unpack_tail
from asyncdist_transports.byte_stream import PACKET_NBYTES, Reader, Writer
from asyncdist_transports.shm.byte_ring import NBYTES, RingReader, RingWriter
from asyncdist_transports.shm.control_block import RING, ControlBlock, OwnControlBlock
from asyncdist_transports.shm.memory_order import Fence

WAKE_PACKET = b"!"
READABLE, WRITABLE = select.POLLIN, select.POLLOUT


class PeerGone(Exception):
    """The peer has closed its end of the socket; the message is the reason."""


class LocalPeer:
    """One rank of the world with which this rank shares memory."""

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        mapping: ArenaMapping,
        control: ControlBlock,
        own_control: OwnControlBlock,
        host: Host,
        arena: Arena,
        fence: Fence,
    ) -> None:
        self.peer = peer
        self.sock = sock
        self.mapping, self.control = mapping, control
        self.asleep = control.asleep
        self._host, self._arena, self._fence = host, arena, fence
        self._own_words, self._peer_words = own_control.peer_words(peer), control.peer_words(host.rank)
        # Control messages for which the socket had no space.
        self._unsent_control: deque[bytes] = deque()
        self.queue: deque[Outgoing] = deque()
        self._ring_block: ArenaBlock | None = None
        self._writer: Writer | None = None
        self._ring: RingReader | None = None
        self._reader: Reader | None = None
        self.end_reason: str | None = None
        """Why the peer's socket has ended; None while it is open."""
        # Whether the peer has closed its end, after which it reads no memory of this rank.
        self._peer_closed = False
        self.kept_socket: socket.socket | None = None
        """The socket on which `has_left` waits for the peer, after `release`."""

    # -- the socket ----------------------------------------------------------------------------

    def signal(self) -> None:
        """Wake the sleeping peer. Clearing its flag first spares later publishers the system call."""
        self.asleep[0] = 0
        # A full socket already holds a packet that wakes the peer, and a closed one has no reader.
        try:  # noqa: SIM105 - suppress() would enter three functions
            self.sock.send(WAKE_PACKET)
        except OSError:
            pass

    def wake_if_asleep(self) -> None:
        if self.asleep[0]:
            self.signal()

    def send_control(self, packet: bytes) -> None:
        """Send control messages, after those sent before."""
        self._unsent_control.append(packet)
        self.flush_control()

    def flush_control(self) -> None:
        """Send the pending control messages as far as the socket takes them."""
        try:
            while self._unsent_control:
                self.sock.send(self._unsent_control[0])
                self._unsent_control.popleft()
        except BlockingIOError:
            pass
        # The reading side reports the end, after the peer's last messages.
        except OSError:
            self._unsent_control.clear()

    def poll_events(self) -> int:
        """Return the poll events to wait for at the socket."""
        return READABLE | WRITABLE if self._unsent_control else READABLE

    def receive_packets(self) -> None:
        """Handle the packets that have arrived, up to a wake-up: most often it is the only one.

        Raises PeerGone at the end, and ProtocolError for a malformed packet.
        """
        while True:
            try:
                packet = self.sock.recv(PACKET_NBYTES)
            except BlockingIOError:
                return
            # The peer has closed a socket with unread packets. The system says so before it gives the peer's last packets.
            except ConnectionResetError:
                continue
            except OSError as cause:
                self._peer_closed = True
                raise PeerGone(cause.strerror or str(cause)) from cause
            if not packet:
                self._peer_closed = True
                raise PeerGone("its connection has ended")
            if packet == WAKE_PACKET:
                return
            self._dispatch_control(packet)

    def _dispatch_control(self, packet: bytes) -> None:
        at = 0
        while at < len(packet):
            head = packet[at : at + HEADER_NBYTES]
            if len(head) < HEADER_NBYTES:
                raise ProtocolError("a truncated control message")
            _, nbytes, kind = unpack_tail(head)
            at += HEADER_NBYTES + nbytes
            if at > len(packet):
                raise ProtocolError(f"a control message that claims {nbytes} bytes and has fewer")
            self._host.control(self.peer, kind, head[:KEY_NBYTES], packet[at - nbytes : at])

    # -- messages ------------------------------------------------------------------------------

    def send(self, message: Outgoing) -> bool:
        """Send data through the ring, and a control message over the socket; return whether the message has left."""
        if unpack_tail(message.header)[2] != DATA:
            self.send_control(message.header + bytes(message.body))
            message.done = True
            return True
        return (self._writer or self._make_ring()).send(message)

    def _make_ring(self) -> Writer:
        """Make the ring to this peer, with the first message."""
        block = self._ring_block = self._arena.allocate(NBYTES)
        offset = block.offset
        memory = self._arena.mapping.view(offset, NBYTES)
        ring = RingWriter(memory, self._own_words, self._peer_words, self._fence, self.wake_if_asleep)
        writer = self._writer = Writer(ring, self.queue)
        writer.open = True
        self._fence.light()
        self._own_words[RING] = 1 + offset
        return writer

    def move_messages(self) -> bool:
        """Move messages in both directions as far as possible; return whether any byte moved."""
        moved = self._writer.flush() if self.queue and self._writer is not None else False
        ring = self._ring
        if ring is None:
            offset = self._peer_words[RING] - 1
            if offset < 0:
                return moved
            self._fence.light()
            ring = self._ring = RingReader(
                self.mapping.view(offset, NBYTES), self._own_words, self._peer_words, self._fence, self.wake_if_asleep
            )
            self._reader = Reader(ring, self.peer, self._host, self._host.inbox(self.peer))
        reader = self._reader
        assert reader is not None
        if not ring.empty or reader.backlogged:
            return reader.read() or moved
        return moved

    @property
    def drained(self) -> bool:
        """Whether every byte that the peer has sent has been read."""
        return self._peer_words[RING] == 0 or (self._ring is not None and self._ring.empty)

    # -- the end -------------------------------------------------------------------------------

    def mark_ended(self, reason: str) -> None:
        """Note the end of the socket. It stays open, which tells the peer that this rank may still read its memory."""
        if self.end_reason is None:
            self.end_reason = reason

    def shut_down(self) -> None:
        """Close the sending half, so that the peer reads the end of the socket. Idempotent."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def release(self) -> None:
        """Read no memory of the peer any more. `has_left` says whether the peer may still read this rank's memory."""
        self.shut_down()
        if not self._peer_closed:
            # A loop may still watch the original.
            self.kept_socket = self.sock.dup()
            lifecycle.close_in_children(self.kept_socket)
        self._host.retire(self.sock)
        self._writer = self._reader = self._ring = None
        self.queue.clear()

    def has_left(self) -> bool:
        """Return whether the peer has left the world or has died, and so reads no memory of this rank."""
        # After a disconnection the socket stays open, and no other thread reads it.
        sock = self.sock if self.kept_socket is None and self.end_reason is not None else self.kept_socket
        if not self._peer_closed and sock is not None:
            with contextlib.suppress(BlockingIOError):
                while not self._peer_closed:
                    try:
                        self._peer_closed = not sock.recv(PACKET_NBYTES)
                    except ConnectionError:
                        self._peer_closed = True
        return self._peer_closed

    def free_ring(self) -> None:
        """Free the memory of the ring to the peer, which has left."""
        if self._ring_block is not None:
            self._ring_block.free()

    def close_kept_socket(self) -> None:
        """Close the socket that `release` has kept. Idempotent."""
        if self.kept_socket is not None:
            self._peer_closed = True
            self.kept_socket.close()
