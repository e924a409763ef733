"""Agreements in a simulator: members end, lose each other, quit and vote late, in schedules that are drawn from a seed."""

import itertools
import random
from typing import Any

import msgpack
import pytest

from asyncdist.kernel.membership.agreement import DEGREE, Agreement
from asyncdist.kernel.membership.messages import AgreementKind, AgreementMessage, Decision, MemberEnd
from asyncdist.kernel.membership.relays import Courier, Letter, pack_letters, unpack_letters


class Schedule:
    """The members of one agreement, the messages on their way, and the choice of what happens next.

    A message is lost only if its sender ends before it has sent it, if its receiver has ended or holds its sender lost, or
    if the connection breaks, which both ends notice later; or with ``loss``, until the members repeat their messages.
    Some members receive late. Every message is packed and unpacked.

    With a ``degree`` below the number of members, relays pass on the messages. Members then learn of losses by chance, or
    when they look at the members that they watch, which they do when nothing else happens.
    """

    loss = 0.0
    """How likely a message cannot be sent."""

    def __init__(self, size: int, seed: int, *, settles_disputes: bool = False, degree: int = DEGREE) -> None:
        self.random = random.Random(seed)
        self.members = [3 * rank + 1 for rank in range(size)]
        self.settles_disputes = settles_disputes
        self.parts = {
            member: Agreement(member, self.members, settles_disputes=settles_disputes, degree=degree)
            for member in self.members
        }
        self.couriers = {member: Courier(part) for member, part in self.parts.items()}
        self.is_large = size > degree
        self.living = set(self.members)
        self.pending: list[tuple[str, int, tuple[Any, ...]]] = [("vote", member, ()) for member in self.members]
        self.slow = {member for member in self.members if self.random.random() < 0.3}
        self.faults: dict[int, list[tuple[str, int, tuple[Any, ...]]]] = {}
        """What goes wrong, by the number of steps before it."""
        self.doomed: dict[int, tuple[int, float]] = {}
        """By member: the number of messages that it sends before it ends, and how likely others know that for certain."""
        self.lost: set[tuple[int, int]] = set()
        self.lost_before_vote: set[tuple[int, int]] = set()
        self.broken: set[tuple[int, int]] = set()
        """The connections that carry nothing any more, in both directions."""
        self.decided: dict[int, Decision] = {}
        self.certain: dict[int, float] = {}
        """How likely others know of members that have died that they have."""
        self.steps = self.sent = self.looks = 0

    # -- faults ----------------------------------------------------------------------------------

    def plan_death(self, member: int, *, certain: float = 1.0) -> None:
        """Let a member end after some of its messages. Each other one notices it later, with ``certain`` for certain."""
        self.doomed[member] = self.random.randrange(3 * len(self.members)), certain

    def plan_suspicion(self, one: int, other: int) -> None:
        """Let two members that may be alive hold each other lost, the one first."""
        self._plan("lose", one, (other, "suspected"))

    def plan_break(self, one: int, other: int) -> None:
        """Let the connection of two members break at some time, with a part of what is on its way."""
        self._plan("break_connection", one, (other,))

    def plan_partition(self) -> None:
        """Cut the members at some time into two sides that hold each other lost."""
        step = self.random.randrange(5 * len(self.members))
        side = self.random.sample(self.members, self.random.randrange(1, len(self.members)))
        for one, other in itertools.product(side, [each for each in self.members if each not in side]):
            self._plan("lose", one, (other, "partition"), step)
            self._plan("lose", other, (one, "partition"), step)

    def plan_quit(self, member: int) -> None:
        """Let a member give up at some time."""
        self._plan("quit", member, ())

    def plan_repeat(self, member: int) -> None:
        """Let a member repeat its messages, and tell the others whom it holds lost."""
        self._plan("repeat", member, (self.random.random() < 0.5,))

    def _plan(self, action: str, member: int, arguments: tuple[Any, ...], step: int | None = None) -> None:
        step = self.random.randrange(5 * len(self.members)) if step is None else step
        self.faults.setdefault(step, []).append((action, member, arguments))

    # -- what happens ----------------------------------------------------------------------------

    def step(self) -> None:
        for fault in self.faults.pop(self.steps, ()):
            self.perform(fault)
        self.steps += 1
        if self.pending:
            for _ in range(20):
                number = self.random.randrange(len(self.pending))
                if self.pending[number][1] not in self.slow:
                    break
            self.perform(self.pending.pop(number))

    def perform(self, event: tuple[str, int, tuple[Any, ...]]) -> None:
        """Let something happen to a member, unless it has ended; then send its messages."""
        action, member, arguments = event
        if member in self.living:
            getattr(self, action)(member, *arguments)
            self.flush(member)
        elif self.is_large and action == "receive" and arguments[0] in self.living:  # the connection has ended
            self.pending.append(self.news_of(member, arguments[0]))
        self.check()

    def settle(self) -> None:
        """Let everything happen that is on its way."""
        while self.pending:
            self.step()

    def run(self) -> None:
        """Run until nothing is left to happen; members without a quorum then give up, one after the other."""
        while True:
            while self.pending or self.faults:
                self.step()
            hopeless = [
                member
                for member in sorted(self.living)
                if (part := self.parts[member]).coordinates and not part.is_over and not part.has_quorum
            ]
            if self.is_large and not self.doomed and not all(self.parts[member].is_over for member in self.living):
                self.looks += 1
                assert self.looks < 60 * len(self.members), "members wait forever"
                if hopeless and self.looks % 8 == 0:
                    self.perform(("quit", self.random.choice(hopeless), ()))
                for member in sorted(self.living):
                    self.perform(("look", member, ()))
            elif hopeless:
                self.perform(("quit", self.random.choice(hopeless), ()))
            elif self.doomed:
                self.die(min(self.doomed))
            elif self.loss and not all(self.parts[member].is_over for member in self.living):
                self.loss *= 0.9
                assert self.loss > 1e-6, "members wait forever"
                for member in sorted(self.living):
                    self.perform(("repeat", member, (False,)))
            else:
                return

    def flush(self, member: int) -> None:
        """Send the messages of a member, which may end before one of them."""
        courier = self.couriers[member]
        for receiver, packet in courier.take_outbox(hold=self.random.random() < 0.8):
            assert receiver != member
            if member in self.doomed:
                left, certain = self.doomed[member]
                if left == 0:
                    self.die(member)
                    return
                self.doomed[member] = left - 1, certain
            self.sent += 1
            if (member, receiver) in self.broken or (self.loss and self.random.random() < self.loss):
                continue
            self.pending.append(("receive", receiver, (member, packet)))
        if courier.holds:
            self.pending.append(("flush", member, ()))

    def receive(self, receiver: int, sender: int, packet: bytes) -> None:
        if (receiver, sender) not in self.lost:
            self.couriers[receiver].receive(sender, packet)
        elif sender in self.living:  # the connection is closed
            self.pending.append(("lose", sender, (receiver, "it holds this one lost")))

    def break_connection(self, one: int, other: int) -> None:
        self.broken |= {(one, other), (other, one)}
        self.pending = [event for event in self.pending if not self._breaks(event) or self.random.random() < 0.5]
        for here, there in ((one, other), (other, one)):
            self.pending.append(("lose", here, (there, "the connection has ended")))

    def _breaks(self, event: tuple[str, int, tuple[Any, ...]]) -> bool:
        action, receiver, arguments = event
        return action == "receive" and (receiver, arguments[0]) in self.broken

    def vote(self, member: int) -> None:
        if not self.parts[member].has_quit:
            self.lost_before_vote |= {pair for pair in self.lost if pair[0] == member}
            self.parts[member].vote(b"vote of %d" % member)

    def die(self, member: int) -> None:
        _, self.certain[member] = self.doomed.pop(member)
        self.living.discard(member)
        for other in sorted(self.living):
            if not self.is_large or self.random.random() < 0.3:
                self.pending.append(self.news_of(member, other))

    def news_of(self, dead: int, member: int) -> tuple[str, int, tuple[Any, ...]]:
        """Return that a member learns of a death."""
        return "end" if self.random.random() < self.certain[dead] else "lose", member, (dead, "died")

    def look(self, member: int) -> None:
        """Let a member look at those that it watches, adopt accusations, and repeat its messages."""
        part, courier = self.parts[member], self.couriers[member]
        if part.is_over:
            return
        for other in dict.fromkeys(
            [*part.awaited, *courier.neighbours(), *courier.further_neighbours(lambda other: False), *part.accused]
        ):
            if other == member:
                continue
            if other not in self.living:
                self.pending.append(self.news_of(other, member))
            elif (other, member) in self.lost or (other in part.accused and self.random.random() < 0.3):
                self.pending.append(("lose", member, (other, "it is not heard")))
        courier.repeat(to_all=True)

    def lose(self, member: int, other: int, reason: str) -> None:
        if (member, other) not in self.lost:
            self.lost.add((member, other))
            self.parts[member].lose(other, reason)
            self.pending.append(("lose", other, (member, reason)))

    def end(self, member: int, other: int, reason: str) -> None:
        # Messages that the other one had sent may still arrive. The part has to ignore them.
        self.parts[member].end(other, reason)

    def quit(self, member: int) -> None:
        self.parts[member].quit("enough")

    def repeat(self, member: int, to_all: bool) -> None:
        self.couriers[member].repeat(to_all=to_all)

    # -- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        """No two members that are alive have decided differently, and no member changes its decision."""
        for member in self.living:
            decision = self.parts[member].decision
            if decision is not None:
                if member not in self.decided:
                    self.check_decision(decision)
                assert self.decided.setdefault(member, decision) == decision
                assert not self.parts[member].has_quit
        decisions = [self.decided[member] for member in self.living if member in self.decided]
        assert all(decision == decisions[0] for decision in decisions)

    def check_decision(self, decision: Decision) -> None:
        assert all(vote == b"vote of %d" % member for member, vote in decision.votes.items())
        assert sorted([*decision.votes, *decision.excluded]) == self.members
        assert set(decision.quitters) <= set(decision.excluded)
        if self.settles_disputes:
            going = {(one, other) for one, other in self.lost_before_vote if {one, other} <= decision.votes.keys()}
            assert not going, "members go on that cannot reach each other"

    @property
    def outcomes(self) -> dict[int, Decision | None]:
        return {member: self.parts[member].decision for member in sorted(self.living)}

    def only_decision(self) -> Decision:
        """Return the decision that every living member holds."""
        first = self.outcomes[min(self.living)]
        assert first is not None
        assert set(map(repr, self.outcomes.values())) == {repr(first)}
        return first


