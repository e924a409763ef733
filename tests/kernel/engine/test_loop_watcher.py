"""`asyncdist.kernel.engine.drivers.loop_watcher`: sockets that an event loop watches for a machine."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from asyncdist.kernel.engine.drivers.loop_watcher import LoopWatcher
from asyncdist.kernel.engine.machine import READ, WRITE

pytestmark = pytest.mark.each_loop


async def test_broken_connection_that_was_read_can_be_watched_for_writing(eventually):
    """uvloop ends the watch of a descriptor whose connection was reset."""
    events = []
    watcher, loop = LoopWatcher(events.append), asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        peer, _ = server.accept()
        sock.setblocking(False)
        watcher.watch(loop, {sock.fileno(): READ})
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        await eventually(lambda: events)
        # The loop may still be in the middle of the event.
        await asyncio.sleep(0)
        events.clear()
        watcher.watch(loop, {sock.fileno(): READ | WRITE})
        await eventually(lambda: sock.fileno() in events)
        watcher.leave(loop)
