"""`Subscriber`: gets the newest version of a model's parameters while requests use the one before."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self

from asyncdist.base.background_loop import run_in_background
from asyncdist.base.backoff import Backoff
from asyncdist.base.callables import Predicate
from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError, StoreError, UnsupportedError, UsageError, WaitTimeoutError
from asyncdist.weights.content.layout import Manifest
from asyncdist.weights.content.selection import Selection, Slices, select
from asyncdist.weights.errors import DigestError, WeightsError
from asyncdist.weights.model_copies import ModelCopies, ModelCopy
from asyncdist.weights.publisher import Source, tensors_of
from asyncdist.weights.transfer.exchange import WeightsExchange
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.version_table import NO_VERSION, ReaderStatus, Version

log = logging.getLogger("asyncdist")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds before a version that no process could give is tried again."""


class Subscribing:
    """The subscriber's work, on the background loop but for `reading`. The arguments are those of `Subscriber`."""

    def __init__(
        self, like: Source | None, job: str, name: str, slices: Slices | None, copies: int, timeout: Timeout
    ) -> None:
        if not isinstance(copies, int) or copies < 2:
            raise UsageError(
                f"copies is {copies!r}: a subscriber needs one copy for requests and one for the next version"
            )
        self._job, self._name, self._slices = job, name, slices
        self._config = Config.from_environment()
        self._timeout = seconds(timeout, self._config.timeout)
        self._wanted: dict[str, tuple[int, ...]] | None = None
        if like is not None:
            tensors = tensors_of(like)
            distributed = [each for each, tensor in tensors.items() if hasattr(tensor, "full_tensor")]
            if distributed:
                raise UnsupportedError(
                    f"{distributed[0]} is a distributed tensor: pass a dict of the local parts, which to_local() returns, "
                    "as like=, and say with slices= which part of the whole each is"
                )
            self._wanted = {each: tuple(tensor.shape) for each, tensor in tensors.items()}
        self._copies = ModelCopies(like, copies, self._drained)
        self._exchange: WeightsExchange | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._dropping: set[asyncio.Task[None]] = set()
        self._latest = NO_VERSION
        self._changed = asyncio.Event()
        self._ready: tuple[HeldVersion, Selection] | None = None
        """What `next` has returned, or will return, and what is not swapped in."""
        self._seen = NO_VERSION
        """The version that `next` has returned or refused last."""
        self._fetching: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._last_try = ""
        """Why the version that is being fetched could not be read last."""

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._exchange = await WeightsExchange.open(
            self._job, self._name, label="subscriber", config=self._config, timeout=self._timeout
        )
        try:
            self._latest = await self._exchange.table.latest()
            self._watching = asyncio.create_task(self._watch())
            await self._report()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave the job. The copies keep what they show."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        tasks = {task for task in (self._watching, self._fetching, *self._dropping) if task is not None}
        for task in tasks - self._dropping:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
            with contextlib.suppress(StoreError):
                await exchange.table.leave(exchange.port.address.id)
        finally:
            await exchange.close()

    def _opened(self) -> WeightsExchange:
        if self._exchange is None:
            raise UsageError("the subscriber is not open: use it inside its (async) with block")
        return self._exchange

    # -- new versions --------------------------------------------------------------------------

    async def _watch(self) -> None:
        try:
            async for latest in self._opened().table.watch_latest():
                if latest is NO_VERSION:
                    # The store has lost its keys, and numbers them anew.
                    self._seen = replace(self._seen, number=0)
                else:
                    self._latest = latest
                    self._changed.set()
        except Exception as error:
            self._failure = error
            self._changed.set()

    async def next(self, timeout: Timeout) -> Version:
        """Wait until a version that was not returned before is here, and return it."""
        self._opened()
        if self._ready is not None and self._ready[0].version.key == self._seen.key:
            (held, _), self._ready = self._ready, None
            await self._opened().drop(held)
        # The fetch goes on if this call is cancelled, and the next call finds its result.
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch())
            self._fetching.add_done_callback(lambda done: done.cancelled() or done.exception())
        fetching = self._fetching
        await asyncio.wait([fetching], timeout=Deadline.after(timeout).remaining_or_none())
        if not fetching.done():
            raise WaitTimeoutError(self._delay(seconds(timeout)))
        if self._fetching is fetching:
            # Its version or its error is told once, also if the call that began it has ended before.
            self._fetching = None
        if fetching.cancelled() or self._ready is None:
            fetching.cancelled() or fetching.result()
            raise UsageError("the subscriber has been closed while this call waited for a version")
        self._seen = self._ready[0].version
        return self._seen

    def _delay(self, limit: float) -> str:
        """Say why `next` has returned no version within ``limit`` seconds."""
        if not self._latest.number:
            return (
                f"no version of {self._name!r} has been published in {self._job} within {limit:g} s: check that the "
                "publisher runs, with the same job and name"
            )
        if not self._is_new(self._latest):
            return f"no version of {self._name!r} newer than {self._seen} has been published within {limit:g} s"
        if self._copies.spare is None:
            return (
                f"{self._latest} of {self._name!r} waits for a copy of the model: within {limit:g} s no request has left "
                "reading() on the older one; let requests end sooner, or pass copies=3"
            )
        return f"{self._latest} of {self._name!r} has not arrived completely within {limit:g} s: wait again{self._last_try}"

    def _is_new(self, version: Version) -> bool:
        return version.number > self._seen.number and version.key != self._seen.key

    async def _fetch(self) -> None:
        """Get the newest version, once there is a newer one than the last and a copy of the model is free for it."""
        exchange, backoff = self._opened(), Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        async for _ in backoff:
            await self._until(lambda: self._is_new(self._latest) and self._copies.spare is not None)
            version = self._latest
            try:
                self._ready = await self._get(exchange, version)
                self._last_try = ""
                return
            except AsyncdistError as error:
                if not isinstance(error, WeightsError) or isinstance(error, DigestError):
                    self._seen = version
                    raise
                # Its publisher has died, or a newer version has replaced it.
                log.info("%s", error.summary)
                self._last_try = f"; the last try: {error.summary}"
                if self._latest is not version:
                    backoff.reset()

    async def _get(self, exchange: WeightsExchange, version: Version) -> tuple[HeldVersion, Selection]:
        encoded = await exchange.table.manifest(version)
        if encoded is None:
            raise WeightsError(f"{version} has been withdrawn")
        manifest = Manifest.decode(encoded)
        selection = select(manifest.layout, self._wanted, self._slices)
        return await exchange.fetch(version, manifest, selection), selection

    async def _until(self, condition: Predicate) -> None:
        while not condition():
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    # -- copies --------------------------------------------------------------------------------

    async def show(self, version: Version) -> ModelCopy:
        """Show the version that `next` has returned last in a spare copy, for `commit` or `withdraw`; return the copy."""
        exchange, ready, spare = self._opened(), self._ready, self._copies.spare
        if ready is None or ready[0].version.key != version.key or spare is None:
            raise UsageError(
                f"{version} cannot be swapped in: swap in only the version that the subscriber has yielded last, once"
            )
        held, selection = ready
        self._ready = None
        self._copies.reserve(spare)
        showing = asyncio.wrap_future(exchange.port.threads.submit(spare.show, held, selection))
        try:
            try:
                await asyncio.wait([showing])
            except asyncio.CancelledError:
                await asyncio.wait([showing])
                showing.exception()
                raise
            showing.result()
        except BaseException:
            # Even if it shows only a part, so that the version is dropped.
            spare.held = held
            self._copies.end_reading(spare)
            raise
        return spare

    async def commit(self, shown: ModelCopy) -> None:
        """Let new requests read a copy, and tell the publisher."""
        self._copies.make_current(shown)
        self._copies.end_reading(shown)
        self._release_drained()
        if self._exchange is not None:
            await self._report()

    def withdraw(self, shown: ModelCopy) -> None:
        """Give up a copy that was shown. Any thread may call it."""
        self._copies.end_reading(shown)

    @property
    def current(self) -> Version | None:
        """The version that new requests read; None before the first."""
        return self._copies.current

    @contextlib.contextmanager
    def reading(self) -> Iterator[tuple[Any, Version]]:
        """Read the current copy. Any thread may call it."""
        read = self._copies.begin_reading()
        try:
            yield read.model, read.version
        finally:
            self._copies.end_reading(read)

    def _drained(self) -> None:
        assert self._loop is not None
        # The loop may have ended with the process.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._release_drained)

    def _release_drained(self) -> None:
        if self._exchange is None:
            return
        for held in self._copies.hide_drained():
            dropping = asyncio.create_task(self._exchange.drop(held))
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropped)
        self._changed.set()

    def _dropped(self, dropping: asyncio.Task[None]) -> None:
        self._dropping.discard(dropping)
        if not dropping.cancelled() and (error := dropping.exception()) is not None:
            log.warning("a version could not be withdrawn from the store: %s", error)

    async def _report(self) -> None:
        exchange, current = self._opened(), self._copies.current or NO_VERSION
        status = ReaderStatus(
            exchange.port.address.id,
            self._config.host or socket.gethostname(),
            os.getpid(),
            current.number,
            current.incarnation,
        )
        await exchange.table.report(status)


