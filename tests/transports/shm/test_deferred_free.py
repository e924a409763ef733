"""Memory of a closed world is freed when the last peer has left, at whatever moment that is."""

from __future__ import annotations

import itertools
import socket
import threading
import types

import pytest

from asyncdist.kernel.memory.shared_arena import ArenaBlock, arena
from asyncdist_transports.shm import deferred_free
from asyncdist_transports.shm.collectives.slot_table import SlotTable
from asyncdist_transports.shm.control_block import OwnControlBlock
from asyncdist_transports.shm.local_peer import LocalPeer
from asyncdist_transports.shm.memory_order import Fence

GROUP_NUMBER = 7


class Rank:
    """The control block, the slot table and the local peers of one rank."""

    def __init__(self, rank, size):
        self.rank, self.size, self.fence = rank, size, Fence()
        self.control = OwnControlBlock(arena(), size, self.fence)
        self.local_peers = {}

    def meet(self, peer, sock):
        sock.setblocking(False)
        host = types.SimpleNamespace(rank=self.rank, retire=lambda sock: sock.close())
        self.local_peers[peer.rank] = LocalPeer(
            peer.rank, sock, arena().mapping, peer.control, self.control, host, arena(), self.fence
        )

    def make_slots(self):
        members = range(self.size)
        self.slots = SlotTable(
            GROUP_NUMBER,
            self.rank,
            members,
            self.local_peers,
            arena(),
            self.fence,
            1 << 12,
            members,
            pytest.fail,
            meet=set().add,
        )
        self.control.publish_group(self.control.reserve_entry(), GROUP_NUMBER, self.slots.block.offset)

    def begin_collective(self):
        assert list(self.slots.enter(1)) == []
        self.slots.post(1, 0, 0, 1)

    def close_connections(self):
        for peer in self.local_peers.values():
            peer.shut_down()

    def leave(self):
        deferred_free.release_slots(self.slots, self.control)
        for peer in self.local_peers.values():
            peer.release()
        deferred_free.release_world(self.control, list(self.local_peers.values()))


def world(size):
    ranks = [Rank(rank, size) for rank in range(size)]
    for one, other in itertools.combinations(ranks, 2):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.meet(other, here)
        other.meet(one, there)
    for rank in ranks:
        rank.make_slots()
    return ranks


def join_waiting_threads():
    """Wait until no thread waits for the end of a peer."""
    for thread in threading.enumerate():
        if thread.name.startswith("asyncdist-deferred-free"):
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("size", [2, 3])
def test_world_is_freed_when_peers_leave_between_two_checks(monkeypatch, size):
    """Two calls of `has_left` may return different results."""
    used = arena().used_nbytes
    has_left, free, remove_group = LocalPeer.has_left, ArenaBlock.free, OwnControlBlock.remove_group
    for last in itertools.count():
        first, *others = world(size)
        first.begin_collective()
        calls, freed = itertools.count(), []

        def check(local_peer, first=first, others=others, calls=calls, last=last):
            if local_peer in first.local_peers.values() and next(calls) == last:
                for other in others:
                    other.close_connections()
            return has_left(local_peer)

        with monkeypatch.context() as patch:
            patch.setattr(LocalPeer, "has_left", check)
            patch.setattr(
                OwnControlBlock,
                "remove_group",
                lambda control, number, freed=freed: (freed.append(number), remove_group(control, number)),
            )
            patch.setattr(ArenaBlock, "free", lambda block, freed=freed: (freed.append(block.offset), free(block)))
            first.leave()
            in_time = next(calls) > last
            for other in others:
                other.close_connections()
            join_waiting_threads()
        assert freed == [GROUP_NUMBER, first.slots.block.offset, first.control.block.offset]
        for other in others:
            other.leave()
        join_waiting_threads()
        assert arena().used_nbytes == used
        if not in_time:
            break
    assert last > 1


def test_slots_are_kept_for_an_excluded_process_that_lives():
    """It may be stopped in a call that this rank has never made, and go on to read the words of this rank."""
    used = arena().used_nbytes
    first, other = world(2)
    excluded = first.local_peers[1]
    excluded.shut_down()
    excluded.mark_ended("")
    deferred_free.release_slots(first.slots, first.control)
    seen = other.local_peers[0].control
    assert seen.group_slots(GROUP_NUMBER) is not None
    other.close_connections()
    deferred_free.free_unused()
    assert seen.group_slots(GROUP_NUMBER) is None
    excluded.release()
    deferred_free.release_world(first.control, [excluded])
    other.leave()
    join_waiting_threads()
    assert arena().used_nbytes == used


def test_world_is_left_when_no_thread_can_be_started(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    used = arena().used_nbytes
    first, other = world(2)
    first.begin_collective()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first.leave()
    assert arena().used_nbytes > used
    other.leave()
    assert arena().used_nbytes == used
    for local_peer in first.local_peers.values():
        local_peer.close_kept_socket()
