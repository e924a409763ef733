"""Keys with their values, and barriers. The quota counts and the log records each change; waiters and watches see it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from asyncdist.store.protocol.operations import Op, Reason
from asyncdist.store.state.change_log import Change, ChangeLog
from asyncdist.store.state.key_index import KeyIndex
from asyncdist.store.state.leases import Leases
from asyncdist.store.state.model import (
    ENTRY_NBYTES,
    NO_REPLY,
    MemoryQuota,
    Place,
    RequestRefused,
    SizeLimits,
    extend,
    growth,
    named,
)
from asyncdist.store.state.open_streams import OpenStreams
from asyncdist.store.state.requests import OpenRequests, Waiters, several


class KeySpace:
    """The values by key. A key that is set or deleted by a request is detached from its lease."""

    def __init__(
        self,
        limits: SizeLimits,
        quota: MemoryQuota,
        log: ChangeLog,
        waiters: Waiters,
        streams: OpenStreams,
        leases: Leases,
    ) -> None:
        self._limits = limits
        self._quota = quota
        self._log = log
        self._waiters = waiters
        self._streams = streams
        self._leases = leases
        self._values: dict[str, bytes] = {}
        self._index = KeyIndex()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def peek(self, key: str) -> bytes | None:
        return self._values.get(key)

    def under(self, prefix: str) -> dict[str, bytes]:
        return {key: self._values[key] for key in self._index.under(prefix)}

    def list_keys(self, prefix: str) -> list[str]:
        if 4 * self._index.count(prefix) > len(self._values):  # to sort that many would take longer
            return [key for key in self._values if key.startswith(prefix)]
        return self._index.oldest_first(prefix)

    # -- waiting ----------------------------------------------------------------------------------

    def get(self, place: Place, key: str) -> Any:
        value = self._values.get(key)
        return self._waiters.add(place, Op.GET, [key], {key}) if value is None else value

    def multi_get(self, place: Place, keys: list[str], optional: Sequence[str] = ()) -> Any:
        """Return the values of keys once all exist, and then those of optional ones, empty for a missing one."""
        if any(key not in self._values for key in keys):
            # Many requests wait for the same keys.
            keys, optional = list(map(sys.intern, keys)), list(map(sys.intern, optional))
            missing = {key for key in keys if key not in self._values}
            return self._waiters.add(place, Op.MULTI_GET, keys, missing, optional)
        return several(self._values, keys, optional)

    # -- changes ----------------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:
        """Set a value. Raises RequestRefused if it is too long or does not fit into the memory quota."""
        limits, before = self._limits, self._values.get(key)
        if len(value) > limits.max_value_nbytes or len(key) > limits.short_key_length:
            limits.check(key, len(value))
        quota = self._quota
        more = len(value) - len(before) if before is not None else len(key) + len(value) + ENTRY_NBYTES
        if more > 0 and quota.max_nbytes:
            quota.check(more)
        quota.nbytes += more
        self._store(key, value)

    def set_within_limits(self, key: str, value: bytes) -> None:
        """Set a short value without a check of the limits and the quota."""
        self._quota.nbytes += growth(key, value, self._values.get(key))
        self._store(key, value)

    def _store(self, key: str, value: bytes) -> None:
        if self._log.recording:
            self._log.record(Change.SET, key, value)
        if key in self._leases.of_key:
            self._leases.detach(key)
        if key not in self._values:
            self._index.add(key)
        self._values[key] = value
        if key in self._streams.of_keys or self._streams.of_prefixes:
            self._streams.changed(key, value)
        if key in self._waiters.awaited:
            self._waiters.value_set(key, self._values)

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        """Set several values: all of them, or none if one is refused."""
        if len(keys) != len(values):
            raise RequestRefused(Reason.INVALID, f"multi_set with {len(values)} values for {len(keys)} keys")
        for key, value in zip(keys, values, strict=True):
            self._limits.check(key, len(value))
        last = dict(zip(keys, values, strict=True))
        # One value may use the memory that another one releases.
        self._quota.take(sum(growth(key, value, self._values.get(key)) for key, value in last.items()))
        for key, value in last.items():
            self._store(key, value)

    def append(self, key: str, value: bytes) -> None:
        """Append to a value; an ephemeral key is detached, like one that is set."""
        if key not in self._values:
            self.set(key, value)
            return
        self._limits.check(key, len(self._values[key]) + len(value))
        self._quota.take(len(value))
        if key in self._leases.of_key:
            self._leases.detach(key)
            self._log.record(Change.SET, key, self._values[key])
        self._log.record(Change.APPEND, key, value)
        extend(self._values, key, value)
        self._streams.changed(key, self._values[key])

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum. Raises RequestRefused if the value is no 64-bit integer."""
        total = self.integer(key) + amount
        if not -(1 << 63) <= total < 1 << 63:
            raise RequestRefused(
                Reason.INVALID, f"add would take {named(key)} to {total}, which does not fit in 64 bits"
            )
        self.set(key, b"%d" % total)
        return total

    def integer(self, key: str) -> int:
        value = self._values.get(key, b"0")
        try:
            return int(value.replace(b"_", b"?"))  # int() accepts underscores between digits
        except ValueError:
            text = f"the value of {named(key)} is not an integer: {value[:32]!r}"
            raise RequestRefused(Reason.INVALID, text) from None

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        current = self._values.get(key)
        if current is None and expected:
            return expected  # as torch's server: nothing is stored
        if current is None or current == expected:
            self.set(key, desired)
            return desired
        return current

    def delete(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._index.remove(key)
        self._quota.nbytes -= growth(key, value, None)
        self._log.record(Change.DELETE, key)
        if key in self._leases.of_key:
            self._leases.detach(key)
        self._streams.changed(key, None)
        return True

    # -- ends of a server -------------------------------------------------------------------------

    def contents(self) -> dict[str, bytes]:
        return dict(self._values)

    def restore(self, values: dict[str, bytes]) -> None:
        """Take over the values that an earlier server left."""
        self._values.update(values)
        self._index = KeyIndex(self._values)
        self._quota.nbytes += sum(growth(key, value, None) for key, value in values.items())


class Barriers:
    """The barriers that have not opened: too few requests wait in them *at one time*.

    An open barrier stays open, and its key holds the count, until the key is deleted.
    """

    def __init__(self, limits: SizeLimits, requests: OpenRequests, keys: KeySpace) -> None:
        self._limits = limits
        self._requests = requests
        self._keys = keys
        self._closed: dict[str, tuple[int, dict[Place, None]]] = {}

    def join(self, place: Place, key: str, world_size: int) -> Any:
        """Block until ``world_size`` requests wait in this barrier."""
        if key in self._keys:
            if self._keys.integer(key) >= world_size:
                return None
            raise RequestRefused(
                Reason.INVALID, f"{named(key)} holds a value that is not that of a barrier of {world_size}"
            )
        if world_size <= 0:
            raise RequestRefused(Reason.INVALID, f"a barrier of {world_size}")
        self._limits.check(key, 0)
        expected, waiting = self._closed.get(key, (world_size, {}))
        if expected != world_size:
            raise RequestRefused(
                Reason.INVALID,
                f"barrier {named(key)} is one of {expected}, not of {world_size}: all clients must pass the same number",
            )
        self._requests.open(place, self._withdraw, key)
        waiting[place] = None
        self._closed[key] = world_size, waiting
        if len(waiting) == world_size:
            del self._closed[key]
            for each in waiting:
                self._requests.resolve(each, None)
            # A full store does not refuse the short count, because all participants have been released.
            self._keys.set_within_limits(key, b"%d" % world_size)
        return NO_REPLY

    def _withdraw(self, place: Place, key: str) -> None:
        waiting = self._closed[key][1]
        del waiting[place]
        if not waiting:
            del self._closed[key]