def size_of(seed: int, most: int = 9) -> int:
    return 2 + seed % (most - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_members_without_faults_decide_all_votes(size):
    schedule = Schedule(size, size)
    schedule.run()
    assert schedule.only_decision() == Decision({each: b"vote of %d" % each for each in schedule.members}, {}, ())
    assert schedule.sent <= 4 * (size - 1)  # a promise, a proposal, an acceptance and the decision for each


def deadly(seed: int, size: int, degree: int = DEGREE) -> Schedule:
    """Return a schedule in which any number of members end at any step, and everybody learns for certain that they have."""
    schedule = Schedule(size, seed, settles_disputes=seed % 2 == 0, degree=degree)
    for member in schedule.random.sample(schedule.members, schedule.random.randrange(size)):
        schedule.plan_death(member)
    return schedule


def faulty(seed: int, size: int, degree: int = DEGREE) -> Schedule:
    """Return a schedule with a partition, suspicions or broken connections, deaths that are noticed or not, and more."""
    schedule = Schedule(size, seed, settles_disputes=seed % 4 < 2, degree=degree)
    for member in schedule.members:
        schedule.plan_repeat(member)
    draw = schedule.random
    if seed % 2:
        schedule.plan_partition()
    else:
        for _ in range(draw.randrange(2 * size)):
            draw.choice((schedule.plan_suspicion, schedule.plan_break))(*draw.sample(schedule.members, 2))
    for member in draw.sample(schedule.members, draw.randrange(size)):
        schedule.plan_death(member, certain=draw.choice((0.0, 0.5, 1.0)))
    if seed % 5 == 0:
        schedule.plan_quit(draw.choice(schedule.members))
    return schedule


def check_deadly(seed: int, size: int, degree: int = DEGREE) -> None:
    """Safety is checked after each event. Liveness: all survivors decide, and go on."""
    schedule = deadly(seed, size, degree)
    schedule.run()
    assert schedule.living <= schedule.only_decision().votes.keys(), (seed, size)


def check_faulty(seed: int, size: int, degree: int = DEGREE) -> None:
    """Safety is checked after each event. Liveness: every living member decides, or knows that it cannot go on."""
    schedule = faulty(seed, size, degree)
    schedule.run()
    assert all(schedule.parts[member].is_over for member in schedule.living), (seed, size)


@pytest.mark.parametrize("block", [0, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in range(1, 10))])
@pytest.mark.parametrize("check", [check_deadly, check_faulty])
def test_survivors_decide_the_same_and_at_most_one_side_goes_on(check, block):
    for seed in range(300 * block, 300 * (block + 1)):
        check(seed, size_of(seed))


