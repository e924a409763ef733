"""`Subscriber`: gets the newest version of a model's parameters while requests use the one before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Self

from asyncdist.base.background_loop import run_in_background
from asyncdist.base.deadline import Timeout
from asyncdist.weights.subscribing import SubscriberBase
from asyncdist.weights.transfer.version_table import Version


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
