"""Messages between two ranks' devices: by the best way that both can go, the last one being through the host.

They stand in a line and a stream of their own, beside the collectives: ranks need not agree on an order between the two.
Nobody waits in that line for a peer, so what two ranks send each other at once cannot hold up either. Matching is the
host's: a message meets its receive as one between hosts does, and so differing sizes or types are told apart there.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, NamedTuple

import torch

from asyncdist.base.daemon_threads import SerialExecutor
from asyncdist.collectives import p2p
from asyncdist.devices.completion_watcher import CompletionWatcher, Pending
from asyncdist.devices.cpu_group import CpuGroup
from asyncdist.devices.side_group import SideGroup
from asyncdist.engine.work import Work
from asyncdist.errors import MismatchError
from asyncdist.memory.buffers import Memory, OutputTensor
from asyncdist.transport.device_collectives import DeviceCollectives, DeviceContext
from asyncdist.transport.device_p2p import (
    LETTER_NBYTES,
    NUMBERS,
    REFUSED,
    ControlChannel,
    ControlMessage,
    Conversation,
    DeviceP2P,
    TransferRefused,
)
from asyncdist.transport.device_streams import DeviceEvent
from asyncdist.transport.host_group import HostWork

log = logging.getLogger("asyncdist")

_BY_HOST = "host"
_UNDER_WAY = 3  # pieces at once, where a message goes through the host
_MOMENT = 50e-6  # seconds


class Arrival(NamedTuple):
    """How a message ended: the value of its work, and where on the device it is over."""

    value: Any
    mark: DeviceEvent


class DevicePointToPoint:
    """What one rank sends and receives. ``guarded`` does something for an operation, and fails the group if that raises."""

    def __init__(
        self,
        host: CpuGroup,
        site: DeviceContext,
        kinds: Sequence[type[DeviceCollectives]],
        watch: CompletionWatcher,
        guarded: Callable[[Pending, Callable[[], None]], None],
    ) -> None:
        self.line = SerialExecutor(f"asyncdist-{site.streams.device}-messages")
        self._host = host
        self._site, self._kinds, self._watch, self._guarded = site, kinds, watch, guarded
        self._numbers = itertools.count()
        self._piece_nbytes = max(1, site.host.mesh.config.device_piece_nbytes)
        self._couriers: dict[str, DeviceP2P] | None = None
        self._refused: set[tuple[int, str]] = set()  # ranks in the group, and ways that cannot be gone with them
        self._letters = SideGroup(site.host, "letters")  # what ranks tell one another beside the messages' tags

    # -- one step after the other --------------------------------------------------------------

    def go_on(self, conversation: Conversation[Arrival], pending: Pending, over: HostWork | None = None) -> None:
        """Lead a conversation as far as it goes without waiting; what it waits for brings it back. On the line."""
        if pending.work.failed:
            conversation.close()
            return
        with self._site.streams.ours():
            try:
                while over is None or over.is_completed():
                    if over is not None:
                        over.result()
                    over = next(conversation)
            except StopIteration as end:
                pending.stands(*end.value)
                return
            except BaseException:
                conversation.close()
                raise
        again = functools.partial(self.go_on, conversation, pending, over)
        over.add_done_callback(lambda _: self.line.put(functools.partial(self._guarded, pending, again)))

    # -- sending -------------------------------------------------------------------------------

    def send(self, memory: Memory, peer: int, tag: int, fingerprint: int) -> Callable[[Pending, DeviceEvent], None]:
        """Return what sends a tensor's elements, to be called on the line."""

        def begin(pending: Pending, before: DeviceEvent) -> None:
            self.go_on(self._sending(memory, peer, tag, fingerprint, pending.deadline, before), pending)

        return begin

    def _sending(
        self, memory: Memory, peer: int, tag: int, fingerprint: int, deadline: float, before: DeviceEvent
    ) -> Conversation[Arrival]:
        host, data = self._host, memory.raw

        def first(letter: torch.Tensor) -> Work:
            plan = p2p.send(host._who, letter, peer)
            plan.fingerprint = fingerprint
            return host._start(host._messages, "send", tag, plan, timeout=max(0.0, deadline - monotonic()))

        number = next(self._numbers) % NUMBERS
        talk = ControlChannel(self._letters.group(), peer, number, data.numel(), deadline, first, sends=True)
        for courier in self._ways_to(peer, data.numel()):
            try:
                return Arrival(None, (yield from courier.send(data, talk, before)))
            except TransferRefused as why:
                self._refused.add((peer, courier.name))
                log.info("messages to rank %d do not go by %s: %s", host.ranks[peer], courier.name, why)
        return Arrival(None, (yield from self._send_by_host(data, talk, before)))

    def _send_by_host(self, data: torch.Tensor, talk: ControlChannel, before: DeviceEvent) -> Conversation[DeviceEvent]:
        on_their_way = deque([talk.say(_BY_HOST)])
        streams = self._site.streams
        streams.follow(before)
        for piece in data.split(self._piece_nbytes):
            pinned = streams.pinned(piece.numel(), piece.dtype)
            pinned.copy_(piece, non_blocking=True)
            mark = streams.mark()
            if len(on_their_way) == _UNDER_WAY:
                yield on_their_way.popleft()
            if not _is_soon_passed(mark):
                yield self._watch.passed(mark)
            on_their_way.append(talk.put(pinned))
        yield from on_their_way
        return mark

    # -- receiving -----------------------------------------------------------------------------

    def receive(
        self, target: OutputTensor, peer: int | None, tag: int, fingerprint: int
    ) -> Callable[[Pending, DeviceEvent], None]:
        """Return what receives into a tensor, from any rank if ``peer`` is None; the value is the sender's global rank."""

        def begin(pending: Pending, before: DeviceEvent) -> None:
            self.go_on(self._receiving(target, peer, tag, fingerprint, pending.deadline, before), pending)

        return begin

    def _receiving(
        self, target: OutputTensor, peer: int | None, tag: int, fingerprint: int, deadline: float, before: DeviceEvent
    ) -> Conversation[Arrival]:
        host, data = self._host, target.memory.raw
        room = torch.empty(LETTER_NBYTES, dtype=torch.uint8, device="cpu")
        plan = p2p.receive(host._who, room, peer, host.ranks)
        plan.fingerprint = fingerprint
        came = host._start(host._messages, "recv", tag, plan, timeout=max(0.0, deadline - monotonic()))
        yield came
        source, letter = came.result(), ControlMessage.unpacked(room)
        if letter.nbytes != data.numel():  # a fingerprint counts elements modulo some number
            words = f"rank {source} sent {letter.nbytes} bytes where {data.numel()} were expected"
            raise MismatchError(source, words)
        talk = ControlChannel(
            self._letters.group(), host.ranks.index(source), letter.number, letter.nbytes, deadline, sends=False
        )
        mark = yield from self._taken(letter, data, talk, before)
        if target.copied:
            with self._site.streams.behind(mark):
                target.store()
                mark = self._site.streams.mark()
        else:
            target.store()
        return Arrival(source, mark)

    def _taken(
        self, letter: ControlMessage, data: torch.Tensor, talk: ControlChannel, before: DeviceEvent
    ) -> Conversation[DeviceEvent]:
        """Receive by the first offered way that we can go."""
        while letter.word != _BY_HOST:
            try:
                return (yield from self._courier(letter.word).receive(data, talk, letter.content, before))
            except TransferRefused as why:
                talk.say(REFUSED, str(why).encode()[:400])
                letter = yield from talk.hear()
        return (yield from self._take_by_host(data, talk, before))

    def _take_by_host(self, data: torch.Tensor, talk: ControlChannel, before: DeviceEvent) -> Conversation[DeviceEvent]:
        streams = self._site.streams
        streams.follow(before)
        coming: deque[tuple[torch.Tensor, torch.Tensor, HostWork]] = deque()
        left = deque(data.split(self._piece_nbytes))
        while left or coming:
            while left and len(coming) < _UNDER_WAY:
                piece = left.popleft()
                pinned = streams.pinned(piece.numel(), piece.dtype)
                coming.append((piece, pinned, talk.take(pinned)))
            piece, pinned, came = coming.popleft()
            yield came
            piece.copy_(pinned, non_blocking=True)
        return streams.mark()

    # -- ways ----------------------------------------------------------------------------------

    def _ways_to(self, peer: int, nbytes: int) -> Iterator[DeviceP2P]:
        for name, courier in self._all().items():
            if nbytes > courier.least_nbytes and (peer, name) not in self._refused:
                yield courier

    def _courier(self, name: str) -> DeviceP2P:
        courier = self._all().get(name)
        if courier is None:
            raise TransferRefused(f"rank {self._site.host.ranks[self._site.rank]} cannot go this way")
        return courier

    def _all(self) -> dict[str, DeviceP2P]:
        """Return who carries messages, by name, the preferred first; made when first asked for."""
        if self._couriers is None:
            self._couriers = {}
            for kind in self._kinds:
                try:
                    courier = kind.courier(self._site) if kind.probe() is None else None
                except Exception as cause:  # whatever a driver or a library says: it is the reason why not
                    log.info("no messages by %s: %s: %s", kind.name, type(cause).__name__, cause)
                    continue
                if courier is not None:
                    self._couriers[kind.name] = courier
        return self._couriers

    # -- failing, and the end ------------------------------------------------------------------

    @property
    def error(self) -> Exception | None:
        """What the letters failed with; None while they work."""
        return self._letters.error

    def trouble(self) -> Exception | None:
        """Return what has gone wrong beside any message, None if nothing has."""
        troubles = (courier.trouble() for courier in list((self._couriers or {}).values()))
        return self.error or next((one for one in troubles if one is not None), None)

    def abort(self, reason: str) -> None:
        """End everything, as the group has failed; never blocks."""
        self._letters.abort(reason)
        for courier in list((self._couriers or {}).values()):
            courier.abort()

    def close(self) -> None:
        """Destroy what there is: what is pending has failed. The couriers end on the line."""
        self._letters.close()
        self.line.close(self._leave)

    def _leave(self) -> None:
        for courier in (self._couriers or {}).values():
            courier.close()


def _is_soon_passed(mark: DeviceEvent) -> bool:
    """Look for a moment whether the device passes a mark: a small copy takes less time than being told of it."""
    until = monotonic() + _MOMENT
    while not mark.query():
        if monotonic() > until:
            return False
    return True
