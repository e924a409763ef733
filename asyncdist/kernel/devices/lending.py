"""The devices of one process for loans: the device tensors that it lends to processes of its host, and that it borrows.

A `DeviceLending` makes the `DeviceLoans` of each device on first use. Its executor runs the calls that may block (loading a
driver, mapping memory), and a `CompletionWatcher` polls events, so the event loop never waits for a device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch

from asyncdist.base.callables import Predicate
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.base.error_text import describe_error
from asyncdist.kernel.devices.completion_watcher import CompletionWatcher
from asyncdist.kernel.devices.cuda_streams import CudaStreams
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.transport.device_collectives import DeviceCollectives
from asyncdist.kernel.transport.device_loans import DeviceLoans
from asyncdist.kernel.transport.device_p2p import TransferRefused
from asyncdist.kernel.transport.device_streams import DeviceEvent, Streams
from asyncdist.kernel.transport.registry import device_backends

log = logging.getLogger("asyncdist")

T = TypeVar("T")

# Seconds in which the copies in progress may end when this is closed.
_CLOSE_TIMEOUT = 5.0
# Seconds after which the thread ends when it has no call.
_IDLE_TIMEOUT = 5.0


class OwnerHasEnded(Exception):
    """The owner of a loan has ended before its tensors were copied."""


class DeviceLending:
    """The loans of all devices of this process to and from others. It belongs to the loop on which it was made.

    Args:
        transport: ASYNCDIST_TRANSPORT, which may name the back end of a kind of devices: ``"cpu:auto,cuda:staged"``.
    """

    def __init__(self, transport: str | None) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._executor = DaemonThreadPool("asyncdist-device-loans", max_threads=1, idle_timeout=_IDLE_TIMEOUT)
        self._watcher = CompletionWatcher("asyncdist-watch-device-loans")
        self._made: dict[torch.device, DeviceLoans] = {}
        self._refusals: dict[torch.device, str] = {}
        self._waits: dict[Work, str] = {}
        """The waits for events of owners, with the owner."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_used = False

    # -- what tests replace for devices that are pretended ---------------------------------------------

    def current_device(self, kind: str) -> torch.device:
        """Return the device of a kind at which tensors arrive: the calling thread's current one."""
        if kind != "cuda":
            raise TransferRefused(f"no loans of tensors on {kind}")
        return torch.device(kind, torch.cuda.current_device() if torch.cuda.is_initialized() else 0)

    def streams_of(self, device: torch.device) -> Streams:
        """Return the streams of a device."""
        return CudaStreams(device)

    def backends(self, kind: str) -> Sequence[type[DeviceCollectives]]:
        """Return the back ends for a kind of devices, the preferred first."""
        return device_backends(self._transport, kind)

    def place(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        """Return a copy of a tensor of host memory on the current device of a kind."""
        return tensor.to(kind)

    # -- devices -----------------------------------------------------------------------------------

    def loans_of(self, device: torch.device) -> DeviceLoans | None:
        """Return the loans of a device, if they have been made. Thread-safe."""
        return self._made.get(device)

    async def open(self, device: torch.device) -> DeviceLoans:
        """Return the loans of a device, and make them on first use. Raises TransferRefused if it has none."""
        made = self._made.get(device)
        return await self._run(self._make, device) if made is None else made

    def _make(self, device: torch.device) -> DeviceLoans:
        if device in self._made:
            return self._made[device]
        if device not in self._refusals:
            reasons = []
            # Drivers and libraries raise errors of any type.
            try:
                for kind in self.backends(device.type):
                    reason = kind.probe()
                    loans = kind.make_loans(self.streams_of(device)) if reason is None else None
                    if loans is not None:
                        self._made[device] = loans
                        return loans
                    if reason is not None:
                        reasons.append(f"{kind.name}: {reason}")
            except Exception as cause:
                reasons.append(describe_error(cause))
            self._refusals[device] = "; ".join(reasons) or "no back end has loans"
        raise TransferRefused(self._refusals[device])

    # -- reading -----------------------------------------------------------------------------------

    async def verify(self, kind: str, name: str, owner: str, probe: bytes) -> None:
        """Check that the current device of a kind maps the memory of an owner. Raises TransferRefused.

        Args:
            name: The name of the owner's back end.
            probe: See `DeviceLoans`.
        """
        loans = await self.open(self.current_device(kind))
        if loans.name != name:
            raise TransferRefused(f"the owner lends by {name}, and this process by {loans.name}")
        await self._run(loans.verify, owner, probe)

    async def read(
        self, owner: str, kind: str, lent: Sequence[tuple[int, bytes]], is_wanted: Predicate
    ) -> list[torch.Tensor] | None:
        """Copy lent tensors to the current device of a kind, when they are ready.

        Args:
            owner: The owner, whose memory has been verified.
            lent: The bytes and the location of each tensor.
            is_wanted: Called before the copy, which is not made if it returns False, as it does after `abandon`.

        Returns:
            The copies, complete, as flat uint8 tensors; None if they were not wanted any more.

        Raises:
            TransferRefused: They cannot be mapped.
            OwnerHasEnded: `abandon` was called for the owner before the copy.
            torch.OutOfMemoryError: The device has no memory for them.
        """
        loans = await self.open(self.current_device(kind))
        device = loans.streams.device
        # The memory belongs to this thread's current stream, as that of any tensor that it makes.
        targets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes, _ in lent]
        before = loans.streams.position()
        locations = [location for _, location in lent]
        while is_wanted():
            found = await self._run(self._read_if_ready, loans, owner, locations, targets, before)
            if not isinstance(found, list):
                # From here on the device writes the targets: nothing ends this wait but the device.
                await self._passed(found, None)
                return targets
            for event in found:
                # `abandon` finds the waits that have begun: none may begin after it.
                if not is_wanted():
                    return None
                await self._passed(event, owner)
        return None

    def _read_if_ready(
        self,
        loans: DeviceLoans,
        owner: str,
        locations: Sequence[bytes],
        targets: Sequence[torch.Tensor],
        before: DeviceEvent | None,
    ) -> list[DeviceEvent] | DeviceEvent:
        """Enqueue the copies and return their event, or the events of the owner that its device has not passed."""
        events = {id(event): event for event in (loans.ready(owner, location) for location in locations)}
        pending = [event for event in events.values() if not event.query()]
        return pending or loans.read(owner, locations, targets, before)

    async def _passed(self, event: DeviceEvent, owner: str | None) -> None:
        """Wait until a device has passed an event. One of an ``owner`` is waited for until that is abandoned."""
        if event.query():
            return
        wait = self._watcher.when_passed(event)
        if owner is not None:
            self._waits[wait] = owner
        try:
            await wait
        finally:
            self._waits.pop(wait, None)

    def abandon(self, owner: str) -> None:
        """Wait no more for the device of an owner that has ended, and unmap its memory when no copy uses it."""
        for wait in [wait for wait, each in self._waits.items() if each == owner]:
            wait.finish(error=OwnerHasEnded())
            wait.run_callbacks()
        if self._is_used:
            # This executor runs no call after `close`, which unmaps everything.
            with contextlib.suppress(RuntimeError):
                self._executor.submit(self._forget, owner)

    def _forget(self, owner: str) -> None:
        for loans in self._made.values():
            try:
                loans.forget(owner)
            # A device that has failed raises errors of any type. The memory then stays mapped.
            except Exception as cause:
                log.warning("the device memory of a process that has ended stays mapped: %s", describe_error(cause))

    # -- tasks and threads ----------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a task, for which `close` waits."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run a function that may block in the executor, and return the future of its result."""
        self._is_used = True
        return self._loop.run_in_executor(self._executor, function, *args)

    async def close(self) -> None:
        """Release all memory when the copies in progress are complete. All owners have been abandoned.

        A device that does not complete them is left to the executor's thread.
        """
        if self._tasks:
            _, unfinished = await asyncio.wait(list(self._tasks), timeout=_CLOSE_TIMEOUT)
            for task in unfinished:
                log.warning("a copy of a lent tensor is not complete after %.0f s", _CLOSE_TIMEOUT)
                task.cancel()
        if self._is_used:
            await asyncio.wait([self._run(self._close_loans)], timeout=_CLOSE_TIMEOUT)
        self._executor.shutdown(wait=False)
        self._watcher.remove_unfinished()
        self._watcher.close()

    def _close_loans(self) -> None:
        for loans in self._made.values():
            loans.close()
        self._made.clear()
