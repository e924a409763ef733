"""What we have left and peers may still read: freed as soon as they have left too, at whatever moment that is."""

from __future__ import annotations

import itertools
import socket
import threading
import types

import pytest

from asyncdist.memory.shared_arena import ArenaBlock, arena
from asyncdist_transports.shm import deferred_free
from asyncdist_transports.shm.collectives.slot_table import PeerHandle, SlotTable
from asyncdist_transports.shm.control_block import OwnControlBlock
from asyncdist_transports.shm.local_peer import LocalPeer
from asyncdist_transports.shm.memory_order import Fence

NUMBER = 7  # of the group


class Rank:
    """What one rank of a world has in shared memory: a board, a window, and neighbours."""

    def __init__(self, rank, size):
        self.rank, self.size, self.fence = rank, size, Fence()
        self.board = OwnControlBlock(arena(), size, self.fence)
        self.neighbours = {}

    def meet(self, peer, sock):
        sock.setblocking(False)
        host = types.SimpleNamespace(rank=self.rank, retire=lambda sock: sock.close())
        self.neighbours[peer.rank] = LocalPeer(
            peer.rank, sock, arena().mapping, peer.board, self.board, host, self.fence
        )

    def make_window(self):
        sharers = [None] * self.size
        for rank, peer in self.neighbours.items():
            sharers[rank] = PeerHandle(peer.mapping, peer.board.window, peer.asleep, peer.ring, peer.gone)
        members = range(self.size)
        self.window = SlotTable(NUMBER, self.rank, members, sharers, arena(), self.fence, 1 << 12, pytest.fail)
        self.board.show(self.board.claim(), NUMBER, self.window.block.offset)

    def begin_a_collective(self):
        assert list(self.window.enter(1)) == []
        self.window.post(1, 0, 0, 1)

    def hang_up(self):
        for peer in self.neighbours.values():
            peer.hang_up()

    def leave(self):
        deferred_free.leave(self.window, self.board)
        for peer in self.neighbours.values():
            peer.leave()
        deferred_free.leave_board(self.board, [], list(self.neighbours.values()))


def world(size):
    ranks = [Rank(rank, size) for rank in range(size)]
    for one, other in itertools.combinations(ranks, 2):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.meet(other, here)
        other.meet(one, there)
    for rank in ranks:
        rank.make_window()
    return ranks


def outlasted():
    """Wait until nobody waits for the end of a peer."""
    for thread in threading.enumerate():
        if thread.name == "asyncdist-limbo":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("size", [2, 3])
def test_a_world_is_freed_whenever_between_two_questions_its_peers_leave(monkeypatch, size):
    """Whoever asks twice whether somebody is gone may be told different things."""
    used = arena().used_nbytes
    gone, free, hide = LocalPeer.gone, ArenaBlock.free, OwnControlBlock.hide
    for last in itertools.count():
        first, *others = world(size)
        first.begin_a_collective()
        asked, given_up = itertools.count(), []

        def ask(neighbour, first=first, others=others, asked=asked, last=last):
            if neighbour in first.neighbours.values() and next(asked) == last:
                for other in others:
                    other.hang_up()
            return gone(neighbour)

        with monkeypatch.context() as patch:
            patch.setattr(LocalPeer, "gone", ask)
            patch.setattr(
                OwnControlBlock, "hide", lambda board, number, to=given_up: (to.append(number), hide(board, number))
            )
            patch.setattr(ArenaBlock, "free", lambda block, to=given_up: (to.append(block.offset), free(block)))
            first.leave()
            in_time = next(asked) > last
            for other in others:
                other.hang_up()
            outlasted()
        assert given_up == [NUMBER, first.window.block.offset, first.board.block.offset]
        for other in others:
            other.leave()
        outlasted()
        assert arena().used_nbytes == used
        if not in_time:
            break
    assert last > 1


def test_a_process_at_its_end_which_may_start_no_thread_leaves_nevertheless(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    used = arena().used_nbytes
    first, other = world(2)
    first.begin_a_collective()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first.leave()
    assert arena().used_nbytes > used
    other.leave()
    assert arena().used_nbytes == used
    for neighbour in first.neighbours.values():
        neighbour.close()
