"""Ranks of shared memory that wait, sleep, fork and fall back, each as one test needs it."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import socket
import time

import torch

from asyncdist import sync

torch.set_num_threads(1)
NOBODY = 65534
_KEEP_CAPABILITIES, _CAPABILITIES_V3, _MAY_READ = 8, 0x20080522, 1 << 2


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("asyncdist").addHandler(self)
        logging.getLogger("asyncdist").setLevel(logging.INFO)

    def emit(self, record):
        self.lines.append(record.getMessage())


def summed(group, count):
    tensor = torch.full((count,), group.rank() + 1.0)
    group.all_reduce(tensor, background=False).result()
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
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=1.0) as group:
        summed(group, 10)
        test.send("warm")
        test.recv()
        before, began = time.process_time(), time.monotonic()
        try:
            summed(group, 10)
        except Exception as error:
            kind, peers = type(error).__name__, getattr(error, "peers", ())
        test.send((kind, peers, time.monotonic() - began, time.process_time() - before))


def dies_with_a_child(test, where, rank, size):
    """Fork a child that outlives us, as a loader of data may."""
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=30) as group:
        summed(group, 10)
        if rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)
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


HOW = {
    "nothing": lambda: None,
    "another folder": lambda: os.chdir("/"),
    "small files": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY)),
    "no descriptors": lose_descriptors,
    "another user": become_nobody,
}


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def cannot_grow(test, where, rank, size):
    """Rank 1 may not reserve what a larger message needs; nothing of it has been summed when it says so."""
    with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=30) as group:
        summed(group, 10)
        if rank == 1:
            os.posix_fallocate = no_space
        tensor = torch.full((100_000,), rank + 1.0)
        try:
            group.all_reduce(tensor, background=False).result()
        except Exception as error:
            test.send((type(error).__name__, str(error), bool((tensor == rank + 1.0).all())))
