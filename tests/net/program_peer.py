"""A process with a port, for tests that kill, stop and block it."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncdist.config import Config
from asyncdist.net import ChannelPort
from tests.support.channels import TOKEN, Recorder


def listen(test: Any, local: bool, heartbeat: float) -> None:
    """Listen, tell the test the address, and wait for messages that say what to do."""
    asyncio.run(_listen(test, None if local else "there", heartbeat))


def leave_without_closing(test: Any) -> None:
    """Listen until a message arrives, and exit without closing the port."""
    asyncio.run(_listen_once(test))


async def _listen_once(test: Any) -> None:
    handler = Recorder()
    port = ChannelPort(handler, host="127.0.0.1", service="test", token=TOKEN, config=Config())
    test.send(port.address.encode())
    await handler.until(1)
    globals()["kept"] = port


async def _listen(test: Any, host: str | None, heartbeat: float) -> None:
    handler = Recorder()
    config = Config(host=host, heartbeat=heartbeat)
    async with ChannelPort(handler, host="127.0.0.1", service="test", token=TOKEN, config=config) as port:
        test.send(port.address.encode())
        for number in range(1000):
            order, _ = (await handler.until(number + 1))[number]
            if order == b"block the loop":
                test.send("blocking")
                test.recv()
            elif order == b"answer":
                handler.channels[0].send(b"answer")
            elif order == b"exit":
                return
