"""A rank that does what the test tells it: ``(name of a function below, its arguments)``, each answered by an `Outcome`.

`blocking` obeys with the blocking face, `awaiting` on an event loop with the async face. Functions that differ between
the two are methods of `Blocking` and `Awaiting`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import time

import torch

import asyncdist
from asyncdist import sync
from asyncdist.engine.executor import Executor

torch.set_num_threads(1)


def outcome_of(error):
    """Return a failure as what can be sent to the test."""
    peers = getattr(error, "peers", ())
    return {
        "kind": type(error).__name__,
        "peer": getattr(error, "peer", None),
        "peers": peers,
        "text": str(error),
        "at": time.monotonic(),
    }


class Rank:
    """What a rank remembers between two orders, and the orders that are the same in both faces."""

    def __init__(self):
        self.groups = {}
        self.works = []
        self.tensors = []
        self.descriptors = []

    def ones(self, count):
        tensor = torch.ones(count)
        self.tensors.append(tensor)
        return tensor

    def new_group(self, name, ranks, timeout=None):
        self.groups[name] = sync.new_group(ranks, timeout=timeout)

    def group(self, name):
        return self.groups.get(name)

    def pend(self, group, count):
        """Leave an all-reduce going on in the background."""
        self.works.append((sync if type(self) is Blocking else asyncdist).all_reduce(
            self.ones(count), group=self.group(group), async_op=True
        ))  # fmt: skip

    def pend_receive(self, group, src, tag=0):
        self.works.append(asyncdist.irecv(self.ones(1), src, group=self.group(group), tag=tag))

    def pend_send(self, group, dst, count=1, tag=0):
        self.works.append(asyncdist.isend(self.ones(count), dst, group=self.group(group), tag=tag))

    def abort(self, group, reason):
        (self.group(group) or sync.group.WORLD).abort(reason)

    def error_of(self, group):
        error = (self.group(group) or sync.group.WORLD).error
        return None if error is None else outcome_of(error)

    def die_at(self, number):
        """Be killed in the middle of the collectives to come.

        Over links just before their ``number``-th send or receive, over shared memory at every tenth line of its code.
        """
        do, left = Executor.perform, [number]

        def die_or_do(executor, task, action):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            do(executor, task, action)

        Executor.perform = die_or_do
        lines = [10 * number]

        def count_lines(frame, event, argument):
            if event == "line":
                lines[0] -= 1
                if lines[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return count_lines

        def choose(frame, event, argument):
            return count_lines if "asyncdist_transports/shm/" in frame.f_code.co_filename else None

        sys.settrace(choose)

    def leave_suddenly(self, status):
        os._exit(status)

    def fork(self, what):
        """Fork a child that does ``what`` and ends; return its exit status and what it met."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                met = getattr(self, what)()
            except Exception as error:
                met = f"{type(error).__name__}: {error}"
            os.write(writer, str(met).encode())
            if type(self) is Blocking:
                sys.exit(0)  # which runs what is registered for the end of the interpreter
            os._exit(0)  # a loop must not be left in a child: it shares its selector with the parent's
        os.close(writer)
        with open(reader) as said:
            met = said.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), met

    def leave_a_child(self):
        """Fork a child that outlives us, and return its number."""
        child = os.fork()
        if child == 0:
            reader, _ = os.pipe()
            os.read(reader, 1)  # until it is killed
        return child

    def look_around(self):
        return f"rank {sync.get_rank()} of {sync.get_world_size()}"

    def use_the_parents_group(self):
        sync.all_reduce(torch.ones(1))

    def leave_for_itself_and_begin_anew(self):
        sync.destroy_process_group()
        with sync.process_group(store=sync.HashStore(), rank=0, world_size=1) as group:
            tensor = torch.ones(1)
            group.all_reduce(tensor, background=False)
            return tensor.item()

    def effort(self):
        """Return how many seconds of a processor this process has used, and how often it has woken up."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, used.ru_nvcsw

    def effort_since(self, before):
        return tuple(now - then for now, then in zip(self.effort(), before, strict=True))

    def exhaust_descriptors(self):
        """Use every free descriptor of this process; return the limit."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        with contextlib.suppress(OSError):
            while True:
                self.descriptors.append(os.dup(0))
        return limit

    def release_descriptors(self):
        while self.descriptors:
            os.close(self.descriptors.pop())

    def is_initialized(self):
        return sync.is_initialized()

    def exit(self, status):
        sys.exit(status)

    def fail(self, text):
        raise_out(RuntimeError(text))


class Out(BaseException):
    """Carries an exception past the answering machine, to end the program with it."""


def raise_out(error):
    raise Out from error


