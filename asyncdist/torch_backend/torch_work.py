"""What our process group returns to torch: its `Work`, standing on ours."""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as torch_distributed

from asyncdist.devices.work import DeviceWork
from asyncdist.engine import work as started
from asyncdist.engine.work import call_apart
from asyncdist.memory.torch_compile import excluded_from_compile

_NONE = timedelta(0)  # how torch spells "no timeout"


@excluded_from_compile
class Work(torch_distributed.Work):
    """One operation: wait() on it as torch's code does, or await it.

    ``outputs`` are the tensors that the operation writes: what `result` and the future give. A receive has none but
    ``source``, which finds the sender's rank in the group.
    """

    def __init__(
        self, work: started.Work, outputs: list[torch.Tensor], source: Callable[[Any], int] | None = None
    ) -> None:
        super().__init__()
        self._work = work
        self._outputs = outputs
        self._source = source
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Block until the operation has ended and return True; raise what it failed with.

        On a device the current stream is ordered behind the operation instead, and the host goes on. ``timeout`` limits
        the waiting only: WaitTimeoutError leaves the operation going.
        """
        return self._work.wait(timeout or None)

    def synchronize(self) -> None:
        """Wait: on a device the current stream does it for us, on the CPU there is none."""
        self._work.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or badly."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return what the operation failed with, None if it went well or still goes on."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation wrote; raise what it failed with, or UsageError while it goes on."""
        self._work.result()
        return self._outputs

    def _source_rank(self) -> int:
        """Return the sender's rank in the group, of a receive from any rank."""
        sender = self._work.result()
        return sender if self._source is None else self._source(sender)

    source_rank = _source_rank

    def __await__(self) -> Generator[Any, None, Any]:
        return self._work.__await__()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors that the operation wrote, one and the same at every call.

        Its callbacks run where they may block on other operations: not on the thread that drives these. A failure
        comes out of a ``then``: with one put in by ``set_exception``, DDP's reducer would take the process down.
        """
        if self._future is None:
            over: torch.futures.Future[Any] = torch.futures.Future()
            if self._work.is_success():
                over.set_result(self._outputs)
                self._future = over
            elif isinstance(self._work, DeviceWork):
                self._future = self._future_in_order(self._work)
            else:
                self._future = over.then(lambda _: self.result())
                self._work.add_done_callback(lambda _: call_apart(lambda: over.set_result(None)))
        return self._future

    def _future_in_order(self, work: DeviceWork) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is complete, as torch's own are, when the operation stands in the device's queue.

        What its callbacks put into their streams, and what comes after its ``wait()``, is ordered behind the operation.
        """
        devices: Any = list({tensor.device for tensor in self._outputs if tensor.is_cuda})
        queued: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

        def complete() -> None:
            with work.behind():
                queued.set_result(self._outputs)

        future = queued.then(lambda _: self.result())
        work.when_queued(lambda: call_apart(complete))
        return future

    def waited_for(self, times: int) -> Work:
        """Return this work, which C++ waits for so many times: once for each of several tensors."""
        return self

    def held(self) -> HeldWork:
        """Return the same operation as a Work that lives until it is waited for, whoever else lets go of it."""
        return HeldWork(self._work, self._outputs, self._source)

    def __repr__(self) -> str:
        return repr(self._work)


@excluded_from_compile
class HeldWork(Work):
    """A Work that holds itself until it is waited for: for C++ code that keeps no more than its C++ half.

    So does torch 2.6 with every Work.
    """

    _held: ClassVar[dict[int, HeldWork]] = {}
    _waits = 1

    def __init__(
        self, work: started.Work, outputs: list[torch.Tensor], source: Callable[[Any], int] | None = None
    ) -> None:
        super().__init__(work, outputs, source)
        self._held[id(self)] = self
        while len(self._held) > _MOST_HELD:  # of those that nobody will wait for any more
            self._held.pop(next(iter(self._held)))

    def wait(self, timeout: timedelta = _NONE) -> bool:
        try:
            return super().wait(timeout)
        finally:
            self._waits -= 1
            if self._waits <= 0:
                self._held.pop(id(self), None)

    def waited_for(self, times: int) -> Work:
        self._waits = times
        return self

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._held.pop(id(self), None)
        return super().get_future()


_MOST_HELD = 1024

make_work: type[Work] = HeldWork if torch.__version__.startswith("2.6.") else Work


@excluded_from_compile
class _Done(Work):
    def wait(self, timeout: timedelta = _NONE) -> bool:
        return True


DONE = _Done(started.completed(), [])
"""What a blocking call returns when it is over: torch waits on it once, and throws it away."""
