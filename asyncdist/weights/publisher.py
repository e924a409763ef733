"""`Publisher`: makes versions of a model's parameters available to subscribers."""

from __future__ import annotations

import asyncio
from typing import Self

from asyncdist.base.background_loop import run_in_background
from asyncdist.base.deadline import Timeout
from asyncdist.weights.publishing import PublisherBase
from asyncdist.weights.transfer.version_table import ReaderStatus, Version


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
            newer one appears.
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
