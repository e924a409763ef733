"""The callee's side of remote calls: runs the calls that come over one channel, in order, and answers.

Calls of one caller to one object begin in the order in which they were made. A method that runs in a thread ends before the
next call of that caller to that object begins; coroutines and async generators then run concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from asyncdist.base.callables import Callback
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.base.timers import DeadlineTimer
from asyncdist.errors import PeerLostError, ProtocolError, UsageError
from asyncdist.kernel import DeviceLending
from asyncdist.net import OutgoingMessage, PeerChannel
from asyncdist.rpc.caller import current_deadline
from asyncdist.rpc.calls import WINDOW
from asyncdist.rpc.errors import describe
from asyncdist.rpc.loans import ChannelLoans, MessageLoan
from asyncdist.rpc.objects import MethodKind, NoSuchObject, ServedMethod, ServedObjects
from asyncdist.rpc.references import ReferenceTable
from asyncdist.rpc.values import Carrier, PackedValue, cannot_change
from asyncdist.rpc.wire import END, FAILED, ITEM, RESULT, Failure, pack_plain

log = logging.getLogger("asyncdist")

_EAGERLY: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
"""Lets the first step of a task run at once, where that is possible."""

ObjectKey = tuple[str | int, int]
"""The name of an object, or the number of a reference to it, and its index among those of that name."""


class CallResources(Protocol):
    """What all callers of a session share, which is its `RpcSession`.

    ``value_threads`` pack and unpack values; ``call_timeout`` is that of a call without a timeout of its own, in seconds.
    """

    objects: ServedObjects
    references: ReferenceTable
    carrier: Carrier
    lending: DeviceLending
    threads: DaemonThreadPool
    value_threads: DaemonThreadPool
    num_calls: int
    most_calls: int
    call_timeout: float
    is_closing: bool


@dataclass(slots=True, eq=False)
class Execution:
    """One call that this process runs for a caller."""

    owner: Callee
    number: int
    key: ObjectKey
    method: ServedMethod
    deadline: float
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_ready: bool = False
    is_queued: bool = False
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None
    credits: int = WINDOW
    taken: asyncio.Event | None = None

    def expire(self) -> None:
        self.owner.overdue(self)


@dataclass(slots=True)
class _Queue:
    """The calls of one object that wait for an earlier one of the same caller."""

    waiting: deque[Execution] = field(default_factory=deque)
    is_running: bool = False

    def add(self, execution: Execution) -> None:
        execution.is_queued = True
        self.waiting.append(execution)


class Callee:
    """Runs the calls of one caller, at most ``credits`` at a time."""

    def __init__(self, channel: PeerChannel, resources: CallResources, loans: ChannelLoans, credits: int) -> None:
        self._channel, self._resources, self._loans, self._credits = channel, resources, loans, credits
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Execution] = {}
        self._queues: dict[ObjectKey, _Queue] = {}
        self._sending: dict[int, OutgoingMessage] = {}
        self._timer = DeadlineTimer(self._calls.values)

    # -- what the caller sends ---------------------------------------------------------------------

    def called(self, envelope: Sequence[Any], *, is_ready: bool) -> Execution | None:
        """Begin a call, or queue it; return None if it is refused, in which case the caller has been told.

        ``is_ready`` says whether its arguments have arrived. If not, `arrived` follows.
        """
        number, name_or_number, index, method_name, timeout = envelope
        if number in self._calls:
            raise ProtocolError(f"call {number} was made twice")
        resources = self._resources
        if resources.is_closing or len(self._calls) >= self._credits or resources.num_calls >= resources.most_calls:
            self._refuse_overload(number)
            return None
        try:
            method = resources.objects.method(name_or_number, index, method_name)
        except NoSuchObject as error:
            self._fail(number, Failure.REFUSED, str(error))
            return None
        deadline = inf if timeout is None else self._loop.time() + timeout
        execution = Execution(self, number, (name_or_number, index), method, deadline)
        self._calls[number] = execution
        resources.num_calls += 1
        if deadline < inf:
            self._timer.note(deadline)
        if not is_ready:
            self._queues.setdefault(execution.key, _Queue()).add(execution)
        return execution

    def arrived(self, execution: Execution, value: Sequence[Any]) -> None:
        """Run a call, or queue it, now that its arguments have arrived."""
        execution.args, execution.kwargs = value
        execution.is_ready = True
        queue = self._queues.get(execution.key)
        if queue is None:
            if not execution.is_cancelled:
                self._begin(execution)
            return
        if not execution.is_queued and not execution.is_cancelled:
            queue.add(execution)
        self._continue(execution.key, queue)

    def refuse(self, execution: Execution, reason: str) -> None:
        """Refuse a call whose arguments cannot be read."""
        self._fail(execution.number, Failure.REFUSED, reason)
        self._drop(execution)

    def cancel(self, number: int) -> None:
        """Cancel a call, or the sending of its result."""
        execution = self._calls.get(number)
        if execution is not None:
            self._drop(execution)
        elif (outgoing := self._sending.pop(number, None)) is not None:
            self._channel.withdraw(outgoing)

    def credit(self, number: int, count: int) -> None:
        execution = self._calls.get(number)
        if execution is not None:
            execution.credits += count
            if execution.taken is not None:
                execution.taken.set()

    def overdue(self, execution: Execution) -> None:
        """Cancel a call whose deadline has passed, and tell the caller."""
        self._fail(execution.number, Failure.TIMED_OUT, "its deadline passed at the callee")
        self._drop(execution)

    def closed(self) -> None:
        """Cancel all calls: the caller has gone."""
        self._timer.cancel()
        for execution in list(self._calls.values()):
            self._drop(execution)
        self._queues.clear()
        self._sending.clear()

    def _drop(self, execution: Execution) -> None:
        execution.is_cancelled = True
        self._forget(execution)
        if execution.task is not None:
            execution.task.cancel()
        queue = self._queues.get(execution.key)
        if queue is not None and execution.is_queued:
            execution.is_queued = False
            queue.waiting.remove(execution)
            self._continue(execution.key, queue)

    def _forget(self, execution: Execution) -> None:
        if self._calls.pop(execution.number, None) is not None:
            self._resources.num_calls -= 1

    # -- running -----------------------------------------------------------------------------------

    def _continue(self, key: ObjectKey, queue: _Queue) -> None:
        """Begin the calls that need not wait any more."""
        waiting = queue.waiting
        while waiting and waiting[0].is_ready and not queue.is_running:
            execution = waiting.popleft()
            execution.is_queued = False
            self._begin(execution)
        if not waiting and not queue.is_running and self._queues.get(key) is queue:
            del self._queues[key]

    def _begin(self, execution: Execution) -> None:
        kind = execution.method.kind
        if kind is MethodKind.PLAIN:
            self._queues.setdefault(execution.key, _Queue()).is_running = True
            if _EAGERLY:
                self._submit(execution)
            else:
                # The coroutines before it begin in this turn of the loop.
                self._loop.call_soon(self._submit, execution)
            return
        running = self._run(execution) if kind is MethodKind.COROUTINE else self._stream(execution)
        context = None
        if execution.deadline < inf:
            context = contextvars.copy_context()
            context.run(current_deadline.set, execution.deadline)
        task = asyncio.Task(running, loop=self._loop, context=context, **_EAGERLY)
        if not task.done():
            execution.task = task

    def _submit(self, execution: Execution) -> None:
        context = contextvars.copy_context()
        context.run(current_deadline.set, execution.deadline)
        # A session that is closing has no threads any more. The end of the channel then ends the call.
        with contextlib.suppress(RuntimeError):
            self._resources.threads.submit(context.run, self._run_in_thread, execution)

    async def _run(self, execution: Execution) -> None:
        try:
            value = await self._call(execution)
            # In this order: an argument refers to the value, too.
            if cannot_change(sys.getrefcount(value), value):
                packed = await self._pack_aside(value)
            else:
                packed = self._pack(value, snapshot=True)
            del value
        except BaseException as error:
            # Also one that ends a process ends its call alone, and not the process that serves others.
            self._raised(execution, error)
        else:
            self._returned(execution, packed)

    def _call(self, execution: Execution) -> Any:
        """Call the method: a coroutine, an async generator, or the value of a plain method."""
        try:
            return execution.method.function(*execution.args, **execution.kwargs)
        except TypeError as error:
            # Without a frame of the method itself the arguments did not fit.
            trace = error.__traceback__
            if trace is not None and trace.tb_next is None:
                raise CallFailed(Failure.REFUSED, f"the arguments do not fit: {error}") from error
            raise
        finally:
            execution.args, execution.kwargs = (), {}

    def _run_in_thread(self, execution: Execution) -> None:
        outcome: Callback | None = None
        if not execution.is_cancelled:
            try:
                packed = self._pack(self._call(execution), snapshot=True)
            except BaseException as failure:
                outcome = functools.partial(self._raised, execution, failure)
            else:
                outcome = functools.partial(self._returned, execution, packed)
        # The loop has ended with the process.
        try:
            self._loop.call_soon_threadsafe(self._ended_in_thread, execution, outcome)
        except RuntimeError:
            return

    def _ended_in_thread(self, execution: Execution, outcome: Callback | None) -> None:
        if outcome is not None:
            outcome()
        queue = self._queues.get(execution.key)
        if queue is not None:
            queue.is_running = False
            self._continue(execution.key, queue)

    async def _stream(self, execution: Execution) -> None:
        try:
            generator = self._call(execution)
            try:
                async for item in generator:
                    await self._send_item(execution, item)
                    del item
            finally:
                await generator.aclose()
        except BaseException as error:
            self._raised(execution, error)
        else:
            self._forget(execution)
            self._send(pack_plain([END, execution.number]))

    async def _send_item(self, execution: Execution, item: Any) -> None:
        while not execution.credits:
            execution.taken = execution.taken or asyncio.Event()
            execution.taken.clear()
            await execution.taken.wait()
        execution.credits -= 1
        # The generator may change the item when it continues.
        outgoing, loan = self._send_value(ITEM, execution.number, self._pack(item, snapshot=False))
        if outgoing is not None and not outgoing.done:
            sent: asyncio.Future[None] = self._loop.create_future()
            outgoing.on_done = lambda _: None if sent.done() else sent.set_result(None)
            try:
                await sent
            except asyncio.CancelledError:
                self._channel.withdraw(outgoing)
                raise
        if loan is not None and not loan.ended:
            returned: asyncio.Future[None] = self._loop.create_future()
            loan.on_end = lambda: None if returned.done() else returned.set_result(None)
            await returned

    # -- answering ---------------------------------------------------------------------------------

    def _pack(self, value: Any, *, snapshot: bool) -> PackedValue:
        if inspect.isgenerator(value):
            raise _not_carried("it is a generator: write the method as `async def` with `yield`, to send a stream")
        try:
            return self._resources.carrier.pack(value, snapshot=snapshot, lender=self._loans)
        except UsageError as error:
            raise _not_carried(error.summary) from error

    async def _pack_aside(self, value: Any) -> PackedValue:
        """Pack a value that cannot change, in a thread if that takes long."""
        try:
            packed = self._resources.carrier.pack_arguments(value, self._loans, self._resources.value_threads)
            return await packed if isinstance(packed, asyncio.Future) else packed
        except UsageError as error:
            raise _not_carried(error.summary) from error

    def _returned(self, execution: Execution, packed: PackedValue) -> None:
        if execution.is_cancelled:
            return
        self._forget(execution)
        number = execution.number
        try:
            outgoing, _ = self._send_value(RESULT, number, packed)
        except Exception as error:
            log.exception("the result of call %d of %s cannot be sent", number, self._channel.peer.name)
            reason = f"its result cannot be sent: {type(error).__name__}: {error}"
            self._fail(number, Failure.RESULT_NOT_CARRIED, reason)
            return
        if outgoing is not None and not outgoing.done:
            self._sending[number] = outgoing
            outgoing.on_done = functools.partial(self._has_left, number)

    def _has_left(self, number: int, _: OutgoingMessage) -> None:
        self._sending.pop(number, None)

    def _send_value(
        self, kind: int, number: int, packed: PackedValue
    ) -> tuple[OutgoingMessage | None, MessageLoan | None]:
        """Send a value; return the message if it is long, and the loan of its device tensors if they are lent."""
        if not self._channel.is_open:
            return None, None
        for reference in packed.references:
            reference.grant_to(self._channel)
        value, buffers = packed.for_head()
        plain, loan = self._loans.attach(buffers)
        if loan is None:
            return self._send(b"".join((b"\x93", pack_plain(kind), pack_plain(number), value)), plain), None
        try:
            head = (b"\x94", pack_plain(kind), pack_plain(number), value, pack_plain(loan.number))
            return self._send(b"".join(head), plain), loan
        except BaseException:
            self._loans.end(loan.number)
            raise

    def _raised(self, execution: Execution, error: BaseException) -> None:
        if execution.is_cancelled:
            return
        self._forget(execution)
        if isinstance(error, CallFailed):
            self._fail(execution.number, error.failure, error.reason)
        else:
            self._fail(execution.number, Failure.RAISED, *describe(error))

    def _refuse_overload(self, number: int) -> None:
        if self._resources.is_closing:
            self._fail(number, Failure.REFUSED, "its process is leaving the session and accepts no more calls")
            return
        is_own = len(self._calls) >= self._credits
        whose = (
            f"{self._credits} calls of this caller" if is_own else f"{self._resources.num_calls} calls of all callers"
        )
        self._fail(number, Failure.OVERLOADED, f"{whose} are open, and the callee accepts no more")

    def _fail(self, number: int, failure: Failure, *texts: str) -> None:
        self._send(pack_plain([FAILED, number, int(failure), list(texts)]))

    def _send(self, head: bytes, buffers: Sequence[memoryview] = ()) -> OutgoingMessage | None:
        try:
            return self._channel.send(head, buffers)
        except PeerLostError:
            return None


class CallFailed(Exception):
    """The arguments do not fit the method, or a result or an item of a stream cannot be carried."""

    def __init__(self, failure: Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure, self.reason = failure, reason


def _not_carried(reason: str) -> CallFailed:
    return CallFailed(Failure.RESULT_NOT_CARRIED, f"its result cannot be carried: {reason}")
