"""The groups of one rank, the peers that it has lost, and how failures spread.

A lost peer fails every group that contains it. Any other failure (a deadline, a mismatch, an abort) fails one group. The
rank that detects a failure notifies all members of the group. Each member forwards the notice to the ranks at distances
1, 2, 4, …, so that it reaches all members even if the first rank dies while it sends.

The `Endpoint` owns one `GroupFailures` and calls it under the lock of its `Progress`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from asyncdist.base.descriptors import is_exhausted
from asyncdist.errors import GroupAbortedError, GroupError, PeerLostError, TransportUnavailableError
from asyncdist.kernel.engine.control_messages import (
    EXCLUDES,
    LEFT,
    MAX_CLOSING_FAILURES,
    closing_frames,
    decode_abort,
    encode_abort,
    ranks_to_notify,
)
from asyncdist.kernel.engine.executor import EngineHost, Executor
from asyncdist.kernel.engine.operation import Channel, local_failure
from asyncdist.kernel.transport.base import Outgoing, Transport
from asyncdist.kernel.transport.wire_format import ABORT, GOODBYE, generation_of, is_earlier, name_of, pack_key
from asyncdist.net.detector import Liveness

log = logging.getLogger("asyncdist")

_MAX_ENDED = 1 << 16
"""The number of ended groups that are remembered, because their last messages may still arrive."""
GRACE = 0.5
"""Seconds between the suspicion that a peer is lost and the failure; the peer's goodbye may still arrive."""
_NOTIFY_AGAIN = 1.0
"""Seconds after which a notice is sent again if this process had no file descriptor for it."""


