"""Limits of a store: the longest key, the longest value, and the memory of all of them.

Used by `machine` and the server. No I/O.
"""

from __future__ import annotations

from asyncdist.store.protocol.operations import Reason
from asyncdist.store.state.model import RequestRefused, named


class SizeLimits:
    """The longest value and key in bytes that the store accepts."""

    def __init__(self, max_value_nbytes: int = 1 << 62, max_key_nbytes: int = 1 << 62) -> None:
        self.max_value_nbytes = max_value_nbytes
        self._max_key_nbytes = max_key_nbytes
        self.short_key_length = max_key_nbytes // 4
        """A key of at most this number of characters is not too long: a character has at most 4 bytes."""

    def check(self, key: str, nbytes: int) -> None:
        """Raise RequestRefused if the key, or a value of ``nbytes`` under it, is too long."""
        if nbytes > self.max_value_nbytes:
            raise RequestRefused(
                Reason.TOO_LARGE,
                f"a value of {nbytes} bytes for {named(key)}, and the store takes {self.max_value_nbytes}: raise "
                "ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs, or send bulk data through a collective",
            )
        if len(key) > self.short_key_length and (key_nbytes := len(key.encode())) > self._max_key_nbytes:
            raise RequestRefused(
                Reason.TOO_LARGE,
                f"a key of {key_nbytes} bytes, {named(key)}, and the store takes {self._max_key_nbytes}: choose a "
                "shorter one, or raise ASYNCDIST_STORE_MAX_KEY_NBYTES where the store runs",
            )


class MemoryQuota:
    """Counts the bytes that a store holds, and refuses more than ``max_nbytes`` (0: no limit).

    ``nbytes`` counts keys, values, queue items and kept replies. ``arriving_nbytes`` counts the parts of long values
    that have arrived but are not stored yet.
    """

    def __init__(self, max_nbytes: int = 0) -> None:
        self.nbytes = 0
        self.arriving_nbytes = 0
        self.max_nbytes = max_nbytes

    def check(self, nbytes: int) -> None:
        """Raise RequestRefused if the store cannot hold ``nbytes`` more."""
        held = self.nbytes + self.arriving_nbytes
        if self.max_nbytes and nbytes > 0 and held + nbytes > self.max_nbytes:
            raise RequestRefused(
                Reason.FULL,
                f"the store holds {held} bytes and takes {self.max_nbytes}, too few for {nbytes} more: delete unused "
                "keys, or raise --max-memory (ASYNCDIST_STORE_MAX_NBYTES) where the store runs",
            )

    def take(self, nbytes: int) -> None:
        """Count ``nbytes`` more, or fewer if negative. Raises RequestRefused if they do not fit."""
        if self.max_nbytes:
            self.check(nbytes)
        self.nbytes += nbytes

    def reserve(self, nbytes: int) -> None:
        """Count a part of a long value that has arrived. Raises RequestRefused if it does not fit."""
        self.check(nbytes)
        self.arriving_nbytes += nbytes
