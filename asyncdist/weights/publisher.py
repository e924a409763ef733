"""`Publisher`: makes versions of a model's parameters available to subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Self

import torch
from torch import nn

from asyncdist.base.background_loop import run_in_background
from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.base.error_text import describe_error
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.config import Config
from asyncdist.errors import StoreError, UnsupportedError, UsageError, WaitTimeoutError
from asyncdist.kernel import whole_number_of
from asyncdist.weights.errors import PublisherReplacedError, WeightsError
from asyncdist.weights.transfer.exchange import WeightsExchange
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.version_table import NO_VERSION, ReaderStatus, Version, new_version

log = logging.getLogger("asyncdist")

Source = nn.Module | Mapping[str, torch.Tensor]
"""What is published: a module's state dict, or tensors by name."""


class Publishing:
    """The publisher's work, on the background loop. The arguments are those of `Publisher`."""

    def __init__(self, source: Source, job: str, name: str, keep: int, timeout: Timeout) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise UsageError(f"keep is {keep!r}: a publisher keeps at least one version")
        self._source, self._job, self._name, self._keep = source, job, name, keep
        self._config = Config.from_environment()
        self._timeout = seconds(timeout, self._config.timeout)
        self.incarnation = 0
        self._kept: list[tuple[HeldVersion, bytes]] = []
        """The versions that readers can get, the newest last, each with its manifest."""
        self._serial = 0
        self._publishing = asyncio.Lock()
        self._cleaning: asyncio.Future[None] | None = None
        self._latest = NO_VERSION
        """The newest version, as far as this publisher knows."""
        self._exchange: WeightsExchange | None = None
        self._watching: asyncio.Task[None] | None = None
        self._replaced: PublisherReplacedError | None = None

    async def open(self) -> None:
        tensors_of(self._source)
        self._exchange = await WeightsExchange.open(
            self._job, self._name, label="publisher", config=self._config, timeout=self._timeout
        )
        try:
            self.incarnation = await self._exchange.table.become_publisher()
            self._watching = asyncio.create_task(self._watch())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave the job. Readers that have the newest version give it to others."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        try:
            if self._watching is not None:
                self._watching.cancel()
                await asyncio.wait([self._watching])
            await self._cleaned()
            with contextlib.suppress(StoreError):
                for held, _ in self._kept:
                    await exchange.drop(held)
            self._kept.clear()
        finally:
            await exchange.close()

    # -- publishing ----------------------------------------------------------------------------

    async def publish(self, step: int | None) -> Version:
        exchange = self._opened()
        step = None if step is None else whole_number_of("step", step)
        async with self._publishing:
            if self._replaced is not None:
                raise self._replaced
            await self._cleaned()
            newest = self._kept[-1][0].version.number if self._kept else 0
            self._serial += 1
            tensors = tensors_of(self._source)
            if not tensors:
                raise UsageError("there are no weights to publish: the module or dict contains no tensors")
            for name, tensor in tensors.items():
                if tensor.is_meta:
                    raise UnsupportedError(
                        f"{name} is on the meta device and has no values to publish: load the weights first"
                    )
            version = new_version(self.incarnation, self._serial, step, newest + 1)
            held, manifest = await exchange.port.copy(tensors, version)
            # From here on the copy is complete: a caller that is cancelled leaves a version that is whole.
            return await asyncio.shield(asyncio.ensure_future(self._announce(exchange, held, manifest.encode())))

    async def _cleaned(self) -> None:
        if self._cleaning is not None:
            await asyncio.wait([self._cleaning])

    async def _announce(self, exchange: WeightsExchange, held: HeldVersion, manifest: bytes) -> Version:
        try:
            await exchange.announce(held, manifest, self._latest)
        except BaseException as error:
            if isinstance(error, PublisherReplacedError):
                self._replaced = error
            await exchange.drop(held)
            raise
        self._kept.append((held, manifest))
        self._latest = held.version
        self._cleaning = asyncio.ensure_future(self._clean(exchange))
        return held.version

    async def _clean(self, exchange: WeightsExchange) -> None:
        try:
            while len(self._kept) > self._keep:
                await exchange.drop(self._kept.pop(0)[0])
            await exchange.table.forget_all_but({each.version.key for each, _ in self._kept}, self.incarnation)
        except StoreError as error:
            log.warning("old versions of %r could not be deleted from the store: %s", self._name, error.summary)

    async def _watch(self) -> None:
        """Announce the newest version again if the store has lost it, and note when another publisher takes over."""
        try:
            async for latest in self._opened().table.watch_latest():
                self._latest = latest
                if latest.incarnation > self.incarnation:
                    self._note_replaced(PublisherReplacedError(self.incarnation, latest.incarnation))
                elif latest is NO_VERSION:
                    await self._announce_again()
        except Exception as error:
            log.error(
                "publisher %d of %r watches the store no more, and learns at its next call whether it was replaced: %s",
                self.incarnation,
                self._name,
                describe_error(error),
            )

    async def _announce_again(self) -> None:
        async with self._publishing:
            exchange = self._opened()
            if not self._kept or self._latest is not NO_VERSION:
                return
            held, manifest = self._kept[-1]
            try:
                await exchange.announce(held, manifest, self._latest)
            except PublisherReplacedError as error:
                self._note_replaced(error)
            except StoreError as error:
                log.error(
                    "the store has lost %s of %r, which could not be announced again; publish the next one: %s",
                    held.version,
                    self._name,
                    describe_error(error),
                )
            else:
                log.warning("the store had lost %s of %r, which was announced again", held.version, self._name)

    def _note_replaced(self, error: PublisherReplacedError) -> None:
        if self._replaced is None:
            self._replaced = error
            log.error("%s", error.summary)

    # -- readers -------------------------------------------------------------------------------

    async def readers(self) -> list[ReaderStatus]:
        return await self._opened().table.readers()

    async def wait_for_readers(self, version: Version | None, timeout: Timeout) -> list[ReaderStatus]:
        """Wait until every subscriber uses a version, or a newer one, and return what they use."""
        exchange = self._opened()
        if version is None and not self._kept:
            raise UsageError("wait_for_readers before the first publish: there is no version to wait for")
        number = self._kept[-1][0].version.number if version is None else version.number
        try:
            limit = Deadline.after(timeout).remaining_or_none()
            async with asyncio.timeout(limit), contextlib.aclosing(exchange.table.watch_readers()) as changes:
                async for readers in changes:
                    if all(each.version >= number for each in readers):
                        return readers
        except TimeoutError:
            behind = [each for each in await self.readers() if each.version < number]
            names = ", ".join(f"process {each.pid} on {each.host} (version {each.version})" for each in behind[:8])
            raise WaitTimeoutError(
                f"these readers do not use version {number} yet: {names}; they do when they have swapped it in: wait again"
            ) from None
        raise WeightsError("the watch of the readers has ended")

    def _opened(self) -> WeightsExchange:
        if self._exchange is None:
            raise UsageError("the publisher is not open: use it inside its (async) with block")
        return self._exchange


