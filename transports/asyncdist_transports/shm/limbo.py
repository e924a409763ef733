"""Where memory goes that we have no more use for while a peer may still read it.

A member that is done with its group's last collective may leave at once; others may still be adding up what lies in its
slots. What it leaves behind is kept here, visible on its board, until they are done too or gone. Looked through whenever
something is added.
"""

from __future__ import annotations

import threading

from asyncdist.arena import Block
from asyncdist_transports.shm.board import OwnBoard
from asyncdist_transports.shm.neighbour import Neighbour
from asyncdist_transports.shm.window import Window

_lock = threading.Lock()
_windows: list[tuple[Window, OwnBoard]] = []
_boards: list[tuple[OwnBoard, list[tuple[Block, Neighbour]]]] = []


def leave(window: Window, board: OwnBoard) -> None:
    """Free a window, and take it off the board, once nobody looks at it any more."""
    with _lock:
        _windows.append((window, board))
    sweep()


def leave_board(board: OwnBoard, rings: list[tuple[Block, Neighbour]]) -> None:
    """Free the board and the rings of a world that we have left, once nobody looks at any window on it, or reads a ring."""
    with _lock:
        _boards.append((board, rings))
    sweep()


def sweep() -> None:
    """Free what nobody looks at any more."""
    with _lock:
        kept = []
        for window, board in _windows:
            if any(window.pending()):
                kept.append((window, board))
            else:
                board.hide(window.number)
                window.block.free()
        _windows[:] = kept
        shown = {id(board) for _, board in kept}
        waiting = []
        for board, rings in _boards:
            unread = [(block, neighbour) for block, neighbour in rings if not neighbour.heard]
            if id(board) in shown or unread:
                waiting.append((board, rings))
                continue
            for block in (board.block, *(block for block, _ in rings)):
                block.free()
        _boards[:] = waiting
