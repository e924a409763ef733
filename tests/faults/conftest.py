"""A wait for what has no event of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

PATIENCE = 20.0


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """Return a wait until something is so."""

    async def eventually(true: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    return eventually
