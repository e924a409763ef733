"""One program for both APIs: the awaited one on an event loop, and the blocking one, whose coroutines never suspend."""

import asyncio
import contextlib
import time

import asyncdist
from asyncdist import sync
from asyncdist.errors import WaitTimeoutError


class Awaiting:
    """Awaits works on an event loop."""

    @staticmethod
    def run(coroutine):
        return asyncio.run(coroutine)

    @staticmethod
    def entered(context):
        return context

    @staticmethod
    async def value_of(work):
        return await work

    @staticmethod
    async def sleep(seconds):
        await asyncio.sleep(seconds)

    @staticmethod
    def world(**options):
        return asyncdist.process_group(**options)

    @staticmethod
    async def generations(session):
        async for group in session.generations():
            yield group

    @staticmethod
    async def stop_waiting(work):
        """Wait for a work in a task that is cancelled soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1e-4):
                await work


class Blocking:
    """Waits for works in the main thread. No event loop runs there."""

    @staticmethod
    def run(coroutine):
        with contextlib.suppress(StopIteration):
            coroutine.send(None)
            raise AssertionError("a blocking program has suspended")

    @staticmethod
    @contextlib.asynccontextmanager
    async def entered(context):
        with context as value:
            yield value

    @staticmethod
    async def value_of(work):
        waited = work.wait()
        return work.result() if hasattr(work, "result") else waited

    @staticmethod
    async def sleep(seconds):
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs

    @staticmethod
    def world(**options):
        return Blocking.entered(sync.process_group(**options))

    @staticmethod
    async def generations(session):
        for group in session.generations():
            yield group

    @staticmethod
    async def stop_waiting(work):
        """Wait for a work for a short time only."""
        with contextlib.suppress(WaitTimeoutError):
            work.wait(1e-4)


FACES = {"awaiting": Awaiting, "blocking": Blocking}
