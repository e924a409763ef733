"""What the tests of the rendezvous share: worlds on loopback that heed no environment, and a look at what is left."""

import asyncio
import os
import threading
import time

import pytest

from asyncdist.config import Config, Launch
from asyncdist.rendezvous import meet
from asyncdist.runtime import runtime


@pytest.fixture
def meet_as():
    """Call `meet` as one rank with nothing from the environment; every meeting is closed after the test."""
    meetings = []

    async def call(init_method=None, rank=None, world_size=2, **arguments):
        arguments.setdefault("config", Config())
        arguments.setdefault("launch", Launch())
        arguments.setdefault("timeout", 10)
        meeting = await meet(init_method, rank=rank, world_size=world_size, **arguments)
        meetings.append(meeting)
        return meeting

    call.meetings = meetings
    return call


@pytest.fixture
async def nothing_left(meet_as):
    """Close the test's meetings, then wait until no task, thread or socket is left of them."""
    runtime()
    before = _belongings()
    yield
    await asyncio.gather(*(meeting.close() for meeting in meet_as.meetings))
    end = time.monotonic() + 5
    while (left := _belongings() - before) and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert not left


def _belongings():
    return (
        _tasks() | {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")} | _sockets()
    )


def _tasks():
    tasks = asyncio.all_tasks() | asyncio.all_tasks(runtime().loop)
    return {task for task in tasks if task is not asyncio.current_task()}


def _sockets():
    found = set()
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found
