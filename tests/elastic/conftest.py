"""A store server, a job at it, and members over the transport inproc."""

import pytest

from asyncdist.elastic.session import join
from asyncdist.store import AsyncStore, StoreServer


@pytest.fixture(scope="session")
def shared_nursery(training_nursery):
    return training_nursery


@pytest.fixture
async def server():
    async with await StoreServer.start("127.0.0.1", 0) as server:
        yield server


@pytest.fixture
def job(server):
    """Return the URL of a job."""
    return f"asyncdist://127.0.0.1:{server.port}/test"


@pytest.fixture
async def store(server):
    """Return a client of the job's store."""
    async with await AsyncStore.connect("127.0.0.1", server.port) as store:
        yield store


def enter(job, **options):
    """Make a session of a member."""
    return join(job, backend="inproc", **{"timeout": 20.0, **options})
