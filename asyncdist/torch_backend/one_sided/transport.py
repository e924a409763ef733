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
import itertools
import os
import secrets
import threading
from typing import Any, NoReturn, Self

import torch

from asyncdist.base.background_loop import background_loop, run_in_background
from asyncdist.base.deadline import LONGEST_SLEEP, Deadline, Timeout, seconds
from asyncdist.config import Config
from asyncdist.errors import UnsupportedError, UsageError, WaitTimeoutError
from asyncdist.groups import BackgroundCall
from asyncdist.kernel import MemoryPort, Registration, RemoteMemory, RemotePort, c10d_private
from asyncdist.rendezvous import outward
from asyncdist.torch_backend.one_sided.memory import LocalMemory, LocalView, MutableLocalView
from asyncdist.torch_backend.torch_work import Work

_Base: Any = c10d_private.Transport or object


class OneSidedTransport(_Base):  # type: ignore[misc]
    """One-sided transfers between registered CPU tensors of two processes, for ``torch.distributed._transport``.

    On one host, memory of ``asyncdist.empty`` and ``Group.register`` is copied once, by the process that reads or
    writes; the peer executes nothing. So are up to 4 MiB of other tensors, where the system lets the process trace its
    peer. The rest passes in messages that the peer's background thread handles, over shared memory on one host and TCP,
    with TLS if the settings ask for it, between hosts.

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
        AddressError: This host has no such address.

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
            raise UnsupportedError(
                f"this transport moves host memory, not that of {self.device}: pass device='cpu', or use torch's "
                "transport 'nixl'"
            )
        config = Config.from_environment()
        self._default_timeout = seconds(timeout, config.timeout)
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        """Held to change the registrations and the transfers."""
        self._pending: list[Registration] = []
        """The registered memory of each transfer under way."""
        self._idle: list[concurrent.futures.Future[None]] = []
        """What waits until no transfer is under way."""
        self._is_closing = False
        self._remote: RemotePort | None = None
        where, token = outward(config) if host is None else host, secrets.token_hex(16)
        self._port = background_loop().call(lambda: MemoryPort(host=where, token=token, config=config))
        self._connecting = asyncio.Lock()

    @staticmethod
    def supported() -> bool:
        """Return whether this torch has one-sided transports."""
        return c10d_private.Transport is not None

    @property
    def port_id(self) -> str:
        return self._port.id

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

    def bind(self, *, timeout: Timeout = None) -> bytes:
        """Return what a peer passes to `connect`. Later calls return the same."""
        self._limit(timeout)
        self._check_open()
        return self._port.endpoint

    def connect(self, peer_url: bytes, *, timeout: Timeout = None) -> int:
        """Connect to the peer whose memory is read and written, and return 0. It may be in this process.

        Raises:
            UsageError: The bytes are not those of an endpoint, or the transport is connected already.
            PeerLostError: The peer cannot be reached, or has ended.
            AuthenticationError: The peer has another secret.
            TimeoutError: The timeout passed.
        """
        deadline = self._limit(timeout)
        self._check_open()

        async def connect() -> None:
            async with self._connecting:
                if self._remote is not None and self._remote.is_open:
                    raise UsageError(
                        f"this transport is connected to {self._remote.name}: make another one for another peer"
                    )
                self._remote = await self._port.connect(peer_url, deadline.remaining())

        background_loop().run(connect())
        return 0

    def connected(self) -> bool:
        """Return whether the peer is connected, and not known to be lost."""
        return self._remote is not None and self._remote.is_open and not self._is_closing

    # -- memory ------------------------------------------------------------------------------------

    def register_memory(self, tensor: torch.Tensor, *, timeout: Timeout = None) -> LocalMemory:
        """Let peers read and write a contiguous CPU tensor.

        Raises:
            UsageError: The tensor is empty, or is not contiguous.
            UnsupportedError: It is not on the CPU, or has a dtype or layout that is not carried.
        """
        self._limit(timeout)
        registration = Registration(next(self._numbers), tensor)
        with self._lock:
            self._check_open()
            self._port.memories[registration.number] = registration
        return LocalMemory(self, registration)

    def unregister_memory(self, memory: LocalMemory, *, timeout: Timeout = None) -> None:
        """Let peers use memory no more. Idempotent.

        Peers get UsageError for its descriptors. When this returns, no process writes into it any more: a peer on this host
        that copies at the moment ends its copy first, or is lost.

        Raises:
            UsageError: A transfer of this process uses it, or another transport has registered it.
            TimeoutError: The timeout passed, and a peer may copy still.
        """
        deadline = self._limit(timeout)
        if not isinstance(memory, LocalMemory) or memory.owner is not self:
            raise UsageError("this memory is not registered with this transport")
        registration = memory.registration
        with self._lock:
            self._check_open()
            if not registration.is_active:
                return
            if any(used is registration for used in self._pending):
                raise UsageError("a transfer uses this memory: wait for it before unregistering")
            registration.is_active = False
        background_loop().run(self._port.unregister(registration.number), deadline.remaining_or_none())

    # -- transfers ---------------------------------------------------------------------------------

    def read(
        self, local_buffer: MutableLocalView, remote_buffer: RemoteMemory, *, async_op: bool = False,
        timeout: Timeout = None,
    ) -> int | Work:  # fmt: skip
        """Read the first bytes of a peer's memory into a view.

        Returns:
            0, or with ``async_op`` a work, which ``timeout`` does not limit.

        Raises:
            UsageError: The view or the descriptor does not belong to this transport and its peer, they do not fit, or the
                peer has unregistered the memory.
            PeerLostError: The peer has died, has closed its transport, or has not been heard for ASYNCDIST_HEARTBEAT.
            OperationTimeoutError: The timeout passed. The transfer has ended.
        """
        return self._start(local_buffer, remote_buffer, False, async_op, self._limit(timeout))

    def write(
        self, local_buffer: LocalView, remote_buffer: RemoteMemory, *, async_op: bool = False, timeout: Timeout = None
    ) -> int | Work:
        """Write a view into the first bytes of a peer's memory. Returns and raises as `read` does.

        A write that fails may have changed part of the memory.
        """
        return self._start(local_buffer, remote_buffer, True, async_op, self._limit(timeout))

    async def read_async(
        self, local_buffer: MutableLocalView, remote_buffer: RemoteMemory, *, timeout: Timeout = None
    ) -> None:
        """Read as `read` does; other tasks can run during it. If the caller is cancelled, the transfer ends."""
        deadline = self._limit(timeout)
        remote = self._begin(local_buffer, remote_buffer, False)
        await self._transfer(remote, local_buffer, remote_buffer, False, deadline)

    async def write_async(
        self, local_buffer: LocalView, remote_buffer: RemoteMemory, *, timeout: Timeout = None
    ) -> None:
        """Write as `write` does; other tasks can run during it. If the caller is cancelled, the transfer ends."""
        deadline = self._limit(timeout)
        remote = self._begin(local_buffer, remote_buffer, True)
        await self._transfer(remote, local_buffer, remote_buffer, True, deadline)

    def read_stream(self, *args: Any, **options: Any) -> NoReturn:
        """Raise UnsupportedError: this transport has no memory of CUDA devices, whose streams order transfers."""
        raise UnsupportedError("this transport moves host memory, which no CUDA stream orders: call read or read_async")

    write_stream = read_stream

    def _begin(self, view: Any, memory: Any, writes: bool) -> RemotePort:
        """Return the port of the peer for a transfer, which `_end` ends."""
        if not isinstance(view, LocalView if writes else MutableLocalView) or view.owner is not self:
            kind = "to_view()" if writes else "to_mutable_view()"
            raise UsageError(f"a view of memory that this transport has registered is needed: {kind} makes one")
        if not isinstance(memory, RemoteMemory):
            raise UsageError(f"a descriptor of an asyncdist transport is needed, not {type(memory).__name__}")
        if view.nbytes > memory.nbytes:
            raise UsageError(f"a view of {view.nbytes} bytes, and memory of the peer of {memory.nbytes}")
        if self._remote is None:
            raise UsageError(
                "this transport is not connected: call connect() with what bind() of the peer has returned"
            )
        self._remote.check(memory)
        with self._lock:
            self._check_open()
            view.registration.check_use()
            self._pending.append(view.registration)
        return self._remote

    def _end(self, view: LocalView) -> None:
        with self._lock:
            # By identity: a registration has no other equality.
            self._pending.remove(view.registration)
            idle, self._idle = ([], self._idle) if self._pending else (self._idle, [])
        for each in idle:
            each.set_result(None)

    def _start(
        self, view: LocalView, memory: RemoteMemory, writes: bool, async_op: bool, deadline: Deadline
    ) -> int | Work:
        remote = self._begin(view, memory, writes)
        if async_op:
            return Work(BackgroundCall(self._transfer(remote, view, memory, writes, Deadline.never())), [])
        try:
            if not remote.copy_now(memory, 0, view, writes, deadline):
                background_loop().run(_in_time(remote, view, memory, writes, deadline))
        finally:
            self._end(view)
        return 0

    async def _transfer(
        self, remote: RemotePort, view: LocalView, memory: RemoteMemory, writes: bool, deadline: Deadline
    ) -> None:
        try:
            await _in_time(remote, view, memory, writes, deadline)
        finally:
            self._end(view)

    # -- the end -----------------------------------------------------------------------------------

    def _close(self) -> concurrent.futures.Future[None]:
        """Accept no further calls; return what is done when no transfer is under way."""
        idle: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            self._is_closing = True
            if self._pending:
                self._idle.append(idle)
            else:
                idle.set_result(None)
        return idle

    def _still_busy(self) -> WaitTimeoutError:
        count = len(self._pending)
        return WaitTimeoutError(f"{count} transfers are under way: the transport accepts no others; call close() again")

    def close(self, *, timeout: Timeout = None) -> None:
        """Accept no further calls, wait for the transfers under way, and disconnect. Idempotent.

        Raises:
            WaitTimeoutError: The timeout passed. Call it again.
        """
        deadline = self._limit(timeout)
        if self._pid == os.getpid():
            idle = self._close()
            while not concurrent.futures.wait([idle], min(deadline.remaining(), LONGEST_SLEEP)).done:
                if deadline.expired():
                    raise self._still_busy()
            background_loop().run(self._port.close("it has closed its transport"))

    async def close_async(self, *, timeout: Timeout = None) -> None:
        """Close as `close` does; other tasks can run during it."""
        deadline = self._limit(timeout)
        if self._pid == os.getpid():
            if (await asyncio.wait([asyncio.wrap_future(self._close())], timeout=deadline.remaining_or_none()))[1]:
                raise self._still_busy()
            await run_in_background(self._port.close("it has closed its transport"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _in_time(remote: RemotePort, view: LocalView, memory: RemoteMemory, writes: bool, deadline: Deadline) -> None:
    try:
        async with asyncio.timeout(deadline.remaining_or_none()) as limit:
            await remote.transfer(memory, 0, view, writes)
    except TimeoutError:
        if limit.expired():
            raise remote.overdue(view, writes) from None
        raise
