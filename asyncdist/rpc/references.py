"""Remote references: objects that stay in their process, and are held by others.

The owner counts the holds of each process on each of its objects. Sending a reference gives the receiver one hold; a
process returns its holds together when its last `RemoteReference` to the object has gone. All holds of a process end with
its last channel. An object without holds is forgotten.

A holder may pass a reference on. It tells the owner in a GRANT, over the channel over which it would also return its own
holds, and sends the reference itself. So the owner learns of the new hold before the old one can end, whatever the order of
the two messages. The receiver connects to the owner. One that has not connected `_CONNECTED_WITHIN` seconds after the GRANT
is taken for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from asyncdist.base.callables import AnyFunction
from asyncdist.base.deadline import Timeout
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import AsyncdistError, PeerLostError, UsageError
from asyncdist.net import ChannelAddress, ChannelPort, PeerChannel
from asyncdist.rpc.caller import Caller
from asyncdist.rpc.calls import RemoteCall
from asyncdist.rpc.errors import CalleeLostError
from asyncdist.rpc.objects import ServedObjects
from asyncdist.rpc.wire import GRANT, RELEASE, pack_plain

REFERENCES = ""
"""The name under which each session serves its `ReferenceService`. No object of a program can have it."""
_CONNECTED_WITHIN = 30.0
_TOLD_WITHIN = 2.0
"""Seconds for which a session that closes waits for owners to which it is connecting."""


class RemoteReference(ProcessBound):
    """A reference to an object of another process, which keeps the object alive there.

    `RemoteMethod.ref` makes one of a tensor that a served object has, and `asyncdist.rpc.refer` one of any object. Methods
    may return it, and arguments may contain it. It is valid until it is dropped, or its owner ends; then calls raise
    CalleeLostError.

    Attributes:
        owner: The process of the object, for messages.
        owner_id: The id of the port of that process.
        kind: The name of the object's class.
        shape: The shape of a tensor; None for other objects.
        dtype: The dtype of a tensor; None for other objects.
    """

    _elsewhere = "pass it as an argument or a result of a remote call, also in a list or a dict"

    def __init__(
        self, table: ReferenceTable, address: ChannelAddress, number: int, kind: str, tensor: Sequence[Any] | None
    ) -> None:
        self._table, self._address, self._number = table, address, number
        self.owner, self.owner_id, self.kind = address.name, address.id, kind
        self.shape = None if tensor is None else torch.Size(tensor[0])
        self.dtype: torch.dtype | None = None if tensor is None else getattr(torch, str(tensor[1]))
        self._tensor = tensor

    @property
    def is_owner(self) -> bool:
        """Whether this process has the object."""
        return self._address.id == self._table.address.id

    def local_value(self) -> Any:
        """Return the object itself. Raises UsageError in a process that does not have it."""
        if not self.is_owner:
            raise UsageError(f"the object is at {self.owner}, and not in this process: await read() or call()")
        return self._table.objects.object(self._number, 0)

    def grant_to(self, channel: PeerChannel) -> None:
        """Give the peer of a channel, to which the reference is sent, a hold on its object. The session calls it."""
        self._table.grant(self, channel.peer.id)

    async def call(self, method: str, *args: Any, timeout: Timeout = None, **kwargs: Any) -> Any:
        """Call a method of the object, and return its result, or a `CallStream` for an async generator.

        A reference to a tensor has no methods: `read`, `read_into` and `write` use it.

        Args:
            method: Its name; ``"__call__"`` calls the object itself.
            args: Its arguments.
            timeout: Seconds; see `RemoteObject.call`.
            kwargs: Its keyword arguments.

        Raises:
            CallError: See `RemoteObject`.
        """
        return await (await self._start(self._number, method, args, kwargs, timeout))

    async def read(self, where: Any = None, *, timeout: Timeout = None) -> Any:
        """Return the object, or a part of a tensor, as it is now.

        Args:
            where: The index of the part: a number, a slice, ``...``, or a tuple of these; None for all.
            timeout: Seconds.
        """
        return await (await self._start(REFERENCES, "read", [self._number, _plain_index(where)], {}, timeout))

    async def read_into(self, tensor: torch.Tensor, where: Any = None, *, timeout: Timeout = None) -> torch.Tensor:
        """Read a tensor, or a part of it, into a tensor of the same shape and dtype, and return that.

        A contiguous tensor in host memory receives the data where it lies. If the call fails, its content is undefined.

        Raises:
            UsageError: Shape or dtype differ.
        """
        args = [self._number, _plain_index(where), _signature(tensor)]
        call = await self._start(REFERENCES, "read", args, {}, timeout)
        target = tensor.detach()
        if target.is_cpu and target.is_contiguous() and target.dtype.itemsize * target.numel():
            call.destination = target
        value = await call
        if value.data_ptr() != target.data_ptr():
            target.copy_(value)
        return tensor

    async def write(self, tensor: torch.Tensor, where: Any = None, *, timeout: Timeout = None) -> None:
        """Copy a tensor into the object, which is a tensor, or into a part of it."""
        await (await self._start(REFERENCES, "write", [self._number, _plain_index(where), tensor], {}, timeout))

    async def _start(
        self, served: str | int, method: str, args: Sequence[Any], kwargs: dict[str, Any], timeout: Timeout
    ) -> RemoteCall:
        """Start a call of the object, by its number, or of the `ReferenceService` of its owner."""
        target = f"<{self.kind}>"
        caller = await self._table.caller_for(self._address, target, method)
        return caller.start(target, method_key(served, 0, method), method, args, kwargs, timeout)

    def __repr__(self) -> str:
        what = self.kind if self.shape is None else f"{self.kind} {tuple(self.shape)} {self.dtype}"
        return f"<remote reference to {what} at {self.owner}>"


def method_key(name_or_number: str | int, index: int, method: str) -> bytes:
    """Return an object and its method, as the wire has them."""
    return pack_plain(name_or_number) + pack_plain(index) + pack_plain(method)


def _signature(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


# -- the index of a part as plain data --------------------------------------------------------------


def _plain_index(where: Any) -> Any:
    """Return an index as plain data. Raises UsageError for other indices."""
    if where is None or (isinstance(where, int) and not isinstance(where, bool)):
        return where
    if where is ...:
        return "..."
    if isinstance(where, slice):
        return {"slice": [where.start, where.stop, where.step]}
    if isinstance(where, tuple):
        return [_plain_index(each) for each in where]
    raise UsageError(f"where= is a number, a slice, ..., or a tuple of these, not {where!r}")


def _index(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_index(each) for each in plain)
    if isinstance(plain, dict):
        return slice(*plain["slice"])
    return ... if plain in (None, "...") else plain


class ReferenceService:
    """The services of an owner for its holders, called like the methods of any object.

    ``offers_attributes`` says whether callers may refer to tensors of the served objects.
    """

    def __init__(self, table: ReferenceTable, offers_attributes: bool) -> None:
        self._table, self._offers_attributes = table, offers_attributes

    async def make(self, target: str, index: int, attribute: str) -> RemoteReference:
        """Return a reference to a tensor that is an attribute of a served object.

        Other attributes, and what they have, are not offered: a program names what it offers.
        """
        if not self._offers_attributes or not isinstance(target, str):
            raise PermissionError("this process offers no references to attributes: serve a method that returns one")
        served = self._table.objects.object(target, index)
        kind = type(served).__qualname__
        value = None if attribute.startswith("_") else getattr(served, attribute, None)
        if value is None:
            raise AttributeError(f"an object of type {kind} has no attribute {attribute!r}")
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"the attribute {attribute!r} of an object of type {kind} is a {type(value).__qualname__}, and only those "
                "that are tensors can be referred to: serve a method that returns it, or rpc.refer() of it"
            )
        return self._table.refer(value)

    async def read(self, number: int, where: Any, expected: list[Any] | None = None) -> Any:
        """Return an object, or a part of a tensor, which has the ``expected`` shape and dtype if these are given."""
        value = self._table.objects.object(number, 0) if expected is None else self._tensor(number)
        value = value if where is None else value[_index(where)]
        if expected is not None and (own := _signature(value)) != expected:
            shape, into = tuple(own[0]), tuple(expected[0])
            raise ValueError(f"the part is {shape} {own[1]}, and the tensor to read into {into} {expected[1]}")
        return value.detach() if expected is not None else value

    async def write(self, number: int, where: Any, tensor: torch.Tensor) -> None:
        """Copy a tensor into a tensor, or into a part of it."""
        with torch.no_grad():
            self._tensor(number)[_index(where)].copy_(tensor)

    def _tensor(self, number: int) -> torch.Tensor:
        value = self._table.objects.object(number, 0)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"the object is a {type(value).__qualname__} and no tensor: use read()")
        return value


class ReferenceTable:
    """The references of one session: the objects that others hold, and those that this process holds."""

    def __init__(self, objects: ServedObjects) -> None:
        self.objects = objects
        self._loop = asyncio.get_running_loop()
        # Methods that run in threads make references too.
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._number_of: dict[int, int] = {}
        """The number of each object that is held, by its `id`."""
        self._holds: dict[str, Counter[int]] = {}
        """The holds of each holder on each object; negative if they are returned before their GRANT arrives."""
        self._num_holders: Counter[int] = Counter()
        """The holders of each object of this process that others, or this process, refer to."""
        self._held: dict[tuple[str, int], weakref.ref[RemoteReference]] = {}
        self._received: Counter[tuple[str, int]] = Counter()
        self._connecting: dict[str, tuple[asyncio.Task[None], list[list[Any]]]] = {}
        """The connections to owners that are being opened, by the id of the owner, and the messages for it in order."""
        self._port: ChannelPort | None = None

    def open(self, port: ChannelPort) -> None:
        self._port = port

    async def close(self) -> None:
        """End what connects to owners. Those of references that this process has passed on are told first."""
        connecting = self._connecting.values()
        granting = [task for task, messages in connecting if any(message[0] == GRANT for message in messages)]
        if granting:
            await asyncio.wait(granting, timeout=_TOLD_WITHIN)
        tasks = [task for task, _ in connecting]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @property
    def address(self) -> ChannelAddress:
        assert self._port is not None
        return self._port.address

    async def caller_for(self, address: ChannelAddress, target: str, method: str) -> Caller:
        """Return the table of calls over a channel to a port. Raises CalleeLostError if it cannot be reached."""
        assert self._port is not None
        try:
            channel = await self._port.connect(address)
        except PeerLostError as error:
            raise CalleeLostError(target, method, address.name, error.why, False) from error
        caller: Caller = channel.context.caller
        return caller

    # -- the owner's side --------------------------------------------------------------------------

    def refer(self, target: Any) -> RemoteReference:
        """Return a reference to an object of this process."""
        tensor = _signature(target) if isinstance(target, torch.Tensor) else None
        with self._lock:
            number = self._number_of.get(id(target))
            if number is None:
                number = self._number_of[id(target)] = next(self._numbers)
                self.objects.unpublished[number] = target
            self._hold(number, self.address.id, 1)
            return self._keep(self.address, number, type(target).__qualname__, tensor)

    def granted(self, channel: PeerChannel, number: int, holder: str) -> None:
        """Note a hold that a holder has given to another process."""
        with self._lock:
            if number not in self._num_holders:
                return
            self._hold(number, holder, 1)
        if not self._is_connected(holder):
            self._loop.call_later(_CONNECTED_WITHIN, self.drop_absent, holder)

    def released(self, channel: PeerChannel, number: int, count: int) -> None:
        """Note that a process returns its holds."""
        with self._lock:
            if number in self._num_holders:
                self._hold(number, channel.peer.id, -count)

    def drop_absent(self, holder: str) -> None:
        """Drop the holds of a process to which there is no channel."""
        if not self._is_connected(holder):
            with self._lock:
                for number, count in list(self._holds.get(holder, {}).items()):
                    self._hold(number, holder, -count)

    def _is_connected(self, peer: str) -> bool:
        return self._port is not None and self._port.channel_to(peer) is not None

    def _hold(self, number: int, holder: str, change: int) -> None:
        """Change the holds of a process on an object, and forget the object if none is left. Needs the lock."""
        holds = self._holds.setdefault(holder, Counter())
        before, now = holds[number], holds[number] + change
        self._num_holders[number] += bool(now) - bool(before)
        if now:
            holds[number] = now
            return
        del holds[number]
        if not holds:
            del self._holds[holder]
        if not self._num_holders[number]:
            del self._num_holders[number]
            del self._number_of[id(self.objects.object(number, 0))]
            del self.objects.unpublished[number]

    # -- the holder's side -------------------------------------------------------------------------

    def encode(self, part: Any) -> Any:
        """Return a reference as plain data; None for another object."""
        if not isinstance(part, RemoteReference):
            return None
        return [part._address.encode(), part._number, part.kind, part._tensor]

    def decode(self, stand_in: Any) -> RemoteReference:
        """Return a reference that has arrived, with one hold on its object."""
        address, number, kind, tensor = stand_in
        owner = ChannelAddress.decode(address)
        reference = self._keep(owner, int(number), str(kind), tensor)
        if not (reference.is_owner or owner.id in self._connecting or self._is_connected(owner.id)):
            self._connecting[owner.id] = self._loop.create_task(self._connect(owner)), []
        return reference

    def grant(self, reference: RemoteReference, holder: str) -> None:
        """Give a process, by the id of its port, a hold on the object of a reference of this table."""
        if reference.is_owner:
            with self._lock:
                self._hold(reference._number, holder, 1)
        else:
            self._tell(reference._address.id, [GRANT, reference._number, holder])

    async def _connect(self, owner: ChannelAddress) -> None:
        assert self._port is not None
        try:
            # Calls of the reference say why this process cannot connect.
            with contextlib.suppress(AsyncdistError, TimeoutError):
                await self._port.connect(owner)
        finally:
            _, messages = self._connecting.pop(owner.id)
            for message in messages:
                self._tell(owner.id, message)

    def _keep(self, address: ChannelAddress, number: int, kind: str, tensor: Sequence[Any] | None) -> RemoteReference:
        key = (address.id, number)
        with self._lock:
            self._received[key] += 1
            known = self._held.get(key)
            reference = None if known is None else known()
            if reference is None:
                reference = RemoteReference(self, address, number, kind, tensor)
                self._held[key] = weakref.ref(reference)
                finalizer = weakref.finalize(reference, _drop_soon, self._loop, weakref.WeakMethod(self._dropped), key)
                finalizer.atexit = False
            return reference

    def _dropped(self, key: tuple[str, int]) -> None:
        """Return the holds of a reference that has gone, unless it has arrived again since."""
        with self._lock:
            known = self._held.get(key)
            if known is None or known() is not None or self._port is None:
                return
            del self._held[key]
            count = self._received.pop(key)
        owner, number = key
        if owner == self.address.id:
            with self._lock:
                self._hold(number, owner, -count)
        else:
            self._tell(owner, [RELEASE, number, count])

    def _tell(self, owner: str, message: list[Any]) -> None:
        """Send a message to an owner, now or when this process has connected.

        One to which there is no channel has dropped the holds of this process.
        """
        assert self._port is not None
        if owner in self._connecting:
            self._connecting[owner][1].append(message)
        elif (channel := self._port.channel_to(owner)) is not None:
            channel.send(pack_plain(message))


def _drop_soon(loop: asyncio.AbstractEventLoop, dropped: weakref.WeakMethod[AnyFunction], key: tuple[str, int]) -> None:
    """Return the holds of a reference on the loop. Any thread may collect the reference."""
    method = dropped()
    if method is not None and not loop.is_closed():
        loop.call_soon_threadsafe(method, key)
