"""The transport ``asyncdist`` of torch 2.15: processes read and write each other's registered memory, and can await it.

    transport = torch.distributed._transport.new_transport_rank("asyncdist", peer_rank=1 - rank)
    memory = transport.register_memory(asyncdist.empty(1 << 20))
    ...                                                     # exchange memory.to_remote_buffer().serialize()
    await transport.read_async(memory.to_mutable_view(), remote)

A transfer that fails, times out or is cancelled uses its buffers no more when its error is raised.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import itertools
import os
import secrets
import threading
from collections.abc import Coroutine, Generator, Iterator
from datetime import timedelta
from typing import Any, NoReturn, Self, TypeVar

import torch
import torch.distributed as torch_distributed

from asyncdist.base.background_loop import background_loop, run_in_background
from asyncdist.base.deadline import LONGEST_SLEEP, Deadline, Timeout, seconds
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.config import Config
from asyncdist.errors import LoopThreadError, OperationTimeoutError, UnsupportedError, UsageError, WaitTimeoutError
from asyncdist.kernel import c10d_private
from asyncdist.net import ChannelAddress
from asyncdist.rendezvous import outward
from asyncdist.torch_backend.one_sided.memory import (
    LocalMemory,
    LocalView,
    MutableLocalView,
    Registration,
    RemoteMemory,
    pack_endpoint,
    unpack_endpoint,
)
from asyncdist.torch_backend.one_sided.memory_port import Grant, MemoryPort

T = TypeVar("T")

_STEP_NBYTES = 2 << 20
"""Bytes that a loop copies before other callbacks get their turn: well below a millisecond."""
_BLOCKING_STEP_NBYTES = 128 << 20
"""Bytes that a blocking call copies between two looks at its peer. The C library copies large pieces past the caches."""
_Base: Any = c10d_private.Transport or object


class TransferWork(ProcessBound, torch_distributed.Work):
    """The handle of one transfer: block in `wait`, or await it. Neither ends the transfer by giving up."""

    _elsewhere = "call wait()"

    def __init__(self, done: concurrent.futures.Future[None]) -> None:
        super().__init__()
        self._done = done
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.add_done_callback(self._complete)

    def _complete(self, done: concurrent.futures.Future[None]) -> None:
        error = UsageError("this process is exiting") if done.cancelled() else done.exception()
        if error is None:
            self._future.set_result([])
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the transfer is complete and return True; raise its error if it failed.

        After a WaitTimeoutError the transfer is still under way.
        """
        if asyncio._get_running_loop() is background_loop().loop and not self._done.done():
            raise LoopThreadError("a transfer")
        deadline = Deadline.after(timeout or None)
        while not concurrent.futures.wait([self._done], min(deadline.remaining(), LONGEST_SLEEP)).done:
            if deadline.expired():
                raise WaitTimeoutError(f"a transfer is under way after {timeout}: wait again, or close the transport")
        self._done.result()
        return True

    def synchronize(self) -> None:
        """Block until the transfer is complete."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the transfer has succeeded or failed."""
        return self._done.done()

    def is_success(self) -> bool:
        """Return whether the transfer has succeeded."""
        return self._done.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the transfer, None if it has succeeded or is under way."""
        return self._done.exception() if self._done.done() and not self._done.cancelled() else None

    def result(self) -> list[torch.Tensor]:
        """Wait for the transfer, and return an empty list."""
        self.wait()
        return []

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future, which resolves to an empty list."""
        return self._future

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(asyncio.wrap_future(self._done)).__await__()


class _Transfer:
    """A transfer that has been accepted. ``ended`` is done when it uses its buffers no more."""

    __slots__ = ("ended", "remote", "view", "writes")

    def __init__(self, view: LocalView, remote: RemoteMemory, writes: bool) -> None:
        self.view, self.remote, self.writes = view, remote, writes
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def name(self) -> str:
        return f"{'write' if self.writes else 'read'} of {self.view.nbytes} bytes"


