"""Channels to real processes that are killed, stopped and blocked, and the detector with looks that the test makes."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from asyncdist.net import ChannelAddress
from asyncdist.net.connection import liveness as liveness_module
from asyncdist.net.connection.liveness import ChannelLiveness
from tests.support.channels import Recorder, channel_pair, port_of, stop_reading

PROGRAM = Path(__file__).parent / "program_peer.py"
both_ways = pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])
real_processes = pytest.mark.processes


def start(nursery, local: bool, heartbeat: float):
    peer = nursery.start(PROGRAM, "listen", local, heartbeat)
    return peer, ChannelAddress.decode(peer.hear())


@real_processes
@both_ways
async def test_killed_process_is_lost_at_once(nursery, local):
    peer, address = start(nursery, local, 60.0)
    handler = Recorder()
    async with port_of(handler, heartbeat=60.0) as port:
        channel = await port.connect(address)
        message = channel.send(b"long", [memoryview(bytearray(64 << 20))])
        peer.kill()
        await handler.when(lambda: handler.errors)
        assert "it has closed" not in str(handler.errors[0])
        assert handler.errors[0].peer == address.name
        assert handler.errors[0].noticed == "connection"
        assert message.done
        peer.wait()
        again = await asyncio.gather(port.connect(address), return_exceptions=True)
        assert "cannot be reached" in str(again[0])


@real_processes
@both_ways
async def test_stopped_process_is_lost_after_the_heartbeat_and_learns_it(nursery, local):
    peer, address = start(nursery, local, 0.5)
    handler = Recorder()
    async with port_of(handler, heartbeat=0.5) as port:
        channel = await port.connect(address)
        peer.stop()
        channel.send(b"nobody reads this")
        await handler.when(lambda: handler.errors)
        (error,) = handler.errors
        assert error.noticed == "heartbeat"
        assert error.last_heard >= 0.4
        assert "no heartbeat for" in str(error)
        if local:
            assert "its process is stopped" in str(error)
        peer.resume()


@real_processes
async def test_process_whose_loop_is_blocked_is_not_lost(nursery):
    peer, address = start(nursery, True, 0.3)
    handler = Recorder()
    async with port_of(handler, heartbeat=0.3) as port:
        channel = await port.connect(address)
        channel.send(b"block the loop")
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, peer.hear) == "blocking"
        await asyncio.sleep(3 * 0.3)
        assert channel.is_open
        peer.say("go on")
        channel.send(b"answer")
        await handler.until(1)
        channel.send(b"exit")
        await handler.when(lambda: handler.errors)
        assert "it has closed" in str(handler.errors[0])
        assert peer.wait() == 0


@real_processes
async def test_process_that_exits_without_closing_says_goodbye(nursery):
    peer = nursery.start(PROGRAM, "leave_without_closing")
    address = ChannelAddress.decode(peer.hear())
    handler = Recorder()
    async with port_of(handler) as port:
        channel = await port.connect(address)
        channel.send(b"exit")
        await handler.when(lambda: handler.errors)
        assert "its process ends" in str(handler.errors[0])


async def test_silent_peer_is_suspected_read_and_lost(monkeypatch):
    clock = itertools.count(0.0, 0.5)
    monkeypatch.setattr(liveness_module, "monotonic", lambda: next(clock))
    async with channel_pair(heartbeat=0.0) as (near, ours, far, theirs):
        liveness = ChannelLiveness(5.0, None, {near})
        stop_reading(far)
        for _ in range(9):
            far.pulse()
            near.read_now()
            liveness.look()
        last = next(clock)
        while near.is_open:
            liveness.look()
        # The process of the peer is this one, so this process does not look at its state.
        assert 4.0 <= next(clock) - last <= 6.5
        assert ours.errors[0].noticed == "heartbeat"
        assert "its process is stopped, or its host is unreachable" in str(ours.errors[0])
        far.read_now()
        assert "this peer was given up: no heartbeat" in str(theirs.errors[0])