class PublisherBase(ProcessBound):
    """What the awaited and the blocking publisher have in common."""

    _elsewhere = "the other process enters one of its own: send the URL of the job instead"

    def __init__(
        self, source: Source, *, job: str, name: str = "weights", keep: int = 2, timeout: Timeout = None
    ) -> None:
        self._publishing = Publishing(source, job, name, keep, timeout)

    @property
    def incarnation(self) -> int:
        """The number of this publisher: 1 for the first of these weights, and one more for each later one."""
        return self._publishing.incarnation


class Publisher(PublisherBase):
    """Publishes versions of a model's parameters and persistent buffers. An asynchronous context manager.

    A version is a copy of the tensors in memory that the processes of this host share; a publisher uses up to ``keep``
    + 1 such copies, and more while readers use older ones. Readers on this host map the copy, and readers on other
    hosts copy from each other. The work is done on asyncdist's background loop and in threads: the loop of the caller
    goes on.

    At any time one process publishes. Another one that enters, for example after a restart, takes over, and the first
    one can publish no more. When a publisher leaves or dies, readers that have its newest version give it to those that
    come.

    Args:
        source: A module, whose state dict is published, or a dict of tensors. Tensors are on any device, dense and not
            distributed.
        job: ``asyncdist://host:port/job`` of a job at a store daemon (``asyncdist store``).
        name: The name of these weights in the job; give different names to different models.
        keep: The number of versions that readers can get: 2 lets a reader that has begun to read a version finish when a
            newer one appears. Readers on other hosts that have one of them get only what has changed since.
        timeout: Limit of each operation of the store, in seconds or as a timedelta; None for ASYNCDIST_TIMEOUT.

    Raises:
        UsageError: An argument is wrong.

    Example:
        >>> async with weights.Publisher(model, job="asyncdist://10.0.0.1:29500/digits") as publisher:
        ...     for step in range(1000):
        ...         train(model)
        ...         if step % 50 == 0:
        ...             version = await publisher.publish(step)
    """

    async def __aenter__(self) -> Self:
        """Enter the job, and take over from the publisher before.

        Raises:
            StoreConnectionError: No store answers.
            AuthenticationError: The tokens differ, or a token is missing where other hosts can connect.
        """
        try:
            await run_in_background(self._publishing.open())
        except asyncio.CancelledError:
            # It may have opened before it was cancelled.
            await run_in_background(self._publishing.close())
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await run_in_background(self._publishing.close())

    async def publish(self, step: int | None = None) -> Version:
        """Make the present values of the tensors the newest version.

        The tensors must not change until the call returns. It never waits for a reader. A process that is killed during
        the call leaves the version before, never a part of this one. A cancelled call leaves either.

        Args:
            step: A number for readers, such as the number of training steps.

        Returns:
            The version, once readers can see it.

        Raises:
            PublisherReplacedError: Another publisher has taken over.
            SharedMemoryError: No memory is left. The version before remains the newest.
            UnsupportedError: A tensor is sparse or distributed, or has a dtype that asyncdist does not carry.
            StoreConnectionError: The connection to the store was lost.
        """
        return await run_in_background(self._publishing.publish(step))

    async def readers(self) -> list[ReaderStatus]:
        """Return which version each living subscriber uses."""
        return await run_in_background(self._publishing.readers())

    async def wait_for_readers(self, version: Version | None = None, timeout: Timeout = None) -> list[ReaderStatus]:
        """Wait until every subscriber uses a version or a newer one. A subscriber that leaves or dies is not waited for.

        Args:
            version: The version; None means the newest of this publisher.
            timeout: Seconds or a timedelta; None means no limit.

        Returns:
            What each subscriber uses.

        Raises:
            WaitTimeoutError: Some still use an older version; the message names them.
        """
        return await run_in_background(self._publishing.wait_for_readers(version, timeout))


def tensors_of(source: Source) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a module or a mapping, by name.

    Raises:
        UsageError: It is neither, or a value is not a tensor.
    """
    tensors = source.state_dict() if isinstance(source, nn.Module) else source
    if not isinstance(tensors, Mapping):
        raise UsageError(f"weights are a module or a dict of tensors, not {type(source).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"{name!r} in the weights is of type {type(tensor).__name__}: names are texts and values are tensors"
            )
    return tensors
