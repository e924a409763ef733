"""Jobs at a store server, and sessions of this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import torch

from asyncdist import rpc
from asyncdist.config import Config
from asyncdist.store import StoreServer


@pytest.fixture
async def job() -> AsyncIterator[str]:
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
    async def serving(served: object, *, local: bool = True, **options) -> AsyncIterator[rpc.RemoteObject]:
        settings = options.pop("settings", {})
        near, far = (Config(timeout=60.0, host=None if local else host, **settings) for host in ("near", "far"))
        async with rpc.serve({"it": served}, job, config=far, **options), rpc.connect(job, config=near):
            yield await rpc.find("it")

    return serving


def assert_equal_and_writable(found: torch.Tensor, sent: torch.Tensor) -> None:
    """Compare a tensor with the one that was sent, and overwrite it."""
    assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
    assert found.requires_grad == sent.requires_grad
    assert torch.equal(found.resolve_conj(), sent.resolve_conj())
    with torch.no_grad():
        found.zero_()
