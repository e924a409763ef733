"""Windows: memory of the ranks of a group which the other ranks write without their help."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import (
    AsyncdistError,
    NotInitializedError,
    OperationTimeoutError,
    PeerLostError,
    UnsupportedError,
    UsageError,
)
from asyncdist.groups.procedure import BackgroundCall
from asyncdist.kernel.engine.work import Work, completed
from asyncdist.kernel.memory.buffers import DTYPE_NUMBERS, DTYPES, input_memory
from asyncdist.kernel.memory.shared_arena import ArenaMapping
from asyncdist.kernel.one_sided.memory_port import MemoryPort
from asyncdist.kernel.one_sided.registration import Registration, RemoteMemory
from asyncdist.kernel.one_sided.remote_port import Grant, RemotePort
from asyncdist.kernel.transport.host_group import HostGroup
from asyncdist.rendezvous import outward

_SIGNAL = torch.zeros(1, dtype=torch.uint8)
_AT_ONCE_NBYTES = 256 << 10
"""The most bytes that `Window.put` copies in the calling thread: some tens of microseconds."""


class _WindowGroup(HostGroup, Protocol):
    timeout: float


class GroupWindows:
    """The windows of a group, which share a group of the same ranks for their signals and meetings.

    Attributes:
        group: The group.
        control: The other group.
        registered: The windows with a tensor.
        is_ended: Whether the group has ended on this rank.
    """

    def __init__(self, group: _WindowGroup) -> None:
        self.group = group
        self.control: Any = group._sibling("its windows")
        self.registered: set[Window] = set()
        self.is_ended = False
        self._numbers = itertools.count()

    def new(self) -> Window:
        """Return a window without a tensor."""
        return Window(self, next(self._numbers))

    def abort(self, reason: str) -> None:
        """End the pending calls on all ranks, and all windows on this one."""
        self.control.abort(reason)
        self._release(reason)

    def close(self) -> None:
        """End the pending calls and all windows on this rank."""
        self._release("it has destroyed the group")
        self.control.close()

    def _release(self, reason: str) -> None:
        self.is_ended = True
        for window in list(self.registered):
            window.end(reason)


@dataclass(eq=False, slots=True)
class _Member:
    """A rank and its memory, as it has described them."""

    endpoint: bytes
    memory: RemoteMemory
    dtype: torch.dtype
    shape: Sequence[int]
    remote: RemotePort | None = None
    puts: set[Work] = field(default_factory=set)
    """The puts of this rank there which have not ended."""


@dataclass(eq=False, slots=True)
class _Exposed:
    """The registered tensor of this rank, and the members with what they have registered."""

    port: MemoryPort
    registration: Registration
    members: list[_Member] = field(default_factory=list)


class Window(ProcessBound):
    """A tensor of each rank of a group, into which the other ranks put data and signals. `Group.new_window` makes it.

    Ranks in arguments are ranks in the group. The methods return works, as those of the group do: await them, or call
    ``wait()``. A put needs no call of its target. On one host the rank that puts writes memory of ``asyncdist.empty`` and
    ``Group.register``, and up to 4 MiB of other memory if the system lets it trace the target. The rest passes in messages,
    which the target's background thread handles, whatever its program does. The tensors may differ in size and dtype.

    A signal arrives after all puts which its sender has started before; if one of them fails, the signal fails, too.

    Errors name the rank: OperationTimeoutError, and PeerLostError for one that has died, at once, or has stopped, within
    ASYNCDIST_HEARTBEAT. A put that fails with one of them may have changed a part of its target; with a UsageError nothing
    has changed. Any thread may call the methods.
    """

    _elsewhere = "each rank makes its own with Group.new_window(): send the ranks instead"

    def __init__(self, windows: GroupWindows, number: int) -> None:
        self._windows, self._tag = windows, number
        self._group, self._control = windows.group, windows.control
        self._exposed: _Exposed | None = None
        self._is_busy = False
        """Whether the ranks register a tensor, or give one up."""

    def __repr__(self) -> str:
        return f"<window of group {self._group.name!r}, {'registered' if self._exposed else 'not registered'}>"

    # -- the tensor --------------------------------------------------------------------------------

    def tensor_register(self, tensor: torch.Tensor, *, timeout: Timeout = None) -> Work[Window]:
        """Let the other ranks put into a contiguous CPU tensor. All ranks call it, each with its tensor.

        The tensor must not be resized, and the window keeps it, until `tensor_deregister` or the end of the group.

        Raises:
            UsageError: The window has a tensor already; or, on all ranks, one rank has passed no tensor that can be
                registered.
        """
        if self._exposed is not None or self._is_busy:
            raise UsageError(
                "double registration: this window has a tensor; call tensor_deregister() on all ranks first"
            )
        self._is_busy = True
        return BackgroundCall(self._register(tensor, self._limit(timeout)))

    async def _register(self, tensor: torch.Tensor, limit: float) -> Window:
        refusal: AsyncdistError | None = None
        exposed: _Exposed | None = None
        told: list[Any] = [None] * self._control.size()
        try:
            try:
                registration = Registration(1, tensor)
                exposed = _Exposed(self._open_port(), registration)
                exposed.port.memories[1] = registration
                described = [exposed.port.endpoint, exposed.port.id, registration.nbytes]
                own: Any = [*described, DTYPE_NUMBERS[tensor.dtype], list(tensor.shape)]
            # The other ranks must learn of it, or they would wait for this one.
            except AsyncdistError as error:
                refusal, own = error, error.summary
            await self._control.all_gather_object(told, own, weights_only=True, timeout=limit)
            if refusal is not None:
                raise refusal
            assert exposed is not None
            for rank, each in enumerate(told):
                if isinstance(each, str):
                    raise UsageError(f"rank {self._group.ranks[rank]} has registered no tensor: {each}")
                endpoint, port, nbytes, dtype, shape = each
                exposed.members.append(_Member(endpoint, RemoteMemory(port, 1, nbytes), DTYPES[dtype], shape))
            if self._windows.is_ended:
                raise NotInitializedError("the group has ended while its members registered a window: make a new one")
            self._exposed, exposed = exposed, None
            self._windows.registered.add(self)
            return self
        finally:
            self._is_busy = False
            if exposed is not None:
                await exposed.port.close("it has registered no tensor")

    def _open_port(self) -> MemoryPort:
        config, rank = self._group.endpoint.config, self._group.ranks[self._group.rank()]
        return MemoryPort(host=outward(config), token=secrets.token_hex(16), config=config, label=f"rank {rank}")

    def tensor_deregister(self, *, timeout: Timeout = None) -> Work[None]:
        """Give up the tensor. All ranks call it. Completes when the puts of all ranks have ended.

        Other calls of this rank are refused from now on. After an error, too, the tensor is given up: puts of the others
        under way get PeerLostError.
        """
        exposed = self._registered()
        self._exposed, self._is_busy = None, True
        self._windows.registered.discard(self)
        return BackgroundCall(self._deregister(exposed, self._limit(timeout)))

    async def _deregister(self, exposed: _Exposed, limit: float) -> None:
        try:
            puts = [put for member in exposed.members for put in member.puts]
            if puts:
                # Unlike gather, it leaves their errors to the program.
                await asyncio.wait(puts)  # type: ignore[type-var]
            await self._control.barrier(background=True, timeout=limit)
        finally:
            self._is_busy = False
            await exposed.port.close("it has deregistered its window")

    def end(self, reason: str) -> None:
        """Give up the tensor on this rank alone, because the group ends there."""
        exposed, self._exposed = self._exposed, None
        self._windows.registered.discard(self)
        if exposed is not None:
            background_loop().submit(exposed.port.close(reason))

    # -- calls of one rank -------------------------------------------------------------------------

    def put(
        self, tensor: torch.Tensor, dst_rank: int, target_offset_nelems: int = 0, *, timeout: Timeout = None
    ) -> Work[None]:
        """Write a tensor into that of a rank, from an element on. The work completes when it is there.

        ``tensor`` must not change before. It has the dtype of the target, and any shape and strides.

        Raises:
            UsageError: It does not fit, or has another dtype.
        """
        exposed, member = self._target(dst_rank)
        limit = self._limit(timeout)
        memory = input_memory(tensor)
        if memory.dtype != member.dtype:
            raise UsageError(f"put() of {memory.dtype} into {member.dtype} of rank {self._named(dst_rank)}: convert it")
        offset = target_offset_nelems * memory.itemsize
        if target_offset_nelems < 0 or offset + memory.nbytes > member.memory.nbytes:
            raise UsageError(
                f"put() of {memory.count} elements from element {target_offset_nelems} on exceeds the window size of rank "
                f"{self._named(dst_rank)}, {member.memory.nbytes // memory.itemsize} elements"
            )
        if not memory.count:
            return completed()
        source = Registration(0, memory.tensor)
        if dst_rank == self._control.rank():
            exposed.registration.bytes[offset : offset + memory.nbytes] = memory.view
            return completed()
        if memory.nbytes <= _AT_ONCE_NBYTES and member.remote is not None and not member.puts:
            with contextlib.suppress(PeerLostError):
                if member.remote.copy_now(member.memory, offset, source, True, Deadline.never()):
                    return completed()
        put: Work[None] = BackgroundCall(self._put(exposed, dst_rank, offset, source, limit))
        member.puts.add(put)
        put.add_done_callback(member.puts.discard)
        return put

    async def _put(self, exposed: _Exposed, rank: int, offset: int, source: Registration, limit: float) -> None:
        async def write() -> None:
            remote = await self._connected(exposed, rank)
            await remote.transfer(exposed.members[rank].memory, offset, source, True)

        await self._within(limit, f"a put of {source.nbytes} bytes", rank, write())

    def signal(self, peer_rank: int, *, timeout: Timeout = None) -> Work[None]:
        """Send a signal to a rank, after the puts there which this rank has started."""
        _, member = self._target(peer_rank)
        limit = self._limit(timeout)
        puts = list(member.puts)
        if puts:
            return BackgroundCall(self._signal(puts, peer_rank, limit))
        sending: Work[None] = self._control.send(_SIGNAL, peer_rank, self._tag, timeout=limit)
        return sending

    async def _signal(self, puts: Sequence[Work], rank: int, limit: float) -> None:
        # Their own limits end them.
        await asyncio.gather(*puts)
        await self._control.send(_SIGNAL, rank, self._tag, timeout=limit)

    def wait_signal(self, peer_rank: int, *, timeout: Timeout = None) -> Work[int]:
        """Wait for a signal of a rank. Each call takes one; signals that no call awaits yet are kept."""
        self._target(peer_rank)
        target, limit = torch.empty_like(_SIGNAL), self._limit(timeout)
        receiving: Work[int] = self._control.recv(target, peer_rank, self._tag, timeout=limit)
        return receiving

    def map_remote_tensor(self, rank: int, *, timeout: Timeout = None) -> Work[torch.Tensor]:
        """Return the tensor of a rank of this host, without a copy: what either side writes, both see.

        It must not be used after the window was deregistered, when its owner may use the memory for something else.

        Raises:
            UnsupportedError: That rank is on another host, or its tensor is in ordinary memory.
        """
        exposed, member = self._target(rank)
        if rank == self._control.rank():
            return completed(exposed.registration.tensor)
        return BackgroundCall(self._map(exposed, member, rank, self._limit(timeout)))

    async def _map(self, exposed: _Exposed, member: _Member, rank: int, limit: float) -> torch.Tensor:
        grant = await self._within(limit, "a mapping", rank, self._granted(exposed, rank))
        if not isinstance(grant.memory, ArenaMapping):
            raise UnsupportedError(
                f"the tensor of rank {self._named(rank)} cannot be mapped here: it is on another host, or in ordinary "
                "memory. Make it with asyncdist.empty() or Group.register(), or put() into it"
            )
        count = grant.nbytes // member.dtype.itemsize
        return grant.memory.tensor(grant.address - grant.memory.address, count, member.dtype).view(member.shape)

    def is_mapped(self, rank: int, *, timeout: Timeout = None) -> Work[bool]:
        """Return whether `map_remote_tensor` can return the tensor of a rank."""
        exposed, _ = self._target(rank)
        if rank == self._control.rank():
            return completed(True)
        return BackgroundCall(self._is_mapped(exposed, rank, self._limit(timeout)))

    async def _is_mapped(self, exposed: _Exposed, rank: int, limit: float) -> bool:
        grant: Grant = await self._within(limit, "a mapping", rank, self._granted(exposed, rank))
        return grant.is_mapped

    # -- peers -------------------------------------------------------------------------------------

    def _registered(self) -> _Exposed:
        if self._exposed is None:
            raise UsageError("this window is not registered: call tensor_register() on all ranks first")
        return self._exposed

    def _target(self, rank: int) -> tuple[_Exposed, _Member]:
        exposed = self._registered()
        if not 0 <= rank < self._control.size():
            raise UsageError(f"rank {rank} in a window of {self._control.size()} ranks")
        if self._control.error is not None:
            raise self._control.error
        return exposed, exposed.members[rank]

    def _named(self, rank: int) -> int:
        return self._group.ranks[rank]

    def _limit(self, timeout: Timeout) -> float:
        return seconds(timeout, self._group.timeout)

    async def _connected(self, exposed: _Exposed, rank: int) -> RemotePort:
        member = exposed.members[rank]
        if member.remote is None or not member.remote.is_open:
            member.remote = await exposed.port.connect(member.endpoint, None)
        return member.remote

    async def _granted(self, exposed: _Exposed, rank: int) -> Grant:
        return await (await self._connected(exposed, rank)).ask(exposed.members[rank].memory)

    async def _within(self, limit: float, what: str, rank: int, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a call of one peer, whose errors name the rank."""
        where: dict[str, Any] = {"group": self._group.name, "rank": self._named(self._group.rank())}
        peer = self._named(rank)
        try:
            async with asyncio.timeout(Deadline.after(limit).remaining_or_none()):
                return await call
        except PeerLostError as error:
            raise PeerLostError(peer, error.why, **where) from error
        except TimeoutError as cause:
            text = f"{what} with rank {peer} did not end within {limit:g} s, and has ended now"
            raise OperationTimeoutError(text, peers=[peer], timeout=limit, **where) from cause
