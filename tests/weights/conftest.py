"""A job at a store, and publishers and subscribers on hosts of their own."""

import contextlib

import pytest
import torch

from asyncdist.base.background_loop import background_loop
from asyncdist.config import Config
from asyncdist.store import StoreServer
from asyncdist.weights import Publisher, Subscriber

TOKEN = "a token for tests"


@pytest.fixture
def job(monkeypatch):
    """The URL of a job at a store, whose token is set."""
    monkeypatch.setenv("ASYNCDIST_TOKEN", TOKEN)
    config = Config.from_environment()
    server = background_loop().run(StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config))
    yield f"asyncdist://127.0.0.1:{server.port}/job"
    background_loop().run(server.close())


@pytest.fixture
def on_host(monkeypatch):
    """Make a publisher or a subscriber as if on a host with a name: ``on_host("a", Subscriber, like=..., job=...)``."""

    def make(host, kind, *args, **options):
        monkeypatch.setenv("ASYNCDIST_HOST", host)
        made = kind(*args, **options)
        monkeypatch.delenv("ASYNCDIST_HOST")
        return made

    return make


@pytest.fixture
def exchange(job, on_host):
    """Publish on the host "trainer" and read on another one, or on the same: ``async with exchange(source, like=...)``."""

    @contextlib.asynccontextmanager
    async def exchange(source, host="trainer", **options):
        publisher = on_host("trainer", Publisher, source, job=job)
        async with publisher, on_host(host, Subscriber, job=job, **options) as subscriber:
            yield publisher, subscriber

    return exchange


def network(value=0.0, width=300):
    """Return a small network whose parameters and buffers all have one value."""
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 10))
    return fill(model, value)


def fill(model, value):
    """Set all parameters and buffers of a model to one value."""
    for tensor in model.state_dict().values():
        tensor.fill_(value)
    return model


def values(model):
    """Return the values that the parameters and buffers of a model have."""
    return {value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()}
