"""A process of a random world: runs the rounds, does to itself what the runner asks for, and reports what it sees.

The reports are ``(kind, ...)``; see `tests/chaos/judge.py`. The commands are ``(name of a fault, its seconds)`` and
``("end",)``.
"""

import asyncio
import contextlib
import faulthandler
import gc
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch

import asyncdist
from asyncdist import sync
from asyncdist.base.background_loop import background_loop, observing_loop
from asyncdist.elastic.job import Job
from asyncdist.errors import ExcludedError, GroupError, NoQuorumError
from asyncdist.kernel.engine.transport_selector import TransportSelector
from asyncdist.kernel.memory.shared_arena import arena
from asyncdist.store import StoreServer
from asyncdist.store.persistence.group_commit import Fsync
from asyncdist.testing.hosts import enter
from tests.chaos.faces import FACES
from tests.chaos.operations import SCRIBBLE, start
from tests.chaos.plan import operations_of
from tests.chaos.services import Services
from tests.support.resources import children, mapped_segments, open_files

_REPORT_EVERY = 0.05
_WITHOUT_DRIVER = 0.25
"""Seconds in which a rank beats more than once."""
_SETTLED_WITHIN = 5.0
"""Seconds within which threads and descriptors of a closed world must be gone."""
_MOST_SCRIBBLED = 64
"""The number of tensors of operations that are over whose content is checked."""


class ChaosError(Exception):
    """The exception of the fault ``exception``."""


