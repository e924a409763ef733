"""Deferred release of shared memory: memory that this rank no longer uses while a peer may still read it.

A member that has finished its group's last collective may leave at once, while other members still read its slots. Its
slot table stays allocated, and published in the control block, until they have finished or left. Every release checks
all pending ones. If peers are still in a closed world, a thread also waits for their sockets to close, because the
process may never call this transport again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import select
import threading
import weakref
from collections.abc import Sequence

from asyncdist.base import lifecycle
from asyncdist.base.daemon_threads import start_daemon_thread
from asyncdist.kernel.memory.shared_arena import ArenaMapping
from asyncdist_transports.shm.collectives.slot_table import SlotTable
from asyncdist_transports.shm.control_block import OwnControlBlock
from asyncdist_transports.shm.local_peer import READABLE, LocalPeer

_lock = threading.Lock()
lifecycle.renew_in_children(globals(), "_lock", threading.Lock)
_slot_tables: list[tuple[SlotTable, OwnControlBlock]] = []
_worlds: list[tuple[OwnControlBlock, Sequence[LocalPeer]]] = []
_peer_mappings: weakref.WeakSet[ArenaMapping] = weakref.WeakSet()
# Mappings of peers that have ended, or whose world is closed, before a garbage collection looks for cycles that hold them.
_MAX_PEER_MAPPINGS = 16


def release_slots(slots: SlotTable, control: OwnControlBlock) -> None:
    """Free a slot table, and unpublish it, once no peer reads it any more."""
    slots.mark_left()
    with _lock:
        _slot_tables.append((slots, control))
    free_unused()


def release_world(control: OwnControlBlock, local_peers: Sequence[LocalPeer]) -> None:
    """Free the control block and the rings of a closed world, once all its local peers have left it too."""
    with _lock:
        _worlds.append((control, local_peers))
    expect_unmapped(*(local_peer.mapping for local_peer in local_peers))
    if all(local_peer.has_left() for local_peer in local_peers):
        _close(local_peers)
    else:
        # A process at its end starts no thread, and its memory ends with it.
        with contextlib.suppress(RuntimeError):
            start_daemon_thread(
                functools.partial(_await_peers, local_peers), "asyncdist-deferred-free", awaited_at_exit=False
            )
    # After `has_left`: if every peer had left by then, no later call would check again.
    free_unused()


def expect_unmapped(*mappings: ArenaMapping) -> None:
    """Look for reference cycles if too many mappings of peers that are not needed any more still exist."""
    with _lock:
        _peer_mappings.update(mappings)
    # The traceback of one error is enough to keep a group, and with it the memory of a dead peer.
    if len(_peer_mappings) > _MAX_PEER_MAPPINGS:
        gc.collect()


def free_unused(of: OwnControlBlock | None = None) -> bool:
    """Free what no peer reads any more; return whether something is left of the world with a control block."""
    with _lock:
        # A peer may leave at any moment, so worlds are checked first: once all peers of a world have left, none of its slot
        # tables is pending, and none is removed from a control block that has been freed.
        finished = [world for world in _worlds if all(local_peer.has_left() for local_peer in world[1])]
        _worlds[:] = [world for world in _worlds if world not in finished]
        pending = []
        for slots, control in _slot_tables:
            if any(slots.pending_readers()):
                pending.append((slots, control))
            else:
                control.remove_group(slots.number)
                slots.block.free()
        _slot_tables[:] = pending
        for control, local_peers in finished:
            control.block.free()
            for local_peer in local_peers:
                local_peer.free_ring()
        return any(control is of for _, control in _slot_tables)


def _await_peers(local_peers: Sequence[LocalPeer]) -> None:
    """Wait until all local peers of a world have left it."""
    while waiting := [each.kept_socket for each in local_peers if not each.has_left() and each.kept_socket is not None]:
        poll = select.poll()
        for sock in waiting:
            poll.register(sock, READABLE)
        poll.poll()
    _close(local_peers)
    free_unused()


def _close(local_peers: Sequence[LocalPeer]) -> None:
    # Another thread may call `has_left` on them.
    with _lock:
        for local_peer in local_peers:
            local_peer.close_kept_socket()


def _after_fork_in_child() -> None:
    """Drop what belongs to the parent process."""
    _slot_tables.clear()
    _worlds.clear()


lifecycle.after_fork(_after_fork_in_child)
