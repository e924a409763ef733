"""Remote calls and published weights of a process that joins a job, on an event loop that runs next to its rounds.

Every process serves an object and calls those of all processes, itself included. The process of slot 0 publishes weights;
the others read them. The rules are:

- A call returns the right result, or fails with an error of remote calls, within its limit. The time counts in which the
  process ran.
- No call is executed twice.
- All elements of a version have the value that was published under its number, and numbers grow.
- After the last fault, every process calls every other one with success, and every reader gets a new version.
"""

import asyncio
import contextlib
import os
import threading
import time
from random import Random

import torch

from asyncdist import rpc, weights
from asyncdist.errors import StoreConnectionError
from tests.chaos.plan import HEARTBEAT

LIMIT = 2.0 * HEARTBEAT
"""The timeout of a call in seconds."""
_LATE = 3.0
"""Seconds after the timeout within which a call must have ended."""
_ENDS_WITHIN = 20.0
_LONGEST_TICK = 0.05
"""The seconds that count of the time between two ticks: a process that was stopped blames no other."""
_NUM_ELEMENTS = 5000
_FACTOR = 100_000
"""A version has the value: number of its publisher × this + number of its publication."""


class Served:
    """The object that each process serves."""

    def __init__(self, violation):
        self._violation = violation
        self._seen = set()

    def _note(self, caller, number):
        if (caller, number) in self._seen:
            self._violation(f"call {number} of {caller} executed twice")
        self._seen.add((caller, number))

    async def on_the_loop(self, caller, number, tensor):
        self._note(caller, number)
        return os.getpid(), tensor * 2 + number

    def in_a_thread(self, caller, number, tensor):
        self._note(caller, number)
        return os.getpid(), tensor * 2 + number

    async def as_a_stream(self, caller, number, tensor):
        self._note(caller, number)
        for part in tensor.chunk(3):
            yield os.getpid(), part * 2 + number


class Services:
    """The services of one process.

    Args:
        job: The job.
        slot: The slot of the process.
        seed: The seed of the world.
        say: Sends a report to the runner; any thread may call it.
    """

    def __init__(self, job, slot, seed, say):
        self._job, self._slot, self._say = job, slot, say
        self._draw = Random(f"{seed} {slot} {os.getpid()}")
        self._clock = 0.0
        self._number = 0
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-services", daemon=True)

    def start(self):
        self._thread.start()

    def stop(self):
        """End all services."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_ENDS_WITHIN)
        if self._thread.is_alive():
            self._violation(f"its services alive {_ENDS_WITHIN:.0f} s after they were to end")

    def _violation(self, text):
        self._say("violation", text)

    def _run(self):
        try:
            while not self._over.is_set():
                # A service ends with the lease at its store, whose faults may last longer.
                with contextlib.suppress(StoreConnectionError):
                    self._loop.run_until_complete(self._live())
        except Exception as error:  # the runner must hear of any
            self._violation(f"its services end with {error!r}")
        finally:
            self._loop.close()

    async def _live(self):
        parts = [self._tick(), self._call_all(), self._publish() if self._slot == 0 else self._read()]
        async with rpc.serve({"chaos": Served(self._violation)}, self._job):
            tasks = [asyncio.ensure_future(part) for part in parts]
            over = asyncio.ensure_future(self._over.wait())
            await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in (over, *tasks):
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(outcome, asyncio.CancelledError):
                    raise outcome or RuntimeError("a service has ended by itself")

    async def _tick(self):
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            self._clock += min(now - before, _LONGEST_TICK)
            before = now

    # -- calls -------------------------------------------------------------------------------------

    async def _call_all(self):
        while True:
            called, failed = [], 0
            with contextlib.suppress(rpc.NameNotFoundError):
                peers = await rpc.find_all("chaos", timeout=LIMIT)
                for outcome in await asyncio.gather(*[self._call(peer) for peer in peers]):
                    called.append(outcome)
                    failed += outcome is None
            self._say("called", [pid for pid in called if pid is not None], failed)
            await asyncio.sleep(self._draw.uniform(0.0, 0.2))

    async def _call(self, peer):
        """Call an object; return the process that answered, or None."""
        self._number += 1
        number, begun = self._number, self._clock
        tensor = torch.arange(self._draw.choice((1, 100, 100_000)))
        caller = f"{self._slot}/{os.getpid()}"
        method = self._draw.choice(("on_the_loop", "in_a_thread", "as_a_stream"))
        calling = getattr(peer, method)(caller, number, tensor, timeout=LIMIT)
        pid, result = None, None
        try:
            if method == "as_a_stream":
                parts = [part async for part in calling]
                pid, result = parts[0][0], torch.cat([part for _, part in parts])
            else:
                pid, result = await calling
        except rpc.CallError:
            pass
        if result is not None and not torch.equal(result, tensor * 2 + number):
            self._violation(f"a wrong result of call {number} to process {pid}")
        if self._clock - begun > LIMIT + _LATE:
            self._violation(f"call {number} take {self._clock - begun:.1f} s, with a timeout of {LIMIT:g} s")
        return pid

    # -- weights -----------------------------------------------------------------------------------

    async def _publish(self):
        tensors = {"first": torch.zeros(_NUM_ELEMENTS), "second": torch.zeros(7)}
        async with weights.Publisher(tensors, job=self._job) as publisher:
            for number in range(1, _FACTOR):
                value = publisher.incarnation * _FACTOR + number
                for tensor in tensors.values():
                    tensor.fill_(value)
                await publisher.publish(value)
                await asyncio.sleep(self._draw.uniform(0.0, 0.3))

    async def _read(self):
        last = 0
        async with weights.Subscriber(job=self._job) as subscriber:
            async for version in subscriber:
                async with subscriber.swap(version) as tensors:
                    wrong = [name for name, each in tensors.items() if not bool((each == version.step).all())]
                    if wrong or len(tensors) != 2:
                        self._violation(f"wrong elements of {wrong} in {version}")
                if version.step <= last:
                    self._violation(f"version {version.step} after version {last}")
                last = version.step
                self._say("read", last)
