"""Messages of ranks that map one another's memory of the device: who receives copies from where the data lies.

    sender                                                  receiver
    marks its stream, offers: where the data lies     ──>   has its stream wait for that mark, and copies
    has its stream wait for their mark: it is over    <──   marks its stream, answers: it is over

The marks are events that cross between processes. Each is for one peer, and is recorded again only when that peer is known
to wait for what was recorded before: who offers knows it by the answer, who answers by a later offer, which names the
messages whose answers have been heard. The answer is the last word: a letter behind it would miss a peer that has left.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from collections import defaultdict
from typing import Any, ClassVar

import torch

from asyncdist.transport.device_collectives import DeviceContext
from asyncdist.transport.device_p2p import CONTENT_NBYTES, ControlChannel, Conversation, DeviceP2P, TransferRefused
from asyncdist.transport.device_streams import DeviceEvent
from asyncdist_transports.cuda_ipc.driver import HANDLE_NBYTES, Driver
from asyncdist_transports.cuda_ipc.handles import SHOWN_NBYTES, Exports, Imports, Shown
from asyncdist_transports.cuda_ipc.release import leave, quiet

_BEACON_NBYTES = 16
_OFFER = struct.Struct(f"<16s{SHOWN_NBYTES}s{_BEACON_NBYTES}s{SHOWN_NBYTES}s{HANDLE_NBYTES}s")
_HEARD = struct.Struct("<I")
_MOST_HEARD = (CONTENT_NBYTES - _OFFER.size) // _HEARD.size

Event = tuple[Any, bytes]
"""An event of ours that crosses, and its handle."""


class Events:
    """Events by which streams of two processes are ordered: ours that are free, by peer, and those of others."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: dict[int, list[Event]] = defaultdict(list)
        self._made: list[Event] = []
        self._theirs: dict[tuple[int, bytes], Any] = {}

    def take(self, peer: int) -> Event:
        """Return an event for which nothing of a peer's waits that it has not been told to."""
        free = self._free[peer]
        if free:
            return free.pop()
        self._made.append(made := self._driver.event())
        return made

    def give(self, peer: int, event: Event) -> None:
        """Take back an event that the peer's stream waits for by now."""
        self._free[peer].append(event)

    def of(self, peer: int, handle: bytes) -> Any:
        """Return a peer's event."""
        found = self._theirs.get((peer, handle))
        if found is None:
            found = self._theirs[peer, handle] = self._driver.event_of(handle)
        return found

    @property
    def all(self) -> list[Event]:
        return self._made


class CudaIpcP2P(DeviceP2P):
    """One rank's part."""

    name: ClassVar[str] = "cuda_ipc"

    def __init__(self, site: DeviceContext, driver: Driver) -> None:
        self._site, self._driver = site, driver
        self._exports = Exports(driver)
        self._imports = Imports(driver, lambda: quiet(site.streams))
        self._events = Events(driver)
        self._machine = hashlib.blake2b(site.machine.encode(), digest_size=16).digest()
        self._beacon = driver.allocate(_BEACON_NBYTES)
        self._shines = os.urandom(_BEACON_NBYTES)
        lit = driver.bytes_at(self._beacon, _BEACON_NBYTES)
        self._aside = site.streams.beside()  # for what must not wait for messages
        with self._aside.ours():
            lit.copy_(torch.frombuffer(bytearray(self._shines), dtype=torch.uint8))  # and waits until it is there
        self._lies = self._exports.show(lit, 0)[1].pack()
        self._seen: set[int] = set()  # ranks whose memory is theirs, as far as we map it
        self._rooms: list[int] = []  # places of what is shown by a copy that are free
        self._further = itertools.count(1)
        # By peer and its message: for all we know, not waited for yet.
        self._answered: dict[tuple[int, int], Event] = {}
        self._heard: dict[int, list[int]] = defaultdict(list)  # by peer: our messages whose answers it is to be told of

    def send(self, data: torch.Tensor, talk: ControlChannel, before: DeviceEvent) -> Conversation[DeviceEvent]:
        streams = self._site.streams
        streams.follow(before)
        room = self._rooms.pop() if self._rooms else next(self._further)
        ours = self._events.take(talk.peer)
        try:
            _, lies = self._exports.show(data, room)
            ours[0].record()
            offer = _OFFER.pack(self._machine, self._lies, self._shines, lies.pack(), ours[1])
            heard = self._heard[talk.peer]
            talk.say(self.name, offer + b"".join(map(_HEARD.pack, heard[:_MOST_HEARD])))
            del heard[:_MOST_HEARD]
            answer = yield from talk.hear()
            # Not after a refusal: then nobody has waited for what it was recorded for.
            self._events.give(talk.peer, ours)
            self._events.of(talk.peer, answer.content).wait()
            heard.append(talk.number)
            return streams.mark()
        finally:
            self._rooms.append(room)

    def receive(
        self, data: torch.Tensor, talk: ControlChannel, offer: bytes, before: DeviceEvent
    ) -> Conversation[DeviceEvent]:
        streams, peer = self._site.streams, talk.peer
        machine, beacon, shines, lies, handle = _OFFER.unpack_from(offer)
        if machine != self._machine:
            raise TransferRefused("it is on another host")
        try:
            self._look_at(peer, Shown.unpack(beacon), shines)
            sent = self._imports.see(peer, Shown.unpack(lies))
            theirs = self._events.of(peer, handle)
        except RuntimeError as cause:
            raise TransferRefused(f"its device's memory cannot be mapped: {cause}") from cause
        for (number,) in _HEARD.iter_unpack(offer[_OFFER.size :]):
            self._events.give(peer, self._answered.pop((peer, number)))
        streams.follow(before)
        theirs.wait()
        data.copy_(sent)
        event, ours = self._answered[peer, talk.number] = self._events.take(peer)
        event.record()
        mark = streams.mark()
        yield talk.say(content=ours)
        return mark

    def _look_at(self, peer: int, beacon: Shown, shines: bytes) -> None:
        """See, once, that what we map of a rank's is its memory."""
        if peer in self._seen:
            return
        with self._aside.ours():
            seen = bytes(self._imports.see(peer, beacon).cpu().numpy())
        if seen != shines:
            raise TransferRefused("what is mapped of its device is not its memory")
        self._seen.add(peer)

    def abort(self) -> None:
        """Nothing to end: what stands in our stream waits for no call that was not made."""

    def close(self) -> None:
        leave(self._site.streams, self._driver, self._imports, self._exports, self._beacon, self._events.all)
