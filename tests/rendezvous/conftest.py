"""Fixtures of the rendezvous tests: worlds on loopback with default settings."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.rendezvous import meet


@pytest.fixture
async def meet_as():
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
    yield call
    await asyncio.gather(*(meeting.close() for meeting in meetings))


@pytest.fixture
def no_such_name(monkeypatch):
    """Let every name look-up fail at once."""

    def look_up(*name, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.fixture
async def in_thread():
    """Run a blocking call in a thread that ends with the test, because the loop's own pool keeps its threads."""
    with ThreadPoolExecutor() as pool:

        async def call(function, *arguments):
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

        yield call