@pytest.mark.parametrize("block", [0, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in range(1, 10))])
@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("check", [check_deadly, check_faulty])
def test_survivors_decide_the_same_although_relays_pass_on_their_messages(check, degree, block):
    for seed in range(150 * block, 150 * (block + 1)):
        check(seed, degree + 1 + seed % 14, degree)


@pytest.mark.parametrize("make", [deadly, faulty])
def test_members_that_repeat_their_messages_end_although_some_could_not_be_sent(make):
    for seed in range(300):
        schedule = make(seed, size_of(seed))
        schedule.loss = schedule.random.choice((0.1, 0.5))
        schedule.run()
        assert all(schedule.parts[member].is_over for member in schedule.living), seed
        if make is deadly:
            assert schedule.living <= schedule.only_decision().votes.keys(), seed


@pytest.mark.parametrize("check", [check_deadly, check_faulty])
def test_many_members(check):
    for size in (16, 33, 64):
        check(size, size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", [check_deadly, check_faulty])
@pytest.mark.parametrize("sizes", [range(2, 6), range(6, 17), range(17, 33), range(33, 49), range(49, 65)], ids=str)
def test_many_more_schedules_of_every_number_of_members(check, sizes):
    for size in sizes:
        for seed in range(max(6, 20_000 // size**2)):
            check(seed, size)


def messages_of(member: int, size: int) -> int:
    """Return the most messages that a member sends in an agreement without faults."""
    return 3 * (size - 1) if member == 0 else 2 + size


@pytest.mark.parametrize(
    ("size", "dying"),
    [(2, 1), (3, 1), (3, 2), (4, 1), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((4, 2), (5, 2)))],
)
def test_death_before_each_message_of_each_member(size, dying):
    """All combinations of ``dying`` members and the messages before which they end, each in a few orders of events."""
    for members in itertools.permutations(range(size), dying):
        for moments in itertools.product(*(range(messages_of(member, size)) for member in members)):
            for seed in range(3):
                schedule = Schedule(size, seed, settles_disputes=seed == 0)
                for member, moment in zip(members, moments, strict=True):
                    schedule.doomed[schedule.members[member]] = moment, 1.0
                schedule.run()
                assert schedule.living <= schedule.only_decision().votes.keys(), (members, moments, seed)


def split(schedule: Schedule, *sides: list[int]) -> None:
    """Let members on different sides hold each other lost, before anything else happens."""
    for side, other in itertools.permutations(sides, 2):
        for one, two in itertools.product(side, other):
            schedule.perform(("lose", schedule.members[one], (schedule.members[two], "partition")))


@pytest.mark.parametrize(
    ("sides", "goes_on"),
    [
        (([0, 1, 2], [3, 4]), [0, 1, 2]),
        (([0, 1], [2, 3, 4]), [2, 3, 4]),
        (([0, 2], [1, 3]), [0, 2]),
        (([0], [1]), [0]),
        (([0, 1], [2, 3], [4, 5]), None),
        (([0], [1, 2], [3, 4]), None),
    ],
)
def test_only_a_majority_goes_on_or_the_half_with_the_first_member(sides, goes_on):
    for seed in range(20):
        schedule = Schedule(sum(map(len, sides)), seed)
        split(schedule, *sides)
        schedule.run()
        going = {schedule.members[each] for each in goes_on or ()}
        for member, decision in schedule.outcomes.items():
            assert (decision is not None and decision.votes.keys() == going) == (member in going)
            assert schedule.parts[member].has_quit == (member not in going)


def test_members_that_ended_count_in_the_half_because_they_may_have_decided_with_the_other_side():
    """{0, 1} decide, 0 ends, and 1 goes on alone: {2, 3}, which hold 1 lost, must not go on as two of three."""
    schedule = Schedule(4, 0)
    first, second, third, fourth = schedule.members
    split(schedule, [0, 1], [2, 3])
    schedule.pending = [one for one in schedule.pending if one[1] in (first, second)]
    schedule.settle()
    assert schedule.parts[second].decision is not None
    schedule.living.discard(first)
    for member in (third, fourth):
        schedule.perform(("end", member, (first, "died")))
        schedule.perform(("vote", member, ()))
    schedule.run()
    assert [schedule.parts[member].decision for member in (third, fourth)] == [None, None]


def test_members_that_hold_each_other_lost_are_left_out_until_all_others_reach_one_another():
    """First goes the member with most disputes, then the later one of a pair."""
    for seed in range(50):
        schedule = Schedule(7, seed, settles_disputes=True)
        for one, other in ((1, 2), (2, 3), (2, 4), (5, 6)):
            split(schedule, [one], [other])
        schedule.run()
        decision = schedule.only_decision()
        assert [schedule.members.index(member) for member in decision.votes] == [0, 1, 3, 4, 5]
        assert decision.excluded == {schedule.members[2]: "partition", schedule.members[6]: "partition"}


@pytest.mark.parametrize(("ended", "excluded"), [({1}, 1), (set(), 2)], ids=["a dead one", "two living ones"])
def test_member_that_holds_a_dead_one_lost_goes_on(ended, excluded):
    """Member 1 has died after its promise, which the coordinator has not noticed yet. It looks before it leaves one out."""
    first = Agreement(0, range(3), settles_disputes=True, ended_of=ended.intersection)
    first.vote(b"vote")
    first.receive(1, AgreementMessage(AgreementKind.PROMISE, (0, 0), b"vote"))
    first.receive(2, AgreementMessage(AgreementKind.PROMISE, (0, 0), b"vote", lost={1: "its connection has ended"}))
    (_, proposal), *_ = first.take_outbox()
    assert proposal.decision.votes.keys() == {0, 1, 2} - {excluded}
    assert proposal.decision.excluded.keys() == {excluded}


def test_one_member_that_two_others_dispute_is_excluded_and_learns_why():
    """The coordinator holds the last member lost; the member in between reaches both, and tells the last one."""
    for seed in range(100):
        schedule = Schedule(3, seed)
        first, between, last = schedule.members
        schedule.perform(("lose", first, (last, "no heartbeat")))
        schedule.run()
        decision = schedule.only_decision()
        assert decision.votes.keys() == {first, between}
        assert decision.excluded == {last: "no heartbeat"}


def test_coordinator_that_reaches_no_quorum_leaves_the_others_a_new_one():
    """Member 0 reaches only member 1, which reaches all."""
    for seed in range(50):
        schedule = Schedule(5, seed)
        split(schedule, [0], [2, 3, 4])
        schedule.run()
        decisions = list(schedule.outcomes.values())
        assert decisions[0] is None
        assert schedule.parts[schedule.members[0]].has_quit
        assert decisions[1] is not None
        assert list(decisions[1].votes) == schedule.members[1:]
        assert decisions[1:] == decisions[1:2] * 4


def test_member_that_quits_is_excluded_by_name_and_the_others_go_on():
    schedule = Schedule(4, 1)
    quitter = schedule.members[1]
    schedule.perform(("quit", quitter, ()))
    schedule.run()
    decisions = {member: decision for member, decision in schedule.outcomes.items() if member != quitter}
    for decision in decisions.values():
        assert decision is not None
        assert decision.excluded == {quitter: "enough"}
        assert decision.quitters == (quitter,)


def test_late_voter_decides_with_the_others_and_is_awaited_by_name():
    schedule = Schedule(4, 2)
    late = schedule.members[2]
    schedule.pending.remove(("vote", late, ()))
    schedule.settle()
    assert schedule.parts[schedule.members[0]].awaited == [late]
    assert not any(schedule.outcomes.values())
    schedule.pending.append(("vote", late, ()))
    schedule.run()
    assert list(schedule.only_decision().votes) == schedule.members


def test_coordinator_learns_whom_only_others_have_lost_also_after_their_promises():
    """Member 3 is dead, and only member 1 notices it."""
    for told_before in (True, False):
        schedule = Schedule(4, 0)
        first, second, third, dead = schedule.members
        schedule.pending.remove(("vote", dead, ()))
        schedule.living.discard(dead)
        if told_before:
            schedule.perform(("lose", second, (dead, "silent")))
        schedule.settle()
        if not told_before:
            assert schedule.parts[first].accused == {}
            schedule.perform(("lose", second, (dead, "silent")))
            schedule.settle()
        assert schedule.parts[first].accused == {dead: "silent"}
        assert schedule.parts[first].has_quorum_without([dead])
        assert not schedule.parts[first].has_quorum_without([second, third, dead])
        schedule.perform(("lose", first, (dead, "rank 4 says so")))
        schedule.settle()
        decision = schedule.parts[third].decision
        assert decision is not None
        assert list(decision.votes) == [first, second, third]


def test_members_that_wait_for_a_dead_coordinator_learn_it_from_each_other():
    """Members 0 and 1 are dead. Member 2 has noticed the one, member 3 the other."""
    schedule = Schedule(4, 0)
    one, other, third, fourth = schedule.members
    for dead in (one, other):
        schedule.pending.remove(("vote", dead, ()))
        schedule.living.discard(dead)
    schedule.perform(("lose", third, (one, "silent")))
    schedule.perform(("lose", fourth, (other, "silent")))
    schedule.settle()
    assert schedule.parts[third].awaited == [other]
    assert schedule.parts[fourth].awaited == [one]
    for member in (third, fourth):
        schedule.perform(("repeat", member, (True,)))
    schedule.settle()
    assert schedule.parts[third].accused == {other: "silent"}
    assert schedule.parts[fourth].accused == {one: "silent"}


def looks_until_decided(schedule: Schedule, dead: list[int]) -> int:
    """Let members that nobody has lost be dead; return how often the others look at those that they watch, and no others.

    They adopt accusations of dead members only, because they hear the living.
    """
    schedule.living -= set(dead)
    schedule.certain |= dict.fromkeys(dead, 0.0)
    for number in range(len(schedule.members)):
        schedule.settle()
        if all(schedule.parts[member].decision for member in schedule.living):
            return number
        for member in sorted(schedule.living):
            courier = schedule.couriers[member]
            for other in {*courier.neighbours(), *schedule.parts[member].accused} - schedule.living:
                schedule.perform(("lose", member, (other, "it died")))
            courier.ask()
            schedule.flush(member)
    raise AssertionError("members wait forever")


@pytest.mark.parametrize("first", [0, 5, 16, 20, 60])
def test_lost_block_of_relays_of_relays_is_found_in_the_logarithm_of_its_size(first):
    """40 of 100 members with relays of degree 4 are whole blocks of 16."""
    schedule = Schedule(100, first, degree=4)
    assert looks_until_decided(schedule, schedule.members[first : first + 40]) <= 6
    assert schedule.only_decision().votes.keys() == schedule.living


@pytest.mark.parametrize("accused", [4, 16, 17])
def test_living_relay_that_a_member_holds_lost_is_no_obstacle(accused):
    schedule = Schedule(60, accused, degree=4)
    schedule.perform(("lose", schedule.members[50], (schedule.members[accused], "no heartbeat")))
    dead = schedule.members[20:40]
    assert looks_until_decided(schedule, dead) <= 6
    assert schedule.only_decision().votes.keys() == schedule.living


def test_packed_message_is_the_same_and_other_bytes_are_refused():
    decision = Decision({4: b"yes"}, {7: "lost"}, (7,))
    message = AgreementMessage(
        AgreementKind.PROMISE, (1, 2), b"vote", decision, (0, 1), {7: MemberEnd("it died", True)}, "why", {3: "silent"}
    )
    assert AgreementMessage.unpack(message.pack()) == message
    for body in (b"", b"\xc1", message.pack()[:-1], message.pack() + b"x", b"\x90", b"\x98" + b"\xc0" * 8):
        with pytest.raises(ValueError, match="not a message"):
            AgreementMessage.unpack(body)


def test_packed_letters_are_the_same_and_other_bytes_are_refused():
    letter = Letter([0, 1, 2, 7], [3], True, b"body")
    for letters in ([letter], [letter] * 20, [Letter((), (), False, b"\x98body")]):
        packet = pack_letters(letters)
        assert unpack_letters(packet, 8) == letters
    for body in (b"\x91", pack_letters([letter])[:-1], pack_letters([letter]) + b"x", b"\x91\x91\x94" + b"\xc0" * 4):
        with pytest.raises(ValueError, match="not letters"):
            unpack_letters(body, 8)
    with pytest.raises(ValueError, match="not letters"):
        unpack_letters(pack_letters([letter]), 7)


SPARSE = [member for member in range(10_000) if member % 3]
LONG_REASON = "rank 0 had lost it (" + 60 * "no heartbeat, " + ")"


@pytest.mark.parametrize(
    ("lost", "reasons", "most"),
    [
        (range(300), [LONG_REASON], 1 << 10),
        (range(2, 10_000), [LONG_REASON], 1 << 10),
        (SPARSE, [LONG_REASON], 1 << 16),
        (SPARSE, [f"rank {member} gave up: {LONG_REASON}" for member in SPARSE], 1 << 17),
        (SPARSE, [f"{member}: {9 * LONG_REASON}" for member in SPARSE], 1 << 17),
    ],
    ids=["300", "10000", "sparse", "different reasons", "long reasons"],
)
def test_message_about_thousands_of_lost_members_is_small(lost, reasons, most):
    why = dict(zip(lost, itertools.cycle(reasons), strict=False))
    votes = {member: b"vote" for member in range(10_000) if member not in why}
    ended = {member: MemberEnd(reason) for member, reason in why.items()}
    message = AgreementMessage(AgreementKind.ACCEPT, (1, 2), decision=Decision(votes, why), ended=ended)
    body = message.pack()
    assert len(body) < most
    received = AgreementMessage.unpack(body)
    assert received.decision.votes == votes
    assert list(received.decision.excluded) == list(why)
    assert received.ended.keys() == ended.keys()
    assert all(why[member].startswith(reason) for member, reason in list(received.decision.excluded.items())[:64])


def test_member_that_claims_too_many_members_is_refused():
    decision = [[[b"yes"], [0, 0, 1 << 40]], [[], []], []]
    body = msgpack.packb([AgreementKind.ACCEPT, (1, 2), b"", decision, None, [[], []], "", [[], []]])
    with pytest.raises(ValueError, match="not a message"):
        AgreementMessage.unpack(body)


def test_messages_of_strangers_and_of_ended_members_are_ignored():
    part = Agreement(0, [0, 1, 2])
    part.vote(b"")
    decide = AgreementMessage(AgreementKind.DECIDE, decision=Decision({1: b""}, {}))
    part.receive(5, decide)
    part.end(1, "it died")
    part.receive(1, decide)
    assert part.decision is None
    part.receive(2, decide)
    assert part.decision is not None
