"""Ranks that share memory and wait, fork, use another transport or run out of memory: a function for each test."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import socket
import tempfile
import time

import torch

import asyncdist
from asyncdist import sync
from asyncdist.errors import AsyncdistError
from asyncdist.kernel.engine.drivers import waiting
from asyncdist.kernel.engine.operation import Plan
from asyncdist.kernel.memory import shared_arena

torch.set_num_threads(1)
NOBODY = 65534
_KEEP_CAPABILITIES, _CAPABILITIES_V3, _MAY_READ = 8, 0x20080522, 1 << 2
_NEW_MOUNTS, _PRIVATE, _DETACHED = 0x20000, 0x44000, 2


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("asyncdist").addHandler(self)
        logging.getLogger("asyncdist").setLevel(logging.INFO)

    def emit(self, record):
        self.lines.append(record.getMessage())


def summed(group, count, **how):
    tensor = torch.full((count,), group.rank() + 1.0)
    group.all_reduce(tensor, background=False, **how).result()
    return tensor[-1].item()


def run_many_collectives(test, where, rank, size, rounds):
    """Run all-reduces, barriers and messages, and check the sums."""
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=30) as group:
        for number in range(rounds):
            tensor = torch.tensor([float(number + rank)])
            group.all_reduce(tensor, background=False).result()
            assert tensor.item() == size * number + size * (size - 1) / 2
            if number % 4 == 0:
                group.barrier(background=False).result()
            if number % 16 == 0:
                group.send(tensor, 1 - rank, background=False) if rank else group.recv(tensor, 1, background=False)
    test.send("done")


def wait_for_a_stopped_rank(test, where, rank, size):
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=30) as group:
        summed(group, 10)
        test.send("warm")
        test.recv()
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        try:
            summed(group, 10, timeout=1.0)
        except Exception as error:
            kind, peers = type(error).__name__, getattr(error, "peers", ())
        over, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        test.send((kind, peers, over - began, over, used, after.ru_nvcsw - before.ru_nvcsw))


def fork_and_wait(test, where, rank, size):
    """Fork a child that outlives rank 1, as a data loader may."""
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=30) as group:
        summed(group, 10)
        if rank == 1:
            child = os.fork()
            if child == 0:
                # The test kills the child, unless the test itself is killed first.
                time.sleep(60)
                os._exit(0)
            test.send(child)
        test.recv()
        try:
            summed(group, 300_000)
        except Exception as error:
            test.send((type(error).__name__, getattr(error, "peer", None), time.monotonic()))


def join_despite(test, where, rank, size, obstacle, port):
    """Join a world where rank 1 has an obstacle to sharing memory; send the sum, the links, the log and the seconds."""
    lines = Lines()
    if rank == 1:
        OBSTACLES[obstacle]()
    began = time.monotonic()
    store = sync.TCPStore("127.0.0.1", port)
    with sync.process_group(store=store, rank=rank, world_size=size, timeout=30) as group:
        took = time.monotonic() - began
        names = sorted({type(link).__name__ for link in map(group.endpoint.link, {0, 1} - {rank})})
        test.send((summed(group, 100_000), names, lines.lines, took))
        test.recv()


def lose_descriptors():
    receive = socket.recv_fds

    def without(sock, *args):
        packet, descriptors, flags, address = receive(sock, *args)
        for descriptor in descriptors:
            os.close(descriptor)
        return packet, [], flags, address

    socket.recv_fds = without


def become_nobody():
    """Change the user, but keep the right to read every file: this Python may be installed in root's home."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0) == 0
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)(_MAY_READ, _MAY_READ)
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def limit_segment(nbytes):
    """Place this process's shared segment in a tmpfs of ``nbytes`` bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory() as folder:
        for step in (
            lambda: libc.unshare(_NEW_MOUNTS),
            lambda: libc.mount(b"none", b"/", None, _PRIVATE, None),
            lambda: libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=%d" % nbytes),
        ):
            if step() != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC)
        assert libc.umount2(folder.encode(), _DETACHED) == 0
    os.memfd_create = lambda name, flags: descriptor


OBSTACLES = {
    "nothing": lambda: None,
    "another folder": lambda: os.chdir("/"),
    "small files": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, resource.RLIM_INFINITY)),
    "no memory": lambda: limit_segment(8 << 10),
    "no descriptors": lose_descriptors,
    "another user": become_nobody,
}


@contextlib.contextmanager
def full_segment():
    """Fill the file system of this process's shared segment, except for 64 KiB."""
    there = os.fstatvfs(shared_arena.arena().descriptor)
    filling = asyncdist.empty(there.f_bavail * there.f_bsize - (64 << 10), dtype=torch.uint8, shared=True)
    yield
    del filling


