"""Where memory goes that we have no more use for while a peer may still read it.

A member that is done with its group's last collective may leave at once; others may still be adding up what lies in its
slots. What it leaves behind is kept here, visible on its board, until they are done too or gone. Looked through whenever
something is added; a world that we have left with peers still in it has a thread that waits for their ends, as a process
may have no further business with us.
"""

from __future__ import annotations

import contextlib
import gc
import select
import threading
import weakref
from collections.abc import Sequence

from asyncdist.base import lifecycle
from asyncdist.errors import ranks
from asyncdist.memory.shared_arena import ArenaBlock, ArenaMapping
from asyncdist_transports.shm.collectives.slot_table import SlotTable
from asyncdist_transports.shm.control_block import OwnControlBlock
from asyncdist_transports.shm.local_peer import READABLE, LocalPeer

_lock = threading.Lock()
_slot_tables: list[tuple[SlotTable, OwnControlBlock]] = []
_control_blocks: list[tuple[list[ArenaBlock], Sequence[LocalPeer]]] = []
_peer_mappings: weakref.WeakSet[ArenaMapping] = weakref.WeakSet()
_MAX_PEER_MAPPINGS = (
    16  # mappings of peers whose worlds we have left, before we look for the rings of references they hang in
)


def release_slots(slots: SlotTable, control: OwnControlBlock) -> None:
    """Free a window, and take it off the board, once nobody looks at it any more."""
    slots.mark_left()
    with _lock:
        _slot_tables.append((slots, control))
    free_unused()


def release_world(control: OwnControlBlock, rings: Sequence[ArenaBlock], local_peers: Sequence[LocalPeer]) -> None:
    """Free the board and the rings of a world that we have left, once all neighbours have left it too."""
    with _lock:
        _control_blocks.append(([control.block, *rings], local_peers))
        _peer_mappings.update(local_peer.mapping for local_peer in local_peers)
    if (
        len(_peer_mappings) > _MAX_PEER_MAPPINGS
    ):  # the traceback of one error is enough to keep a world, and a dead peer's memory
        gc.collect()
    waiting = [local_peer for local_peer in local_peers if not local_peer.has_left()]
    if waiting:
        outlasting = threading.Thread(
            target=_await_peers, args=(waiting, local_peers), name="asyncdist-deferred-free", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # a process at its end starts no thread, and all this ends with it
            outlasting.start()
    else:
        _close(local_peers)
    free_unused()  # after that question: if all were gone then, nobody else would look again


def free_unused() -> None:
    """Free what nobody looks at any more."""
    with _lock:
        # A neighbour may go at any moment, so the boards come first: where all are gone no window is pending after that,
        # and none is taken off a board that has been freed.
        finished = [world for world in _control_blocks if all(local_peer.has_left() for local_peer in world[1])]
        _control_blocks[:] = [world for world in _control_blocks if world not in finished]
        pending_releases = []
        for slots, control in _slot_tables:
            if any(slots.pending_readers()):
                pending_releases.append((slots, control))
            else:
                control.remove_group(slots.number)
                slots.block.free()
        _slot_tables[:] = pending_releases
        for blocks, _ in finished:
            for block in blocks:
                block.free()


def pending_releases() -> list[str]:
    """Return what is kept, and for which ranks, in words: for who looks for a leak."""
    with _lock:
        windows = [
            (
                f"the window of group {slots.number}",
                [slots.world_ranks[member.rank] for member in slots.pending_readers()],
            )
            for slots, _ in _slot_tables
        ]
        controls = [
            (
                f"{sum(block.nbytes for block in blocks)} bytes of a world",
                [n.peer for n in local_peers if not n.has_left()],
            )
            for blocks, local_peers in _control_blocks
        ]
    return [f"{what}, for ranks {ranks(peers)}" for what, peers in windows + controls]


def _await_peers(waiting: list[LocalPeer], local_peers: Sequence[LocalPeer]) -> None:
    """Wait until each of some neighbours has left; all are neighbours of one world."""
    poll = select.poll()
    for local_peer in waiting:
        assert local_peer.kept_socket is not None
        poll.register(local_peer.kept_socket, READABLE)
    while waiting:
        poll.poll()
        for local_peer in [local_peer for local_peer in waiting if local_peer.has_left()]:
            assert local_peer.kept_socket is not None
            poll.unregister(local_peer.kept_socket)
            waiting.remove(local_peer)
    _close(local_peers)
    free_unused()


def _close(local_peers: Sequence[LocalPeer]) -> None:
    with _lock:  # somebody may just be asking them
        for local_peer in local_peers:
            local_peer.close_kept_socket()


def _after_fork_in_child() -> None:
    """Forget what is the parent's."""
    global _lock
    _lock = threading.Lock()
    _slot_tables.clear()
    _control_blocks.clear()


lifecycle.after_fork(_after_fork_in_child)
