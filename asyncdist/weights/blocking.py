"""Publisher and subscriber for programs without an event loop. Exported as ``asyncdist.sync.weights``.

from asyncdist.sync import weights

with weights.Publisher(model, job="asyncdist://10.0.0.1:29500/digits") as publisher:
    version = publisher.publish(step)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Timeout
from asyncdist.weights.publisher import PublisherBase
from asyncdist.weights.subscriber import SubscriberBase
from asyncdist.weights.transfer.version_table import ReaderStatus, Version


class BlockingPublisher(PublisherBase):
    """`asyncdist.weights.Publisher` for programs without an event loop: ``with``, and calls that block.

    The arguments, attributes and errors are those of `asyncdist.weights.Publisher`. Any thread may call the methods.

    Example:
        >>> with weights.Publisher(model, job="asyncdist://10.0.0.1:29500/digits") as publisher:
        ...     publisher.publish(step)
    """

    def __enter__(self) -> Self:
        background_loop().run(self._publishing.open())
        return self

    def __exit__(self, *error: object) -> None:
        background_loop().run(self._publishing.close())

    def publish(self, step: int | None = None) -> Version:
        """Make the present values of the tensors the newest version, and return it once readers can see it."""
        return background_loop().run(self._publishing.publish(step))

    def readers(self) -> list[ReaderStatus]:
        """Return which version each living subscriber uses."""
        return background_loop().run(self._publishing.readers())

    def wait_for_readers(self, version: Version | None = None, timeout: Timeout = None) -> list[ReaderStatus]:
        """Wait until every subscriber uses a version or a newer one."""
        return background_loop().run(self._publishing.wait_for_readers(version, timeout))


class BlockingSubscriber(SubscriberBase):
    """`asyncdist.weights.Subscriber` for programs without an event loop: ``with``, ``for``, and calls that block.

    The arguments, attributes and errors are those of `asyncdist.weights.Subscriber`. Any thread may call the methods.

    Example:
        >>> with weights.Subscriber(like=model, job="asyncdist://10.0.0.1:29500/digits") as subscriber:
        ...     for version in subscriber:
        ...         with subscriber.swap(version):
        ...             pass
    """

    def __enter__(self) -> Self:
        background_loop().run(self._subscribing.open())
        return self

    def __exit__(self, *error: object) -> None:
        background_loop().run(self._subscribing.close())

    def __iter__(self) -> Iterator[Version]:
        return self

    def __next__(self) -> Version:
        return self.next()

    def next(self, timeout: Timeout = None) -> Version:
        """Wait until a newer version than the last one is here, and return it."""
        return background_loop().run(self._subscribing.next(timeout))

    @contextlib.contextmanager
    def swap(self, version: Version) -> Iterator[Any]:
        """Show a version in a spare copy, and make the copy the current one when the block ends without an exception."""
        shown = background_loop().run(self._subscribing.show(version))
        try:
            yield shown.model
        except BaseException:
            self._subscribing.withdraw(shown)
            raise
        background_loop().run(self._subscribing.commit(shown))


Publisher = BlockingPublisher
Subscriber = BlockingSubscriber

__all__ = ["Publisher", "ReaderStatus", "Subscriber", "Version"]