class SubscriberBase(ProcessBound):
    """What the awaited and the blocking subscriber have in common."""

    _elsewhere = "the other process enters one of its own: send the URL of the job instead"

    def __init__(
        self,
        like: Source | None = None,
        *,
        job: str,
        name: str = "weights",
        slices: Slices | None = None,
        copies: int = 2,
        timeout: Timeout = None,
    ) -> None:
        self._subscribing = Subscribing(like, job, name, slices, copies, timeout)

    def reading(self) -> AbstractContextManager[tuple[Any, Version]]:
        """Return a context in which the current copy does not change: the model, or dict of tensors, and its version.

        Any thread may enter it, and it may be left in another one. Keep no tensor of the model beyond it.

        Raises:
            WeightsError: On entry: no version has been swapped in yet.

        Example:
            >>> with subscriber.reading() as (model, version):
            ...     outputs = model(inputs)
        """
        return self._subscribing.reading()

    @property
    def current(self) -> Version | None:
        """The version that new requests read; None before the first."""
        return self._subscribing.current


class Subscriber(SubscriberBase):
    """Receives versions of a model's parameters and persistent buffers. An asynchronous context manager and iterator.

    It has several copies of the model. Requests read the current one, inside `reading`. A new version arrives while
    they do, is verified block by block, and is shown by another copy. `swap` makes that copy the current one: new
    requests read it, and the one before is used again when its last request has ended. So no request reads two
    versions.

    A copy refers to the memory in which the version has arrived. On the publisher's host that is the publisher's, and
    on another host it is that of the first subscriber there, so a host has one copy however many processes read it.
    Tensors on devices, and tensors with another dtype than the published ones, are copied from there in a thread.

    Args:
        like: A module like the publisher's, or a dict of tensors, which may be on the meta device. It says which tensors
            are received, with which shape and dtype and on which device; their values are not used, and not changed.
            Tensors of a module that are not in its state dict keep their values, so they must not be on the meta device.
            It may lack tensors that are published, such as those of another stage of a pipeline. None stands for a dict of
            all tensors that are published, on the CPU.
        job: ``asyncdist://host:port/job`` of a job at a store daemon.
        name: The name of the weights in the job.
        slices: Which part of a published tensor this process has: a dict from names to slices (or tuples of slices) with
            a step of 1, or a function of the name and the published shape that returns one, or None for all. Only the
            bytes of the part are transferred.
        copies: The number of copies, from 2 up. With 2, a version is received when the last request of the version two
            before has ended.
        timeout: Limit of each operation of the store, in seconds or as a timedelta; None for ASYNCDIST_TIMEOUT.

    Raises:
        UsageError: An argument is wrong, or copies of the module cannot show a version.

    Example:
        >>> async with weights.Subscriber(like=model, job="asyncdist://10.0.0.1:29500/digits") as subscriber:
        ...     async for version in subscriber:
        ...         async with subscriber.swap(version) as new:
        ...             new(example)  # optional: warm the new copy up; requests still read the one before

        In a request::

        >>> with subscriber.reading() as (model, version):
        ...     answer = {"digit": int(model(pixels).argmax()), "version": version.number}
    """

    async def __aenter__(self) -> Self:
        """Enter the job.

        Raises:
            StoreConnectionError: No store answers.
            AuthenticationError: The tokens differ, or a token is missing where other hosts can connect.
        """
        try:
            await run_in_background(self._subscribing.open())
        except asyncio.CancelledError:
            # It may have opened before it was cancelled.
            await run_in_background(self._subscribing.close())
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """Leave the job. The copies keep the values that they have."""
        await run_in_background(self._subscribing.close())

    def __aiter__(self) -> AsyncIterator[Version]:
        return self

    async def __anext__(self) -> Version:
        return await self.next()

    async def next(self, timeout: Timeout = None) -> Version:
        """Wait until a newer version than the last one is here, and return it.

        It is the newest one when its transfer begins; versions in between are skipped. If a source dies, stalls or
        sends wrong bytes, the transfer goes on with another one. If none is left, this call waits for a newer version
        or another source. A cancelled call loses nothing: the transfer goes on, and the next call returns its version.

        Args:
            timeout: Seconds or a timedelta; None means no limit.

        Raises:
            WaitTimeoutError: No newer version has arrived in time, or all copies are still read. A transfer that has begun
                goes on, and the next call returns its version.
            DigestError: All sources have sent bytes of a parameter that were not published. The next call waits for a
                newer version.
            UsageError: The published tensors do not fit ``like`` and ``slices``.
            StoreConnectionError: The connection to the store was lost for good.
        """
        return await run_in_background(self._subscribing.next(timeout))

    @contextlib.asynccontextmanager
    async def swap(self, version: Version) -> AsyncIterator[Any]:
        """Show a version in a spare copy, and make the copy the current one when the block ends without an exception.

        Args:
            version: The version that this subscriber has yielded last.

        Yields:
            The copy: a module, or a dict of tensors. Other requests do not read it before the end of the block.

        Raises:
            UsageError: It is not that version, or it was swapped in before; or a tensor of the copy was replaced.
        """
        shown = await run_in_background(self._subscribing.show(version), undo=self._subscribing.withdraw)
        try:
            yield shown.model
        except BaseException:
            self._subscribing.withdraw(shown)
            raise
        await run_in_background(self._subscribing.commit(shown))
