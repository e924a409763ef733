"""The two faces of a store: the same operations, awaited or blocking, each one line over a single ``request``.

A store of either kind says how a `Command` is carried out, and has every operation from here. `AsyncStoreBase` is that of
`asyncdist.store.client.aio`; `Store` is that of torch's names, TCPStore, FileStore, HashStore and PrefixStore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import Future
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from asyncdist.base.deadline import Timeout, seconds
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.operations import Command, Value

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class AsyncStream(Protocol[T_co]):
    """A stream of values: ``async with store.subscribe(name) as messages: async for message in messages: …``."""

    async def __aenter__(self) -> AsyncIterator[T_co]: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    async def __anext__(self) -> T_co: ...


AsyncSubscription = AsyncStream[bytes]
"""Messages of one channel."""
AsyncWatch = AsyncStream[bytes | None]
"""What a key holds, None if it is gone."""


class AsyncStoreBase(ABC):
    """A store to be awaited.

    Each operation begins when it is called and returns a future, to be awaited, gathered or shielded as it is, or given to
    `asyncio.wait`; `asyncio.create_task` takes coroutines alone, and there is no need for it. Any number may be under way.
    Only `queue_pop` is a coroutine, since the item is taken when it has reached who awaits it.

    ``timeout`` arguments are seconds or a timedelta; None is the store's own ``timeout``. What does not finish in time
    raises StoreTimeoutError, what the store refuses StoreError, and a wrong argument UsageError. A connection that breaks
    is made again, and what was asked is done once; where that cannot be, or its outcome is unknown, it raises
    StoreConnectionError. A task that awaits one may be cancelled at any point: the store then stops waiting too.
    """

    timeout: float

    @abstractmethod
    def request(self, command: Command[T], timeout: Timeout = None) -> Future[T]:
        """Begin one command, and return the future of its result. Raises UsageError off the store's loop."""

    @abstractmethod
    async def take(self, command: Command[T], timeout: Timeout = None) -> T:
        """Carry out a pop; the item goes back to its queue unless it reaches who awaits this."""

    @abstractmethod
    def subscribe(self, channel: str) -> AsyncSubscription:
        """Return the messages published to ``channel`` from when it is entered (or awaited) on."""

    @abstractmethod
    def watch(self, key: str) -> AsyncWatch:
        """Return what ``key`` holds now (None if it is missing), and then each time that it changes or goes.

        Of several changes since one last looked, only the last is told. It goes on over a connection that broke.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of the store. May be called again."""

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of operations that name none; None is no limit."""
        self.timeout = seconds(timeout)

    def set(self, key: str, value: Value, *, ephemeral: bool = False) -> Future[None]:
        """Store ``value`` under ``key``; wakes the clients that wait for it.

        An ``ephemeral`` key goes with this client: when it closes, or when its lease has run out after its connection
        broke, unless another client has set the key since. A client that comes back later has its keys again, but for
        those under which there is something by then.
        """
        return self.request(operations.set_ephemeral(key, value) if ephemeral else operations.set_(key, value))

    def get(self, key: str, timeout: Timeout = None) -> Future[bytes]:
        """Return the value of ``key``, waiting at the store until there is one. One round trip."""
        return self.request(operations.get(key), timeout)

    def add(self, key: str, amount: int) -> Future[int]:
        """Add to the whole number under ``key`` (kept as decimal digits; 0 if missing) and return the sum."""
        return self.request(operations.add(key, amount))

    def wait(self, keys: Iterable[str], timeout: Timeout = None) -> Future[None]:
        """Wait until every key has been set; a queue with an item counts."""
        return self.request(operations.wait(keys), timeout)

    def check(self, keys: Iterable[str]) -> Future[bool]:
        """Say whether all keys are there now; a queue with an item counts."""
        return self.request(operations.check(keys))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> Future[bytes]:
        """Set ``key`` to the desired value if it holds the expected one (b"": or is missing); return what it holds now.

        Where the key is missing and something was expected, nothing is stored and ``expected_value`` is returned.
        """
        return self.request(operations.compare_set(key, expected_value, desired_value))

    def delete_key(self, key: str) -> Future[bool]:
        """Delete a key and say whether it was there. Queues are left alone."""
        return self.request(operations.delete_key(key))

    def num_keys(self) -> Future[int]:
        """Return how many keys there are, queues not counted."""
        return self.request(operations.num_keys())

    def append(self, key: str, value: Value) -> Future[None]:
        """Append to the value of ``key``, or store it if there is none."""
        return self.request(operations.append(key, value))

    def multi_get(self, keys: Iterable[str], timeout: Timeout = None) -> Future[list[bytes]]:
        """Return the values of all keys, waiting until all are there. One round trip."""
        return self.request(operations.multi_get(keys), timeout)

    def multi_set(self, keys: Iterable[str], values: Iterable[Value]) -> Future[None]:
        """Set several keys at once: all of them or none."""
        return self.request(operations.multi_set(keys, values))

    def list_keys(self, prefix: str = "") -> Future[list[str]]:
        """Return the keys that begin with ``prefix``, oldest first, queues not counted.

        Of what a server held when it was started again, ephemeral keys come last.
        """
        return self.request(operations.list_keys(prefix))

    def queue_push(self, key: str, value: Value) -> Future[None]:
        """Append an item to a queue; the first who waits to pop gets it."""
        return self.request(operations.queue_push(key, value))

    async def queue_pop(self, key: str, block: bool = True, timeout: Timeout = None) -> bytes:
        """Take the oldest item of a queue, waiting for one if ``block``; else QueueEmptyError.

        An item goes to one taker only, and goes back to the head if the taker is cancelled, times out or dies; or if its
        connection breaks just when it has the item and the store has not heard so: then it may be taken twice.
        """
        return await self.take(operations.queue_pop(key, block), timeout)

    def queue_len(self, key: str) -> Future[int]:
        """Return how many items a queue holds."""
        return self.request(operations.queue_len(key))

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> Future[None]:
        """Wait until ``world_size`` callers wait here at one time. Then it stays open: use a new key each time."""
        return self.request(operations.barrier(key, world_size), timeout)

    def publish(self, channel: str, message: Value) -> Future[int]:
        """Send a message to all who are subscribed now, and return how many they are."""
        return self.request(operations.publish(channel, message))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class BlockingStream(ABC, Generic[T_co]):
    """A stream of values: iterate over it, or `get` one; `close` it, or use ``with``."""

    @abstractmethod
    def get(self, timeout: Timeout = None) -> T_co:
        """Return the next that was not returned yet, waiting for it; None is no limit. Raises StoreTimeoutError."""

    @abstractmethod
    def close(self) -> None:
        """Listen no more. May be called again."""

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __next__(self) -> T_co:
        return self.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


Subscription = BlockingStream[bytes]
"""Messages of one channel, from when it was made on."""
Watch = BlockingStream[bytes | None]
"""What a key holds, at first and whenever that changes, None if it is gone: only the newest that was not returned yet."""


class Store(ABC):
    """A store whose calls block, with torch.distributed's method names and arguments.

    Timeouts, errors and each operation's meaning are those of `AsyncStoreBase`. May be called from many threads at once.
    """

    def __init__(self, timeout: Timeout = None) -> None:
        self._timeout = seconds(timeout)

    @abstractmethod
    def request(self, command: Command[T], timeout: Timeout = None) -> T:
        """Carry out one command and return its result."""

    @abstractmethod
    def subscribe(self, channel: str) -> Subscription:
        """Start to listen to a channel."""

    @abstractmethod
    def watch(self, key: str) -> Watch:
        """Return what ``key`` holds now (None if it is missing), and then each time that it changes or goes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the store. May be called again."""

    @property
    def timeout(self) -> timedelta:
        """How long operations that name no timeout may take."""
        return timedelta(seconds=min(self._timeout, timedelta.max.total_seconds() // 2))

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of operations that name none; None is no limit."""
        self._timeout = seconds(timeout)

    def set(self, key: str, value: Value, *, ephemeral: bool = False) -> None:
        """Store ``value`` (a str as UTF-8) under ``key``; an ``ephemeral`` one goes with this client.

        A client that calls nothing notices only in its next call that its connection is broken. If that comes after its
        lease, the key is missing in between.
        """
        self.request(operations.set_ephemeral(key, value) if ephemeral else operations.set_(key, value))

    def get(self, key: str, timeout: Timeout = None) -> bytes:
        """Return the value of ``key``, waiting until there is one."""
        return self.request(operations.get(key), timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to the whole number under ``key`` (0 if missing) and return the sum."""
        return self.request(operations.add(key, amount))

    def wait(self, keys: Iterable[str], timeout: Timeout = None) -> None:
        """Wait until every key has been set; a queue with an item counts."""
        self.request(operations.wait(keys), timeout)

    def check(self, keys: Iterable[str]) -> bool:
        """Say whether all keys are there now; a queue with an item counts."""
        return self.request(operations.check(keys))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Set ``key`` to the desired value if it holds the expected one (b"": or is missing); return what it holds now.

        Where the key is missing and something was expected, nothing is stored and ``expected_value`` is returned.
        """
        return self.request(operations.compare_set(key, expected_value, desired_value))

    def delete_key(self, key: str) -> bool:
        """Delete a key and say whether it was there. Queues are left alone."""
        return self.request(operations.delete_key(key))

    def num_keys(self) -> int:
        """Return how many keys there are, queues not counted."""
        return self.request(operations.num_keys())

    def append(self, key: str, value: Value) -> None:
        """Append to the value of ``key``, or store it if there is none."""
        self.request(operations.append(key, value))

    def multi_get(self, keys: Iterable[str], timeout: Timeout = None) -> list[bytes]:
        """Return the values of all keys, waiting until all are there."""
        return self.request(operations.multi_get(keys), timeout)

    def multi_set(self, keys: Iterable[str], values: Iterable[Value]) -> None:
        """Set several keys at once: all of them or none."""
        self.request(operations.multi_set(keys, values))

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, oldest first, queues not counted.

        Of what a server held when it was started again, ephemeral keys come last.
        """
        return self.request(operations.list_keys(prefix))

    def queue_push(self, key: str, value: Value) -> None:
        """Append an item to a queue; the first who waits to pop gets it."""
        self.request(operations.queue_push(key, value))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout = None) -> bytes:
        """Take the oldest item of a queue, waiting for one if ``block``; else QueueEmptyError."""
        return self.request(operations.queue_pop(key, block), timeout)

    def queue_len(self, key: str) -> int:
        """Return how many items a queue holds."""
        return self.request(operations.queue_len(key))

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        """Wait until ``world_size`` callers wait here at one time. Then it stays open: use a new key each time."""
        self.request(operations.barrier(key, world_size), timeout)

    def publish(self, channel: str, message: Value) -> int:
        """Send a message to all who are subscribed now, and return how many they are."""
        return self.request(operations.publish(channel, message))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
