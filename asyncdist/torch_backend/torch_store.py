"""A store of ours as a store of torch's: ``init_process_group(store=...)`` and everything in C++ take it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed

from asyncdist.base.deadline import Timeout
from asyncdist.store import base as faces

_ENDLESS = timedelta(days=10_000)
"""No limit, as far as torch can count."""

# torch's own PrefixStore holds a store's C++ half only, which calls into nothing once the Python half is collected.
_open: set[Store] = set()


class Store(torch_distributed.Store):  # type: ignore[misc,name-defined]  # torch does not say that it exports it
    """Any blocking store of ours, under the names by which torch's C++ and Python code calls it.

    What waits does so for its own ``timeout``, at first that of ``store``: torch's code sets it through a PrefixStore
    around this one, in C++, where nothing calls Python. `close` it in the end, which closes ``store`` too. Raises the
    errors of `asyncdist.store`, which are RuntimeErrors. Through a PrefixStore of torch's it has neither queues nor
    `list_keys`, which torch calls of its own stores only; asyncdist's PrefixStore has both.
    """

    def __init__(self, store: faces.Store) -> None:
        super().__init__()
        self._store = store
        self.set_timeout(min(store.timeout, _ENDLESS))
        _open.add(self)

    @property
    def underlying(self) -> faces.Store:
        """The store of ours."""
        return self._store

    @property
    def host(self) -> str | None:
        """Where the store is served, None where it is not."""
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
        """Return another store of torch's on the same store of ours, which any number of threads may use.

        It has a timeout of its own, at first the same.
        """
        other = Store(self._store)
        other.set_timeout(self.timeout)
        return other

    # By these names C++ calls them.
    deleteKey, getNumKeys, hasExtendedApi = delete_key, num_keys, has_extended_api  # noqa: N815

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        _open.discard(self)
        self._store.close()

    def __repr__(self) -> str:
        return f"<torch's face of {self._store!r}>"


def _bytes(value: Any) -> Any:
    return bytes(value) if isinstance(value, list) else value  # as C++ gives a vector of bytes
