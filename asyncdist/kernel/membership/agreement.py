"""One agreement among the members of a group: every member votes once, and all that go on decide the same set of votes.

Members end at any step, lose their connections to each other at different times, and may each hold another member lost that
is alive. The protocol is single-decree Paxos (L. Lamport, "Paxos Made Simple", ACM SIGACT News 32(4), 2001). Its
*coordinator* is the first member that one does not hold lost, as in the agreement of ULFM (T. Herault et al., "Practical
Scalable Consensus for Pseudo-Synchronous Distributed Systems", SC 2015)::

    member        PROMISE(ballot, vote, what it accepted)     as soon as it follows the coordinator
    coordinator   ACCEPT(ballot, decision)                    once all members that it does not hold lost have promised
    member        ACCEPTED(ballot)
    coordinator   DECIDE(decision)                            once all of them have accepted
    coordinator   PREPARE(ballot)                             if it lost one of them in between, or has taken over
    member        QUIT(reason)                                instead of a vote, or before it gives up

A ballot is (position of the coordinator, attempt). A member only follows coordinators in ascending order and answers no
other one, so coordinators do not compete. A decision proposed before is proposed again, also by a later coordinator.

*Quorum.* A member that one holds lost may be alive and coordinate others. A member has *ended* if its process ended, it
left in order, or it quit: it then decides nothing any more. The members of a ballot are a quorum if all other members have
ended, or if they are more than half of all members, or exactly half with the first member. Two quorums of the second kind
intersect. One of the first kind contains every member that is alive. ACCEPT therefore names the members that have ended,
and a member ignores messages of these from then on, such as a DECIDE that was still on its way. So no two members that are
alive hold different decisions. Ended members count in the half, because they may have decided with members that are lost.

*Accusations.* A member may wait for another one that is dead, and that only others have lost. They say so in promises and
in PREPARE, and the owner, which may hear the accused member, decides whether it adopts the loss.

*Disputes.* Two members that reach the coordinator may hold each other lost. Members that are to form a group must all reach
one another. A promise therefore names the members that its sender holds lost, and the coordinator leaves out members until
no such pair is left: first those with the most, and of two equals the later one.

*Large groups.* In a group of more than `degree` members a `Courier` (`relays`) passes messages on along a tree, and only
the coordinator tells all others anything. Members then do not learn from their connections who holds them lost. So a
member that gets a message of one that it holds lost answers so.

The owner passes in what happens (`vote`, `receive`, `lose`, `end`, `quit`), and after each call sends what `take_outbox`
returns. Messages may arrive in any order, and only those to or from members that have ended or are held lost may be
missing, and those that a relay had which is lost. If a member holds another one lost, the other one eventually holds it
lost too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise, takewhile
from typing import cast

from asyncdist.kernel.membership.messages import AgreementKind, AgreementMessage, Ballot, Decision, MemberEnd

DEGREE = 64
"""The members of a group whose agreements need no relays, and the branches of the tree in a larger one."""
_NO_BALLOT = -1, 0
_PROMISE, _PREPARE, _ACCEPT, _ACCEPTED, _DECIDE, _QUIT = AgreementKind


class Agreement:
    """One member's part in one agreement. No method does I/O.

    Args:
        member: This member's rank.
        members: The ranks of all members, in the same order on each of them.
        settles_disputes: Whether of two members that hold each other lost only one goes on. Equal on all members.
        degree: The most members that exchange messages without relays. Equal on all members.
        ended_of: Returns those of some members whose processes are seen to have ended.

    Attributes:
        place: The position of this member among the members.
        is_large: Whether relays pass on the messages.
        decision: The decision, once this member knows it. It may exclude this member.
        has_quit: Whether this member has quit.
    """

    def __init__(
        self,
        member: int,
        members: Sequence[int],
        *,
        settles_disputes: bool = False,
        degree: int = DEGREE,
        ended_of: Callable[[Collection[int]], Collection[int]] = lambda members: (),
    ) -> None:
        self.member, self.members, self.degree, self._ended_of = member, members, degree, ended_of
        self.is_large = len(members) > degree
        self.decision: Decision | None = None
        self.has_quit = False
        self._settles_disputes = settles_disputes
        self._outbox: list[tuple[list[int], AgreementMessage]] = []
        self.places = _positions_of(members)
        self.place = self.places[member]
        self._vote: bytes | None = None
        self._accusations: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._ended: dict[int, MemberEnd] = {}
        self._followed: int | None = None
        self._promised: Ballot = (-1, 0)
        self._accepted: tuple[Ballot, Decision] | None = None
        self._unanswered: set[int] = set()
        """The members that have another coordinator than this one has, and asked or promised this one."""
        # As the coordinator:
        self._attempt = 0
        self._promises: dict[int, AgreementMessage] = {}
        self._electorate: set[int] | None = None
        """The members to which the decision of this attempt was proposed; None before."""
        self._acceptors: set[int] = set()

    # -- what the owner asks -------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether this member has decided or quit."""
        return self.decision is not None or self.has_quit

    @property
    def coordinates(self) -> bool:
        """Whether this member has voted and is its own coordinator."""
        return self._followed == self.member

    @property
    def has_quorum(self) -> bool:
        """Whether the members that this one does not hold lost are enough to decide."""
        return self.has_quorum_without(())

    def has_quorum_without(self, members: Collection[int]) -> bool:
        """Return whether the members that this one does not hold lost are enough to decide without some others."""
        absent = self._lost.keys() | set(members)
        if absent <= self._ended.keys():
            return True
        return 2 * (len(self.members) - len(absent)) + (self.members[0] not in absent) > len(self.members)

    @property
    def awaited(self) -> list[int]:
        """The ranks that this member waits for; those that have not voted, if it is the coordinator."""
        if self.is_over or self._vote is None:
            return []
        if not self.coordinates:
            return [] if self._followed is None else [self._followed]
        done = self._promises.keys() if self._electorate is None else self._acceptors
        return [each for each in self._present() if each not in done]

    @property
    def accused(self) -> dict[int, str]:
        """Those of the awaited ranks that another member holds lost, with its reasons; in a large group also those that
        would be awaited without them.

        A member that has promised reaches the coordinator, which so learns of its end itself.
        """
        if self.is_over or self._followed is None:
            return {}
        found: Iterable[int] = self._accusations
        if not self.coordinates:
            after = (each for each in self.members[self.places[self._followed] :] if each not in self._lost)
            found = islice(takewhile(self._accusations.__contains__, after), None if self.is_large else 1)
        return {each: self._accusations[each] for each in found if self.shuns(each) and each not in self._lost}

    @property
    def excluded(self) -> dict[int, str]:
        """The members that this one holds lost, by rank, with the reasons."""
        return dict(self._lost)

    def holds_lost(self, member: int) -> bool:
        """Return whether this member holds another one lost."""
        return member in self._lost

    def shuns(self, member: int) -> bool:
        """Return whether this or another member holds a member lost, from which this one has no promise."""
        return member in self._lost or (member in self._accusations and member not in self._promises)

    def take_outbox(self) -> list[tuple[list[int], AgreementMessage]]:
        """Return and remove the messages to send, each with its receivers."""
        outbox, self._outbox = self._outbox, []
        return outbox

    # -- what happens --------------------------------------------------------------------------

    def vote(self, vote: bytes) -> None:
        """Take part with a vote. Call it once."""
        self._vote = vote
        self._advance()

    def ask(self, members: Iterable[int]) -> None:
        """As the coordinator, ask members for their votes. Those that have quit answer so."""
        if self.coordinates and not self.is_over and self._electorate is None:
            self._send_to(members, self._prepare(self._promised))

    def repeat(self, *, to_all: bool = False) -> None:
        """Send again what others wait for, in case a message could not be sent.

        ``to_all``: as another member than the coordinator, tell all whom this one holds lost. Others may wait for these. In
        a large group the coordinator hears it, and tells all.
        """
        if self._followed is None or self.is_over:
            return
        if not self.coordinates:
            everybody = to_all and not self.is_large
            self._send_to(self._present() if everybody else [self._followed], self._own_promise(self._promised))
        elif self._electorate is None:
            self.ask(self.awaited)
        else:
            self._send_to(self.awaited, self._proposal())

    def quit(self, reason: str) -> None:
        """Take part no more; does nothing once this member has decided."""
        if not self.is_over:
            self.has_quit = True
            first = next(each for each in self.members if each not in self._lost)
            # A later coordinator of a large group will ask.
            receivers = [first] if self.is_large and first != self.member else self._present()
            self._send_to(receivers, AgreementMessage(_QUIT, reason=reason))

    def answer(self, senders: Iterable[int]) -> None:
        """Tell members that have not decided the decision of this one."""
        self._send_to(senders, AgreementMessage(_DECIDE, decision=self.decision))

    def lose(self, member: int, reason: str) -> None:
        """Hold a member lost, which may be alive."""
        if member != self.member and member in self.places and member not in self._lost:
            self._lost[member] = reason
            followed = self._followed
            self._advance()
            if followed == self._followed and followed is not None and not self.coordinates and not self.is_over:
                # The coordinator may wait for that member.
                self._promise(self._promised)

    def end(self, member: int, reason: str, *, has_quit: bool = False) -> None:
        """Record that a member has ended: it decides nothing any more."""
        self._adopt({member: MemberEnd(reason, has_quit)})
        self._advance()

    def receive(self, sender: int, message: AgreementMessage) -> None:
        """Handle a message of another member."""
        if sender not in self.places:
            return
        if sender in self._lost:
            if self.is_large and sender not in self._ended and self.member not in message.lost:
                word = AgreementMessage(_PREPARE, _NO_BALLOT, lost={sender: self._lost[sender]})
                self._send_to([sender], word)
            return
        if self.is_large and self.member in message.lost:
            self.lose(sender, message.lost[self.member])
        if message.kind == _DECIDE:
            if message.decision is not None and not self.is_over:
                self._decide(message.decision)
        elif message.kind == _QUIT:
            self.end(sender, message.reason, has_quit=True)
        elif self.is_over:
            if message.kind in (_PROMISE, _PREPARE) or (self.has_quit and message.kind == _ACCEPT):
                kind = _QUIT if self.decision is None else _DECIDE
                self._send_to([sender], AgreementMessage(kind, decision=self.decision, reason="it had quit before"))
        else:
            self._adopt(message.ended)
            self._accusations.update(message.lost)
            if self.places[sender] == message.ballot[0]:
                self._follow(sender, message)
            elif self.place == message.ballot[0] and message.ballot[1] == self._attempt:
                if message.kind == _PROMISE:
                    self._promises[sender] = message
                    self._unanswered.add(sender)
                elif message.kind == _ACCEPTED:
                    self._acceptors.add(sender)
            self._advance()

    # -- the protocol --------------------------------------------------------------------------

    def _follow(self, coordinator: int, message: AgreementMessage) -> None:
        """Answer a message of the coordinator that this member follows, unless a later ballot has begun."""
        if coordinator != self._followed:
            self._unanswered.add(coordinator)
            return
        if message.ballot < self._promised:
            return
        if message.kind == _PREPARE:
            self._promise(message.ballot, is_asked=True)
        elif message.kind == _ACCEPT and message.decision is not None:
            self._promised = message.ballot
            self._accepted = message.ballot, message.decision
            self._send_to([coordinator], AgreementMessage(_ACCEPTED, message.ballot))

    def _advance(self) -> None:
        """Do everything that the present knowledge allows."""
        if self._vote is None or self.is_over:
            return
        coordinator = next(each for each in self.members if each not in self._lost)
        if coordinator != self._followed:
            takes_over, self._followed = self._followed is not None, coordinator
            if coordinator == self.member:
                # Most members of a large group do not notice by themselves that the first one is lost.
                self._begin_attempt(ask=takes_over or (self.is_large and self.place > 0))
            else:
                self._promise((self.places[coordinator], 0))
        if coordinator == self.member:
            self._coordinate()

    def _promise(self, ballot: Ballot, *, is_asked: bool = False) -> None:
        self._promised, coordinator = ballot, self.members[ballot[0]]
        # Of many coordinators that are lost one after the other, most get no promise. One that lives will ask.
        if is_asked or not (self.is_large and self.shuns(coordinator)):
            self._send_to([coordinator], self._own_promise(ballot))

    def _own_promise(self, ballot: Ballot) -> AgreementMessage:
        assert self._vote is not None
        accepted_in, decision = self._accepted or (None, None)
        ended = dict(self._ended)
        return AgreementMessage(_PROMISE, ballot, self._vote, decision, accepted_in, ended, lost=dict(self._lost))

    def _begin_attempt(self, *, ask: bool) -> None:
        """Begin a ballot; ``ask`` for promises, which members send unasked when they begin to follow a coordinator."""
        ballot = self._promised = self.place, self._attempt
        self._promises[self.member] = self._own_promise(ballot)
        if ask:  # a member that has decided answers too
            self._send_to(self._present(), self._prepare(ballot))

    def _prepare(self, ballot: Ballot) -> AgreementMessage:
        return AgreementMessage(_PREPARE, ballot, ended=dict(self._ended), lost=dict(self._lost))

    def _coordinate(self) -> None:
        # Looks at all members only when enough have answered. Members are lost and never return, so counts tell.
        present = len(self.members) - len(self._lost)
        if self._electorate is not None and len(self._electorate) != present:
            self._attempt += 1
            self._electorate = None
            self._promises.clear()
            self._begin_attempt(ask=True)
        if self._electorate is None and len(self._promises) >= present:
            electorate = set(self._present())
            if electorate <= self._promises.keys() and self.has_quorum:
                self._lose_ended(electorate)
                self._propose(electorate)
        if self._electorate is not None and len(self._acceptors) >= present and self._electorate <= self._acceptors:
            assert self._accepted is not None
            self._decide(self._accepted[1])

    def _lose_ended(self, present: set[int]) -> None:
        """Remove members from ``present`` that others hold lost rightly: in a dispute the other one might be left out."""
        accused = present & {member for promise in self._promises.values() for member in promise.lost}
        ended = set(self._ended_of(accused)) if accused else set()
        self._adopt({each: MemberEnd(f"rank {self.member} saw that its process has ended") for each in ended})
        present -= ended

    def _propose(self, present: set[int]) -> None:
        ballot = self._promised
        earlier = [
            (promise.accepted_in, promise.decision)
            for member, promise in self._promises.items()
            if member in present and promise.accepted_in is not None and promise.decision is not None
        ]
        if earlier:
            decision = max(earlier, key=lambda accepted: accepted[0])[1]
        else:
            excluded = self._lost | (self._disputed(present) if self._settles_disputes else {})
            decision = Decision(
                {each: self._promises[each].vote for each in self.members if each not in excluded},
                {each: excluded[each] for each in self.members if each in excluded},
                tuple(each for each, end in self._ended.items() if end.has_quit),
            )
        self._accepted = ballot, decision
        self._electorate, self._acceptors = present, {self.member}
        self._send_to(present, self._proposal())

    def _proposal(self) -> AgreementMessage:
        assert self._accepted is not None
        ballot, decision = self._accepted
        return AgreementMessage(_ACCEPT, ballot, decision=decision, ended=dict(self._ended))

    def _disputed(self, present: set[int]) -> dict[int, str]:
        """Return the members to leave out, with the reasons, so that no two of the others hold each other lost."""
        reasons: dict[int, dict[int, str]] = {member: {} for member in self.members if member in present}
        for member in reasons:
            for other, reason in self._promises[member].lost.items():
                if other in reasons:
                    reasons[other][member] = reason
                    reasons[member].setdefault(other, reason)
        left_out = {}
        while any(reasons.values()):
            worst = max(reasons, key=lambda member: (len(reasons[member]), self.places[member]))
            left_out[worst] = next(iter(reasons.pop(worst).values()))
            for others in reasons.values():
                others.pop(worst, None)
        return left_out

    def _decide(self, decision: Decision) -> None:
        """Decide. The coordinator tells all; the others tell those that the coordinator may not reach.

        These are the excluded members, which in a large group hear it from a relay when they repeat their promises, and
        those that have lost the coordinator and have turned to this member.
        """
        self.decision = decision
        if self.coordinates:
            self.answer(self._present())
        else:
            others = self._unanswered if self.is_large else self._unanswered | decision.excluded.keys()
            self.answer(sorted(others - self._lost.keys()))

    # -- the members ---------------------------------------------------------------------------

    def _present(self) -> list[int]:
        return [each for each in self.members if each not in self._lost]

    def _adopt(self, ended: Mapping[int, MemberEnd]) -> None:
        for member, end in ended.items():
            if member != self.member and member in self.places and member not in self._ended:
                self._ended[member] = end
                self._lost.setdefault(member, end.reason)

    def _send_to(self, receivers: Iterable[int], message: AgreementMessage) -> None:
        if others := [each for each in receivers if each != self.member]:
            self._outbox.append((others, message))


class _Positions(Mapping[int, int]):
    """The position of each of many members that ascend, found by bisection, without a table."""

    def __init__(self, members: Sequence[int]) -> None:
        self._members = members

    def __contains__(self, member: object) -> bool:
        place = bisect_left(self._members, cast(int, member))
        return place < len(self._members) and self._members[place] == member

    def __getitem__(self, member: int) -> int:
        return bisect_left(self._members, member)

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


def _positions_of(members: Sequence[int]) -> Mapping[int, int]:
    if len(members) > DEGREE and (isinstance(members, range) or all(one < other for one, other in pairwise(members))):
        return _Positions(members)
    return {each: place for place, each in enumerate(members)}
