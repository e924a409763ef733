"""A rank that executes commands of the test: ``(name of a method below, its arguments)``. It sends each one's outcome.

`blocking` uses the blocking API, `awaiting` the awaited API on an asyncio loop, `in_trio` the awaited API in trio.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import trio

import asyncdist
from asyncdist import sync
from asyncdist.errors import GroupAbortedError, PeerLostError
from asyncdist.groups import introductions
from asyncdist.kernel.algorithms.schedule import Combine
from asyncdist.kernel.engine import agreements
from asyncdist.kernel.engine.direct_calls import PlannedCalls
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.kernel.engine.executor import Executor
from asyncdist.kernel.transport.wire_format import AGREE
from asyncdist.rendezvous import session
from tests.support.resources import mapped_segments

torch.set_num_threads(1)


def outcome_of(error):
    """Return an error in a form that can be sent to the test."""
    peers = getattr(error, "peers", ())
    return {
        "kind": type(error).__name__,
        "peer": getattr(error, "peer", None),
        "peers": peers,
        "noticed": getattr(error, "noticed", None),
        "last_heard": getattr(error, "last_heard", None),
        "text": str(error),
        "at": time.monotonic(),
    }


class Rank:
    """The commands, and what a rank keeps between them. `call`, `wait` and `sleep` differ between the two APIs."""

    def __init__(self):
        self.groups = {}
        self.works = []
        self.tensors = []
        self.descriptors = []
        self.opened = len(os.listdir("/proc/self/fd"))

    def ones(self, count):
        tensor = torch.ones(count)
        self.tensors.append(tensor)
        return tensor

    def new_group(self, name, ranks, timeout=None):
        self.groups[name] = sync.new_group(ranks, timeout=timeout)

    def group(self, name):
        return self.groups.get(name)

    def pend(self, group, count):
        """Start an all-reduce in the background."""
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
        """Kill this process in a later collective.

        Over links, before the ``number``-th send or receive; over shared memory, after 10 ``number`` lines of its code.
        """
        perform, begin, left = Executor.perform, PlannedCalls.perform, [number]

        def spend(actions):
            if left[0] < actions:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= actions

        def die_or_perform(executor, task, action):
            spend(1)
            perform(executor, task, action)

        # Small calls do without an executor. Each step sends and receives at once.
        def die_or_begin(calls, step, *args):
            spend(sum(not isinstance(action, Combine) for action in step))
            return begin(calls, step, *args)

        Executor.perform, PlannedCalls.perform = die_or_perform, die_or_begin
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

    def fork(self, name):
        """Fork a child that calls the method ``name`` and exits; return its exit status and its result."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                outcome = getattr(self, name)()
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            os.write(writer, str(outcome).encode())
            # sys.exit() also runs the exit hooks. A child must not close a loop that shares its selector with the parent's.
            if type(self) is Blocking:
                sys.exit(0)
            os._exit(0)
        os.close(writer)
        with open(reader) as results:
            outcome = results.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), outcome

    def leave_a_child(self):
        """Fork a child that outlives this process, and return its PID."""
        child = os.fork()
        if child == 0:
            reader, _ = os.pipe()
            os.read(reader, 1)
        return child

    def describe_world(self):
        return f"rank {sync.get_rank()} of {sync.get_world_size()}"

    def use_the_parents_group(self):
        sync.all_reduce(torch.ones(1))

    def destroy_and_open_own_world(self):
        sync.destroy_process_group()
        with sync.process_group(store=sync.HashStore(), rank=0, world_size=1) as group:
            tensor = torch.ones(1)
            group.all_reduce(tensor, background=False)
            return tensor.item()

    def effort(self):
        """Return the seconds of CPU time and the number of wake-ups of this process."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, used.ru_nvcsw

    def effort_since(self, before):
        return tuple(now - then for now, then in zip(self.effort(), before, strict=True))

    def kept(self):
        """Return how many descriptors the rank has opened since its start, and how many threads it has."""
        return len(os.listdir("/proc/self/fd")) - self.opened, len(os.listdir("/proc/self/task"))

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

    def mapped_segments(self):
        """Return how many shared segments, of this process and of peers, this process has mapped."""
        gc.collect()
        return len(mapped_segments())

    def hold_interpreter(self, milliseconds):
        """Sleep in a call that does not release the interpreter."""
        ctypes.PyDLL(None).poll(None, 0, milliseconds)

    def compute_with_interpreter(self):
        """Compute in one call that does not release the interpreter, until SIGUSR1."""

        def end(number, frame):
            raise InterruptedError

        signal.signal(signal.SIGUSR1, end)
        with contextlib.suppress(InterruptedError):
            re.match("(a+)+$", "a" * 100 + "b")

    async def interrupted_unseen(self, name, *arguments):
        """Execute a command while which another thread of this process gets SIGINT, which does not wake the main thread.

        A signal has the same effect that arrives at the main thread right before it sleeps.
        """

        def interrupt():
            state, asleep = Path(f"/proc/self/task/{os.getpid()}/stat"), 0
            while asleep < 100:
                asleep = asleep + 1 if state.read_text().rsplit(")", 1)[1].split()[0] == "S" else 0
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        await getattr(self, name)(*arguments)

    def interrupt_after_acquire(self, number):
        """Raise KeyboardInterrupt right after a lock of the driver was acquired, as a signal handler may."""
        turns, acquired = sync.group.WORLD.endpoint.progress.turns, 0

        def interrupt(frame, event, called):
            nonlocal acquired
            if event == "c_return" and called in (turns.lock.acquire, turns.driver_lock.acquire):
                acquired += 1
                if acquired == number:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)

    def log_changes(self):
        """Write what the heartbeats show to the output."""
        logging.basicConfig(level=logging.INFO)

    def is_initialized(self):
        return sync.is_initialized()

    def exit(self, status):
        sys.exit(status)

    def fail(self, text):
        raise_out(RuntimeError(text))

    def be_large(self):
        """Let a world of more than four ranks count as large, and blocks have two ranks."""
        introductions.MOST_EAGER, session.BLOCK = 4, 2

    async def init(self, where, rank, size, timeout=60.0):
        await self.call("init_process_group", init_method=where, rank=rank, world_size=size, timeout=timeout)

    async def destroy(self):
        self.groups.clear()
        await self.call("destroy_process_group")

    async def all_reduce(self, group, count, rounds=1):
        tensor = self.ones(count)
        for _ in range(rounds):
            await self.call("all_reduce", tensor, group=self.group(group))
        return tensor[-1].item()

    async def all_reduce_persistent(self, group, count, rounds):
        tensor = self.ones(count)
        call = await self.call("all_reduce_init", tensor, group=self.group(group))
        for _ in range(rounds):
            await self.wait(call.start())
        return tensor[-1].item()

    async def regroup(self, min_size=1, timeout=None):
        group = await self.call("regroup", min_size=min_size, timeout=timeout)
        return group.rank(), group.member_ids, group.generation

    async def agree(self, flag=True, timeout=None):
        return tuple(await self.call("agree", flag, timeout=timeout))

    async def survive(self, count):
        """All-reduce in the default group or, after errors, in its successors; return the members and the result."""
        while True:
            try:
                result = await self.all_reduce(None, count)
            except (PeerLostError, GroupAbortedError):
                await self.call("regroup")
            else:
                return sync.group.WORLD.member_ids, result

    def pass_on_messages_in_blocks_of(self, degree):
        """Let the agreements of this process use relays as in a large group. Call it on all ranks, before the first one."""
        agreements.DEGREE = degree

    def die_in_agreement(self, number):
        """Kill this process before it sends the ``number``-th message of an agreement, counted from 0."""
        send, left = Endpoint.send_unordered, [number]

        def die_or_send(endpoint, peer, kind, key, body):
            if kind == AGREE and left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= kind == AGREE
            send(endpoint, peer, kind, key, body)

        Endpoint.send_unordered = die_or_send

    async def broadcast(self, group, count, src, rounds):
        tensor = self.ones(count)
        for _ in range(rounds):
            await self.call("broadcast", tensor, src, group=self.group(group))

    async def all_reduce_or_leave(self, count, rounds):
        """Destroy the group immediately after a failure."""
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
        await self.call("send", self.ones(count), dst)
        await self.call("destroy_process_group")

    async def measured_receive(self, src):
        """Return the effort of waiting for a message."""
        before = self.effort()
        await self.call("recv", torch.zeros(1), src)
        return self.effort_since(before)

    async def barrier(self, group):
        await self.call("barrier", group=self.group(group))

    async def receive(self, group, src, count=1):
        tensor = torch.zeros(count)
        await self.call("recv", tensor, src, group=self.group(group))
        return tensor.sum().item()

    async def settle(self):
        """Wait for the pending works and return the error of each, None for success."""
        works, self.works = self.works, []
        return [await self.settled(work) for work in works]

    async def settled(self, work):
        try:
            await self.wait(work)
        except Exception as error:
            return outcome_of(error)
        return None

    async def rest(self, seconds):
        """Sleep and return the effort of the process."""
        before = self.effort()
        await self.sleep(seconds)
        return self.effort_since(before)


class Out(BaseException):
    """Carries an exception that ends the program past `answer`."""


def raise_out(error):
    raise Out from error


class Blocking(Rank):
    """Calls the blocking API. Its coroutines never suspend, and no event loop runs."""

    async def call(self, name, *arguments, **options):
        return getattr(sync, name)(*arguments, **options)

    async def wait(self, work):
        work.wait()

    async def sleep(self, seconds):
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs


class Awaiting(Rank):
    """Awaits the async API on an event loop."""

    async def call(self, name, *arguments, **options):
        return await getattr(asyncdist, name)(*arguments, **options)

    async def wait(self, work):
        await work

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)


class InTrio(Awaiting):
    """Awaits the awaited API in a trio task."""

    async def sleep(self, seconds):
        await trio.sleep(seconds)


async def answer(rank, test):
    """Execute one command and send its outcome."""
    name, arguments = test.recv()
    try:
        result = getattr(rank, name)(*arguments)
        if asyncio.iscoroutine(result):
            result = await result
    except Out as out:
        raise out.__cause__ from None
    except Exception as error:
        test.send(("failed", outcome_of(error)))
    else:
        test.send(("did", result))


def blocking(test):
    rank = Blocking()
    while True:
        with contextlib.suppress(StopIteration):
            answer(rank, test).send(None)


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
        await answer(rank, test)


def in_trio(test):
    trio.run(obey_in_trio, test)


async def obey_in_trio(test):
    rank = InTrio()
    while True:
        await trio.lowlevel.wait_readable(test.fileno())
        await answer(rank, test)
