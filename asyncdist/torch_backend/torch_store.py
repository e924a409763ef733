"""An asyncdist store as a `torch.distributed.Store`, for ``init_process_group(store=...)`` and torch's C++ code.

The modules of `rendezvous` create it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed

from asyncdist.base.deadline import Timeout
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.store import base

_UNLIMITED = timedelta(days=10_000)
"""Stands for no timeout, which torch cannot represent."""

# torch's PrefixStore keeps only the C++ half of a store alive, whose calls fail after the Python half is collected.
_open: set[Store] = set()


# torch does not say that it exports its Store.
class Store(ProcessBound, torch_distributed.Store):  # type: ignore[misc,name-defined]
    """A blocking asyncdist store under the method names that torch's C++ and Python code calls.

    Waiting methods use this object's ``timeout``, initially that of ``store``: torch changes it in C++ through a
    PrefixStore, without calling Python. Methods raise the errors of `asyncdist.store`, which are RuntimeErrors. `close`
    also closes ``store``. torch's PrefixStore offers queues and `list_keys` only for torch's own stores; asyncdist's
    PrefixStore offers both.
    """

    _elsewhere = "connect in the other process: send the address instead"

    def __init__(self, store: base.Store) -> None:
        super().__init__()
        self._store = store
        self.set_timeout(min(store.timeout, _UNLIMITED))
        _open.add(self)

    @property
    def host(self) -> str | None:
        """The host of the store's server, None without a server."""
        return getattr(self._store, "host", None)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._store.get(key, self.timeout)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return self._store.compare_set(key, _bytes(expected_value), _bytes(desired_value))

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        self._store.wait(keys, self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def append(self, key: str, value: Any) -> None:
        self._store.append(key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(keys, self.timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._store.multi_set(keys, [_bytes(value) for value in values])

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        return self._store.list_keys()

    def queue_push(self, key: str, value: Any) -> None:
        self._store.queue_push(key, _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(key, block, self.timeout)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(key)

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        self._store.barrier(key, world_size, self.timeout if timeout is None else timeout)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Store:
        """Return another wrapper of the same asyncdist store, which any number of threads may use.

        The clone has its own timeout, initially the same.
        """
        other = Store(self._store)
        other.set_timeout(self.timeout)
        return other

    # C++ code calls these methods by other names.
    deleteKey, getNumKeys, hasExtendedApi = delete_key, num_keys, has_extended_api  # noqa: N815

    def close(self) -> None:
        """Close the store. Idempotent."""
        _open.discard(self)
        self._store.close()

    def __repr__(self) -> str:
        return f"<torch store over {self._store!r}>"


def _bytes(value: Any) -> Any:
    # C++ passes a vector of bytes as a list.
    return bytes(value) if isinstance(value, list) else value
