"""The publisher's work on the background loop, which `Publisher` and its blocking counterpart start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

import torch
from torch import nn

from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.base.error_text import describe_error
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.config import Config
from asyncdist.errors import StoreError, UnsupportedError, UsageError, WaitTimeoutError
from asyncdist.weights.errors import PublisherReplacedError, WeightsError
from asyncdist.weights.transfer.exchange import WeightsExchange
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.version_table import NO_VERSION, ReaderStatus, Version, new_version

log = logging.getLogger("asyncdist")

Source = nn.Module | Mapping[str, torch.Tensor]
"""What is published: a module's state dict, or tensors by name."""


class Publishing:
    """A publisher, with the arguments of `Publisher`. All methods but the constructor are called on one loop."""

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
        async with self._publishing:
            if self._replaced is not None:
                raise self._replaced
            await self._cleaned()
            newest = self._kept[-1][0].version.number if self._kept else 0
            self._serial += 1
            held, manifest = await exchange.port.copy(
                _published(self._source),
                lambda nbytes: new_version(self.incarnation, self._serial, step, nbytes, newest + 1),
            )
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


def _published(source: Source) -> Mapping[str, torch.Tensor]:
    """Return the tensors to publish; raise if the source has no tensors, or one has no values."""
    tensors = tensors_of(source)
    if not tensors:
        raise UsageError("there are no weights to publish: the module or dict contains no tensors")
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise UnsupportedError(f"{name} is on the meta device and has no values to publish: load the weights first")
    return tensors


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
