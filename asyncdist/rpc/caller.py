"""The caller's side of remote calls: the table of the calls over one channel."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from math import inf
from typing import Any

from asyncdist.base.callables import Callback
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.base.timers import DeadlineTimer
from asyncdist.errors import AsyncdistError, PeerLostError, ProtocolError, UsageError
from asyncdist.kernel import input_memory
from asyncdist.net import IncomingMessage, PeerChannel
from asyncdist.rpc.calls import CallStream, ItemQueue, RemoteCall
from asyncdist.rpc.errors import CalleeLostError, OverloadedError, ResultError, failure_of
from asyncdist.rpc.loans import ChannelLoans
from asyncdist.rpc.values import Carrier, PackedValue
from asyncdist.rpc.wire import CANCEL, CREDIT, END, FAILED, ITEM, RESULT, pack_plain

MOST_WAITING = 1 << 16
"""The most calls of one caller that wait for one callee."""

HeldAnswer = list[Callback]
"""An answer that waits: empty until it has been read, then what handles it."""

current_deadline: ContextVar[float] = ContextVar("current_deadline", default=inf)
"""In a method that a call with a deadline runs: that deadline, in the loop's time. Calls that it makes inherit it."""


class Caller:
    """The calls of this process over one channel.

    The callee says how many calls it accepts at a time, and how many bytes of arguments in buffers; one call may have more.

    Args:
        threads: Pack long arguments.
        timeout: Seconds of a call without a timeout of its own.
    """

    def __init__(
        self, channel: PeerChannel, carrier: Carrier, loans: ChannelLoans, threads: DaemonThreadPool, timeout: float
    ) -> None:
        self.peer, self.peer_id = channel.peer.name, channel.peer.id
        self.loop = asyncio.get_running_loop()
        self._channel, self._carrier, self.loans, self._threads = channel, carrier, loans, threads
        self._credits, self._window = channel.peer.about["credits"], channel.peer.about["window"]
        self._timeout = timeout
        self._number = 0
        self._open: dict[int, RemoteCall | ItemQueue] = {}
        self._waiting: deque[RemoteCall] = deque()
        self._held: dict[int, deque[HeldAnswer]] = {}
        """The answers to a call behind one that is being read in a thread, by the number of the call."""
        self._num_sent = self._sent_nbytes = 0
        self._resuming: asyncio.Task[None] | None = None
        self._timer = DeadlineTimer(self._open.values)

    # -- starting ----------------------------------------------------------------------------------

    def start(
        self,
        target: str,
        key: bytes,
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: Timeout = None,
        packed: PackedValue | asyncio.Future[PackedValue] | None = None,
    ) -> RemoteCall:
        """Start a call, after those started before.

        Args:
            target: The object, for messages.
            key: The object and the method, as the wire has them.
            packed: The arguments, if they have been packed for several calls, or are being packed.

        Raises:
            UsageError: The arguments cannot be carried, the timeout is not a number of seconds, or another thread runs
                the session's loop. The call raises it if a thread finds that out while it packs the arguments.
        """
        here = asyncio._get_running_loop()
        if here is not self.loop and (here is not None or self.loop.is_running()):
            raise UsageError(
                f"{target}.{method}() at {self.peer}: the session of this object is open on another loop; call it in a "
                "coroutine there, which asyncio.run_coroutine_threadsafe starts, or open a session on this loop"
            )
        limit, deadline, told = self._limits(timeout)
        try:
            if packed is None:
                packed = self._carrier.pack_arguments([list(args), kwargs], self.loans, self._threads)
        except UsageError as error:
            raise UsageError(f"{target}.{method}() at {self.peer}: {error.summary}") from error
        self._number = number = self._number + 1
        call = RemoteCall(self, number, target, method, limit, deadline)
        call.limits_stream = told is not None
        if not self._channel.is_open:
            call.set_exception(self._lost(call, self._channel.error))
            return call
        if len(self._waiting) >= MOST_WAITING:
            reason = f"{MOST_WAITING} calls of this process already wait for it"
            call.set_exception(OverloadedError(target, method, self.peer, reason))
            return call
        if isinstance(packed, PackedValue):
            self._fill(call, key, told, packed)
        else:
            packed.add_done_callback(functools.partial(self._packed, call, key, told))
        self._open[number] = call
        if deadline < inf:
            self._timer.note(deadline)
        if call.head and not self._waiting and self._may_send(call):
            self._send(call)
        else:
            self._waiting.append(call)
            self._send_waiting()
        return call

    def _fill(self, call: RemoteCall, key: bytes, told: float | None, packed: PackedValue) -> None:
        """Make the message of a call."""
        value, buffers = packed.for_head()
        if buffers:
            call.buffers, call.loan = self.loans.attach(buffers)
            call.nbytes = sum(buffer.nbytes for buffer in call.buffers)
        call.references = packed.references
        if call.loan is None:
            call.head = b"".join((b"\x97\x00", pack_plain(call.number), key, pack_plain(told), value))
        else:
            call.nbytes += call.loan.nbytes
            loan = pack_plain(call.loan.number)
            call.head = b"".join((b"\x98\x00", pack_plain(call.number), key, pack_plain(told), value, loan))

    def _packed(self, call: RemoteCall, key: bytes, told: float | None, packed: asyncio.Future[PackedValue]) -> None:
        """Send a call whose arguments a thread has packed, and those that have waited for it."""
        if call.number not in self._open:
            return
        try:
            self._fill(call, key, told, packed.result())
        # The program may have changed the arguments in that time, or a device may have failed.
        except Exception as error:
            if isinstance(error, UsageError):
                error = UsageError(f"{call.target}.{call.method}() at {self.peer}: {error.summary}")
            call.fail(error)
            self._ended(call)
        else:
            self._send_waiting()

    def _limits(self, timeout: Timeout) -> tuple[float, float, float | None]:
        """Return a call's timeout, its deadline, and the timeout of which the callee is told."""
        outer = current_deadline.get()
        if timeout is None and outer == inf:
            # The callee needs no timer: this process cancels the call.
            return self._timeout, self.loop.time() + self._timeout, None
        now = self.loop.time()
        limit = min(seconds(timeout), outer - now)
        return limit, now + limit, max(0.0, limit) if limit < inf else None

    def _may_send(self, call: RemoteCall) -> bool:
        if self._num_sent >= self._credits or self._channel.is_congested:
            return False
        return not self._sent_nbytes or self._sent_nbytes + call.nbytes <= self._window

    def _send(self, call: RemoteCall) -> None:
        try:
            call.outgoing = self._channel.send(call.head, call.buffers)
        except AsyncdistError as error:
            del self._open[call.number]
            self._end_loan(call)
            call.fail(self._lost(call, error) if isinstance(error, PeerLostError) else error)
            return
        call.is_sent = True
        for reference in call.references:
            reference.grant_to(self._channel)
        call.head, call.buffers, call.references, call.loan = b"", (), (), None
        self._num_sent += 1
        self._sent_nbytes += call.nbytes

    def _end_loan(self, call: RemoteCall) -> None:
        if call.loan is not None:
            self.loans.end(call.loan.number)
            call.loan = None

    def _ended(self, call: RemoteCall | ItemQueue) -> None:
        """Note that a call has ended at the callee, or was never sent, and send the calls that have waited for it."""
        if self._open.pop(call.number, None) is None:
            return
        if call.is_sent:
            self._num_sent -= 1
            self._sent_nbytes -= call.nbytes
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            # A thread packs its arguments.
            if first.number in self._open and not first.head:
                return
            if first.number in self._open and not self._may_send(first):
                # Otherwise the end of a call that has been sent continues this.
                if not self._num_sent and self._resuming is None:
                    self._resuming = self.loop.create_task(self._resume_when_drained())
                return
            self._waiting.popleft()
            if first.number in self._open:
                self._send(first)

    async def _resume_when_drained(self) -> None:
        try:
            await self._channel.drain()
        except PeerLostError:
            return
        finally:
            self._resuming = None
        self._send_waiting()

    # -- giving up ---------------------------------------------------------------------------------

    def give_up(self, call: RemoteCall | ItemQueue) -> None:
        """Tell the callee that the caller does not wait for a call any more."""
        if call.number not in self._open:
            return
        if call.is_sent and self._channel.is_open:
            if call.outgoing is not None and not call.outgoing.done:
                self._channel.withdraw(call.outgoing)
            self._channel.send(pack_plain([CANCEL, call.number]))
        call.head, call.buffers = b"", ()
        if isinstance(call, RemoteCall):
            self._end_loan(call)
            call.references = ()
            if call.incoming is not None:
                # The memory of the caller is written no more.
                self._channel.drop(call.incoming, Unwanted())
        self._ended(call)

    def grant(self, number: int, count: int) -> None:
        """Let the callee send further items of a stream."""
        if self._channel.is_open:
            self._channel.send(pack_plain([CREDIT, number, count]))

    # -- what the callee answers -------------------------------------------------------------------

    def answered(self, answer: Sequence[Any]) -> None:
        """Handle an answer, whose value has been unpacked. Raises ProtocolError for one that no callee sends."""
        kind, number = answer[0], answer[1]
        if self._held and number in self._held:
            self._held[number].append([functools.partial(self.answered, answer)])
            return
        call = self._open.get(number)
        # The caller has given it up.
        if call is None:
            return
        if kind == RESULT and isinstance(call, RemoteCall):
            if not call.done():
                call.set_result(answer[2])
            self._ended(call)
        elif kind == ITEM:
            self._stream_of(call).put(answer[2])
        elif kind == END:
            self._stream_of(call).end(None)
            self._ended(self._open[number])
        elif kind == FAILED:
            failure, texts = answer[2:]
            call.fail(failure_of(failure, texts, call.target, call.method, self.peer, call.timeout))
            self._ended(call)
        else:
            raise ProtocolError(f"an answer of kind {kind!r} to call {number}")

    def hold_answer(self, number: int) -> HeldAnswer:
        """Hold an answer to a call, which is being read in a thread, and those that follow it, until `take_held`."""
        held: HeldAnswer = []
        self._held.setdefault(number, deque()).append(held)
        return held

    def take_held(self, number: int, held: HeldAnswer, handle: Callback) -> None:
        """Handle an answer that has been read, and those that have waited for it, in the order in which they arrived."""
        held.append(handle)
        answers = self._held.pop(number, None)
        # The channel has ended.
        if answers is None:
            return
        while answers and answers[0]:
            answers.popleft()[0]()
        if answers:
            self._held[number] = answers

    def unreadable(self, number: int, reason: str) -> None:
        """End a call whose result cannot be read."""
        call = self._open.get(number)
        if call is not None:
            self.give_up(call)
            call.fail(ResultError(call.target, call.method, self.peer, reason))

    def _stream_of(self, call: RemoteCall | ItemQueue) -> ItemQueue:
        """Return the queue of a stream; the first item makes it, and is the result of the call."""
        if isinstance(call, ItemQueue):
            return call
        queue = ItemQueue(self, call)
        self._open[call.number] = queue
        if not call.done():
            call.set_result(CallStream(None, queue))
        return queue

    def expects(self, number: int) -> bool:
        """Return whether the caller waits for the answers to a call."""
        return number in self._open

    def receive_into(self, number: int, message: IncomingMessage) -> None:
        """Let the result of a call arrive in the memory that the caller has given for it."""
        call = self._open.get(number)
        if isinstance(call, RemoteCall) and call.destination is not None and not call.done():
            view = input_memory(call.destination).view
            if message.sizes == (view.nbytes,):
                message.buffers, call.incoming = [view], message

    def closed(self, error: PeerLostError) -> None:
        """End all calls: the channel has ended."""
        self._timer.cancel()
        calls = list(self._open.values())
        self._open.clear()
        self._waiting.clear()
        self._held.clear()
        for call in calls:
            call.fail(self._lost(call, error))

    def _lost(self, call: RemoteCall | ItemQueue, error: AsyncdistError | None) -> CalleeLostError:
        reason = getattr(error, "why", "") or "the channel has ended"
        lost = CalleeLostError(call.target, call.method, self.peer, reason, may_have_run=call.is_sent)
        if isinstance(error, PeerLostError):
            lost.noticed, lost.last_heard = error.noticed, error.last_heard
        return lost


class Unwanted(Exception):
    """Nobody waits for a message any more, or its call was refused."""
