"""Objects of other processes, as the program calls them: one, or all that share a name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, overload

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.base.deadline import Timeout
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import UsageError
from asyncdist.rpc.caller import Caller
from asyncdist.rpc.calls import RemoteCall
from asyncdist.rpc.errors import PartialError
from asyncdist.rpc.loans import AnyLender
from asyncdist.rpc.objects import CALL_METHOD
from asyncdist.rpc.references import REFERENCES, RemoteReference, method_key
from asyncdist.rpc.values import Carrier
from asyncdist.rpc.wire import pack_plain


class RemoteMethod:
    """A method of an object of another process. Calling it starts the call and returns a `RemoteCall`."""

    __slots__ = ("_address", "_caller", "_key", "_name", "_target")

    def __init__(self, caller: Caller, target: str, address: tuple[str | int, int], key: bytes, name: str) -> None:
        self._caller, self._target, self._address = caller, target, address
        self._key, self._name = key + pack_plain(name), name

    def __call__(self, *args: Any, timeout: Timeout = None, **kwargs: Any) -> RemoteCall:
        return self._caller.start(self._target, self._key, self._name, args, kwargs, timeout)

    async def ref(self, *, timeout: Timeout = None) -> RemoteReference:
        """Return a reference to the attribute of this name, a tensor, which stays where it is.

        Raises:
            RemoteError: There is no such attribute, it is no tensor, or the process serves with ``references=False``.
        """
        made = await self._caller.start(
            self._target,
            method_key(REFERENCES, 0, "make"),
            f"{self._name}.ref",
            [*self._address, self._name],
            {},
            timeout,
        )
        assert isinstance(made, RemoteReference)
        return made

    def __repr__(self) -> str:
        return f"<remote method {self._target}.{self._name} at {self._caller.peer}>"


class RemoteObject(ProcessBound):
    """An object that another process serves. `find` and `find_all` of `asyncdist.rpc` return it.

    Its methods are called like local ones, and awaited: ``action = await policy.act(observation, timeout=0.5)``. The
    argument ``timeout`` is that of the call, in seconds; the others go to the method. An async generator is iterated over:
    ``async for part in policy.rollout(64)``. An object that is callable, such as a function or a module, is called itself.

    Attributes whose names begin with an underscore are local. `call` reaches methods that have the name of one of the
    attributes of this class, or an argument ``timeout``.

    Every call may raise CallError: RemoteError for an exception of the method, CallRefusedError, ResultError,
    CallTimeoutError, OverloadedError, and CalleeLostError, which is also a PeerLostError.

    Attributes:
        peer: The process of the object, for messages.
        owner_id: The id of the port of that process.
        rank: The rank under which that process serves; None without one.
    """

    _elsewhere = "the other process finds it with rpc.find(): send its name instead"

    def __init__(self, caller: Caller, name: str, index: int, rank: int | None, count: int) -> None:
        self._caller = caller
        self._name = name if count == 1 else f"{name}[{index}]"
        self._address = name, index
        self._key = pack_plain(name) + pack_plain(index)
        self.peer, self.owner_id, self.rank = caller.peer, caller.peer_id, rank

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private: it cannot be called remotely")
        method = RemoteMethod(self._caller, self._name, self._address, self._key, name)
        # Later look-ups find it without this call.
        self.__dict__[name] = method
        return method

    def __call__(self, *args: Any, timeout: Timeout = None, **kwargs: Any) -> RemoteCall:
        """Call the object itself."""
        return self.call(CALL_METHOD, args, kwargs, timeout=timeout)

    def call(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, *, timeout: Timeout = None
    ) -> RemoteCall:
        """Start a call of a method.

        Args:
            method: Its name.
            args: Its arguments.
            kwargs: Its keyword arguments.
            timeout: Seconds, or a timedelta; None for the rest of the deadline of the method that calls, and without one
                for ASYNCDIST_TIMEOUT.

        Raises:
            UsageError: The arguments cannot be carried. The `RemoteCall` raises it if a thread packs them.
        """
        return self._caller.start(self._name, self._key + pack_plain(method), method, args, kwargs or {}, timeout)

    def __repr__(self) -> str:
        return f"<remote object {self._name} at {self.peer}>"


class CallToAll(asyncio.Future[list[Any]]):
    """The calls of one method of several objects. Its result is a list, in the order of the objects.

    If calls fail, it raises PartialError, with the results of the others, when all have ended. Cancelling it cancels all
    calls.
    """

    __slots__ = ("_failures", "_left", "_method", "_name", "_results", "calls")

    def __init__(self, name: str, method: str, calls: Sequence[RemoteCall], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._name, self._method = name, method
        self.calls = calls
        """The call of each object."""
        self._results: list[Any] = [None] * len(calls)
        self._failures: dict[int, Exception] = {}
        self._left = len(calls)
        for number, call in enumerate(calls):
            call.add_done_callback(lambda done, number=number: self._ended(number, done))  # type: ignore[misc]
        if not calls:
            self.set_result([])

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            for call in self.calls:
                call.cancel()
        return cancelled

    def _ended(self, number: int, call: asyncio.Future[Any]) -> None:
        if call.cancelled():
            self.cancel()
            return
        error = call.exception()
        if error is None:
            self._results[number] = call.result()
        elif isinstance(error, Exception):
            self._failures[number] = error
        self._left -= 1
        if self._left or self.done():
            return
        if self._failures:
            self.set_exception(PartialError(self._name, self._method, self._results, self._failures))
        else:
            self.set_result(self._results)


class RemoteObjects(ProcessBound, Sequence[RemoteObject]):
    """All objects that share a name, in the order of the ranks of their processes, then of their numbers there.

    It is a sequence of `RemoteObject`. A method that is called on it is called on all of them, with the same arguments:
    ``actions = await rpc_objects.act(observation)`` returns a list with a result for each, or raises PartialError.
    """

    _elsewhere = "the other process finds them with rpc.find_all(): send their name instead"

    def __init__(self, name: str, objects: Sequence[RemoteObject], carrier: Carrier, threads: DaemonThreadPool) -> None:
        self._name, self._objects, self._carrier, self._threads = name, objects, carrier, threads

    @overload
    def __getitem__(self, index: int) -> RemoteObject: ...

    @overload
    def __getitem__(self, index: slice) -> RemoteObjects: ...

    def __getitem__(self, index: int | slice) -> RemoteObject | RemoteObjects:
        if isinstance(index, slice):
            return RemoteObjects(self._name, self._objects[index], self._carrier, self._threads)
        return self._objects[index]

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[RemoteObject]:
        return iter(self._objects)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private: it cannot be called remotely")

        def call_all(*args: Any, timeout: Timeout = None, **kwargs: Any) -> CallToAll:
            return self.call(name, args, kwargs, timeout=timeout)

        return call_all

    def __call__(self, *args: Any, timeout: Timeout = None, **kwargs: Any) -> CallToAll:
        """Call all objects themselves."""
        return self.call(CALL_METHOD, args, kwargs, timeout=timeout)

    def call(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, *, timeout: Timeout = None
    ) -> CallToAll:
        """Start a call of a method of all objects; see `RemoteObject.call`. The arguments are packed once."""
        keywords = kwargs or {}
        key = pack_plain(method)
        loop = asyncio.get_running_loop()
        try:
            lender = AnyLender(each._caller.loans for each in self._objects)
            packed = self._carrier.pack_arguments([list(args), keywords], lender, self._threads)
        except UsageError as error:
            raise UsageError(f"{self._name}.{method}() at {len(self)} objects: {error.summary}") from error
        calls = [
            each._caller.start(each._name, each._key + key, method, args, keywords, timeout, packed)
            for each in self._objects
        ]
        return CallToAll(self._name, method, calls, loop)

    def __repr__(self) -> str:
        return f"<{len(self)} remote objects {self._name}>"