def chaos_process(test, settings):
    """Run a process of a world."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGUSR2, print_tasks)
    torch.set_num_threads(1)
    if settings["namespace"]:
        enter(settings["namespace"])
    os.chdir(settings["folder"])
    process = ChaosProcess(test, settings)
    FACES[settings["face"]].run(process.live())
    process.say("ended")
    sys.stdout.flush()
    # The end of the interpreter takes seconds.
    os._exit(0)


def print_tasks(number, frame):
    """Print where the tasks of all event loops wait."""
    for loop in {background_loop().loop, asyncio._get_running_loop()} - {None}:
        for task in asyncio.all_tasks(loop):
            print(f"{task.get_name()} of {loop}:", file=sys.stderr)
            awaited = task.get_coro()
            while awaited is not None:
                where = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
                print(f"  {awaited!r}{f' line {where.f_lineno}' if where else ''}", file=sys.stderr)
                awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    sys.stderr.flush()


class ChaosProcess:
    """What a process keeps between the rounds."""

    def __init__(self, test, settings):
        self.test, self.settings = test, settings
        self.face = FACES[settings["face"]]
        self.wishes = []
        """Commands of the runner that this process has not executed yet."""
        self.children = []
        self.scribbled = []
        """Tensors of operations that are over. Only this process writes into them."""
        self._rounds, self._reported_at = [], 0.0
        self._lock = threading.Lock()

    # -- the runner ----------------------------------------------------------------------------

    def say(self, kind, *values):
        with self._lock:
            if self._rounds:
                self.test.send(("rounds", self._rounds))
                self._rounds = []
            self.test.send((kind, *values))

    def report_round(self, generation, number, committed):
        now = time.monotonic()
        self._rounds.append((generation, number, committed, now))
        if now - self._reported_at > _REPORT_EVERY:
            self._reported_at = now
            with self._lock:
                self.test.send(("rounds", self._rounds))
                self._rounds = []

    def report_error(self, error):
        self.say("failed", type(error).__name__, getattr(error, "peer", None), str(error).splitlines()[0])

    def listen(self):
        while self.test.poll(0):
            self.wishes.append(self.test.recv())

    def wants(self, *names):
        """Return whether the runner has asked for one of some things, and the request, which is then removed."""
        for wish in self.wishes:
            if wish[0] in names:
                self.wishes.remove(wish)
                return wish
        return None

    @property
    def is_to_end(self):
        return ("end",) in self.wishes

    def ask_for_addresses(self, rank, addresses):
        """Return where to connect to instead of the addresses of the ranks."""
        self.say("addresses", rank, [(each["host"], each["port"]) if each else None for each in addresses])
        while (answer := self.test.recv())[0] != "proxies":
            self.wishes.append(answer)
        return answer[1]

    # -- the life of a process -----------------------------------------------------------------

    async def live(self):
        background_loop()
        observing_loop()
        arena()
        gc.collect()
        before = _resources()
        # libuv opens one at the first connection of each of the two loops, and keeps it.
        before["descriptor /dev/null"] += 2
        if self.settings["proxied"]:
            self.connect_through_proxies()
        if self.settings["joins"]:
            services = Services(self.settings["services"], self.settings["slot"], self.settings["seed"], self.say)
            services.start()
            await self.join()
            services.stop()
        else:
            await self.found()
        self.check_scribbled()
        self.end_children()
        await self.check_nothing_left(before)

    def end_children(self):
        for child in self.children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def connect_through_proxies(self):
        probe = TransportSelector.probe_peers

        async def probe_through_proxies(selector, timeout):
            addresses = selector.addresses
            instead = self.ask_for_addresses(selector.rank, [each.get("tcp") for each in addresses])
            selector.addresses = [
                {**each, "tcp": {**each["tcp"], "host": other[0], "port": other[1]}} if other else each
                for each, other in zip(addresses, instead, strict=True)
            ]
            return await probe(selector, timeout)

        TransportSelector.probe_peers = probe_through_proxies

    async def found(self):
        settings = self.settings
        options = {"rank": settings["slot"], "world_size": settings["size"], "timeout": 60.0}
        async with self.face.world(init_method=settings["where"], **options) as group:
            await self.connect(group)
            while True:
                self.enter(group, group.member_ids, settings["slot"])
                if await self.rounds(group):
                    return
                try:
                    group = await self.face.value_of(group.regroup())
                except (ExcludedError, NoQuorumError) as error:
                    self.say("out", type(error).__name__, str(error).splitlines()[0])
                    break
                except GroupError as error:
                    self.report_error(error)
                    raise
        while not self.is_to_end:
            self.wishes.append(self.test.recv())

    async def join(self):
        settings = self.settings
        state = asyncdist.State(weights=torch.zeros(20_000, dtype=torch.int64))
        joins = sync.join if settings["face"] == "blocking" else asyncdist.join
        session = joins(
            settings["where"], min_size=settings["min_size"], start_size=settings["start_size"], state=state,
            timeout=60.0,
        )  # fmt: skip
        self.report_waiting()
        async with self.face.entered(session):
            async for group in self.face.generations(session):
                await self.face.value_of(group.adopt(state))
                if settings["start_size"] == group.size() and group.generation == 1:
                    await self.connect(group)
                self.enter(group, group.size(), session.id)
                if await self.rounds(group, state):
                    return
        raise AssertionError("the generations ended although no member wants to end")

    def report_waiting(self):
        wait_to_join = Job.wait_to_join

        async def wait_and_report(job, seen):
            await wait_to_join(job, seen)
            self.say("waits")

        Job.wait_to_join = wait_and_report

    async def connect(self, group):
        """Open all connections. The loss of a host that has not accepted one yet is noticed only by TCP."""
        works = []
        for peer in set(range(group.size())) - {group.rank()}:
            works += [group.recv(torch.zeros(1), peer), group.send(torch.zeros(1), peer)]
        for work in works:
            await self.face.value_of(work)

    def enter(self, group, members, identity):
        place = group.member_ids[group.rank()]
        self.say("entered", group.generation, group.rank(), members, identity, (group.endpoint.world_id, place))

    async def rounds(self, group, state=None):
        """Run rounds until the group has changed, or until all end; return whether all end."""
        number = 0
        self.check_scribbled()
        while not group.changed and group.error is None:
            if state is not None:
                self.check_state(state)
            ends, committed = await self.round(group, number)
            self.report_round(group.generation, number, committed)
            number += 1
            if committed and state is not None:
                state.weights += state.step % 5
                state.step += 1
            if committed and ends:
                return True
            if self.wants("leave"):
                self.say("leaves")
                return True
        return False

    async def round(self, group, number):
        """Run the operations of one step; return whether a member wants to end, and whether the step is committed.

        The second is None on a member that the others have lost, and that does not know it.
        """
        self.listen()
        if wish := self.wants("fork"):
            self.fork(group, *wish[1:])
        ends = torch.tensor(float(self.is_to_end))
        step, started = group.step(), []
        try:
            async with self.face.entered(step):
                try:
                    await self.operate(group, number, started)
                    await self.face.value_of(group.all_reduce(ends, asyncdist.ReduceOp.MAX))
                except GroupError as error:
                    self.report_error(error)
                    raise
        except ChaosError:
            self.say("raised")
        await self.scribble(started)
        return bool(ends), None if step.excluded else step.committed

    async def operate(self, group, number, started):
        at_once, operations = operations_of(self.settings["seed"], group.generation, number, group.size())
        blocks = self.settings["face"] == "blocking" and not at_once
        for position, operation in enumerate(operations):
            started.append(start(group, operation, number, background=not blocks))
            if position == 0:
                await self.go_wrong(group, started[-1].works)
            if not at_once:
                await self.finish(started[-1])
        if at_once:
            for one in started:
                await self.finish(one)

    async def finish(self, one):
        for work in one.works:
            await self.face.value_of(work)
        if problem := one.problem():
            self.say("violation", f"a wrong result: {problem}")

    async def go_wrong(self, group, works):
        """Do what the runner has asked for, in the middle of a step."""
        if self.wants("exception"):
            raise ChaosError
        if self.wants("revoke"):
            group.revoke("chaos")
        if works and self.wants("cancel"):
            await self.face.stop_waiting(works[0])
        if works and (wish := self.wants("callback")):
            self.take_long(group, works[0], wish[1])

    def take_long(self, group, work, seconds):
        """Let a callback or a hook last, whichever is called first. The operation may complete while no thread drives."""
        begun = []

        def last(_):
            hook.remove()
            if "periodic" in threading.current_thread().name:
                self.say("violation", "a callback in the thread of the heartbeats")
            if not begun:
                begun.append(True)
                time.sleep(seconds)

        hook = group.register_hook(on_end=last, on_error=last)
        work.add_done_callback(last)
        time.sleep(_WITHOUT_DRIVER)

    def fork(self, group, seconds):
        """Fork a child that holds the connections of this process for some time, and must not be able to use them."""
        child = os.fork()
        if child:
            self.children.append(child)
            self.say("forked", child)
            return
        self.test.close()
        os.setpgid(0, 0)
        try:
            sync_result = group.all_reduce(torch.ones(1), background=False).result()
            os.write(1, f"VIOLATION: a forked child has reduced: {sync_result}\n".encode())
        except RuntimeError:
            pass
        finally:
            time.sleep(seconds)
            os._exit(0)

    # -- what must hold ------------------------------------------------------------------------

    async def scribble(self, started):
        """Write into the memory of operations that are over, which belongs to this process again."""
        for one in started:
            for work in one.works:
                with contextlib.suppress(GroupError):
                    await self.face.value_of(work)
            for tensor in one.tensors:
                tensor.fill_(SCRIBBLE)
                self.scribbled.append((one.name, tensor))
        del self.scribbled[:-_MOST_SCRIBBLED]

    def check_scribbled(self):
        for name, tensor in self.scribbled:
            if not bool((tensor == SCRIBBLE).all()):
                self.say("violation", f"the memory of {name} has changed after the operation was over")
        self.scribbled.clear()

    def check_state(self, state):
        expected = sum(step % 5 for step in range(state.step % 5)) + state.step // 5 * 10
        if not bool((state.weights == expected).all()):
            self.say("violation", f"the state of step {state.step} is {state.weights.unique()}, expected {expected}")

    async def check_nothing_left(self, before):
        until = time.monotonic() + _SETTLED_WITHIN
        while left := _resources() - before:
            gc.collect()
            if time.monotonic() > until:
                self.say("violation", f"left behind: {', '.join(f'{count} x {what}' for what, count in left.items())}")
                return
            await self.face.sleep(0.02)


def _resources():
    """Count the threads, open descriptors, mapped segments and children of this process."""
    found = Counter()
    for thread in threading.enumerate():
        if not thread.name.startswith(("asyncdist-runtime", "asyncdist-observer", "asyncdist-futures")):
            found[f"thread {thread.name}"] += 1
    for target in open_files():
        found["descriptor " + re.sub(r"\d+", "", target)] += 1
    found["mapped segment"] = len(mapped_segments())
    found["child process"] = len(children())
    return found


def chaos_store(test, namespace, host, port, folder):
    """Run the store of a job until it is killed."""
    if namespace:
        enter(namespace)

    async def serve():
        token = os.environ["ASYNCDIST_TOKEN"]
        server = await StoreServer.start(host, port, token=token, data=Path(folder), fsync=Fsync.NEVER, stays=True)
        test.send(server.port)
        await asyncio.Event().wait()

    asyncio.run(serve())
