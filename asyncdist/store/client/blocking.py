"""A connection of threads to a store: no thread serves it.

All threads share it: each sends its request and then waits, and of those who wait one at a time, the *leader*, reads from
the socket and hands answers to the others. When the leader has its own answer it goes, and the first of the others leads.
So a thread that waits for a key blocks nobody, and nobody's call hops through another thread.

When the socket breaks, the leader waits for a new one (`reconnecting`), and the conversation goes on over that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, TypeVar

from asyncdist.base.deadline import Deadline, Timeout
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.errors import ProtocolError, StoreConnectionError, UsageError
from asyncdist.store.client.blocking_socket import BlockingSocket
from asyncdist.store.client.connect import broken, closed
from asyncdist.store.client.pending import PendingRequest, StreamBuffer, acquire
from asyncdist.store.client.reconnecting import Reconnecting
from asyncdist.store.protocol.chunking import ChunkedMessage
from asyncdist.store.protocol.codec import framed
from asyncdist.store.protocol.operations import Command

T = TypeVar("T")
_MOMENT, _GOODBYE_TIMEOUT = 0.05, 1.0
"""Seconds that a thread waits to send what has no answer, and that it waits to say that we shall not be back."""


def _handler_called() -> UsageError:
    return UsageError(
        "a signal handler has called a store in the middle of a call to it: let it set an event for a thread"
    )


class BlockingConnection(Reconnecting):
    """A conversation with a store that many threads take part in, over one socket, and the next when that breaks."""

    def __init__(self, host: str, port: int, token: str | None, config: Config) -> None:
        super().__init__(host, port, token, config)
        self._pid = os.getpid()
        self._turn, self._carrying = threading.RLock(), threading.RLock()
        self._led = False
        self._standby: dict[PendingRequest[Any], None] = {}
        self._others: weakref.WeakSet[BlockingConnection] = weakref.WeakSet()

    @classmethod
    def open(
        cls, host: str, port: int, token: str | None, timeout: Timeout, config: Config | None = None
    ) -> BlockingConnection:
        """Connect, trying again while nothing answers, for ``timeout`` seconds; raises what AsyncStore.connect does."""
        connection = cls(host, port, token, config or Config())
        connection.reach(timeout)
        return connection

    def another(self, timeout: Timeout) -> BlockingConnection:
        """Open one more to the same store, which is closed with this one."""
        self._be_ours()
        connection = BlockingConnection(self._host, self._port, self._token, self._config)
        self._within(self._add, connection)
        connection._within(connection.reach, timeout)
        return connection

    def _add(self, connection: BlockingConnection) -> None:
        with self.lock:
            if self._closing.is_set():
                raise closed(self.where)
            self._others.add(connection)

    # -- asking -----------------------------------------------------------------------------------

    def settle(self, command: Command[Any], ticket: PendingRequest[Any], limit: float) -> int:
        self._admit()
        return self._within(super().settle, command, ticket, limit)

    def take(self, arrivals: StreamBuffer[T], deadline: Deadline) -> T:
        self._admit()
        taken: T = self._within(super().take, arrivals, deadline)
        return taken

    def _admit(self) -> None:
        """Refuse who is in here already: what it waited for would only come when the call that it is in goes on."""
        self._be_ours()
        if threading.get_ident() in self._inside:
            raise _handler_called()

    def _be_ours(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("this TCPStore was made before a fork, and its connection is the parent's: make a new one")

    def begin(self, command: Command[Any], ticket: PendingRequest[Any], deadline: Deadline) -> int:
        number = 0
        try:
            with self.lock:
                self._go_on()
                ticket.command = command
                number, message = self._conversation.ask(ticket)
                messages, wire = [*self._conversation.data_to_send(), message], self._wire
            if wire is not None and message:
                for each in messages:
                    self._send(wire, each, deadline)
        except BaseException:  # it may have gone just before an interrupt, or have been asked again over another socket
            self.give_up(number)
            raise
        return number

    def give_up(self, number: int) -> None:
        with self.lock:
            wire, word = self._wire, self._conversation.give_up(number) if self._over is None and number else b""
        self._say(wire, word)

    def confirm(self, number: int) -> None:
        with self.lock:
            wire, word = self._wire, self._conversation.confirm(number) if self._over is None else b""
        self._say(wire, word)

    def _say(self, wire: BlockingSocket | None, word: bytes) -> None:
        """Have something sent that has no answer: next of all, and for certain unless the socket breaks first."""
        if wire is None or not word:
            return
        try:
            wire.words.append(word)
            self._send_together(wire, [], Deadline.after(_MOMENT))
        except StoreConnectionError:  # which says the same
            pass
        except BaseException as error:
            self._start(self._send_words, wire)
            if not isinstance(error, TimeoutError):
                raise

    def _send_words(self, wire: BlockingSocket) -> None:
        """Send what is to go next of all as soon as there is room for it, in a thread of its own."""
        with self.lock:
            if wire.attended:
                return
            wire.attended = True
        with contextlib.suppress(StoreConnectionError):
            while wire.attended:
                self._send_together(wire, [], Deadline.never())
                with self.lock:
                    wire.attended = bool(wire.words) and wire is self._wire

    def _send(self, wire: BlockingSocket, message: bytes | ChunkedMessage, deadline: Deadline) -> None:
        """Send over a socket, if that is still the one: what is open is asked again over the next."""
        if isinstance(message, ChunkedMessage):
            acquire(self._carrying, deadline)
            try:
                self._send_in_pieces(wire, message, deadline)
            finally:
                self._carrying.release()
        else:
            self._send_together(wire, [message], deadline)

    def _send_in_pieces(self, wire: BlockingSocket, parcel: ChunkedMessage, deadline: Deadline) -> None:
        """Send a long message; what others send passes between its pieces."""
        try:
            self._break_off(wire)  # where an interrupt kept another thread from it
            while wire is self._wire and self._conversation.is_open(parcel.request):
                if deadline.expired():
                    raise TimeoutError
                self._send_together(wire, [next(parcel)], deadline, parcel)
                if not parcel.is_under_way:
                    return
        finally:
            self._break_off(wire)

    def _break_off(self, wire: BlockingSocket) -> None:
        """Have the store forget what it has of a long message, before the next one comes."""
        if wire.parcel is not None:
            self._say(wire, wire.parcel.end)
            wire.parcel = None

    def _send_apart(self, wire: BlockingSocket, messages: list[bytes | ChunkedMessage]) -> None:
        """Send what is asked again, in a thread of its own: whoever reads has to read on meanwhile, or has to go."""
        with contextlib.suppress(TimeoutError, StoreConnectionError):  # whoever waits for the answer knows better
            self._send_words(wire)
            for message in messages:
                if isinstance(message, ChunkedMessage):
                    self._send(wire, message, Deadline.never())

    def _send_together(
        self, wire: BlockingSocket, messages: list[bytes], deadline: Deadline, parcel: ChunkedMessage | None = None
    ) -> None:
        """Send messages, a piece of ``parcel`` perhaps, behind the words that are to go next; or words alone, in time."""
        # Who has sent a piece and is back with the next waits for its turn behind those who have waited meanwhile.
        acquire(self._turn, deadline)
        try:
            acquire(self._sending, deadline)
        except BaseException:
            self._turn.release()
            raise
        try:
            self._turn.release()
            if wire is self._wire:
                if not messages:
                    wire.wait_for_room(deadline)
                self._put_out(wire, messages, deadline, parcel)
        finally:
            self._sending.release()

    def _put_out(
        self, wire: BlockingSocket, messages: list[bytes], deadline: Deadline, parcel: ChunkedMessage | None
    ) -> None:
        """The same for the one thread that sends."""
        try:
            words = list(wire.words)
            wire.send(b"".join(framed(each) for each in (words, messages) if each), deadline)
            del wire.words[: len(words)]
            if parcel is not None:
                wire.parcel = parcel if parcel.is_under_way else None
        except BaseException as error:
            # Nobody knows how much has gone: after half a request, the store could not read another one.
            self._lose(wire, f"a request could not be sent: {describe_error(error)}")
            if not isinstance(error, OSError) or isinstance(error, TimeoutError):
                raise
            self._go_on()

    # -- waiting: one leads, the others follow ------------------------------------------------------

    def wait_for(self, ticket: PendingRequest[Any], deadline: Deadline) -> None:
        leads = False
        try:
            while True:
                with self.lock:
                    if ticket.ready:
                        return
                    leads = not self._led
                    if leads:
                        self._led = True
                    else:
                        ticket.event = ticket.event or threading.Event()
                        ticket.event.clear()
                        self._standby[ticket] = None
                if leads:
                    self._lead(ticket, deadline)
                    return
                ticket.sleep(deadline.remaining_or_none())
                if deadline.expired() and not ticket.ready:
                    raise TimeoutError
        finally:
            interrupt: BaseException | None = None
            while True:
                try:
                    with self.lock:  # while another thread has it, what a signal raises comes before what is in here
                        if leads:
                            self._led = leads = False
                        if self._closing.is_set() and not self._led:
                            self._drop()
                        self._standby.pop(ticket, None)
                        self._promote()
                    break
                except BaseException as error:
                    interrupt = error
            if interrupt is not None:
                raise interrupt

    def _lead(self, ticket: PendingRequest[Any], deadline: Deadline) -> None:
        while not ticket.ready:
            wire = self._wire
            if wire is None:
                self._wait_for_another(deadline)
            else:
                self._read(wire, deadline)

    def _read(self, wire: BlockingSocket, deadline: Deadline) -> None:
        """Hand out the answers that come next over a socket."""
        wire.wait(deadline)  # here nearly every interrupt comes, and costs nothing
        try:
            data = wire.take()
            with self.lock:
                if wire is not self._wire:
                    return
                self._conversation.receive(data)
                more, lost = self._conversation.data_to_send(), self._conversation.lost
                if more:
                    wire.words += [
                        each for each in more if not isinstance(each, ChunkedMessage)
                    ]  # before it can be given up
            if lost is not None:
                self._break(lost)
                return
            if more:
                self._start(self._send_apart, wire, more)
        except OSError as error:
            self._lose(wire, describe_error(error))
        except ProtocolError as error:
            self._break(broken(self.where, describe_error(error)))
        except BaseException as error:  # what has been read is lost with it
            self._lose(wire, f"reading was interrupted: {describe_error(error)}")
            raise

    def _promote(self) -> None:
        """Wake one of those who wait, to lead if nobody does. The lock is held."""
        if self._led:
            return
        for ticket in self._standby:
            if not ticket.ready and ticket.event is not None:
                ticket.event.set()
                return

    # -- ends -------------------------------------------------------------------------------------

    def _lose(self, wire: BlockingSocket, why: str) -> None:
        """A socket is broken: who leads has another made, if there is a point in that."""
        with self.lock:
            if self._wire is not wire:
                return
            self._wire = None
            self._broken.append(wire)
            self._conversation.interrupted()
            over = self._redial.lost(why)
            if over is None:
                self._promote()
            else:
                self._end(over)
        wire.wake()

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # the fork has closed this process's copies of the sockets, and locks may be held by no thread
        if threading.get_ident() in self._inside:  # this thread may have the locks
            threading.Thread(target=self.close).start()
        else:
            self._within(self._close)

    def _close(self) -> None:
        with self.lock:
            wire, goodbye = self._wire, self._conversation.goodbye() if self._over is None else b""
        if wire is not None and goodbye:
            with contextlib.suppress(TimeoutError, StoreConnectionError):  # then we are given up after our lease
                self._send_together(wire, [goodbye], Deadline.after(_GOODBYE_TIMEOUT))
        self._break(closed(self.where))
        self._closing.set()
        with self._sending, self.lock:
            if not self._led:
                self._drop()
            others = list(self._others)
        for other in others:
            other.close()
