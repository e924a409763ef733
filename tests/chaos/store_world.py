"""Hosts that vanish from a store: its own, and those of its clients. No packet of them says that they have gone.

A packet filter lets the kernel drop what arrives for a connection, as if the host at this end were gone; further
connections find a host again. The rules are:

- A client whose store's host vanished connects again, within the heartbeat limit and a margin, and none of its changes is
  lost or made twice.
- The names of a client whose host vanished end within the heartbeat limit, the lease and a margin, also while the store
  has something to tell it.
"""

import asyncio
import time
from random import Random

from asyncdist.config import Config
from asyncdist.errors import AsyncdistError
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from tests.chaos.judge import ViolationError
from tests.chaos.plan import HEARTBEAT
from tests.support.packets import deafen

LEASE = 0.5
MARGIN = 8.0
"""Seconds that a busy machine may take longer."""
_FAULTS = 2
_CONFIG = Config(token="for this world only", heartbeat=HEARTBEAT, store_lease=LEASE + MARGIN)


class StoreWorld:
    """One store with a few clients of both kinds, and some faults; all of it follows from the seed."""

    def __init__(self, seed: int) -> None:
        self._draw = Random(f"store {seed}")
        self._server: StoreServer
        self._over = False
        self.num_calls = 0
        self.faults: list[str] = []

    def run(self) -> None:
        """Run to the end. Raises ViolationError."""
        try:
            asyncio.run(self._run())
        except AsyncdistError as error:
            raise ViolationError(f"a client of the store got {error!r}") from error

    async def _run(self) -> None:
        async with await StoreServer.start("127.0.0.1", 0, token=_CONFIG.token, config=_CONFIG) as self._server:
            port = self._server.port
            awaited = [
                await AsyncStore.connect("127.0.0.1", port, timeout=60.0, config=_CONFIG)
                for _ in range(self._draw.randint(1, 3))
            ]
            blocking = [
                await asyncio.to_thread(TCPStore, "127.0.0.1", port, timeout=60.0, config=_CONFIG)
                for _ in range(self._draw.randint(1, 2))
            ]
            calling = [
                *[asyncio.ensure_future(self._call(number, store.add)) for number, store in enumerate(awaited)],
                *[
                    asyncio.ensure_future(asyncio.to_thread(self._call_blocking, 100 + number, store))
                    for number, store in enumerate(blocking)
                ],
            ]
            try:
                for _ in range(_FAULTS):
                    await asyncio.sleep(self._draw.uniform(0.0, 0.5))
                    fault = self._draw.choice((self._vanish, self._lose_a_client))
                    self.faults.append(fault.__name__.strip("_").replace("_", " "))
                    await fault()
                self._over = True
                await asyncio.gather(*calling)
            finally:
                self._over = True
                for store in awaited:
                    await store.close()
                for store in blocking:
                    await asyncio.to_thread(store.close)
                await asyncio.gather(*calling, return_exceptions=True)

    # -- clients -----------------------------------------------------------------------------------

    async def _call(self, number, add):
        expected = 0
        while not self._over:
            begun, expected = time.monotonic(), expected + 1
            self._check(number, begun, await add(f"n{number}", 1), expected)
            await asyncio.sleep(self._draw.choice((0.0, 0.01, 0.1)))

    def _call_blocking(self, number, store):
        expected = 0
        while not self._over:
            begun, expected = time.monotonic(), expected + 1
            self._check(number, begun, store.add(f"n{number}", 1), expected)
            time.sleep(self._draw.choice((0.001, 0.01, 0.1)))

    def _check(self, number, begun, found, expected):
        self.num_calls += 1
        took, limit = time.monotonic() - begun, 2 * HEARTBEAT + MARGIN
        if found != expected:
            raise ViolationError(
                f"client {number} of the store has made {expected} changes, and the store counts {found}"
            )
        if took > limit:
            raise ViolationError(f"client {number} of the store waited for {took:.1f} s, of at most {limit:.1f} s")

    # -- faults ------------------------------------------------------------------------------------

    async def _vanish(self):
        """Let the store vanish for all clients that are connected."""
        for connection in self._server.admission.connections:
            deafen(connection.fileno())

    async def _lose_a_client(self):
        """Let the host of a further client vanish, which has a name and watches a key."""
        config = _CONFIG.with_(store_lease=LEASE)
        client = await AsyncStore.connect("127.0.0.1", self._server.port, timeout=60.0, config=config)
        name = f"name {len(self.faults)}"
        await client.set(name, "present", ephemeral=True)
        await client.watch("n0")
        link = client.connection.link
        deafen(link.fileno())
        # The process vanishes with its host: it must not connect again.
        client.connection.policy.patience = 0.0
        begun, limit = time.monotonic(), HEARTBEAT + LEASE + MARGIN
        while self._server.state.keys.peek(name) is not None:
            if time.monotonic() - begun > limit:
                raise ViolationError(f"the {name} of a client whose host vanished is still there after {limit:.1f} s")
            await asyncio.sleep(0.01)
        await client.close()
