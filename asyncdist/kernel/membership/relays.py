"""Carries the messages of agreements along a tree, so that no member of a large group talks to all others.

The members are divided in their order into blocks of `DEGREE`, these into blocks of `DEGREE` blocks, and so on. The *relay*
of a block is its first member that no member is known to hold lost, so the coordinator is the relay of all its blocks. A
message climbs to the relay of the largest block that does not contain its receiver, crosses to the relay of the receiver's
block of that size, and goes down to the receiver. Members with different views of who is lost pass no message on in a
circle: positions descend while it climbs, and after it has crossed, only smaller blocks are left.

A relay waits a little for the messages of the others in its block, and passes on equal ones as one, with all their
senders. It reads only those for itself, and answers promises for others once it has decided. A relay is a member: if it
ends or falls silent, members lose it, as they lose a coordinator, and turn to the next one in the block; the coordinator,
which has lost a member, begins a new ballot. Messages that the relay did not pass on are lost. It may also be late, or cut
off from one member only. So repeated messages take other ways: by each of the first members of a block in turns, which
pass them straight on.

In a group of at most `DEGREE` members a packet is a message, which goes straight to its receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgpack

from asyncdist.kernel.membership.agreement import Agreement
from asyncdist.kernel.membership.messages import AgreementKind, AgreementMessage

_MOST_PACKET_NBYTES = 1 << 16
"""The bytes from which on a packet takes no further letter. A transport limits them."""
_DETOURS = 3
"""The members of a block that repeated messages pass in turns."""
_FEW = 64
"""The receivers to which a message may be repeated straight, and the members that are watched in addition at one look."""

_LETTERS = b"\x91"
"""The first byte of several letters, an array of one array. A message is an array of eight values."""
_Letters = dict[tuple[bytes, tuple[int, ...], bool], dict[int, None]]
"""The senders of letters, by body, receivers and ``is_straight``."""


class Letter(NamedTuple):
    """A message of some members to others, by their positions; without any, of the one that has sent the packet to its
    receiver. ``is_straight``: no further relay may pass it on.
    """

    senders: Collection[int]
    receivers: Collection[int]
    is_straight: bool
    body: bytes


def pack_letters(letters: Iterable[Letter]) -> bytes:
    """Return letters as bytes: a single one without senders and receivers as its body."""
    letters = list(letters)
    if len(letters) == 1 and not letters[0].senders:
        return letters[0].body
    packed: bytes = msgpack.packb(
        [[(_runs(senders), _runs(receivers), straight, body) for senders, receivers, straight, body in letters]]
    )
    return packed


def unpack_letters(packet: bytes, size: int) -> list[Letter]:
    """Return the letters of `pack_letters` in a group of at most ``size`` members. Raises ValueError for other bytes."""
    if packet[:1] != _LETTERS:
        return [Letter((), (), False, packet)]
    try:
        return [
            Letter(_positions(senders, size), _positions(receivers, size), bool(straight), bytes(body))
            for senders, receivers, straight, body in msgpack.unpackb(packet)[0]
        ]
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as cause:
        raise ValueError("not letters of an agreement") from cause


def _runs(positions: Iterable[int]) -> list[int]:
    """Return the first position and the number of each run of consecutive ones."""
    runs: list[int] = []
    for position in positions:
        if runs and position == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += (position, 1)
    return runs


def _positions(runs: Sequence[int], size: int) -> list[int]:
    positions: list[int] = []
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        if not 0 <= first <= first + count <= size or len(positions) + count > size:
            raise ValueError("no positions of members")
        positions += range(first, first + count)
    return positions


class Courier:
    """Sends and receives the messages of one member's agreement, and passes on those of others. No method does I/O."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._own, self._members = agreement.place, agreement.members
        self._sizes = [1]
        """The sizes of blocks, up to one that holds all members."""
        while self._sizes[-1] < len(self._members):
            self._sizes.append(self._sizes[-1] * agreement.degree)
        self._held: dict[int, _Letters] = {}
        """The letters to send, by the position to which they go next."""
        self._repeats = self._told_lost = 0

    # -- messages ------------------------------------------------------------------------------

    def receive(self, peer: int, packet: bytes) -> None:
        """Handle a packet of a member: pass on what is for others, then take what is for this one. Raises ValueError.

        Answers go back the way of the messages, which is open although members on another one may be lost.
        """
        if not self.agreement.is_large:
            self.agreement.receive(peer, AgreementMessage.unpack(packet))
            return
        if peer not in self.agreement.places:
            return
        place = self.agreement.places[peer]
        letters = [
            letter._replace(senders=letter.senders or (place,), receivers=letter.receivers or (self._own,))
            for letter in unpack_letters(packet, len(self._members))
        ]
        self._collect()
        for letter in letters:
            if self._own in letter.receivers:
                message = AgreementMessage.unpack(letter.body)
                for sender in letter.senders:
                    self.agreement.receive(self._members[sender], message)
            self._collect(back_to=(place, letter))
            # Afterwards, because the message may tell which relays are lost.
            if others := [each for each in letter.receivers if each != self._own]:
                self._pass_on(letter, others)

    def _pass_on(self, letter: Letter, receivers: Sequence[int]) -> None:
        agreement = self.agreement
        if agreement.decision is not None and AgreementMessage.unpack(letter.body).kind == AgreementKind.PROMISE:
            agreement.answer([self._members[sender] for sender in letter.senders])
        else:
            route = (lambda to: to) if letter.is_straight else self._next
            self._post(letter.senders, receivers, letter.body, letter.is_straight, route)

    def ask(self) -> None:
        """As the coordinator, ask the members that have not voted; in a large group those whose relays are lost, after
        further losses. They hear so who is lost. Otherwise they would find it out themselves, one relay after the other.
        """
        agreement, sizes, num_lost = self.agreement, self._sizes[1:-1], len(self.agreement.excluded)
        if not agreement.is_large:
            agreement.ask(agreement.awaited)
        elif agreement.coordinates and num_lost != self._told_lost:
            self._told_lost, asked = num_lost, set[int]()
            for place in map(agreement.places.__getitem__, agreement.awaited):
                if any(agreement.holds_lost(self._members[place - place % size]) for size in sizes):
                    asked.update((place, *(self._relay(place, size) for size in sizes)))
            agreement.ask([self._members[place] for place in sorted(asked)])

    def repeat(self, *, to_all: bool = False) -> None:
        """Repeat what others wait for (`Agreement.repeat`), by another way than the last time."""
        if self.agreement.is_large:
            self._collect()
        self._repeats += 1
        self.agreement.repeat(to_all=to_all)
        if self.agreement.is_large:
            self._collect(repeated=True)

    def take_outbox(self, *, hold: bool = False) -> list[tuple[int, bytes]]:
        """Return and remove the packets to send, each with its receiver.

        With ``hold``, those to relays stay that others in the block may still have something for.
        """
        if not self.agreement.is_large:
            packed = ((members, message.pack()) for members, message in self.agreement.take_outbox())
            return [(member, packet) for members, packet in packed for member in members]
        self._collect()
        outbox = []
        for hop, letters in list(self._held.items()):
            if hold and hop < self._own and self._may_grow(letters):
                continue
            del self._held[hop]
            outbox += [(self._members[hop], packet) for packet in self._packets(hop, letters)]
        return outbox

    @property
    def holds(self) -> bool:
        """Whether `take_outbox` has left something."""
        return bool(self._held)

    def _collect(self, *, repeated: bool = False, back_to: tuple[int, Letter] | None = None) -> None:
        """Post the agreement's own messages, of which some may answer a letter that a member has passed on."""
        places = self.agreement.places
        route = self._detour if repeated else self._next
        for members, message in self.agreement.take_outbox():
            receivers, body = [places[member] for member in members], message.pack()
            if back_to is not None and set(receivers) <= set(back_to[1].senders):
                self._post((self._own,), receivers, body, back_to[1].is_straight, lambda to: back_to[0])
            else:
                self._post((self._own,), receivers, body, repeated, route)

    def _post(
        self, senders: Iterable[int], receivers: Sequence[int], body: bytes, straight: bool, route: Callable[[int], int]
    ) -> None:
        hops: dict[int, list[int]] = {}
        for to in receivers:
            hops.setdefault(route(to), []).append(to)
        for hop, those in hops.items():
            letter = self._held.setdefault(hop, {}).setdefault((body, tuple(those), straight), {})
            letter.update(dict.fromkeys(senders))

    def _packets(self, hop: int, letters: _Letters) -> Iterator[bytes]:
        """Yield letters in packets that are not too long."""
        packet: list[Letter] = []
        nbytes = 0
        for (body, receivers, straight), senders in letters.items():
            if packet and nbytes + len(body) > _MOST_PACKET_NBYTES:
                yield pack_letters(packet)
                packet, nbytes = [], 0
            is_direct = receivers == (hop,) and [*senders] == [self._own]
            packet.append(Letter(() if is_direct else sorted(senders), () if is_direct else receivers, straight, body))
            nbytes += len(body)
        yield pack_letters(packet)

    # -- the tree ------------------------------------------------------------------------------

    def _living(self, positions: Iterable[int]) -> Iterator[int]:
        """Yield the positions of members that no member is known to hold lost."""
        return (each for each in positions if not self.agreement.shuns(self._members[each]))

    def _block(self, position: int, size: int) -> range:
        first = position - position % size
        return range(first, min(first + size, len(self._members)))

    def _relay(self, position: int, size: int) -> int:
        """Return the relay of the block of a position, which counts as living."""
        return next(self._living(range(position - position % size, position)), position)

    def _next(self, to: int) -> int:
        """Return where to send a message for a position."""
        level = next(level for level, size in enumerate(self._sizes) if self._own // size == to // size)
        size = self._sizes[max(level - 1, 0)]
        return self._relay(to, size) if self._relay(self._own, size) == self._own else self._parent()[0]

    def _parent(self) -> tuple[int, int]:
        """Return the relay to which this member climbs, and the size of its block; itself, if it is the coordinator."""
        for size in self._sizes:
            relay = self._relay(self._own, size)
            if relay != self._own:
                return relay, size
        return self._own, self._sizes[-1]

    def _detour(self, to: int) -> int:
        """Return where to send a repeated message: to a member of the block of the one that is not the coordinator."""
        block = self._block(to if self.agreement.coordinates else self._own, self.agreement.degree)
        if to in block and self._own in block:
            return to
        living = [each for each, _ in zip(self._living(block), range(_DETOURS), strict=False)]
        turn = self._repeats % (len(living) + 1)
        if turn < len(living):
            hop = living[turn]
        else:  # straight, if that does not make all members connect to one
            is_damaged = any(self.agreement.shuns(self._members[each]) for each in block)
            are_few = self.agreement.coordinates and len(self.agreement.awaited) <= _FEW
            hop = to if is_damaged or are_few else living[0]
        return to if hop == self._own else hop

    def _may_grow(self, letters: _Letters) -> bool:
        """Return whether members of the largest block whose relay this member is have not sent what it passes on."""
        size = next(size for size in reversed(self._sizes) if self._relay(self._own, size) == self._own)
        living = sum(1 for _ in self._living(self._block(self._own, size)))
        return any(straight for _, _, straight in letters) or sum(map(len, letters.values())) < living

    # -- who is watched ------------------------------------------------------------------------

    def neighbours(self) -> list[int]:
        """Return the members whose loss this one has to notice: its relay, and those whose relay it is."""
        if not self.agreement.is_large:
            return []
        _, size = self._parent()
        found = self._first(range(self._own - self._own % size, self._own))
        for size, part in zip(self._sizes[1:], self._sizes, strict=False):
            if self._relay(self._own, size) != self._own:
                break
            block = self._block(self._own, size)
            for first in block[::part]:
                found |= self._first(self._block(first, part))
        return [self._members[each] for each in sorted(found - {self._own})]

    def _first(self, positions: Iterable[int]) -> set[int]:
        """Return the first of some positions that is not held lost, and as many more as are lost before it.

        So a block of lost members is found in the logarithm of its size.
        """
        found, num_lost = set[int](), 0
        for number, each in enumerate(positions, 1):
            num_lost += self.agreement.shuns(self._members[each])
            if not self.agreement.holds_lost(self._members[each]):
                found.add(each)
            if number - num_lost >= max(1, num_lost):
                break
        return found

    def further_neighbours(self, hears: Callable[[int], bool]) -> list[int]:
        """Return members to watch if an agreement takes long: they may be lost too, and be the next that this one needs.

        In a large group these are the next relays to which this member would climb, unless it hears the present one, and
        some of those that a coordinator awaits, others each time.
        """
        agreement = self.agreement
        if not agreement.is_large:
            return [each for each in agreement.members if each != agreement.member]
        parent, _ = self._parent()
        candidates = () if hears(self._members[parent]) else self._living(range(parent, self._own))
        next_ones = [each for each, _ in zip(candidates, range(_FEW), strict=False)]
        # That all others connect to the coordinator would keep it from all else.
        awaited = agreement.awaited if agreement.coordinates else []
        first = self._repeats * _FEW % max(1, len(awaited))
        return [self._members[each] for each in next_ones] + awaited[first : first + _FEW]