class OneSidedTransport(_Base):  # type: ignore[misc]
    """One-sided transfers between registered CPU tensors of two processes, for ``torch.distributed._transport``.

    On one host, memory of ``asyncdist.empty`` and ``Group.register`` is copied once, by the process that reads or
    writes; the peer executes nothing. Other tensors pass in messages that the peer's background thread handles, over
    shared memory on one host and TCP, with TLS if the settings ask for it, between hosts.

    Peers prove a secret of the endpoint, which `bind` returns with its address: pass these bytes only to processes that
    may use the registered memory. A peer that dies ends its transfers with PeerLostError at once, one that stops or
    becomes unreachable within ASYNCDIST_HEARTBEAT. The transport stays disconnected then. Any thread may call the methods.

    Args:
        device: ``"cpu"`` or None.
        timeout: Seconds of each call without ``timeout``; by default ASYNCDIST_TIMEOUT.
        host: The address of this host at which it listens for other hosts; by default the outward one, or that of
            ASYNCDIST_SOCKET_IFNAME.

    Raises:
        UnsupportedError: torch is older than 2.15, or the device is not the CPU.

    Example:
        >>> transport = new_transport_rank("asyncdist", "cpu", store=store, rank=rank, peer_rank=1 - rank)
    """

    def __init__(
        self, device: torch.device | str | None = None, *, timeout: Timeout = None, host: str | None = None
    ) -> None:
        if not self.supported():
            raise UnsupportedError("torch has one-sided transports from 2.15 on: update torch")
        super().__init__(device)
        if self.device is not None and self.device.type != "cpu":
            raise UnsupportedError(f"this transport moves host memory, not that of {self.device}: pass device='cpu'")
        self._config = Config.from_environment()
        self._default_timeout = seconds(timeout, self._config.timeout)
        self._host = host
        self._token = secrets.token_hex(16)
        self._pid = os.getpid()
        self._port: MemoryPort | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        """Held to change the registrations and the transfers."""
        self._memories: dict[int, Registration] = {}
        self._by_range: dict[tuple[int, int], Registration] = {}
        self._pending: set[_Transfer] = set()
        self._is_closing = False

    @staticmethod
    def supported() -> bool:
        """Return whether this torch has one-sided transports."""
        return c10d_private.Transport is not None

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("this transport belongs to the parent process: make one in each process")
        if self._is_closing:
            raise UsageError("this transport is closed: make another one")

    def _limit(self, timeout: Timeout) -> Deadline:
        limit = seconds(timeout, self._default_timeout)
        if timeout is not None and limit == float("inf"):
            raise UsageError("a timeout of a transport is finite: leave it out for the default one")
        return Deadline.after(limit)

    # -- the peer ----------------------------------------------------------------------------------

    async def _open(self) -> MemoryPort:
        # On the background loop, one at a time.
        self._check_open()
        if self._port is None:
            host = outward(self._config) if self._host is None else self._host
            self._port = MemoryPort(self._memories, host=host, token=self._token, config=self._config)
        return self._port

    def bind(self, *, timeout: Timeout = None) -> bytes:
        """Return what a peer passes to `connect`. Later calls return the same. Raises AddressError."""
        self._limit(timeout)
        port = self._port or background_loop().run(self._open())
        self._check_open()
        return pack_endpoint(port.address.encode(), self._token)

    def connect(self, peer_url: bytes, *, timeout: Timeout = None) -> int:
        """Connect to the peer whose memory is read and written, and return 0. It may be in this process.

        Raises:
            UsageError: The bytes are not those of an endpoint, or the transport is connected already.
            PeerLostError: The peer cannot be reached, or has ended.
            AuthenticationError: The peer has another secret.
            TimeoutError: The timeout passed.
        """
        deadline = self._limit(timeout)
        address, token = unpack_endpoint(peer_url)
        peer = ChannelAddress.decode(address)

        async def connect() -> None:
            port = await self._open()
            if port.is_connected:
                raise UsageError(f"this transport is connected to {port.peer_name}: make another one for another peer")
            await port.connect(peer, token, deadline.remaining())

        background_loop().run(connect())
        return 0

    def connected(self) -> bool:
        """Return whether the peer is connected, and not known to be lost."""
        return self._port is not None and self._port.is_connected and not self._is_closing

    # -- memory ------------------------------------------------------------------------------------

    def register_memory(self, tensor: torch.Tensor, *, timeout: Timeout = None) -> LocalMemory:
        """Let peers read and write a contiguous CPU tensor. A tensor that is registered already keeps its registration.

        Raises:
            UsageError: The tensor is empty, or is not contiguous.
            UnsupportedError: It is not on the CPU, or has a dtype or layout that is not carried.
        """
        self._limit(timeout)
        tensor = Registration.check(tensor)
        with self._lock:
            self._check_open()
            known = self._by_range.get((tensor.data_ptr(), tensor.nbytes))
            if known is None:
                known = Registration(next(self._numbers), tensor)
                self._memories[known.number] = self._by_range[known.address, known.nbytes] = known
            return LocalMemory(self, known)

    def unregister_memory(self, memory: LocalMemory, *, timeout: Timeout = None) -> None:
        """Let peers use memory no more. Idempotent.

        Peers get UsageError for its descriptors. When this returns, no message is written into it any more; a peer on this
        host that has mapped the memory ends a copy that is under way a moment later.

        Raises:
            UsageError: A transfer of this process uses it, or another transport has registered it.
        """
        self._limit(timeout)
        if not isinstance(memory, LocalMemory) or memory.owner is not self:
            raise UsageError("this memory is not registered with this transport")
        registration = memory.registration
        with self._lock:
            self._check_open()
            if not registration.is_active:
                return
            if any(transfer.view.registration is registration for transfer in self._pending):
                raise UsageError("a transfer uses this memory: wait for it before unregistering")
            registration.is_active = False
            del self._memories[registration.number], self._by_range[registration.address, registration.nbytes]
        if self._port is not None:
            background_loop().run(self._port.revoke(registration.number))

    def describe(self, registration: Registration) -> RemoteMemory:
        """Return the descriptor of registered memory: `LocalMemory.to_remote_buffer`."""
        port = self._port or background_loop().run(self._open())
        return RemoteMemory(port.address.id, registration.number, registration.nbytes)

    # -- transfers ---------------------------------------------------------------------------------

    def read(
        self, local_buffer: MutableLocalView, remote_buffer: RemoteMemory, *, async_op: bool = False,
        timeout: Timeout = None,
    ) -> int | TransferWork:  # fmt: skip
        """Read the first bytes of a peer's memory into a view.

        Returns:
            0, or with ``async_op`` a work, which ``timeout`` does not limit.

        Raises:
            UsageError: The view or the descriptor does not belong to this transport and its peer, they do not fit, or the
                peer has unregistered the memory.
            PeerLostError: The peer has died, has closed its transport, or has not been heard for ASYNCDIST_HEARTBEAT.
            OperationTimeoutError: The timeout passed. The transfer has ended.
        """
        return self._start(self._begin(local_buffer, remote_buffer, False), async_op, self._limit(timeout))

    def write(
        self, local_buffer: LocalView, remote_buffer: RemoteMemory, *, async_op: bool = False, timeout: Timeout = None
    ) -> int | TransferWork:
        """Write a view into the first bytes of a peer's memory. Returns and raises as `read` does.

        A write that fails may have changed part of the memory.
        """
        return self._start(self._begin(local_buffer, remote_buffer, True), async_op, self._limit(timeout))

    async def read_async(
        self, local_buffer: MutableLocalView, remote_buffer: RemoteMemory, *, timeout: Timeout = None
    ) -> None:
        """Read as `read` does; other tasks can run during it. If the caller is cancelled, the transfer ends."""
        deadline = self._limit(timeout)
        await self._transfer(self._begin(local_buffer, remote_buffer, False), deadline)

    async def write_async(
        self, local_buffer: LocalView, remote_buffer: RemoteMemory, *, timeout: Timeout = None
    ) -> None:
        """Write as `write` does; other tasks can run during it. If the caller is cancelled, the transfer ends."""
        deadline = self._limit(timeout)
        await self._transfer(self._begin(local_buffer, remote_buffer, True), deadline)

    def read_stream(
        self, local_buffer: Any, remote_buffer: Any, *, stream: Any = None, timeout: Timeout = None
    ) -> NoReturn:
        """Raise UnsupportedError: this transport has no memory of CUDA devices, whose streams order transfers."""
        raise UnsupportedError("this transport moves host memory, which no CUDA stream orders: call read or read_async")

    def write_stream(
        self, local_buffer: Any, remote_buffer: Any, *, stream: Any = None, timeout: Timeout = None
    ) -> NoReturn:
        """Raise UnsupportedError, as `read_stream` does."""
        raise UnsupportedError(
            "this transport moves host memory, which no CUDA stream orders: call write or write_async"
        )

    def _check_transfer(self, local_buffer: Any, remote_buffer: Any, *, mutable: bool) -> None:
        if not isinstance(local_buffer, MutableLocalView if mutable else LocalView) or local_buffer.owner is not self:
            kind = "to_mutable_view()" if mutable else "to_view()"
            raise UsageError(f"a view of memory that this transport has registered is needed: {kind} makes one")
        if not isinstance(remote_buffer, RemoteMemory):
            raise UsageError(f"a descriptor of an asyncdist transport is needed, not {type(remote_buffer).__name__}")
        if local_buffer.nbytes > remote_buffer.nbytes:
            raise UsageError(f"a view of {local_buffer.nbytes} bytes, and memory of the peer of {remote_buffer.nbytes}")
        local_buffer.registration.check_use()
        if self._port is None:
            raise UsageError(
                "this transport is not connected: call connect() with what bind() of the peer has returned"
            )
        self._port.check_peer(remote_buffer.port)

    def _begin(self, view: LocalView, remote: RemoteMemory, writes: bool) -> _Transfer:
        self._check_open()
        self._check_transfer(view, remote, mutable=not writes)
        transfer = _Transfer(view, remote, writes)
        with self._lock:
            self._check_open()
            view.registration.check_use()
            self._pending.add(transfer)
        return transfer

    def _end(self, transfer: _Transfer) -> None:
        with self._lock:
            self._pending.discard(transfer)
            if not transfer.ended.done():
                transfer.ended.set_result(None)

    def _start(self, transfer: _Transfer, async_op: bool, deadline: Deadline) -> int | TransferWork:
        grant = self._opened.grants.get(transfer.remote.number)
        try:
            if async_op:
                return TransferWork(background_loop().submit(self._transfer(transfer, Deadline.never())))
            if grant is None or not grant.address:
                background_loop().run(self._transfer(transfer, deadline))
                return 0
        except BaseException:
            # The coroutine may not have begun.
            self._end(transfer)
            raise
        try:
            for _ in self._copies(transfer, grant, _BLOCKING_STEP_NBYTES):
                if deadline.expired():
                    raise self._overdue(transfer)
        finally:
            self._end(transfer)
        return 0

    async def _transfer(self, transfer: _Transfer, deadline: Deadline) -> None:
        port = self._opened
        try:
            async with asyncio.timeout(deadline.remaining_or_none()) as limit:
                grant = port.grants.get(transfer.remote.number)
                if grant is None:
                    grant = await _on_background(port.ask(transfer.remote))
                if grant.address:
                    for _ in self._copies(transfer, grant):
                        await asyncio.sleep(0)
                elif transfer.view.nbytes:
                    exchange = port.write if transfer.writes else port.read
                    await _on_background(exchange(transfer.remote, transfer.view))
        except TimeoutError:
            if limit.expired():
                raise self._overdue(transfer) from None
            raise
        finally:
            self._end(transfer)

    @property
    def _opened(self) -> MemoryPort:
        assert self._port is not None
        return self._port

    def _copies(self, transfer: _Transfer, grant: Grant, step: int = _STEP_NBYTES) -> Iterator[None]:
        """Copy step by step, with a yield before each one. Raises PeerLostError and UsageError."""
        port, view, remote = self._opened, transfer.view, transfer.remote
        if view.nbytes > grant.nbytes:
            raise UsageError(f"a view of {view.nbytes} bytes, and memory of {port.peer_name} of {grant.nbytes}")
        for at in range(0, view.nbytes, step):
            yield
            port.check_peer(remote.port)
            if grant.is_revoked:
                raise UsageError(f"{port.peer_name} has unregistered the memory during the {transfer.name}")
            own, others = view.address + at, grant.address + at
            target, source = (others, own) if transfer.writes else (own, others)
            ctypes.memmove(target, source, min(step, view.nbytes - at))
        port.check_peer(remote.port)

    def _overdue(self, transfer: _Transfer) -> OperationTimeoutError:
        error = OperationTimeoutError(f"a {transfer.name} with {self._opened.peer_name} did not end in time")
        error.advice = "it has ended now, and its buffers are free; pass a longer timeout="
        return error

    # -- the end -----------------------------------------------------------------------------------

    def _refuse_further(self) -> list[concurrent.futures.Future[None]]:
        with self._lock:
            self._is_closing = True
            return [transfer.ended for transfer in self._pending]

    def _still_busy(self, count: int) -> WaitTimeoutError:
        return WaitTimeoutError(f"{count} transfers are under way: the transport accepts no others; call close() again")

    def close(self, *, timeout: Timeout = None) -> None:
        """Accept no further calls, wait for the transfers under way, and disconnect. Idempotent.

        Raises:
            WaitTimeoutError: The timeout passed. Call it again.
        """
        deadline = self._limit(timeout)
        if self._pid != os.getpid():
            return
        busy = set(self._refuse_further())
        while busy:
            busy = concurrent.futures.wait(busy, min(deadline.remaining(), LONGEST_SLEEP)).not_done
            if busy and deadline.expired():
                raise self._still_busy(len(busy))
        if self._port is not None:
            background_loop().run(self._release(self._port))

    async def close_async(self, *, timeout: Timeout = None) -> None:
        """Close as `close` does; other tasks can run during it."""
        deadline = self._limit(timeout)
        if self._pid != os.getpid():
            return
        busy = [asyncio.wrap_future(each) for each in self._refuse_further()]
        if busy:
            _, left = await asyncio.wait(busy, timeout=deadline.remaining_or_none())
            if left:
                raise self._still_busy(len(left))
        if self._port is not None:
            await _on_background(self._release(self._port))

    async def _release(self, port: MemoryPort) -> None:
        await port.close()
        with self._lock:
            for registration in self._memories.values():
                registration.is_active = False
            self._memories.clear()
            self._by_range.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _on_background(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop; a cancelled caller waits for its end."""
    if asyncio.get_running_loop() is background_loop().loop:
        return await coroutine
    return await run_in_background(coroutine)
