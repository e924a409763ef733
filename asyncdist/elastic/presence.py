"""Whether a member of a job can show that no other process may take its place. Used by `job`.

The store deletes the key of a member once it has had no connection of it for the time of the lease, and processes that
wait begin a generation only if no member has a key. So a member fences itself: it counts the lease from the moment when it
sent its last request that was answered, which is never later than the store counts it, and subtracts a margin. (C. Gray, D.
Cheriton: Leases, SOSP 1989; M. Burrows: The Chubby lock service, OSDI 2006.)

    announced ──the record of the generation is written after that──▶ claimed ──▶ shown until the lease may have ended
"""

from __future__ import annotations

import asyncio
import math
from time import monotonic

from asyncdist.base.callables import Callback
from asyncdist.errors import StoreTimeoutError, UsageError
from asyncdist.store import AsyncStoreBase

_RENEWALS = 4
"""How often a member renews within the time of the lease. The margin is as long as the time between two renewals."""


class Presence:
    """The key of one member at the store, and for how long it is sure to stay there.

    ``lease`` are the seconds for which the key stays without a connection. ``until`` is the time on the monotonic clock
    when other processes may find the key missing. ``renewed`` is called after each answer of the store.
    """

    def __init__(self, store: AsyncStoreBase, renewed: Callback) -> None:
        self.lease = store.lease
        if self.lease <= 0:
            raise UsageError(
                "the store of a job must keep ephemeral keys for some time after a connection broke, and this one keeps "
                "them for 0 s: connect with a longer ASYNCDIST_STORE_LEASE"
            )
        self.until = -math.inf
        self._store, self._renewed = store, renewed
        self._pause = self.lease / _RENEWALS
        self._key, self._value = "", b""
        self._announced_in: int | None = None
        self._claimed_in: int | None = None

    async def announce(self, key: str, value: bytes) -> None:
        """Set the key, which is not claimed yet."""
        self._claimed_in, self._key, self._value = None, key, value
        sent = monotonic()
        await self._store.set(key, value, ephemeral=True)
        self._note(sent)

    async def announce_again(self) -> None:
        """Make sure that the key is there, which was announced before; it is not claimed then."""
        self._claimed_in = None
        sent = monotonic()
        if not await self._store.check([self._key]):
            await self._store.set(self._key, self._value, ephemeral=True)
        self._note(sent)

    def _note(self, sent: float) -> None:
        self.until = sent + self.lease - self._pause
        self._announced_in = self._store.expiries

    def claim(self) -> None:
        """Note that the record of the present generation was written after the last announcement."""
        self._claimed_in = self._announced_in

    def withdraw(self) -> None:
        """Note that this process deletes the key."""
        self._announced_in = self._claimed_in = None
        self.until = -math.inf

    @property
    def is_claimed(self) -> bool:
        """Whether the key has been there since it was claimed, as far as the store has told. Any thread may ask."""
        return self._claimed_in is not None and self._claimed_in == self._store.expiries

    @property
    def is_shown(self) -> bool:
        """Whether the key is claimed, and is sure to be there now. Any thread may ask."""
        return self.is_claimed and monotonic() < self.until

    async def keep(self) -> None:
        """Renew without end. An answer extends the lease only in the session in which the key was announced."""
        while self.lease < math.inf:
            if self._announced_in is not None:
                sent = monotonic()
                try:
                    is_there = await self._store.check([self._key])
                except StoreTimeoutError:
                    continue
                if self._announced_in is not None:
                    self.until = max(self.until, sent + self.lease - self._pause) if is_there else -math.inf
                    self._renewed()
                    # After a long call on the loop the answer is old: ask again at once.
                    if self._claimed_in is not None and monotonic() >= self.until and is_there:
                        continue
            await asyncio.sleep(self._pause)
