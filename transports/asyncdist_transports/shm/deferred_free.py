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
_windows: list[tuple[SlotTable, OwnControlBlock]] = []
_boards: list[tuple[list[ArenaBlock], Sequence[LocalPeer]]] = []
_foreign: weakref.WeakSet[ArenaMapping] = weakref.WeakSet()
_MOST_FOREIGN = (
    16  # mappings of peers whose worlds we have left, before we look for the rings of references they hang in
)


def leave(window: SlotTable, board: OwnControlBlock) -> None:
    """Free a window, and take it off the board, once nobody looks at it any more."""
    window.leave()
    with _lock:
        _windows.append((window, board))
    sweep()


def leave_board(board: OwnControlBlock, rings: Sequence[ArenaBlock], neighbours: Sequence[LocalPeer]) -> None:
    """Free the board and the rings of a world that we have left, once all neighbours have left it too."""
    with _lock:
        _boards.append(([board.block, *rings], neighbours))
        _foreign.update(neighbour.mapping for neighbour in neighbours)
    if len(_foreign) > _MOST_FOREIGN:  # the traceback of one error is enough to keep a world, and a dead peer's memory
        gc.collect()
    waiting = [neighbour for neighbour in neighbours if not neighbour.gone()]
    if waiting:
        outlasting = threading.Thread(target=_outlast, args=(waiting, neighbours), name="asyncdist-limbo", daemon=True)
        with contextlib.suppress(RuntimeError):  # a process at its end starts no thread, and all this ends with it
            outlasting.start()
    else:
        _close(neighbours)
    sweep()  # after that question: if all were gone then, nobody else would look again


def sweep() -> None:
    """Free what nobody looks at any more."""
    with _lock:
        # A neighbour may go at any moment, so the boards come first: where all are gone no window is pending after that,
        # and none is taken off a board that has been freed.
        over = [world for world in _boards if all(neighbour.gone() for neighbour in world[1])]
        _boards[:] = [world for world in _boards if world not in over]
        kept = []
        for window, board in _windows:
            if any(window.pending()):
                kept.append((window, board))
            else:
                board.hide(window.number)
                window.block.free()
        _windows[:] = kept
        for blocks, _ in over:
            for block in blocks:
                block.free()


def kept() -> list[str]:
    """Return what is kept, and for which ranks, in words: for who looks for a leak."""
    with _lock:
        windows = [
            (f"the window of group {window.number}", [window.world_ranks[member.rank] for member in window.pending()])
            for window, _ in _windows
        ]
        boards = [
            (f"{sum(block.nbytes for block in blocks)} bytes of a world", [n.peer for n in neighbours if not n.gone()])
            for blocks, neighbours in _boards
        ]
    return [f"{what}, for ranks {ranks(peers)}" for what, peers in windows + boards]


def _outlast(waiting: list[LocalPeer], neighbours: Sequence[LocalPeer]) -> None:
    """Wait until each of some neighbours has left; all are neighbours of one world."""
    poll = select.poll()
    for neighbour in waiting:
        assert neighbour.kept is not None
        poll.register(neighbour.kept, READABLE)
    while waiting:
        poll.poll()
        for neighbour in [neighbour for neighbour in waiting if neighbour.gone()]:
            assert neighbour.kept is not None
            poll.unregister(neighbour.kept)
            waiting.remove(neighbour)
    _close(neighbours)
    sweep()


def _close(neighbours: Sequence[LocalPeer]) -> None:
    with _lock:  # somebody may just be asking them
        for neighbour in neighbours:
            neighbour.close()


def _in_child() -> None:
    """Forget what is the parent's."""
    global _lock
    _lock = threading.Lock()
    _windows.clear()
    _boards.clear()


lifecycle.after_fork(_in_child)
