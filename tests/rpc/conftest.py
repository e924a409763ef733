"""Jobs at a store server, and sessions of this process."""

import asyncio
import contextlib

import pytest
import torch

from asyncdist import rpc
from asyncdist.config import Config
from asyncdist.store import StoreServer


@pytest.fixture
async def job():
    """Return the URL of a job at a store server."""
    server = await StoreServer.start("127.0.0.1", 0)
    try:
        yield f"asyncdist://127.0.0.1:{server.port}/test"
    finally:
        await server.close()


@pytest.fixture
def serving(job):
    """Serve an object under the name "it", and call it from another session: ``async with serving(object) as it``."""

    @contextlib.asynccontextmanager
    async def serving(served, *, local=True, **options):
        settings = options.pop("settings", {})
        near, far = (Config(timeout=60.0, host=None if local else host, **settings) for host in ("near", "far"))
        async with rpc.serve({"it": served}, job, config=far, **options), rpc.connect(job, config=near):
            yield await rpc.find("it")

    return serving


@pytest.fixture
def overdue():
    """Make a call that reaches its deadline after something has happened: ``error = await overdue(call, has_happened)``.

    On a busy machine a short limit may pass before: then ``call(limit)`` gets a longer one.
    """

    async def overdue(call, has_happened):
        for limit in (0.05, 0.5, 5.0, 50.0):
            with pytest.raises(rpc.CallTimeoutError) as caught:
                await call(limit)
            assert caught.value.timeout == limit
            if has_happened():
                return caught.value
        raise AssertionError("the call is overdue before it begins")

    return overdue


def assert_equal_and_writable(found, sent):
    """Compare a tensor with the one that was sent, and overwrite it."""
    assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
    assert found.requires_grad == sent.requires_grad
    assert torch.equal(found.resolve_conj(), sent.resolve_conj())
    with torch.no_grad():
        found.zero_()


def caller_of(remote):
    """Return the connection over which the calls of a remote object go."""
    return remote._caller


def num_open(remote):
    """Return the number of calls that have not ended."""
    return len(caller_of(remote)._open)


def channels_of(session):
    """Return the channels of a session to other processes."""
    return session._port.channels


def number_of(reference):
    """Return the number by which its owner knows an object."""
    return reference._number


def lent_by(loans):
    """Return the tensors that are lent over a channel."""
    return loans._lent


def tasks_of(lending):
    """Return what still copies or waits for a device."""
    return lending._tasks


async def hear(process, expected):
    assert await asyncio.to_thread(process.hear) == expected


async def read_into(found, stream):
    async for item in stream:
        found.append(item)