class Blocking(Rank):
    """Orders of the blocking face."""

    def init(self, where, rank, size, timeout=60.0):
        sync.init_process_group(init_method=where, rank=rank, world_size=size, timeout=timeout)

    def destroy(self):
        self.groups.clear()
        sync.destroy_process_group()

    def all_reduce(self, group, count, rounds=1):
        tensor = self.ones(count)
        for _ in range(rounds):
            sync.all_reduce(tensor, group=self.group(group))
        return tensor[-1].item()

    def broadcast(self, group, count, src, rounds):
        tensor = self.ones(count)
        for _ in range(rounds):
            sync.broadcast(tensor, src, group=self.group(group))

    def all_reduce_or_leave(self, count, rounds):
        """Do not wait a moment after a failure: destroy the group before anything else."""
        try:
            return self.all_reduce(None, count, rounds)
        except Exception as error:
            failed = outcome_of(error)
            self.destroy()
            return failed

    def all_reduce_or_crash(self, count, rounds):
        try:
            return self.all_reduce(None, count, rounds)
        except Exception as error:
            raise_out(error)

    def send_and_destroy(self, count, dst):
        sync.send(self.ones(count), dst)
        sync.destroy_process_group()

    def measured_receive(self, src):
        """Return the effort that it took to wait and receive."""
        before = self.effort()
        sync.recv(torch.zeros(1), src)
        return self.effort_since(before)

    def barrier(self, group):
        sync.barrier(group=self.group(group))

    def receive(self, group, src, count=1):
        tensor = torch.zeros(count)
        sync.recv(tensor, src, group=self.group(group))
        return tensor.sum().item()

    def settle(self):
        """Wait for what was left going on; return how each ended."""
        works, self.works = self.works, []
        return [self.settled(work) for work in works]

    def settled(self, work):
        try:
            work.wait()
        except Exception as error:
            return outcome_of(error)
        return None

    def rest(self, seconds):
        """Do nothing for a while; return the effort that it took."""
        before = self.effort()
        time.sleep(seconds)
        return self.effort_since(before)


class Awaiting(Rank):
    """Orders of the async face."""

    async def init(self, where, rank, size, timeout=60.0):
        await asyncdist.init_process_group(init_method=where, rank=rank, world_size=size, timeout=timeout)

    async def destroy(self):
        self.groups.clear()
        await asyncdist.destroy_process_group()

    async def all_reduce(self, group, count, rounds=1):
        tensor = self.ones(count)
        for _ in range(rounds):
            await asyncdist.all_reduce(tensor, group=self.group(group))
        return tensor[-1].item()

    async def broadcast(self, group, count, src, rounds):
        tensor = self.ones(count)
        for _ in range(rounds):
            await asyncdist.broadcast(tensor, src, group=self.group(group))

    async def all_reduce_or_leave(self, count, rounds):
        try:
            return await self.all_reduce(None, count, rounds)
        except Exception as error:
            failed = outcome_of(error)
            await self.destroy()
            return failed

    async def all_reduce_or_crash(self, count, rounds):
        try:
            return await self.all_reduce(None, count, rounds)
        except Exception as error:
            raise_out(error)

    async def send_and_destroy(self, count, dst):
        await asyncdist.send(self.ones(count), dst)
        await asyncdist.destroy_process_group()

    async def measured_receive(self, src):
        before = self.effort()
        await asyncdist.recv(torch.zeros(1), src)
        return self.effort_since(before)

    async def barrier(self, group):
        await asyncdist.barrier(group=self.group(group))

    async def receive(self, group, src, count=1):
        tensor = torch.zeros(count)
        await asyncdist.recv(tensor, src, group=self.group(group))
        return tensor.sum().item()

    async def settle(self):
        works, self.works = self.works, []

        async def of(work):
            return await work

        results = await asyncio.gather(*map(of, works), return_exceptions=True)
        return [outcome_of(result) if isinstance(result, Exception) else None for result in results]

    async def rest(self, seconds):
        before = self.effort()
        await asyncio.sleep(seconds)
        return self.effort_since(before)


def blocking(test):
    rank = Blocking()
    while True:
        name, arguments = test.recv()
        try:
            answer = getattr(rank, name)(*arguments)
        except Out as out:
            raise out.__cause__ from None
        except Exception as error:
            test.send(("failed", outcome_of(error)))
        else:
            test.send(("did", answer))


def awaiting(test):
    asyncio.run(obey(test))


async def obey(test):
    rank = Awaiting()
    readable = asyncio.Event()
    asyncio.get_running_loop().add_reader(test.fileno(), readable.set)
    while True:
        while not test.poll(0):
            readable.clear()
            await readable.wait()
        name, arguments = test.recv()
        try:
            answer = getattr(rank, name)(*arguments)
            if asyncio.iscoroutine(answer):
                answer = await answer
        except Out as out:
            raise out.__cause__ from None
        except Exception as error:
            test.send(("failed", outcome_of(error)))
        else:
            test.send(("did", answer))
