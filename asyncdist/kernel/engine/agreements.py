"""The agreements of one rank: gives the state machines of `membership.agreement` messages, losses and time.

An agreement belongs to a group and has a number. It goes on after the group has failed, which is when it is needed. The
messages of an agreement that this rank has not begun are kept until it begins it. A rank that has regrouped or destroyed
the group quits the agreements that it has not begun, when it is asked for them.

The `Endpoint` owns one `Agreements` and calls it under the lock of its `Progress`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import monotonic

from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Deadline
from asyncdist.errors import ExcludedError, GroupAbortedError, GroupError, NoQuorumError, OperationTimeoutError
from asyncdist.kernel.engine.executor import EngineHost
from asyncdist.kernel.engine.group_failures import GroupFailures
from asyncdist.kernel.engine.operation import Channel, named
from asyncdist.kernel.membership.agreement import DEGREE, Agreement
from asyncdist.kernel.membership.messages import MOST_MEMBERS, AgreementKind, AgreementMessage, Decision
from asyncdist.kernel.membership.relays import Courier, Letter, pack_letters, unpack_letters
from asyncdist.kernel.transport.wire_format import AGREE, pack_key

REGROUP = 0xFFFFFFFF
"""The number of the agreement on a group's successor. It is the group's last one."""
_FIRST_LOOK, _LONGEST_LOOK, _LONGEST_OF_MANY = 2e-3, 0.5, 4.0
"""Seconds between two looks; the pause doubles. Many that repeat messages as often as few send more than they can read."""
_ASK_AFTER = 0.25
"""The pause from which on members repeat their messages, of which one may have found no descriptor for a connection.