def run_out_of_memory(test, where, rank, size):
    """Run the collectives that the test names, each in its own world, while rank 1 has no memory; send the outcomes."""
    if rank == 1:
        limit_segment(24 << 20)
    test.send("ready")
    while (name := test.recv()) is not None:
        with sync.process_group("shm", init_method=f"{where} {name}", rank=rank, world_size=size, timeout=30) as group:
            summed(group, 10)
            own, *rows = (torch.full((COUNT,), 10.0 * rank + number) for number in range(1 + size))
            # The tensors that other ranks write.
            touched = [own, *(row for peer, row in enumerate(rows) if peer != rank)]
            before = [tensor.clone() for tensor in touched]
            test.send("met")
            # A rank that still waits in the all-reduce would fail with the group.
            test.recv()
            with full_segment() if rank == 1 else contextlib.nullcontext():
                outcome = outcome_of(LARGE[name](group, own, rows))
            test.send((*outcome, all(map(torch.equal, touched, before))))
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=30) as group:
        test.send(summed(group, COUNT))
        test.recv()


def outcome_of(work):
    try:
        work.wait()
    except AsyncdistError as error:
        return type(error).__name__, str(error)
    return "no failure", ""


COUNT = 100_000
LARGE = {
    "all_reduce": lambda group, own, rows: group.all_reduce(own),
    "reduce": lambda group, own, rows: group.reduce(own, 0),
    "reduce_scatter": lambda group, own, rows: group.reduce_scatter(own, rows),
    "broadcast": lambda group, own, rows: group.broadcast(own, 1),
    "all_gather": lambda group, own, rows: group.all_gather(rows, own),
    "gather": lambda group, own, rows: group.gather(own, None if group.rank() else rows, 0),
    "scatter": lambda group, own, rows: group.scatter(rows[1], [own, own] if group.rank() else None, 1),
    "all_to_all": lambda group, own, rows: group.all_to_all(rows, [own, own]),
    "send": lambda group, own, rows: group.send(own, 0) if group.rank() else group.recv(own, 1),
}


def fork_during_an_operation(test, where, rank, size):
    """Fork in a group's operation, as another thread may; send 0 if all groups have failed in the child."""
    sync.init_process_group("shm", where, rank=rank, world_size=size)
    here, there = (sync.new_group(range(size)) for _ in range(2))

    def schedule():
        child = os.fork()
        if child == 0:
            os._exit(0 if here.error is not None and there.error is not None else 1)
        test.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        yield ()

    here._run_plan("fork", lambda _: Plan((schedule(),)), (), {"background": False}).wait()
    sync.destroy_process_group()


def start_on_one_core(test, where, rank, size):
    """Share two cores, with the first reported as the current one; all-reduce until the last rank has moved.

    Send the first two affinity masks that this rank has set.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    asked, allow = [], os.sched_setaffinity

    def noted(thread, mask):
        asked.append(sorted(mask))
        allow(thread, mask)

    os.sched_setaffinity = noted
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=60) as group:
        group.endpoint.transport_selector.placement.find_core = lambda: cores[0]
        # Another program's load must not make the ranks sleep instead.
        waiting.run_delay = lambda: None
        moved = torch.zeros(1)
        while not moved.item():
            moved.fill_(float(rank == size - 1 and len(asked) >= 2))
            group.all_reduce(moved, background=False).result()
        test.send(asked[:2])


def outlive_another_world(test, where, rank, size):
    """Open a second world, close the first, whose memory began the segment, and exchange messages in the second."""
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=30) as first:
        first.all_gather_object([None] * size, rank).wait()
        world = sync.process_group("shm", init_method=where + "2", rank=rank, world_size=size, timeout=30)
        second = world.__enter__()
        second.barrier().wait()
    second.barrier().wait()
    received = [None] * size
    second.all_gather_object(received, rank).wait()
    test.send(received)
    world.__exit__(None, None, None)
