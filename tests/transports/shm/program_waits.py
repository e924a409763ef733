"""Ranks of shared memory that wait, sleep, fork, fall back and run out of memory, each as one test needs it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import resource
import socket
import tempfile
import time

import torch

import asyncdist
from asyncdist import sync
from asyncdist.engine.operation import Plan
from asyncdist.errors import AsyncdistError
from asyncdist.memory import shared_arena

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


def often(test, where, rank, size, rounds):
    """Sum and meet many times; say how long it took."""
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


def waits_for_a_stopped_one(test, where, rank, size):
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


def dies_with_a_child(test, where, rank, size):
    """Fork a child that outlives us, as a loader of data may."""
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=30) as group:
        summed(group, 10)
        if rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)  # until it is killed; should the test be killed first, not for ever
                os._exit(0)
            test.send(child)
        test.recv()
        try:
            summed(group, 300_000)
        except Exception as error:
            test.send((type(error).__name__, getattr(error, "peer", None), time.monotonic()))


def falls_back(test, where, rank, size, how, port):
    """Come into a world in which rank 1 has what keeps it from sharing memory; say the sum, the way, and the log."""
    lines = Lines()
    if rank == 1:
        HOW[how]()
    began = time.monotonic()
    store = sync.TCPStore("127.0.0.1", port)
    with sync.process_group(store=store, rank=rank, world_size=size, timeout=30) as group:
        took = time.monotonic() - began
        names = sorted({type(link).__name__ for link in map(group.mesh.link, {0, 1} - {rank})})
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
    """Change the user for good, but go on reading everything: this very Python may lie in root's home."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0) == 0
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)(_MAY_READ, _MAY_READ)
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def lie_in(nbytes):
    """Have our segment lie in a file system of so many bytes: the kernel's own, as it is, and really full in the end."""
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


HOW = {
    "nothing": lambda: None,
    "another folder": lambda: os.chdir("/"),
    "small files": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, resource.RLIM_INFINITY)),
    "no memory": lambda: lie_in(8 << 10),
    "no descriptors": lose_descriptors,
    "another user": become_nobody,
}


@contextlib.contextmanager
def full():
    """Fill the file system that our segment lies in, but for 64 KiB."""
    there = os.fstatvfs(shared_arena.arena().descriptor)
    filling = asyncdist.empty(there.f_bavail * there.f_bsize - (64 << 10), dtype=torch.uint8, shared=True)
    yield
    del filling


@contextlib.contextmanager
def refused():
    """Have the kernel say that there is no memory left, where it cannot be had to be so."""

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reserve, os.posix_fallocate = os.posix_fallocate, no_space
    yield
    os.posix_fallocate = reserve


def runs_out(test, where, rank, size, how):
    """Do as told, each thing in a world of its own, while rank 1 has no memory left; say what came of it."""
    if rank == 1 and how == "full":
        lie_in(24 << 20)
    without_memory = {"full": full, "refused": refused}[how] if rank == 1 else contextlib.nullcontext
    test.send("ready")
    while (name := test.recv()) is not None:
        with sync.process_group("shm", init_method=f"{where} {name}", rank=rank, world_size=size, timeout=30) as group:
            summed(group, 10)
            own, *rows = (torch.full((COUNT,), 10.0 * rank + number) for number in range(1 + size))
            touched = [own, *(row for peer, row in enumerate(rows) if peer != rank)]  # by others
            before = [tensor.clone() for tensor in touched]
            test.send("met")
            test.recv()  # until nobody waits in what came before any more: that would fail with the group
            with without_memory():
                said = how_it_ended(LARGE[name](group, own, rows))
            test.send((*said, all(map(torch.equal, touched, before))))
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=30) as group:
        test.send(summed(group, COUNT))
        test.recv()


def how_it_ended(work):
    try:
        work.wait()
    except AsyncdistError as error:
        return type(error).__name__, str(error)
    return "it did not fail", ""


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


def forks_in_the_middle(test, where, rank, size):
    """Fork in a group's operation, as another thread may; say whether all groups have ended in the child."""
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


def says_all_are_on_one_core(test, where, rank, size):
    """Share two cores and believe to be on the first; meet until the last rank has moved; say what each allowed itself."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    asked, allow = [], os.sched_setaffinity

    def noted(thread, mask):
        asked.append(sorted(mask))
        allow(thread, mask)

    os.sched_setaffinity = noted
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=60) as group:
        (shm,) = [transport for transport in group.mesh.transport_selector.transports if transport.name == "shm"]
        shm.core_placement.find_core = lambda: cores[0]
        moved = torch.zeros(1)
        while not moved.item():
            moved.fill_(float(rank == size - 1 and len(asked) >= 2))
            group.all_reduce(moved, background=False).result()
        test.send(asked[:2])