In a failed group they also tell each other from then on whom they have lost, and watch each other.
"""
_QUORUM_GRACE = 1.0
"""Seconds for which a coordinator without a quorum waits for the proof that lost members have ended."""
_ACCUSED_GRACE = 0.03
"""Seconds for which a member that others have lost, and that this rank does not hear, may still answer."""
_FOLLOWERS_GRACE = 0.5
"""Seconds by which a member waits longer than its coordinator, whose reason to give up is the better one."""
_EXIT_TIME, _FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1e-3, 4e-3
"""Seconds for which a process that ends may still be seen after its connections have ended, and between two looks."""
_HOLD = 3e-3
"""Seconds for which a relay waits for more messages to pass on together, while this rank is driven."""
_MAX_KEPT = 4096
"""The number of agreements that are kept: those that are over, for members that ask, and those not begun."""

Finish = Callable[[Decision | None, GroupError | None], None]
"""Receives the outcome of an agreement: the decision that this rank is part of, or the error."""


@dataclass(eq=False, slots=True)
class _Running:
    """An agreement of this rank: the state machine, and what the rank waits for."""

    key: bytes
    agreement: Agreement
    courier: Courier
    channel: Channel
    finish: Finish | None = None
    what: str = ""
    timeout: float = 0.0
    deadline: float = 0.0
    pause: float = _FIRST_LOOK
    is_looking: bool = False
    hopeless_since: float | None = None
    accused_since: float | None = None


class Agreements:
    """The agreements of one rank, in groups and about lost peers that ``failures`` knows."""

    def __init__(self, host: EngineHost, failures: GroupFailures) -> None:
        self._rank, self._failures, self._timers, self._host = host.rank, failures, host.timers, host
        self._channels, self._lost_peers = failures.channels, failures.lost_peers
        self._running: dict[bytes, _Running] = {}
        self._early: dict[bytes, list[tuple[int, bytes]]] = {}
        """Messages for groups that this rank has not made yet."""
        self._left: dict[bytes, str] = {}
        """By the first 8 bytes of their keys, the groups in which this rank begins no agreement any more, and why."""

    @property
    def taken_part(self) -> bool:
        """Whether this rank has decided anything, so that its last messages matter to others. Any thread may ask."""
        return any(running.agreement.decision is not None for running in list(self._running.values()))

    def begin(self, channel: Channel, number: int, what: str, vote: bytes, timeout: float, finish: Finish) -> None:
        """Vote in an agreement of a group. ``finish`` is called once, under the lock; ``what`` names the call."""
        self._host.assert_held()
        if self._rank in self._lost_peers:  # interrupted in the middle of a transfer, or a forked child
            finish(None, self._lost_peers[self._rank])
            return
        running = self._find(channel, number)
        if running.agreement.has_quit:
            finish(None, GroupAbortedError(self._left.get(channel.prefix, "this rank has quit"), peer=self._rank))
            return
        running.finish, running.what = finish, what
        running.timeout, running.deadline = timeout, monotonic() + timeout
        running.agreement.vote(vote)
        if number == REGROUP:
            self.leave(channel, f"rank {self._rank} had called regroup()")
        self._advance(running)

    def leave(self, channel: Channel, reason: str, *, entirely: bool = False) -> None:
        """Quit the agreements of a group that this rank has not begun; ``entirely`` includes that on its successor."""
        self._host.assert_held()
        self._left[channel.prefix] = reason
        self._drop_oldest()
        for running in list(self._running.values()):
            is_last = running.key[8:] == REGROUP.to_bytes(4, "little")
            if running.channel is channel and (entirely or (running.finish is None and not is_last)):
                running.agreement.quit(reason)
                self._advance(running)
                if running.agreement.has_quit:
                    self._finish(running, None, GroupAbortedError(reason, peer=self._rank))
        self._drop_oldest()

    def on_message(self, peer: int, key: bytes, body: bytes) -> None:
        """Handle a message of a peer."""
        self._host.assert_held()
        running = self._running.get(key[:12])
        if running is None:
            channel = self._channels.get(key[:8])
            if channel is not None and self._rank in channel.members:
                running = self._find(channel, int.from_bytes(key[8:12], "little"))
            elif key[:8] in self._left:
                self._refuse(peer, key[:12], body)
                return
            else:
                self._early.setdefault(key[:12], []).append((peer, body))
                self._drop_oldest()
                return
        self._receive(running, peer, body)
        self._advance(running)

    def _refuse(self, peer: int, key: bytes, packet: bytes) -> None:
        """Tell a peer that asks in a group of which this rank knows no more than its name that it has quit."""
        with contextlib.suppress(ValueError):
            kinds = {AgreementMessage.unpack(letter.body).kind for letter in unpack_letters(packet, MOST_MEMBERS)}
            if kinds & {AgreementKind.PROMISE, AgreementKind.PREPARE}:
                answer = AgreementMessage(AgreementKind.QUIT, reason=self._left[key[:8]])
                self._host.send_unordered(peer, AGREE, key, pack_letters([Letter((), (), False, answer.pack())]))

    def _receive(self, running: _Running, peer: int, body: bytes) -> None:
        # A peer whose messages are not legible is as good as silent.
        with contextlib.suppress(ValueError):
            running.courier.receive(peer, body)

    def on_loss(self, peer: int) -> None:
        """Handle the loss of a peer."""
        self._host.assert_held()
        for running in list(self._running.values()):
            if peer in running.channel.members:
                running.pause = _FIRST_LOOK
                self._report_loss(running, peer)
                if not running.is_looking:
                    self._timers.cancel(running)
                    self._advance(running)

    def end_all(self, error: GroupError) -> None:
        """Fail the pending agreements of this rank, which leaves its world or can send nothing any more."""
        for running in list(self._running.values()):
            self._finish(running, None, error)

    # -- one agreement -------------------------------------------------------------------------

    def _find(self, channel: Channel, number: int) -> _Running:
        """Return an agreement of an open group, with the messages that have arrived before."""
        key = pack_key(channel.number, number, 0)[:12]
        running = self._running.get(key)
        if running is None:
            agreement = Agreement(
                self._rank,
                channel.members,
                settles_disputes=number == REGROUP,
                degree=DEGREE,
                ended_of=self._ended_of,
            )
            running = self._running[key] = _Running(key, agreement, Courier(agreement), channel)
            for peer in self._lost_peers:
                self._report_loss(running, peer)
            if key[:8] in self._left and (number != REGROUP or channel.prefix not in self._channels):
                running.agreement.quit(self._left[key[:8]])
            for peer, body in self._early.pop(key, ()):
                self._receive(running, peer, body)
            self._drop_oldest()
        return running

    def _ended_of(self, members: Collection[int]) -> set[int]:
        """Return those of the members whose processes have ended. One that ends closes its connections a moment before."""
        ended = set[int]()
        for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, Deadline.after(_EXIT_TIME)):
            ended = {member for member in members if self._host.has_ended(member)}
            if len(ended) == len(members):
                break
        return ended

    def _drop_oldest(self) -> None:
        for table in (self._early, self._left):
            if len(table) > _MAX_KEPT:
                del table[next(iter(table))]
        if len(self._running) > _MAX_KEPT:
            over = (key for key, running in self._running.items() if running.finish is None)
            if (key := next(over, None)) is not None:
                del self._running[key]

    def _report_loss(self, running: _Running, peer: int) -> None:
        error = self._lost_peers[peer]
        why = error.reason.removeprefix(f"rank {peer} was lost ")
        reason = why[1:-1] if why.startswith("(") and why.endswith(")") else why
        if not reason.startswith("rank "):
            reason = f"rank {self._rank} had lost it ({reason})"
        if self._host.has_ended(peer):
            running.agreement.end(peer, reason)
        else:
            running.agreement.lose(peer, reason)

    def _advance(self, running: _Running) -> None:
        """Send what an agreement has to say, and end it or look at it again later."""
        agreement = running.agreement
        self._send(running, hold=running.finish is not None)
        decision = agreement.decision
        if decision is not None:
            error = None
            if self._rank not in decision.votes:
                reason = decision.excluded.get(self._rank, "unknown")
                error = ExcludedError(f"the other members go on without rank {self._rank}: {reason}")
            self._finish(running, decision if error is None else None, error)
        elif running.finish is not None and not agreement.has_quit:
            self._timers.schedule(running, self._next_look(running), functools.partial(self._look, running))

    def _send(self, running: _Running, *, hold: bool = False) -> None:
        for peer, packet in running.courier.take_outbox(hold=hold):
            self._host.send_unordered(peer, AGREE, running.key, packet)
        if running.courier.holds:
            self._timers.schedule(running.courier, monotonic() + _HOLD, functools.partial(self._send, running))

    def _next_look(self, running: _Running) -> float:
        """Return when to look at an agreement again: after its pause, or once others have had their time."""
        now, accused = monotonic(), self._accused(running)
        due = now + (running.pause if now + running.pause < running.deadline else min(running.pause, _LONGEST_LOOK))
        if running.accused_since is not None:
            due = min(due, running.accused_since + _grace_of(running, accused))
        if running.hopeless_since is not None and running.agreement.coordinates:
            due = min(due, running.hopeless_since + _QUORUM_GRACE)
        return max(due, now + _FIRST_LOOK)

    def _finish(self, running: _Running, decision: Decision | None, error: GroupError | None) -> None:
        self._timers.cancel(running)
        finish, running.finish = running.finish, None
        if finish is not None:
            finish(decision, error)

    # -- time ----------------------------------------------------------------------------------

    def _look(self, running: _Running) -> None:
        """Find members that have ended unnoticed, ask those that have not voted, and give up in time."""
        agreement, now, running.is_looking = running.agreement, monotonic(), True
        for peer in list(agreement.excluded):
            if self._host.has_ended(peer) and peer in self._lost_peers:
                self._report_loss(running, peer)
        neighbours = running.courier.neighbours()
        for peer in dict.fromkeys([*neighbours, *agreement.awaited]):
            if peer == self._rank:
                continue
            if self._host.has_ended(peer):
                self._failures.lose_after_reading(peer, "its process has ended")
                if peer not in self._lost_peers:  # it has left, and its last data may still arrive
                    agreement.end(peer, f"rank {peer} has left")
            elif not agreement.is_large or peer in neighbours:
                self._host.watch(peer)
        self._lose_accused(running, now)
        running.is_looking = False
        has_failed, waits_long = running.channel.error is not None, running.pause >= _ASK_AFTER
        if waits_long:
            running.courier.repeat(to_all=has_failed)
        elif has_failed:
            running.courier.ask()
        if waits_long and (has_failed or agreement.is_large):
            for peer in running.courier.further_neighbours(self._host.hears):
                if not self._host.hears(peer):
                    self._host.watch(peer)
        running.pause = min(2 * running.pause, _LONGEST_OF_MANY if agreement.is_large else _LONGEST_LOOK)
        if agreement.has_quorum_without(self._accused(running)):
            running.hopeless_since = None
        else:
            running.hopeless_since = running.hopeless_since or now
        is_hopeless = running.hopeless_since is not None and now >= running.hopeless_since + _QUORUM_GRACE
        if is_hopeless and agreement.coordinates and not agreement.has_quorum:
            self._give_up(running, self._no_quorum(agreement))
        elif now >= running.deadline + (0.0 if agreement.coordinates else _FOLLOWERS_GRACE):
            self._give_up(running, self._timeout(running))
        else:
            self._advance(running)

    def _accused(self, running: _Running) -> dict[int, str]:
        """Return the awaited members that others have lost, and that this rank does not hear, and note since when.

        Its own detector would take another timeout, or never know a member to which this rank had no connection.
        """
        accused = {peer: why for peer, why in running.agreement.accused.items() if not self._host.hears(peer)}
        running.accused_since = (running.accused_since or monotonic()) if accused else None
        return accused

    def _lose_accused(self, running: _Running, now: float) -> None:
        accused = self._accused(running)
        if running.accused_since is not None and now >= running.accused_since + _grace_of(running, accused):
            running.accused_since = None
            for peer, why in accused.items():
                self._failures.lose_after_reading(peer, why)

    def _give_up(self, running: _Running, error: GroupError) -> None:
        running.agreement.quit(f"rank {self._rank} gave up: {error.reason}")
        self._advance(running)
        self._finish(running, None, error)

    def _no_quorum(self, agreement: Agreement) -> GroupError:
        excluded = agreement.excluded
        present = [member for member in agreement.members if member not in excluded]
        reasons = "; ".join(f"rank {member}: {reason}" for member, reason in list(excluded.items())[:4])
        return NoQuorumError(
            f"{named(present)} of {len(agreement.members)} members cannot go on, because "
            f"the others may be alive ({reasons})",
            present=present,
        )

    def _timeout(self, running: _Running) -> GroupError:
        awaited = running.agreement.awaited
        reason = f"timed out after {running.timeout:g} s, waiting for {named(awaited)}"
        quitters = "; ".join(text for text in running.agreement.excluded.values() if "gave up" in text)
        reason = f"{reason} to call {running.what}{f' ({quitters})' if quitters else ''}"
        return OperationTimeoutError(reason, peers=awaited, timeout=running.timeout)


def _grace_of(running: _Running, accused: Collection[int]) -> float:
    """Return the seconds for which accused members may still answer."""
    return _ACCUSED_GRACE if running.agreement.has_quorum_without(accused) else _QUORUM_GRACE
