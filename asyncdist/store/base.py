"""The base classes of all stores: the same operations, awaited or blocking.

A derived class implements ``request``, which executes a `Command`, and ``stream``, and inherits every operation.
`AsyncStore` derives from `AsyncStoreBase`; TCPStore, FileStore, HashStore and PrefixStore derive from `Store`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import Future
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from datetime import timedelta
from math import inf
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

from asyncdist.base.deadline import Timeout, seconds
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.operations import Command, Op, Value, command

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class AsyncStream(Protocol[T_co]):
    """A stream of values: ``async with store.subscribe(name) as messages: async for message in messages: …``."""

    async def __aenter__(self) -> AsyncIterator[T_co]: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def __await__(self) -> Generator[Any, None, AsyncIterator[T_co]]: ...

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    async def __anext__(self) -> T_co: ...


AsyncSubscription = AsyncStream[bytes]
"""Messages of one channel."""
AsyncWatch = AsyncStream[bytes | None]
"""Values of one key, None while it is missing."""
AsyncPrefixWatch = AsyncStream[tuple[str, bytes | None]]
"""Changes of the keys under a prefix: each key with its value, None when it is deleted."""


class AsyncStoreBase(ProcessBound, ABC):
    """A store whose operations are awaited.

    A call starts its operation and returns a future: await it, gather it, shield it, or pass it to `asyncio.wait`.
    `asyncio.create_task` accepts only coroutines and is not needed. Any number of operations may run at a time. Only
    `queue_pop` is a coroutine, because the store removes the item when the awaiting task has received it.

    Keys, channels and queues are named by strings. Values are bytes, or a str, which is stored as UTF-8. ``timeout``
    arguments are seconds or a timedelta; None is the store's own ``timeout``.

    Every operation may raise these errors:

    - StoreTimeoutError: it did not finish in time.
    - StoreError: the store refused it.
    - StoreConnectionError: the connection broke, and the client could not reconnect, or the outcome of a change is unknown.
      After a reconnect the client continues its requests, and each is executed once.
    - UsageError: an argument is wrong.

    A task that awaits an operation may be cancelled at any point. The store then cancels the operation's wait.
    """

    _elsewhere = "connect in the other process: send the address instead"

    timeout: float

    @property
    def lease(self) -> float:
        """Seconds for which the store keeps ephemeral keys after this client lost its connection; infinity without one."""
        return inf

    @property
    def expiries(self) -> int:
        """How often the store has ended this client's lease, and has deleted its ephemeral keys. Any thread may read it."""
        return 0

    @abstractmethod
    def request(self, command: Command[T], timeout: Timeout = None) -> Future[T]:
        """Start one command and return the future of its result.

        Raises:
            UsageError: The calling thread does not run the store's event loop.
        """

    @abstractmethod
    async def take(self, command: Command[T], timeout: Timeout = None) -> T:
        """Execute a pop. The item returns to its queue unless the awaiting task receives it."""

    @abstractmethod
    def stream(self, command: Command[Any], hidden: str = "") -> AsyncStream[Any]:
        """Return the stream of a `subscribe`, `watch` or `watch_keys` command.

        Args:
            command: The command.
            hidden: A prefix that is removed from each key that the stream yields.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the store. Idempotent."""

    def subscribe(self, channel: str) -> AsyncSubscription:
        """Return a stream of the messages that clients publish to ``channel`` after the stream is entered or first awaited.

        Example:
            >>> async with store.subscribe("news") as messages:
            ...     async for message in messages:
            ...         print(message)
        """
        return self.stream(command(Op.SUBSCRIBE, channel))

    def watch(self, key: str) -> AsyncWatch:
        """Return a stream of the value of ``key``: the present one, then one after each change; None is a missing key.

        The stream yields only the last of several changes that occur between two reads. It continues after a reconnect.
        """
        return self.stream(command(Op.WATCH, key))

    def watch_keys(self, prefix: str = "") -> AsyncPrefixWatch:
        """Return a stream of the keys that begin with ``prefix``: each key with its value, then each change.

        A deleted key's value is None. After a reconnect the stream also yields the changes in between. The client buffers
        the changes until they are read.
        """
        return self.stream(command(Op.WATCH_KEYS, prefix))

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of operations that are called without one; None means no limit."""
        self.timeout = seconds(timeout)

    def set(self, key: str, value: Value, *, ephemeral: bool = False) -> Future[None]:
        """Store ``value`` under ``key`` and wake the clients that wait for the key.

        Args:
            key: Name of the key.
            value: The value.
            ephemeral: Delete the key when this client closes, or when its lease expires after its connection broke, unless
                another client has set the key since. A client that reconnects after its lease has expired sets its
                ephemeral keys again, except those that have a value by then.
        """
        return self.request(command(Op.SET_EPHEMERAL, key, value) if ephemeral else operations.set_(key, value))

    def get(self, key: str, timeout: Timeout = None) -> Future[bytes]:
        """Return the value of ``key``; wait at the store until the key exists. Costs one round trip."""
        return self.request(operations.get(key), timeout)

    def add(self, key: str, amount: int) -> Future[int]:
        """Add ``amount`` to the integer under ``key`` and return the sum.

        The store keeps the integer as decimal digits. A missing key counts as 0.
        """
        return self.request(operations.add(key, amount))

    def wait(self, keys: Iterable[str], timeout: Timeout = None) -> Future[None]:
        """Wait until every key exists. A queue with an item counts as a key."""
        return self.request(command(Op.WAIT, keys), timeout)

    def check(self, keys: Iterable[str]) -> Future[bool]:
        """Return whether all keys exist now. A queue with an item counts as a key."""
        return self.request(command(Op.CHECK, keys))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> Future[bytes]:
        """Store ``desired_value`` under ``key`` if the key holds ``expected_value``.

        Args:
            key: Name of the key.
            expected_value: The value that the key must hold; an empty value also stands for a missing key.
            desired_value: The new value.

        Returns:
            The value of the key afterwards. If the key is missing and ``expected_value`` is not empty, the store changes
            nothing and returns ``expected_value``.
        """
        return self.request(command(Op.COMPARE_SET, key, expected_value, desired_value))

    def delete_key(self, key: str) -> Future[bool]:
        """Delete a key and return whether it existed. Queues are not deleted."""
        return self.request(command(Op.DELETE_KEY, key))

    def num_keys(self) -> Future[int]:
        """Return the number of keys, without queues."""
        return self.request(command(Op.NUM_KEYS))

    def append(self, key: str, value: Value) -> Future[None]:
        """Append to the value of ``key``; store the value if the key is missing."""
        return self.request(command(Op.APPEND, key, value))

    def multi_get(self, keys: Iterable[str], timeout: Timeout = None) -> Future[list[bytes]]:
        """Return the values of all keys; wait until all exist. Costs one round trip."""
        return self.request(command(Op.MULTI_GET, keys), timeout)

    def multi_set(self, keys: Iterable[str], values: Iterable[Value]) -> Future[None]:
        """Set several keys in one atomic step."""
        return self.request(operations.multi_set(keys, values))

    def list_keys(self, prefix: str = "") -> Future[list[str]]:
        """Return the keys that begin with ``prefix``, oldest first, without queues.

        After a restart of the server, ephemeral keys come last.
        """
        return self.request(command(Op.LIST_KEYS, prefix))

    def queue_push(self, key: str, value: Value) -> Future[None]:
        """Append an item to a queue. The client that has waited longest in `queue_pop` receives it."""
        return self.request(command(Op.QUEUE_PUSH, key, value))

    async def queue_pop(self, key: str, block: bool = True, timeout: Timeout = None) -> bytes:
        """Remove the oldest item of a queue and return it.

        A client receives each item once, except after a crash: if the connection breaks, or the client dies, after the
        client has received the item but before the store knows it, the item returns to the head of the queue, and may be
        popped again. It also returns there if the awaiting task is cancelled or times out.

        Args:
            key: Name of the queue.
            block: Wait for an item if the queue is empty.
            timeout: Limit of the wait; None is the store's timeout.

        Raises:
            QueueEmptyError: The queue is empty and ``block`` is False.
        """
        return await self.take(command(Op.QUEUE_POP, key, block), timeout)

    def queue_len(self, key: str) -> Future[int]:
        """Return the number of items in a queue."""
        return self.request(command(Op.QUEUE_LEN, key))

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> Future[None]:
        """Wait until ``world_size`` clients wait under this key at the same time.

        Afterwards the barrier stays open: use a new key each time.
        """
        return self.request(operations.barrier(key, world_size), timeout)

    def publish(self, channel: str, message: Value) -> Future[int]:
        """Send a message to the present subscribers of a channel and return their number."""
        return self.request(command(Op.PUBLISH, channel, message))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class BlockingStream(ABC, Generic[T_co]):
    """A stream of values: iterate over it, or call `get`. `close` it, or use it in a ``with`` statement."""

    @abstractmethod
    def get(self, timeout: Timeout = None) -> T_co:
        """Return the next value; wait for it at most ``timeout`` (None means no limit).

        Raises:
            StoreTimeoutError: No value arrived in time.
        """

    @abstractmethod
    def close(self) -> None:
        """End the subscription or watch. Idempotent."""

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __next__(self) -> T_co:
        return self.get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


Subscription = BlockingStream[bytes]
"""Messages of one channel, from its creation on."""
Watch = BlockingStream[bytes | None]
"""Values of one key, None while it is missing: always the newest value that was not returned yet."""
PrefixWatch = BlockingStream[tuple[str, bytes | None]]
"""Changes of the keys under a prefix: each key with its value, None when it is deleted."""


def blocking(method: Callable[Concatenate[AsyncStoreBase, P], Future[T]]) -> Callable[Concatenate[Store, P], T]:
    """Return a method of `AsyncStoreBase` for `Store`, whose ``request`` returns the result and not its future."""
    return cast("Callable[Concatenate[Store, P], T]", method)


class Store(ProcessBound, ABC):
    """A store whose calls block, with the method names and arguments of `torch.distributed.Store`.

    `AsyncStoreBase` documents each operation's arguments, timeouts and errors. Any number of threads may use one object.
    A `FileStore` has only the operations on keys, and raises UnsupportedError in the others.
    """

    _elsewhere = "connect in the other process: send the address instead"

    def __init__(self, timeout: Timeout = None) -> None:
        self._timeout = seconds(timeout)

    @abstractmethod
    def request(self, command: Command[T], timeout: Timeout = None) -> T:
        """Execute one command and return its result."""

    @abstractmethod
    def stream(self, command: Command[Any], hidden: str = "") -> BlockingStream[Any]:
        """Open the stream of a `subscribe`, `watch` or `watch_keys` command; see `AsyncStoreBase.stream`."""

    @abstractmethod
    def close(self) -> None:
        """Close the store. Idempotent."""

    def subscribe(self, channel: str) -> Subscription:
        """Return a stream of the messages that clients publish to ``channel`` from now on."""
        return self.stream(command(Op.SUBSCRIBE, channel))

    def watch(self, key: str) -> Watch:
        """Return a stream of the value of ``key``: the present one, then one after each change; None is a missing key.

        The stream yields only the last of several changes that occur between two reads.
        """
        return self.stream(command(Op.WATCH, key))

    def watch_keys(self, prefix: str = "") -> PrefixWatch:
        """Return a stream of the keys that begin with ``prefix``, with their values, then of each change."""
        return self.stream(command(Op.WATCH_KEYS, prefix))

    @property
    def timeout(self) -> timedelta:
        """The timeout of operations that are called without one."""
        return timedelta(seconds=min(self._timeout, timedelta.max.total_seconds() // 2))

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of operations that are called without one; None means no limit."""
        self._timeout = seconds(timeout)

    def set(self, key: str, value: Value, *, ephemeral: bool = False) -> None:
        """Store ``value`` under ``key``. The store deletes an ``ephemeral`` key with this client.

        A client without a pending call notices a broken connection only in its next call. If that call comes after the
        lease has expired, ephemeral keys are missing in between.
        """
        self.request(command(Op.SET_EPHEMERAL, key, value) if ephemeral else operations.set_(key, value))

    get = blocking(AsyncStoreBase.get)
    add = blocking(AsyncStoreBase.add)
    wait = blocking(AsyncStoreBase.wait)
    check = blocking(AsyncStoreBase.check)
    compare_set = blocking(AsyncStoreBase.compare_set)
    delete_key = blocking(AsyncStoreBase.delete_key)
    num_keys = blocking(AsyncStoreBase.num_keys)
    append = blocking(AsyncStoreBase.append)
    multi_get = blocking(AsyncStoreBase.multi_get)
    multi_set = blocking(AsyncStoreBase.multi_set)
    list_keys = blocking(AsyncStoreBase.list_keys)
    queue_push = blocking(AsyncStoreBase.queue_push)

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout = None) -> bytes:
        """Remove the oldest item of a queue and return it; wait for one if ``block``, else raise QueueEmptyError."""
        item: bytes = self.request(command(Op.QUEUE_POP, key, block), timeout)
        return item

    queue_len = blocking(AsyncStoreBase.queue_len)
    barrier = blocking(AsyncStoreBase.barrier)
    publish = blocking(AsyncStoreBase.publish)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