class GroupFailures:
    """The open groups, the failed groups and the lost peers of one rank.

    Args:
        host: The rank's endpoint.
        executor: The executor, whose operations fail with their groups.
    """

    def __init__(self, host: EngineHost, executor: Executor) -> None:
        self._host, self._executor, self._recorder = host, executor, host.recorder
        self._rank, self._dump_dir = host.rank, host.config.dump_dir
        self.channels: dict[bytes, Channel] = {}
        """The open groups, by the first 8 bytes of their messages' keys."""
        self.ended: dict[bytes, GroupError | None] = {}
        """The errors of failed groups, by the first 8 bytes of their messages' keys; None for destroyed groups."""
        self.lost_peers: dict[int, GroupError] = {}
        """The errors of lost peers, by rank."""
        self.gone = self.lost_peers.get
        """Returns the error of a lost peer; None if the peer is not lost."""
        self.failed: dict[int, GroupError] = {}
        """The errors of the last failed groups, by number, for the peers that a closed connection tells of them."""
        self.failing: set[bytes] = set()
        """The failed groups that have not ended, by prefix. With one, this rank stays reachable: its peers learn of it."""
        self.observers: list[Callable[[int, Liveness, str], None]] = []
        """Called with each peer that is lost, suspected or has recovered, and why."""
        self.left: dict[int, str] = {}
        """The peers that have said goodbye, and why. They take part in nothing any more."""
        self._excluded_by: set[int] = set()
        self._generations: dict[bytes, int] = {}
        """The generations of the groups that have regrouped, by name: of the others no earlier frames exist."""
        self.goodbye = LEFT
        """What this rank says to peers when it leaves."""

    # -- groups --------------------------------------------------------------------------------

    def open(self, channel: Channel) -> None:
        """Accept operations and messages of a group from now on."""
        self._host.assert_held()
        self.channels[channel.prefix] = channel
        if generation := generation_of(channel.prefix):
            self._generations[name_of(channel.prefix)] = generation
        if not channel.point_to_point:
            self._recorder.add_group(
                channel.name, channel.members, lambda: channel.highest, functools.partial(self._describe, channel)
            )
        early = self.ended.pop(channel.prefix, None)
        if early is not None:  # the group failed at a peer before this rank made it
            self.fail(channel, early)
        for member in channel.members:
            if member in self.lost_peers and member not in self.left:
                self.fail(channel, self.lost_peers[member])

    def _describe(self, channel: Channel) -> dict[str, Any]:
        """Return the state of a group for a dump. Any thread may call it."""
        error = channel.error
        return {
            "generation": generation_of(channel.prefix),
            "open": channel.prefix in self.channels,
            "error": None if error is None else error.reason,
        }

    def end(self, channel: Channel) -> None:
        """Remove a group: its pending operations fail, and later messages for it are discarded."""
        self._host.assert_held()
        if self.channels.pop(channel.prefix, None) is None:
            return
        self.failing.discard(channel.prefix)
        closed = GroupAbortedError("the group was destroyed while this operation was pending", peer=self._rank)
        closed.advice = "wait for its operations before you destroy a group"
        if channel.error is None:
            channel.error = closed
        self._discard(channel, None)
        self._executor.abandon(channel, closed)

    def drops(self, key: bytes) -> bool:
        """Return whether a frame belongs to an earlier generation of a group of this rank, and count it then."""
        current = self._generations.get(name_of(key))
        if current is None or not is_earlier(generation_of(key), current):
            return False
        self._recorder.dropped_frames += 1
        return True

    def end_all(self) -> None:
        """Remove every group."""
        for channel in list(self.channels.values()):
            self.end(channel)

    def fail(self, channel: Channel, error: GroupError, *, notified_by: int | None = None) -> None:
        """Fail all pending operations and later calls of a group; ``notified_by`` is the peer that sent the notice."""
        self._host.assert_held()
        if channel.error is not None:
            return
        self.failed[channel.number] = error
        if len(self.failed) > MAX_CLOSING_FAILURES:
            del self.failed[next(iter(self.failed))]
        if channel.prefix in self.channels:
            self.failing.add(channel.prefix)
        # As it is before its operations fail. A driver writes it: the lock is held here, maybe by the thread that beats.
        content = self._recorder.content(error.summary, with_stacks=True) if self._dump_dir else None
        self._host.call_later(functools.partial(self._tell, channel.name, error, content))
        for one in (channel, channel.sibling):
            if one is not None and one.error is None:
                one.error = error
                self._discard(one, error)
                self._executor.abandon(one, error)
        peers = ranks_to_notify(channel.members, self._rank, notified_by)
        self.notify(peers, ABORT, pack_key(channel.number, 0, 0), encode_abort(error, self._rank))
        for follower in list(channel.followers):
            self.fail(follower, error)

    def _tell(self, name: str, error: GroupError, content: dict[str, Any] | None) -> None:
        """Log the failure of a group, and write the flight recorder."""
        log.info("rank %d: group %r failed: %s", self._rank, name, error.reason)
        if content is not None and self._dump_dir is not None:
            self._recorder.write(self._dump_dir, content)

    def no_room(self, peer: int, key: bytes, nbytes: int, stored: int) -> None:
        """Fail the group of a message for which no receive is posted and no memory is left."""
        channel, number = self.channels.get(key[:8]), int.from_bytes(key[8:12], "little")
        message = f"tag {number}" if channel is None or channel.point_to_point else f"collective #{number}"
        error = GroupError(
            f"rank {self._rank} has no room for a message of {nbytes} bytes with {message} from rank {peer}, for which no "
            f"receive is posted, in addition to {stored} bytes of such messages"
        )
        error.advice = "post the receives in the order of the sends, or raise ASYNCDIST_ASIDE_NBYTES"
        if channel is not None:
            self.fail(channel, error)
        else:  # it fails when this rank makes it
            self.ended.setdefault(key[:8], error)

    def follow(self, channel: Channel, other: Channel) -> None:
        """Let a group fail with another one, without whose members its operations cannot continue."""
        if other.error is not None:
            self.fail(channel, other.error)
        else:
            other.followers.add(channel)

    def _fail_all(self, error: GroupError) -> None:
        for channel in list(self.channels.values()):
            self.fail(channel, error)

    def _discard(self, channel: Channel, error: GroupError | None) -> None:
        self.ended[channel.prefix] = error
        if len(self.ended) > _MAX_ENDED:
            del self.ended[next(iter(self.ended))]
        self._host.discard(channel.prefix)

    # -- notices -------------------------------------------------------------------------------

    def notify(self, peers: Iterable[int], kind: int, key: bytes, body: bytes) -> None:
        """Send a control message to each peer that can be reached, in the order of the other messages."""
        for peer in peers:
            if not self.accepts_notices(peer):
                continue
            try:
                self._host.link(peer).send(Outgoing(peer, key, 0, memoryview(body), None, kind))
            except TransportUnavailableError:
                pass
            except OSError as cause:
                if not is_exhausted(cause):
                    raise
                again = functools.partial(self.notify, [peer], kind, key, body)
                self._host.timers.schedule(again, monotonic() + _NOTIFY_AGAIN, again)

    def accepts_notices(self, peer: int) -> bool:
        """Return whether a peer is neither lost nor leaving."""
        return peer not in self.lost_peers and peer not in self.left

    def on_abort(self, peer: int, key: bytes, body: bytes) -> GroupError:
        """Handle a peer's notice that a group has failed, and return the error that it names."""
        error = decode_abort(body, peer, self._host)
        channel = self.channels.get(key[:8])
        if channel is not None:
            self.fail(channel, error, notified_by=peer)
        else:
            self.ended.setdefault(key[:8], error)
        return error

    def closing_frames(self, peer: int) -> bytes:
        """Return the frames to write before a connection to a peer is closed: the failures of groups, then goodbye."""
        return closing_frames(self.failed, self._rank, EXCLUDES if peer in self.lost_peers else self.goodbye)

    def warn_late_readers(self) -> None:
        """Say goodbye to peers that have not read the last messages of this rank, which leaves, over other connections.

        A heartbeat of such a peer would end the connection with the messages. Those of failed groups do not matter.
        """
        for peer in self._host.transport_selector.undelivered() if not self.failed else ():
            if not any(transport.may_receive_from(peer) for transport in self._transports):
                self._host.send_unordered(peer, GOODBYE, bytes(12), self.goodbye.encode())

    # -- peers ---------------------------------------------------------------------------------

    def on_goodbye(self, peer: int, reason: str) -> None:
        """Handle a peer's goodbye."""
        if reason == EXCLUDES:
            self._excluded_by.add(peer)
        else:
            self.left[peer] = reason or LEFT

    def lost(self, peer: int, reason: str, *, last_heard: float | None = None) -> None:
        """Fail every group that contains a peer; if the peer has said goodbye, only those that wait for it.

        ``last_heard`` is given for a silent peer: the seconds since it was last heard.
        """
        self._host.assert_held()
        if peer in self.lost_peers:
            return
        if peer in self.left:
            if any(transport.may_receive_from(peer) for transport in self._transports):
                return  # data that the peer sent before it left may still arrive
            reason = self.left[peer]
        elif peer in self._excluded_by:
            reason = EXCLUDES
        error = self.lost_peers[peer] = PeerLostError(peer, reason)
        if last_heard is not None:
            error.noticed, error.last_heard = "heartbeat", last_heard
        else:
            error.last_heard = self._host.silence_of(peer)
        for channel in list(self.channels.values()):
            if peer in channel.members and (peer not in self.left or self._waits_for(channel, peer)):
                self.fail(channel, error)
        for transport in self._transports:
            transport.disconnect(peer)
        self.observe(peer, Liveness.LOST, error.reason)

    def observe(self, peer: int, liveness: Liveness, reason: str) -> None:
        """Report a change of a peer."""
        for observer in list(self.observers):
            observer(peer, liveness, reason)

    def suspect(self, peer: int, reason: str) -> None:
        """Declare a peer lost after a grace period, unless a message explains the closed connection before."""
        self._host.assert_held()
        if peer not in self.lost_peers:
            lose = functools.partial(self.lose_after_reading, peer, reason)
            self._host.timers.schedule(peer, monotonic() + GRACE, lose)

    def lose_after_reading(self, peer: int, reason: str) -> None:
        """Declare a peer lost, unless a message explains its end that has arrived and has not been read yet."""
        self._host.read_arrived(peer)
        self.lost(peer, reason)

    @property
    def _transports(self) -> list[Transport]:
        return self._host.transport_selector.transports

    def _waits_for(self, channel: Channel, peer: int) -> bool:
        last = set(channel.members) - {self._rank} <= self.lost_peers.keys()
        return self._executor.waits_for(channel, peer, last=last)

    # -- this process --------------------------------------------------------------------------

    def interrupted(self, cause: BaseException) -> None:
        """Fail every group, because an exception has stopped the transports of this rank."""
        if is_exhausted(cause):  # no message was cut off
            self._fail_all(local_failure(cause, self._rank))
            return
        # A stream that was cut at an unknown byte carries no further notice. The peers see that it is closed.
        reason = f"interrupted by {type(cause).__name__} in the middle of a transfer"
        error = GroupAbortedError(f"rank {self._rank} was {reason}", peer=self._rank)
        error.__cause__ = cause
        self.lost_peers.update(dict.fromkeys(range(self._recorder.world_size), error))
        self._fail_all(error)
        for transport in self._transports:
            for peer in self.lost_peers:
                transport.disconnect(peer)

    def forked(self) -> None:
        """Fail every group in a forked child, which is not a rank. No peer is notified."""
        error = GroupAbortedError(
            f"this process was forked from rank {self._rank} and is not a rank itself; create the world in the child",
            peer=self._rank,
        )
        error.advice = ""
        self.lost_peers.update(dict.fromkeys(range(self._recorder.world_size), error))
        for channel in self.channels.values():
            channel.error = channel.error or error
            self._executor.abandon(channel, error)
